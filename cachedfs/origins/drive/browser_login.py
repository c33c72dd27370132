"""Sign in to Google Drive with an OAuth client of your own, check who signed in, and revoke.

google-auth-oauthlib speaks the protocol: developers.google.com/identity/protocols/oauth2/native-app.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

import requests
from google_auth_oauthlib.flow import InstalledAppFlow
from oauthlib import oauth2

from cachedfs.common.logging import without_secrets
from cachedfs.errors import OriginUnavailable, SignInRefused
from cachedfs.origins.drive import accounts, api, auth
from cachedfs.origins.drive.credentials import read_json
from cachedfs.origins.drive.failures import failure
from cachedfs.origins.http_request import HTTPRequest
from cachedfs.origins.proxy import configure
from cachedfs.origins.retry import RetryableError, RetryPolicy

CLIENTS_PAGE = "https://console.cloud.google.com/auth/clients"
GRANTS_PAGE = "https://myaccount.google.com/connections"
# Nothing listens there: the browser shows the address with the code in it.
PASTED_URI = "http://localhost:38085/"
WAIT_S = 300
_LOOPBACK = ("127.0.0.1", "localhost")


# Files from Google's console
def read_client(path: str) -> dict[str, str]:
    """Return the OAuth client in a JSON file of the console; raise ValueError for any other file."""
    info = _read_json(path)
    if "web" in info:
        raise ValueError(
            f"{path}: this client is of the type Web application: make one of the type Desktop app at {CLIENTS_PAGE}"
        )
    if info.get("type") == "service_account":
        raise ValueError(f"{path}: this is the key of a service account: pass it as --service-account")
    try:
        return {name: info["installed"][name] for name in accounts.CLIENT}
    except (LookupError, TypeError):
        raise ValueError(
            f"{path}: this is not the JSON of an OAuth client: download it at {CLIENTS_PAGE}"
        ) from None


def read_key(path: str) -> dict[str, Any]:
    """Return the key of a service account in a JSON file of the console; raise ValueError for any other file."""
    if (info := _read_json(path)).get("type") == "service_account":
        return info
    raise ValueError(
        f"{path}: this is not the key of a service account: add one, of type JSON, at "
        "https://console.cloud.google.com/iam-admin/serviceaccounts"
    )


def _read_json(path: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        return read_json(path, path)
    raise ValueError(f"{path}: this is not a JSON file of Google's console")


# The sign-in
class _OpeningFlow(InstalledAppFlow):  # type: ignore[misc]  # has no types
    """A sign-in that opens its page in a thread: a browser in the foreground ends only after our answer."""

    def authorization_url(self, **parameters: str) -> tuple[str, str]:
        url, state = super().authorization_url(**parameters)
        threading.Thread(target=webbrowser.get().open, args=(url,), daemon=True).start()
        return url, state


def by_browser(client: Mapping[str, str], scope: str, hint: str | None, prompt: str) -> dict[str, Any]:
    """Open the browser, wait for its answer, and return an authorized user as google-auth saves it.

    `prompt` is printed on stderr with the address of Google's page in place of {url}.
    """
    flow = _flow(client, scope, _OpeningFlow)
    # google-auth-oauthlib prints the prompt. Without an answer it raises an AttributeError.
    with _failures(client), contextlib.redirect_stdout(sys.stderr), contextlib.suppress(AttributeError):
        flow.run_local_server(
            host="127.0.0.1",
            port=0,
            timeout_seconds=WAIT_S,
            authorization_prompt_message=prompt,
            success_message="cachedfs has Google's answer. You may close this page and go back to the terminal.",
            open_browser=False,
            **_parameters(hint),
        )
        return _authorized_user(flow, client)
    raise SignInRefused(
        f"Google Drive: the browser did not answer in {WAIT_S // 60} minutes. Sign in again. If Google's page said "
        "'Error 403: access_denied', publish the app at https://console.cloud.google.com/auth/audience; if it said "
        f"'Error 400: redirect_uri_mismatch', make a client of the type Desktop app at {CLIENTS_PAGE}; if this machine "
        "has no browser, add --no-browser"
    )


def by_pasting(
    client: Mapping[str, str], scope: str, hint: str | None, ask: Callable[[str], str]
) -> dict[str, Any]:
    """Return an authorized user; `ask` gets the address of Google's page and returns the one that followed it."""
    flow = _flow(client, scope)
    flow.redirect_uri = PASTED_URI
    with _failures(client):
        url, _ = flow.authorization_url(**_parameters(hint))
        # As in `run_local_server`: oauthlib accepts no http, which the loopback address must have.
        flow.fetch_token(authorization_response=checked_address(ask(url)).replace("http:", "https:", 1))
        return _authorized_user(flow, client)


def checked_address(text: str) -> str:
    """Return the address that followed Google's page; raise ValueError for any other text."""
    address = text.strip()
    if not {"code", "error"} & parse_qs(urlsplit(address).query).keys():
        raise ValueError(
            f"this is not the address that follows Google's page: it begins with {PASTED_URI} and contains code="
        )
    return address


def _flow(client: Mapping[str, str], scope: str, kind: type[InstalledAppFlow] = InstalledAppFlow) -> Any:
    flow = kind.from_client_config({"installed": dict(client)}, [scope])
    configure(flow.oauth2session, client["token_uri"])
    return flow


def _parameters(hint: str | None) -> dict[str, str]:
    # Without `consent` Google may give no refresh token for an app that was allowed before.
    return {"prompt": "consent", "login_hint": hint} if hint else {"prompt": "select_account consent"}


def _authorized_user(flow: Any, client: Mapping[str, str]) -> dict[str, Any]:
    info: dict[str, Any] = json.loads(flow.credentials.to_json())
    if not info.get("refresh_token"):
        raise SignInRefused(
            "Google Drive: Google gave no refresh token: remove the app's access at "
            f"{GRANTS_PAGE}, and sign in again"
        )
    return {"type": "authorized_user", **info, "auth_uri": client["auth_uri"]}


@contextlib.contextmanager
def _failures(client: Mapping[str, str]) -> Iterator[None]:
    """Turn what goes wrong in a sign-in into errors that say what to do."""
    if urlsplit(client["token_uri"]).hostname in _LOOPBACK:  # a simulated Drive, which has no https
        os.environ["OAUTHLIB_INSECURE_TRANSPORT"] = "1"
    try:
        yield
        return
    except oauth2.AccessDeniedError:
        said = "access was not allowed: sign in again and choose Allow"
    except oauth2.MismatchingStateError:
        said = "the answer belongs to another sign-in: sign in again, and use the address that is shown last"
    except oauth2.InvalidClientError as error:
        said = (
            f"Google does not know this OAuth client ({_message(error)}): download its JSON at {CLIENTS_PAGE}"
        )
    except oauth2.OAuth2Error as error:
        said = f"Google refused the sign-in ({_message(error)}): sign in again"
    except Warning:  # how oauthlib reports fewer scopes
        said = "Google granted less than was asked for: sign in again, and leave all boxes checked"
    except requests.RequestException as error:
        raise _unreachable(error) from None
    raise SignInRefused(f"Google Drive: {said}") from None


def _message(error: Any) -> str:
    return without_secrets(": ".join(filter(None, (error.error, error.description))))


# Requests
def about(info: Mapping[str, Any], endpoint_url: str) -> dict[str, Any]:
    """Return what Drive says of the user and the storage of a sign-in, in one request."""
    signed_in = auth.sign_in({"token": info})
    try:
        answer = auth.about(signed_in, endpoint_url, api.ABOUT_FIELDS)
    except (requests.RequestException, RetryableError) as error:
        raise _unreachable(error) from None
    with contextlib.suppress(ValueError):
        if answer.ok and isinstance((found := answer.json())["user"], dict):
            return dict(found)
    asked = HTTPRequest(url="", subject="Google Drive", doing="looking up the account")
    meaning = failure(asked, answer.status_code, answer.headers, answer.content, signed_in)
    if not isinstance(meaning, RetryableError):
        raise meaning
    said = without_secrets(meaning.reason)
    raise OriginUnavailable(f"Google Drive: no answer about the account ({said}): sign in again later")


def revoke(info: Mapping[str, Any]) -> None:
    """Make the tokens of an authorized user invalid at Google, also those that the same app was given elsewhere.

    Raises OriginUnavailable if Google does not confirm it.
    """
    url = info["token_uri"].rpartition("/")[0] + "/revoke"
    try:
        with requests.Session() as session:
            configure(session, url)
            data, timeout = {"token": info["refresh_token"]}, RetryPolicy().metadata_s
            answer = session.post(url, data=data, timeout=timeout)
    except requests.RequestException as error:
        raise _unreachable(error) from None
    is_over = answer.status_code == 400 and "invalid_token" in answer.text
    if not answer.ok and not is_over:
        raise OriginUnavailable(f"Google answered {answer.status_code}")


def _unreachable(error: Exception) -> OriginUnavailable:
    cause = without_secrets(str(error).split("\n")[0])
    return OriginUnavailable(f"Google cannot be reached ({cause}): check the network, and try again")
