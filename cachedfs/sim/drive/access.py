"""Access control of the simulated Drive: tokens, API keys, permissions and quota."""

from __future__ import annotations

from cachedfs.sim.drive.oauth import OAuth, token_of
from cachedfs.sim.faults import Fault
from cachedfs.sim.messages import Call, Refusal, Route, unauthorized
from cachedfs.sim.network import Network
from cachedfs.sim.quota import Meter

# Errors that Drive returns occasionally even when healthy, and more often on a bad day.
_FAILURES = [Fault(status=403, reason="userRateLimitExceeded"), Fault(status=403, reason="rateLimitExceeded")]
_FAILURES += [Fault(status=429), Fault(status=500), Fault(status=503), Fault(status=502, html=True)]
_FOR_KEYS = ("get", "list", "media", "export", "revisions")  # kinds of requests that need no account
_UNREGISTERED = (
    "Method doesn't allow unregistered callers (callers without established identity). Please use API Key or other "
    "form of API consumer identity to call this API."
)
_LOGIN_REQUIRED = (
    "Request is missing required authentication credential. Expected OAuth 2 access token, login cookie or other "
    "valid authentication credential. See https://developers.google.com/identity/sign-in/web/devconsole-project."
)
_INVALID_KEY = {
    "@type": "type.googleapis.com/google.rpc.ErrorInfo",
    "reason": "API_KEY_INVALID",
    "domain": "googleapis.com",
    "metadata": {"service": "drive.googleapis.com"},
}


class Access(OAuth):
    """Admits or refuses requests by token or API key, permission and quota."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.meter = Meter(network.profile.quota)
        self.accounts: dict[str, tuple[str, str]] = {}  # token -> (user, project)
        self.keys: set[str] = set()

    def failure(self) -> Fault:
        return self.network.rng.choice(_FAILURES)

    def _admit(self, call: Call, route: Route) -> None:
        if route.style == "html" or route.kind in ("consent", "token", "revoke"):
            return
        if key := key_of(call):
            if key not in self.keys:
                text = "API key not valid. Please pass a valid API key."
                more = {"status": "INVALID_ARGUMENT", "details": [_INVALID_KEY]}
                raise Refusal(400, text, "badRequest", more=more)
            if route.kind not in _FOR_KEYS:
                raise _login_required()
        elif self._tokens is not None and not token_of(call) and "/drive/v" in call.path:
            if call.method not in ("GET", "HEAD"):
                raise _login_required()
            if route.kind in ("media", "export"):
                raise Refusal(403, "The request is missing a valid API key.", "forbidden")
            raise Refusal(403, _UNREGISTERED, "forbidden", more={"status": "PERMISSION_DENIED"})
        else:
            super()._admit(call, route)
        self._charge(call, route)

    def _charge(self, call: Call, route: Route) -> None:
        """Charge a request to its user and project. Raises Refusal if a quota is used up."""
        user, project = self._account(call)
        if whose := self.meter.charge(user, project, route.units, self.network.now()):
            raise _too_fast(whose)
        call.units = route.units

    def _account(self, call: Call) -> tuple[str, str]:
        """Return the user and project that a call is charged to; by default the same for all tokens."""
        user, project = self.accounts.get(token_of(call), ("user", "project"))
        return user, call.headers.get("x-goog-user-project", project)

    def _count_create(self, call: Call) -> None:
        if not self.meter.create(self._account(call)[0], self.network.now()):
            raise _too_fast("user")


def key_of(call: Call) -> str:
    """Return the API key of a caller without an account, "" for any other: a key beside a token is ignored."""
    given = call.query.get("key") or call.headers.get("x-goog-api-key", "")
    return "" if token_of(call) else given


def _too_fast(whose: str) -> Refusal:
    if whose == "user":
        return Refusal(403, "User Rate Limit Exceeded", "userRateLimitExceeded")
    return Refusal(403, "Rate Limit Exceeded", "rateLimitExceeded")


def _login_required() -> Refusal:
    more = {"status": "UNAUTHENTICATED"}
    return unauthorized(_LOGIN_REQUIRED, "required", short="Login Required.", more=more)
