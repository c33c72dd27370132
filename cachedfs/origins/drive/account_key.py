"""The account behind the options of Drive, as a part of cache keys: two accounts never share what is private."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from contextlib import suppress
from functools import partial
from typing import Any

from cachedfs.common.atomic_files import write_private
from cachedfs.common.user_folders import writable_folder
from cachedfs.origins.drive.credentials import ANONYMOUS, DEFAULT, find, read_json
from cachedfs.origins.drive.options import DriveOptions
from cachedfs.origins.origin_errors import without_secrets

__all__ = ["account_key"]

logger = logging.getLogger("cachedfs.origins")

UNKNOWN = "auth"  # key where no option and no file has credentials
MISSING = "none"  # key where those that the options name are not there
OWN = "own"  # begins a key that is used once, as nothing tells the account
_MOST_KNOWN = 1000  # credentials whose account is remembered; an access token is new every hour
_keys: dict[str, str] = {}  # account keys by digest of a credential, in this process


def account_key(options: DriveOptions, *, may_ask: bool = True) -> str:
    """Return a text that names the account, without secrets.

    A service account says who it is. Of other credentials we ask Drive once (`about`), unless `may_ask` is False, and
    remember the answer on disk by a digest of the credential. Where there is no answer, the digest itself is the key.
    """
    try:
        found = find(options.sign_in)
        if is_live := found.kind in ("credentials", "google_auth"):
            from cachedfs.origins.drive.auth import sign_in

            found = sign_in(options.sign_in)
    except (OSError, ValueError):  # the first request raises it too
        return MISSING
    secret = found.secret
    if found.account is not None:
        return found.account if found.account == ANONYMOUS else f"auth-{_digest(found.account)}"
    if secret is None and is_live:
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
    """Return the file of the known accounts. Raises OSError if this user can have none."""
    import platformdirs

    return os.path.join(
        writable_folder(partial(platformdirs.user_cache_dir, "cachedfs")), "drive-accounts.json"
    )


def _remembered() -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return read_json(_file(), "")
    return {}


def _remember(digest: str, user: str) -> None:
    kept = dict(list({**_remembered(), digest: user}.items())[-_MOST_KNOWN:])
    with suppress(OSError):  # the next process asks again
        write_private(_file(), json.dumps(kept))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
