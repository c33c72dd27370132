"""The account of a sign-in, as cache keys name it: two accounts never share what is private."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import platformdirs

from cachedfs.common.atomic_files import write_private
from cachedfs.common.logging import without_secrets
from cachedfs.common.user_folders import writable_folder
from cachedfs.origins.drive.credentials import ANONYMOUS, DEFAULT, LIVE, SignIn, find, read_json

logger = logging.getLogger("cachedfs.origins")

_UNKNOWN = "auth"  # key where no option and no file has credentials
_MISSING = "none"  # key where those that the options name are not there
_OWN = "own"  # begins a key that is used once, as nothing tells the account
_MOST_KNOWN = 1000  # credentials whose account is remembered; an access token is new every hour
_keys: dict[str, str] = {}  # account keys by digest of a credential, in this process


def account_key(sign_in: Mapping[str, Any], endpoint_url: str, *, may_ask: bool = True) -> str:
    """Return a text that names the account of the options, as `key_of` does."""
    try:
        found = find(sign_in)
        if found.kind in LIVE:  # only Google's libraries tell whose they are
            from cachedfs.origins.drive import auth

            found = auth.with_credentials(found)
    except (OSError, ValueError):  # the first request raises it too
        return _MISSING
    return key_of(found, endpoint_url, may_ask=may_ask)


def key_of(found: SignIn, endpoint_url: str, *, may_ask: bool = True) -> str:
    """Return a text that names the account in cache keys, without secrets.

    A service account says who it is. Of other credentials we ask Drive once (`about`), unless `may_ask` is False, and
    remember the answer on disk by a digest of the credential. Where there is no answer, the digest itself is the key.
    """
    if found.account is not None:
        return ANONYMOUS if found.account == ANONYMOUS else f"auth-{_digest(found.account)}"
    if found.secret is None and found.kind == DEFAULT:
        return _UNKNOWN  # the sign-in of a metadata server is one account for each machine
    if found.secret is None:
        user = _user_of(found, endpoint_url) if may_ask else None
        return f"{_OWN}-{uuid.uuid4().hex}" if user is None else f"user-{user}"
    digest = _digest(f"{endpoint_url} {found.secret}")
    if digest not in _keys:
        user = _remembered().get(digest)
        if user is None and not may_ask:
            return f"auth-{digest}"
        if user is None and (user := _user_of(found, endpoint_url)) is not None:
            _remember(digest, user)
        _keys[digest] = f"auth-{digest}" if user is None else f"user-{user}"
    return _keys[digest]


def _user_of(found: SignIn, endpoint_url: str) -> str | None:
    """Return the id of the user who signs in, or None if there is no answer: the first read will say why."""
    from cachedfs.origins.drive import auth

    try:
        answer = auth.about(auth.with_credentials(found), endpoint_url, "user(permissionId)")
        answer.raise_for_status()
        user = answer.json()["user"]["permissionId"]
    except Exception as error:  # of any library: without an answer the credential itself is the key
        logger.info("the account of these credentials is not known yet: %s", without_secrets(str(error)))
        return None
    return user if isinstance(user, str) and user else None


def _key_file() -> str:
    """Return the file of the known accounts. Raises OSError if this user can have none."""
    folder = writable_folder(partial(platformdirs.user_cache_dir, "cachedfs"))
    return os.path.join(folder, "drive-accounts.json")


def _remembered() -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return read_json(_key_file(), "")
    return {}


def _remember(digest: str, user: str) -> None:
    kept = dict(list({**_remembered(), digest: user}.items())[-_MOST_KNOWN:])
    with suppress(OSError):  # the next process asks again
        write_private(_key_file(), json.dumps(kept))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
