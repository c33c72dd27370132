"""The account behind the options of Drive, as a part of cache keys: two accounts never share what is private."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from cachedfs.common.atomic_files import write_private
from cachedfs.errors import AccessDenied
from cachedfs.origins.drive import accounts
from cachedfs.origins.drive.options import ANONYMOUS, DEFAULT, DriveOptions, saved_by_pydrive2, token_file
from cachedfs.origins.origin_errors import without_secrets

__all__ = ["account_key"]

logger = logging.getLogger("cachedfs.origins")

_MOST_KNOWN = 1000  # credentials whose account is remembered; an access token is new every hour
_keys: dict[str, str] = {}  # account keys by digest of a credential, in this process
_SECRETS = ("refresh_token", "access_token", "token")  # the longest lived first


class _Credential(NamedTuple):
    """What tells one account from another."""

    account: str | None = None  # the account itself
    secret: str | None = None  # belongs to one account


def account_key(options: DriveOptions, *, may_ask: bool = True) -> str:
    """Return a text that names the account, without secrets.

    A service account says who it is. Of other credentials we ask Drive once (`about`), unless `may_ask` is False, and
    remember the answer on disk by a digest of the credential. Where there is no answer, the digest itself is the key.
    """
    found = _credential_of(options.sign_in)
    if found.account is not None:
        return found.account if found.account == ANONYMOUS else f"auth-{_digest(found.account)}"
    if found.secret is None:  # a metadata server's, such as Colab's: one account for each machine
        return "auth"
    digest = _digest(f"{options.endpoint_url} {found.secret}")
    if digest not in _keys:
        user = _remembered().get(digest) or (_asked(options) if may_ask else None)
        if user is None and not may_ask:
            return f"auth-{digest}"
        if user is not None:
            _remember(digest, user)
        _keys[digest] = f"auth-{digest}" if user is None else f"user-{user}"
    return _keys[digest]


def _credential_of(sign_in: Mapping[str, Any]) -> _Credential:
    try:
        if (name := accounts.chosen(sign_in)) is not None:
            return _of_info(accounts.load(name), sign_in)
    except AccessDenied:  # the first request says so
        return _Credential(f"account {sign_in.get('account')}")
    given = sign_in.get("credentials") or sign_in.get("google_auth")
    if given is not None and not isinstance(given, (str, os.PathLike)):
        return _of_object(given)
    token, info = sign_in.get("token"), sign_in.get("client_json")
    if token == ANONYMOUS or sign_in.get("api_key"):
        return _Credential(ANONYMOUS)
    path = given or token_file(token) or sign_in.get("client_json_file_path")
    if isinstance(token, Mapping) or (isinstance(token, str) and token.lstrip().startswith("{")):
        info = token
    elif token is not None and path is None and token != DEFAULT:
        return _Credential(secret=str(token).strip())
    if info is not None:
        return _of_info(_object(info), sign_in)
    if path is None and sign_in.get("client_id"):
        path = saved_by_pydrive2(sign_in["client_id"], sign_in.get("profile"))
    if path is None:
        path = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or _adc_of_gcloud()
    name = os.path.expanduser(os.fspath(path))
    found = _of_info(_read(name), sign_in)
    is_named = token != DEFAULT and sign_in.keys() & {
        "token",
        "client_id",
        "client_json_file_path",
        "google_auth",
    }
    return _Credential(account=name) if found == _Credential() and is_named else found


def _of_object(given: Any) -> _Credential:
    """Return what live credentials of google-auth, or a `GoogleAuth` or `GoogleDrive` of PyDrive2, say of themselves."""
    gauth = getattr(given, "auth", given)
    held = getattr(gauth, "credentials", gauth)
    if type(held).__name__ == "AnonymousCredentials":
        return _Credential(ANONYMOUS)
    email = getattr(held, "service_account_email", None) or getattr(held, "_service_account_email", None)
    if isinstance(email, str) and "@" in email:
        subject = getattr(held, "_subject", None) or getattr(held, "_kwargs", {}).get("sub")
        return _Credential(_acting(email, subject))
    secrets = (getattr(held, name, None) for name in _SECRETS)
    return _Credential(secret=next((secret for secret in secrets if isinstance(secret, str)), None))


def _of_info(info: Mapping[str, Any], sign_in: Mapping[str, Any]) -> _Credential:
    """Return what the JSON of credentials says."""
    if isinstance(email := info.get("client_email"), str):
        return _Credential(_acting(email, sign_in.get("client_user_email")))
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


def _read(path: str) -> Mapping[str, Any]:
    with suppress(OSError, UnicodeDecodeError), open(path, encoding="utf-8") as file:
        return _object(file.read())
    return {}


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
    except Exception as error:
        logger.info("the account of these credentials is not known yet: %s", without_secrets(str(error)))
        return None
    return user if isinstance(user, str) and user else None


# Remembering
def _file() -> str:
    import platformdirs

    return os.path.join(platformdirs.user_cache_dir("cachedfs"), "drive-accounts.json")


def _remembered() -> Mapping[str, Any]:
    return _read(_file())


def _remember(digest: str, user: str) -> None:
    known = {**_remembered(), digest: user}
    kept = dict(list(known.items())[-_MOST_KNOWN:])
    with suppress(OSError):  # the next process asks again
        os.makedirs(os.path.dirname(_file()), exist_ok=True)
        write_private(_file(), json.dumps(kept))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
