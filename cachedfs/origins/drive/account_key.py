"""The account behind the options of Drive, as a part of cache keys: two accounts never share what is private."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from cachedfs.common.atomic_files import write_private
from cachedfs.errors import AccessDenied
from cachedfs.origins.drive import accounts
from cachedfs.origins.drive.options import (
    ANONYMOUS,
    DEFAULT,
    DriveOptions,
    said,
    saved_by_pydrive2,
    token_file,
)
from cachedfs.origins.origin_errors import without_secrets

__all__ = ["account_key"]

logger = logging.getLogger("cachedfs.origins")

UNKNOWN = "auth"  # key where no option and no file has credentials
MISSING = "none"  # key where those that the options name are not there
OWN = "own"  # begins a key that is used once, as nothing tells the account
_MOST_KNOWN = 1000  # credentials whose account is remembered; an access token is new every hour
_keys: dict[str, str] = {}  # account keys by digest of a credential, in this process
_SECRETS = ("refresh_token", "access_token", "token")  # the longest lived first


class _Credential(NamedTuple):
    """The account of credentials, or a secret that belongs to one account; neither where there are no credentials."""

    account: str | None = None
    secret: str | None = None
    is_hidden: bool = False  # live credentials that show neither
    is_missing: bool = False  # the options name credentials that are not there


def account_key(options: DriveOptions, *, may_ask: bool = True) -> str:
    """Return a text that names the account, without secrets.

    A service account says who it is. Of other credentials we ask Drive once (`about`), unless `may_ask` is False, and
    remember the answer on disk by a digest of the credential. Where there is no answer, the digest itself is the key.
    """
    found = _credential_of(said(options.sign_in))
    if found.account is not None:
        return found.account if found.account == ANONYMOUS else f"auth-{_digest(found.account)}"
    if found.is_hidden:
        user = _asked(options) if may_ask else None
        return f"{OWN}-{uuid.uuid4().hex}" if user is None else f"user-{user}"
    if found.is_missing:
        return MISSING
    if found.secret is None:  # no sign-in, or that of a metadata server: one account for each machine
        return UNKNOWN
    digest = _digest(f"{options.endpoint_url} {found.secret}")
    if digest not in _keys:
        user = _remembered().get(digest) or (_asked(options) if may_ask else None)
        if user is None and not may_ask:
            return f"auth-{digest}"
        if user is not None:
            _remember(digest, user)
        _keys[digest] = f"auth-{digest}" if user is None else f"user-{user}"
    return _keys[digest]


def _credential_of(given: Mapping[str, Any]) -> _Credential:
    try:
        if (name := accounts.chosen(given)) is not None:
            return _of_info(accounts.load(name), given)
    except AccessDenied:  # the first request raises it too
        return _Credential(is_missing=True)
    if "api_key" in given or given.get("token") == ANONYMOUS:
        return _Credential(ANONYMOUS)
    if "google_auth" in given:
        return _of_pydrive2(given["google_auth"])
    if "credentials" in given:
        return _of_object(given["credentials"])
    token, info = given.get("token"), given.get("client_json")
    path = token_file(token) or given.get("client_json_file_path")
    if isinstance(token, Mapping) or (isinstance(token, str) and token.startswith("{")):
        info = token
    elif token is not None and path is None and token != DEFAULT:
        return _Credential(secret=str(token))
    if info is not None:
        return _of_info(_object(info), given)
    if path is None and "client_id" in given:
        path = saved_by_pydrive2(given["client_id"], given.get("profile"))
    is_named = path is not None
    name = os.path.realpath(
        os.path.expanduser(path or os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or _adc_of_gcloud())
    )
    if not (text := _text_of(name)):
        return _Credential(is_missing=is_named)
    found = _of_info(_object(text), given)
    # The text of a file whose fields we do not know belongs to one account.
    return found if found != _Credential() else _Credential(secret=f"{name} {text}")


def _of_pydrive2(given: Any) -> _Credential:
    """Return what a `GoogleAuth`, a `GoogleDrive` or a settings.yaml of PyDrive2 signs in with."""
    from cachedfs.origins.drive.auth import sign_in

    try:
        return _of_object(sign_in({"google_auth": given}).credentials)
    except (OSError, ValueError):  # the first request raises it too
        return _Credential(is_missing=True)


def _of_object(held: Any) -> _Credential:
    """Return what live credentials of google-auth or PyDrive2 say of themselves."""
    if held is None or type(held).__name__ == "AnonymousCredentials":
        return _Credential(ANONYMOUS)
    email = getattr(held, "service_account_email", None) or getattr(held, "_service_account_email", None)
    if isinstance(email, str) and "@" in email:
        subject = getattr(held, "_subject", None) or getattr(held, "_kwargs", {}).get("sub")
        return _Credential(_acting(email, subject))
    secrets = (getattr(held, name, None) for name in _SECRETS)
    secret = next((secret for secret in secrets if isinstance(secret, str)), None)
    return _Credential(secret=secret, is_hidden=secret is None)


def _of_info(info: Mapping[str, Any], given: Mapping[str, Any]) -> _Credential:
    """Return what the JSON of credentials says."""
    if isinstance(email := info.get("client_email"), str):
        return _Credential(_acting(email, given.get("client_user_email")))
    if isinstance(account := info.get("account"), str) and account:
        return _Credential(account)
    return _Credential(
        secret=next((info[name] for name in _SECRETS if isinstance(info.get(name), str)), None)
    )


def _acting(email: str, user: str | None) -> str:
    return f"{email} for {user}" if user else email


def _object(text: Any) -> Mapping[str, Any]:
    if isinstance(text, Mapping):
        return text
    with suppress(ValueError, TypeError):
        if isinstance(found := json.loads(text), dict):
            return found
    return {}


def _text_of(path: str) -> str:
    with suppress(OSError, UnicodeDecodeError), open(path, encoding="utf-8") as file:
        return file.read()
    return ""


def _adc_of_gcloud() -> str:
    folder = os.environ.get("CLOUDSDK_CONFIG") or (
        os.path.join(os.environ.get("APPDATA", ""), "gcloud") if os.name == "nt" else "~/.config/gcloud"
    )
    return os.path.join(folder, "application_default_credentials.json")


# Asking Drive
def _asked(options: DriveOptions) -> str | None:
    """Return the id of the user who signs in, or None if there is no answer: the first read will say why."""
    from cachedfs.origins.drive.auth import about, sign_in

    try:
        answer = about(sign_in(options.sign_in), options.endpoint_url, "user(permissionId)")
        answer.raise_for_status()
        user = answer.json()["user"]["permissionId"]
    except Exception as error:  # of any library: without an answer the credential itself is the key
        logger.info("the account of these credentials is not known yet: %s", without_secrets(str(error)))
        return None
    return user if isinstance(user, str) and user else None


# Remembering
def _file() -> str:
    import platformdirs

    return os.path.join(platformdirs.user_cache_dir("cachedfs"), "drive-accounts.json")


def _remembered() -> Mapping[str, Any]:
    return _object(_text_of(_file()))


def _remember(digest: str, user: str) -> None:
    known = {**_remembered(), digest: user}
    kept = dict(list(known.items())[-_MOST_KNOWN:])
    with suppress(OSError):  # the next process asks again
        os.makedirs(os.path.dirname(_file()), exist_ok=True)
        write_private(_file(), json.dumps(kept))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
