"""Access control of the simulated Drive: tokens, permissions and quota."""

from __future__ import annotations

from cachedfs.sim.drive.oauth import OAuth, token_of
from cachedfs.sim.faults import Fault
from cachedfs.sim.messages import Call, Refusal, Route
from cachedfs.sim.network import Network
from cachedfs.sim.quota import Meter, units_of

__all__ = ["Accounts", "key_of"]

# Errors that Drive returns occasionally even when healthy, and more often on a bad day.
_FAILURES = [Fault(status=403, reason="userRateLimitExceeded"), Fault(status=403, reason="rateLimitExceeded")]
_FAILURES += [Fault(status=429), Fault(status=500), Fault(status=503), Fault(status=502, html=True)]


class Accounts(OAuth):
    """Admits or refuses requests by token, permission and quota."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.meter = Meter(network.profile.quota)
        self.accounts: dict[str, tuple[str, str]] = {}  # token -> (user, project)

    # Access control
    def failure(self) -> Fault:
        return self.network.rng.choice(_FAILURES)

    def _admit(self, call: Call, route: Route) -> None:
        if route.kind in ("consent", "token", "revoke"):
            return
        if not key_of(call):
            super()._admit(call, route)
        self._charge(call, route)
        if route.key in self._forbidden:
            text = f"The user does not have sufficient permissions for file {route.key}."
            raise Refusal(403, text, "insufficientFilePermissions")

    def _charge(self, call: Call, route: Route) -> None:
        """Charge a request to its user and project. Raises Refusal if a quota is used up."""
        user, project = self._account(call)
        units = units_of(route.kind) if route.units is None else route.units
        whose = self.meter.charge(user, project, units, self.network.now()) if units else None
        if whose:
            raise self._too_fast(whose)
        call.units = units

    def _account(self, call: Call) -> tuple[str, str]:
        """Return the user and project that a call is charged to; by default the same for all tokens."""
        user, project = self.accounts.get(token_of(call), ("user", "project"))
        return user, call.headers.get("x-goog-user-project", project)

    def _too_fast(self, whose: str) -> Refusal:
        if self.meter.quota.status == 403 and whose == "user":
            return Refusal(403, "User Rate Limit Exceeded", "userRateLimitExceeded")
        return Refusal(self.meter.quota.status, "Rate Limit Exceeded", "rateLimitExceeded")

    def _count_create(self, call: Call) -> None:
        if not self.meter.create(self._account(call)[0], self.network.now()):
            raise self._too_fast("user")


def key_of(call: Call) -> str:
    """Return the API key of a caller without an account, "" for any other: a key beside a token is ignored."""
    given = call.query.get("key") or call.headers.get("x-goog-api-key", "")
    return "" if token_of(call) else given
