"""OAuth 2.0 of the simulated Google: the consent page, the token endpoint and the revocation of tokens.

Written from developers.google.com/identity/protocols/oauth2/native-app and .../service-account. There is one OAuth
client, a desktop app, and one account. Differences from the documentation:

- More lenient: a refresh token that was never issued is accepted, with any scope. The signature
  of a service account is not checked. Codes do not expire.
- The consent page is one page, without a sign-in and without the warning about unverified apps.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import uuid
from collections.abc import Callable, Mapping
from html import escape
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from cachedfs.sim.drive.fields import ME
from cachedfs.sim.messages import Call, Refusal, Response, Route, unauthorized
from cachedfs.sim.network import Network
from cachedfs.sim.service import Service

_CLIENT_ID, _CLIENT_SECRET, _APP = "1-sim.apps.googleusercontent.com", "GOCSPX-sim", "My cachedfs"
_SCOPES = {  # of Drive, as the consent page words them
    "https://www.googleapis.com/auth/drive": "See, edit, create, and delete all of your Google Drive files",
    "https://www.googleapis.com/auth/drive.readonly": "See and download all your Google Drive files",
}
_FULL = next(iter(_SCOPES))
_JWT_GRANT = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>Sign in - Google Accounts (simulated)</title>
<style>body {{font: 16px sans-serif; max-width: 28em; margin: 4em auto}} h1 {{font-size: 1.4em}} button {{font: inherit; margin-right: 1em}}</style>
{}
</html>
"""


class _Error(Refusal):
    """An error of the token endpoint, whose JSON is not that of the APIs."""

    def __init__(self, code: str, text: str = "", status: int = 400) -> None:
        super().__init__(status, text, code)

    def to_json(self) -> str:
        text = {"error_description": self.message} if self.message else {}
        return json.dumps({"error": self.reason} | text)


class OAuth(Service):
    """Issues and revokes tokens, and refuses requests whose token has expired or has not the scope."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.issued: dict[str, bool] = {}  # access token -> whether it is still valid
        self.refuses_tokens = False
        self._scopes: dict[str, str] = {}  # access or refresh token -> scopes, separated by spaces
        self._refresh_tokens: dict[str, str] = {}  # access token -> its refresh token
        self._codes: dict[str, dict[str, str]] = {}  # authorization code -> the request that allowed it
        self._revoked: set[str] = set()  # refresh tokens

    def _oauth_route(self, call: Call) -> Route | None:
        routes: dict[tuple[str, str], tuple[str, Callable[[Call], Response | dict[str, Any]]]] = {
            ("GET", "/o/oauth2/v2/auth"): ("consent", self._consent),
            ("POST", "/o/oauth2/v2/approval"): ("consent", self._approve),
            ("POST", "/token"): ("token", self._token),
            ("POST", "/revoke"): ("revoke", self._revoke),
        }
        found = routes.get((call.method, call.path))
        return Route(*found) if found else None

    def _admit(self, call: Call, route: Route) -> None:
        token = token_of(call)
        is_valid = self.issued.get(token)
        if is_valid is None:
            super()._admit(call, route)
        elif not is_valid:
            raise unauthorized("Invalid Credentials", "authError")
        is_read = call.method == "GET" and route.kind != "ids"
        if not is_read and _FULL not in self._scopes.get(token, _FULL).split():
            realm = (
                f'Bearer realm="https://accounts.google.com/", error="insufficient_scope", scope="{_FULL}"'
            )
            text = "Request had insufficient authentication scopes."
            raise Refusal(403, text, "insufficientPermissions", headers={"WWW-Authenticate": realm})

    # The consent page
    def _consent(self, call: Call) -> Response:
        _check_request(call.query)
        hidden = "".join(
            f'<input type="hidden" name="{escape(name)}" value="{escape(value)}">'
            for name, value in call.query.items()
        )
        wishes = "".join(f"<li>{escape(_SCOPES[scope])}" for scope in call.query["scope"].split())
        return _page(
            f"<h1>{_APP} wants access to your Google Account</h1><p>{ME['displayName']} &lt;{ME['emailAddress']}&gt;"
            f'<p>This will allow <b>{_APP}</b> to:<ul>{wishes}</ul><form method="post" action="/o/oauth2/v2/approval">'
            f'{hidden}<button name="decision" value="deny">Deny</button>'
            '<button name="decision" value="allow">Allow</button></form>'
        )

    def _approve(self, call: Call) -> Response:
        asked = dict(parse_qsl(call.body.decode()))
        _check_request(asked)
        answer = {"state": asked["state"]} if "state" in asked else {}
        if asked.get("decision") != "allow":
            answer["error"] = "access_denied"
        else:
            code = "4/0sim" + secrets.token_urlsafe(24)
            self._codes[code] = asked
            answer |= {"code": code, "scope": asked["scope"]}
        joint = "&" if urlsplit(asked["redirect_uri"]).query else "?"
        return Response(302, {"Location": asked["redirect_uri"] + joint + urlencode(answer)})

    # Tokens
    def _token(self, call: Call) -> dict[str, Any]:
        form = _basic_client(call) | dict(parse_qsl(call.body.decode()))
        grant, given = form.get("grant_type", ""), form.get("refresh_token", "")
        if grant == "authorization_code":
            return self._exchange(form)
        if grant not in ("refresh_token", _JWT_GRANT):
            raise _Error("unsupported_grant_type")
        if given in self._scopes:
            _check_client(form)
        if self.refuses_tokens or given in self._revoked:
            raise _Error("invalid_grant", "Token has been expired or revoked.")
        if not (given or form.get("assertion")):
            raise _Error("invalid_request")
        if grant == _JWT_GRANT:
            claims = json.loads(base64.urlsafe_b64decode(form["assertion"].split(".")[1] + "=="))
            return self._issue(str(claims["scope"]), "")
        return self._issue(self._scopes.get(given) or form.get("scope") or _FULL, given)

    def _exchange(self, form: Mapping[str, str]) -> dict[str, Any]:
        _check_client(form)
        asked = self._codes.pop(form.get("code", ""), None)
        if asked is None:
            raise _Error("invalid_grant", "Malformed auth code.")
        if form.get("redirect_uri") != asked["redirect_uri"]:
            raise _Error("redirect_uri_mismatch", "Bad Request")
        if challenge := asked.get("code_challenge"):
            digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
            if base64.urlsafe_b64encode(digest).decode().rstrip("=") != challenge:
                raise _Error("invalid_grant", "Invalid code verifier.")
        refresh_token = "1//sim-" + uuid.uuid4().hex
        self._scopes[refresh_token] = asked["scope"]
        is_offline = asked.get("access_type") == "offline"
        reply = self._issue(asked["scope"], refresh_token)
        return reply | ({"refresh_token": refresh_token} if is_offline else {})

    def _issue(self, scope: str, refresh_token: str) -> dict[str, Any]:
        token = "ya29.sim-" + uuid.uuid4().hex
        self.issued[token] = True
        self._scopes[token], self._refresh_tokens[token] = scope, refresh_token
        return {"access_token": token, "expires_in": 3599, "scope": scope, "token_type": "Bearer"}

    def _revoke(self, call: Call) -> dict[str, Any]:
        token = call.query.get("token") or dict(parse_qsl(call.body.decode())).get("token", "")
        grant = self._refresh_tokens.get(token) or token
        if token not in self._scopes or grant in self._revoked:
            raise _Error("invalid_token", "Token expired or revoked")
        self._revoked.add(grant)
        for each in [t for t, of in self._refresh_tokens.items() if grant in (of, t)]:
            self.issued[each] = False
        return {}


def client_json(endpoint_url: str) -> dict[str, Any]:
    """Return the JSON of the OAuth client, as Google's console lets its owner download it."""
    client = {"client_id": _CLIENT_ID, "project_id": "sim", "client_secret": _CLIENT_SECRET}
    client |= {"auth_uri": f"{endpoint_url}/o/oauth2/v2/auth", "token_uri": f"{endpoint_url}/token"}
    return {"installed": {**client, "redirect_uris": ["http://localhost"]}}


def token_of(call: Call) -> str:
    return call.headers.get("authorization", "").removeprefix("Bearer ")


def _check_request(asked: Mapping[str, str]) -> None:
    """Raise Refusal for a request that Google does not show to the user."""
    redirect, scopes = urlsplit(asked.get("redirect_uri", "")), asked.get("scope", "").split()
    is_valid = (
        asked.get("client_id") == _CLIENT_ID
        and redirect.scheme == "http"
        and redirect.hostname in ("127.0.0.1", "localhost", "::1")
        and asked.get("response_type") == "code"
        and scopes
        and _SCOPES.keys() >= set(scopes)
        and asked.get("code_challenge_method", "S256") == "S256"
    )
    if not is_valid:
        raise Refusal(400, "Access blocked: Authorization Error")


def _basic_client(call: Call) -> dict[str, str]:
    """Return the client that the headers name, as HTTP Basic does."""
    kind, _, text = call.headers.get("authorization", "").partition(" ")
    if kind != "Basic":
        return {}
    name, _, secret = base64.b64decode(text).decode().partition(":")
    return {"client_id": name, "client_secret": secret}


def _check_client(form: Mapping[str, str]) -> None:
    if form.get("client_id") != _CLIENT_ID:
        raise _Error("invalid_client", "The OAuth client was not found.", 401)
    if form.get("client_secret") != _CLIENT_SECRET:
        raise _Error("invalid_client", "The provided client secret is invalid.", 401)


def _page(body: str) -> Response:
    return Response(200, {"Content-Type": "text/html; charset=UTF-8"}, _PAGE.format(body).encode())
