"""The account behind the options of Drive, as a part of cache keys: two accounts never share what is private."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from cachedfs.common.atomic_files import write_private
from cachedfs.origins.drive.credentials import ANONYMOUS, DEFAULT, Found, find, read_json
from cachedfs.origins.drive.options import DriveOptions
from cachedfs.origins.origin_errors import without_secrets

__all__ = ["account_key"]

logger = logging.getLogger("cachedfs.origins")

UNKNOWN = "auth"  # key where no option and no file has credentials
MISSING = "none"  # key where those that the options name are not there
OWN = "own"  # begins a key that is used once, as nothing tells the account
_MOST_KNOWN = 1000  # credentials whose account is remembered; an access token is new every hour
_keys: dict[str, str] = {}  # account keys by digest of a credential, in this process
_SECRETS = ("refresh_token", "access_token", "token")  # the longest lived first


def account_key(options: DriveOptions, *, may_ask: bool = True) -> str:
    """Return a text that names the account, without secrets.

    A service account says who it is. Of other credentials we ask Drive once (`about`), unless `may_ask` is False, and
    remember the answer on disk by a digest of the credential. Where there is no answer, the digest itself is the key.
    """
    try:
        found = find(options.sign_in)
        account, secret = _owner(found)
    except (OSError, ValueError):  # the first request raises it too
        return MISSING
    if account is not None:
        return account if account == ANONYMOUS else f"auth-{_digest(account)}"
    if secret is None and found.kind in ("credentials", "google_auth"):
        user = _asked(options) if may_ask else None
        return f"{OWN}-{uuid.uuid4().hex}" if user is None else f"user-{user}"
    if secret is None:  # the sign-in of a metadata server is one account for each machine
        return UNKNOWN if found.kind == DEFAULT else MISSING
    digest = _digest(f"{options.endpoint_url} {secret}")
    if digest not in _keys:
        user = _remembered().get(digest) or (_asked(options) if may_ask else None)
        if user is None and not may_ask:
            return f"auth-{digest}"
        if user is not None:
            _remember(digest, user)
        _keys[digest] = f"auth-{digest}" if user is None else f"user-{user}"
    return _keys[digest]


def _owner(found: Found) -> tuple[str | None, str | None]:
    """Return the account of credentials, and a secret that belongs to one account; None for what they do not show."""
    if found.kind in (ANONYMOUS, "api_key"):
        return ANONYMOUS, None
    if found.kind == "token":
        return None, found.value
    acts_for = found.options.get("client_user_email")
    if found.kind == "json":
        return _owner_of(found.value, acts_for)
    if found.kind == DEFAULT:
        return _default_owner()
    from cachedfs.origins.drive.auth import sign_in

    live = sign_in(found.options).credentials
    if live is None:
        return ANONYMOUS, None
    shown = {name: getattr(live, name, None) for name in ("service_account_email", *_SECRETS)}
    is_address = "@" in (shown["service_account_email"] or "")  # a machine's may be "default"
    email = shown["service_account_email"] if is_address else None
    return _owner_of({**shown, "client_email": email}, getattr(live, "_subject", None))


def _owner_of(info: Mapping[str, Any], acts_for: str | None) -> tuple[str | None, str | None]:
    if isinstance(email := info.get("client_email"), str):
        return (f"{email} for {acts_for}" if acts_for else email), None
    account = info.get("account")
    secrets = (info.get(name) for name in _SECRETS)
    secret = next((secret for secret in secrets if isinstance(secret, str)), None)
    return (account if isinstance(account, str) and account else None), secret


def _default_owner() -> tuple[str | None, str | None]:
    """Return the owner of the file with application default credentials: that in the environment, or gcloud's."""
    folder = os.environ.get("CLOUDSDK_CONFIG") or (
        os.path.join(os.environ.get("APPDATA", ""), "gcloud") if os.name == "nt" else "~/.config/gcloud"
    )
    name = (
        os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or f"{folder}/application_default_credentials.json"
    )
    path = os.path.realpath(os.path.expanduser(name))
    try:
        info = read_json(path, path)
    except (OSError, ValueError):
        return None, None
    account, secret = _owner_of(info, None)
    # The text of a file whose fields we do not know belongs to one account.
    return account, secret or f"{path} {json.dumps(info, sort_keys=True)}"


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


def _remembered() -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return read_json(_file(), "")
    return {}


def _remember(digest: str, user: str) -> None:
    kept = dict(list({**_remembered(), digest: user}.items())[-_MOST_KNOWN:])
    with suppress(OSError):  # the next process asks again
        os.makedirs(os.path.dirname(_file()), exist_ok=True)
        write_private(_file(), json.dumps(kept))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
