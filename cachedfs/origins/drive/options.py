"""The options of `drive://`, and the types that Google documents are exported as. No I/O except file checks.

The types are those of developers.google.com/workspace/drive/api/guides/ref-export-formats; any other type that Drive
supports can be given as its MIME type.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import platformdirs

from cachedfs.common.atomic_files import write_private
from cachedfs.common.logging import without_secrets
from cachedfs.common.types import ObjectInfo
from cachedfs.common.user_folders import writable_folder
from cachedfs.origins.drive.api import GOOGLE
from cachedfs.origins.drive.credentials import ANONYMOUS, DEFAULT, SIGN_IN, find, read_json

logger = logging.getLogger("cachedfs.origins")

_APPS = "application/vnd.google-apps."
_ALL = "*"
_OFFICE = "application/vnd.openxmlformats-officedocument."
_TYPES = {
    "csv": "text/csv",
    "docx": f"{_OFFICE}wordprocessingml.document",
    "epub": "application/epub+zip",
    "html": "text/html",
    "jpg": "image/jpeg",
    "json": f"{_APPS}script+json",
    "md": "text/markdown",
    "mp4": "video/mp4",
    "odp": "application/vnd.oasis.opendocument.presentation",
    "ods": "application/vnd.oasis.opendocument.spreadsheet",
    "odt": "application/vnd.oasis.opendocument.text",
    "pdf": "application/pdf",
    "png": "image/png",
    "pptx": f"{_OFFICE}presentationml.presentation",
    "rtf": "application/rtf",
    "svg": "image/svg+xml",
    "tsv": "text/tab-separated-values",
    "txt": "text/plain",
    "xlsx": f"{_OFFICE}spreadsheetml.sheet",
    "zip": "application/zip",
}
_KINDS = {
    "document": ("docx", "odt", "rtf", "pdf", "txt", "html", "zip", "epub", "md"),
    "spreadsheet": ("xlsx", "ods", "pdf", "zip", "csv", "tsv"),
    "presentation": ("pptx", "odp", "pdf", "txt", "jpg", "png", "svg"),
    "drawing": ("pdf", "jpg", "png", "svg"),
    "script": ("json",),
    "vid": ("mp4",),
}


def wanted(export: object) -> Mapping[str, str]:
    """Return the MIME type for each kind of document, from the option `export`; raise ValueError if it is wrong.

    A type is a file extension ("docx") or a MIME type: one for all kinds, or a mapping from kind to type.
    """
    if export is None:
        return {}
    if isinstance(export, str):
        if not export.lstrip().startswith("{"):
            return {_ALL: _mime_of(export)}
        with suppress(ValueError):  # as the environment has it
            export = json.loads(export)
    if not isinstance(export, Mapping):
        raise ValueError(
            "drive option export=: a type ('pdf') or a dictionary of types by kind ({'document': 'docx', "
            f"'spreadsheet': 'csv'}}) is expected, not {type(export).__name__}"
        )
    return {_known(kind): _mime_of(given) for kind, given in export.items()}


def exported_as(info: ObjectInfo, exports: Mapping[str, str]) -> str | None:
    """Return the MIME type that a document is exported as; None if it is not exported."""
    kind = kind_of(info)
    return (exports.get(kind) or exports.get(_ALL)) if kind and info.size is None else None


def kind_of(info: ObjectInfo) -> str:
    """Return the kind of a Google document ("document"); "" for a file with bytes."""
    mime = str(info.details.get("mimeType", ""))
    return mime.removeprefix(_APPS) if mime.startswith(_APPS) else ""


def types_of(kind: str) -> str:
    """Return the file extensions that a kind can be exported as, as text."""
    return ", ".join(_KINDS.get(kind, ())) or "nothing that is known here"


def _known(kind: object) -> str:
    name = str(kind).removeprefix(_APPS)
    if name not in _KINDS:
        raise ValueError(f"drive option export=: no kind of document is called {kind!r}{_near(name, _KINDS)}")
    return name


def _mime_of(given: object) -> str:
    text = str(given).lower().removeprefix(".")
    mime = text if "/" in text else _TYPES.get(text)
    if mime is None:
        raise ValueError(
            f"drive option export=: no type is called {given!r}{_near(text, _TYPES)}; a MIME type does as well"
        )
    return mime


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return (f"; did you mean {near[0]}?" if near else "") + f" (known: {', '.join(sorted(names))})"


_UNKNOWN = "auth"  # key where no option and no file has credentials
_MISSING = "none"  # key where those that the options name are not there
_OWN = "own"  # begins a key that is used once, as nothing tells the account
_MOST_KNOWN = 1000  # credentials whose account is remembered; an access token is new every hour
_keys: dict[str, str] = {}  # account keys by digest of a credential, in this process
_STOPS = "speculation", "everything"  # what daily_limit stops


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DriveOptions:
    """The options of `drive://`; `DriveFileSystem` describes them."""

    sign_in: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    endpoint_url: str = GOOGLE
    trash_only: bool = True
    acknowledge_abuse: bool = False
    export: str | Mapping[str, str] | None = None
    daily_limit: float | None = None
    daily_limit_stops: str = "speculation"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> DriveOptions:
        """Return the options in these keywords; raise ValueError for an unknown one, naming the nearest."""
        own = {field.name for field in dataclasses.fields(cls)} - {"sign_in"}
        if unknown := given.keys() - {*own, *SIGN_IN}:
            name = min(unknown)
            raise ValueError(f"drive option {name!r} is unknown{_near(name, [*own, *SIGN_IN])}")
        values = {name: given[name] for name in own if given.get(name) is not None}
        if "endpoint_url" in values:
            values["endpoint_url"] = os.fspath(values["endpoint_url"]).rstrip("/")
        for name in ("trash_only", "acknowledge_abuse"):
            if isinstance(text := values.get(name), str):
                values[name] = _switch(name, text)
        if "daily_limit" in values:
            values["daily_limit"] = _share(values["daily_limit"])
        if (stops := values.get("daily_limit_stops", _STOPS[0])) not in _STOPS:
            raise ValueError(
                f"drive option daily_limit_stops={stops!r}: one of {', '.join(_STOPS)} is expected"
            )
        made = cls(
            sign_in={name: given[name] for name in SIGN_IN if given.get(name) is not None},
            **values,
        )
        wanted(made.export)  # what is wrong with it is said here
        return made

    @property
    def exports(self) -> Mapping[str, str]:
        """The MIME types that documents are exported as, by kind."""
        return wanted(self.export)


def _share(given: object) -> float:
    with suppress(TypeError, ValueError):  # a text comes from the environment
        if not isinstance(given, bool) and 0 < (share := float(given)) <= 1:  # type: ignore[arg-type]
            return share
    raise ValueError(
        f"drive option daily_limit={given!r}: a share of Google's daily quota is expected, above 0 and at most 1"
    )


def _switch(name: str, text: str) -> bool:
    """Return the boolean in a text from the environment, where Python would take "False" for true."""
    for words, value in ((("true", "yes", "on", "1"), True), (("false", "no", "off", "0"), False)):
        if text.strip().lower() in words:
            return value
    raise ValueError(f"drive option {name}={text!r}: True or False is expected")


def refers_to_objects(sign_in: Mapping[str, Any]) -> bool:
    """Return whether the sign-in is a live object, and not a name, a file or a text."""
    given = sign_in.get("google_auth") or ""
    return sign_in.get("credentials") is not None or not isinstance(given, (str, os.PathLike))


def refuse_live(options: Mapping[str, Any]) -> None:
    """Raise TypeError for a sign-in that is an object: it cannot be pickled, or its secret would be."""
    for name in ("google_auth", "credentials"):
        if options.get(name) is not None:
            raise TypeError(
                f"drive option {name}=: a live {type(options[name]).__name__} cannot travel to another process; "
                "give what can: token= (a file's name, 'google_default'), or client_json_file_path="
            )


# The account in cache keys: two accounts never share what is private
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
        return _MISSING
    if found.account is not None:
        return found.account if found.account == ANONYMOUS else f"auth-{_digest(found.account)}"
    if found.secret is None and is_live:
        user = _asked(options) if may_ask else None
        return f"{_OWN}-{uuid.uuid4().hex}" if user is None else f"user-{user}"
    if found.secret is None:  # the sign-in of a metadata server is one account for each machine
        return _UNKNOWN if found.kind == DEFAULT else _MISSING
    digest = _digest(f"{options.endpoint_url} {found.secret}")
    if digest not in _keys:
        user = _remembered().get(digest) or (_asked(options) if may_ask else None)
        if user is not None:
            _remember(digest, user)
        elif not may_ask:
            return f"auth-{digest}"
        _keys[digest] = f"auth-{digest}" if user is None else f"user-{user}"
    return _keys[digest]


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
