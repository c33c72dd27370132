"""The options of `drive://`, and the types that Google documents are exported as. No I/O except file checks.

The types are those of developers.google.com/workspace/drive/api/guides/ref-export-formats; any other type that Drive
supports can be given as its MIME type.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from cachedfs.common.types import ObjectInfo
from cachedfs.config import flag
from cachedfs.origins.drive.api import GOOGLE
from cachedfs.origins.drive.credentials import LIVE, SIGN_IN
from cachedfs.origins.drive_links import NATIVE

_ALL = "*"
_OFFICE = "application/vnd.openxmlformats-officedocument."
_TYPES = {
    "csv": "text/csv",
    "docx": f"{_OFFICE}wordprocessingml.document",
    "epub": "application/epub+zip",
    "html": "text/html",
    "jpg": "image/jpeg",
    "json": f"{NATIVE}script+json",
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


def _exports(export: object) -> Mapping[str, str]:
    """Return the MIME type for each kind of document, from the option `export`; raise ValueError if it is wrong.

    A type is a file extension ("docx") or a MIME type: one for all kinds, or a mapping from kind to type.
    """
    if isinstance(export, str):
        if not export.lstrip().startswith("{"):
            return {_ALL: _mime_of(export)}
        with suppress(ValueError):  # as the environment has it
            export = json.loads(export)
    if not isinstance(export, Mapping):
        raise ValueError(
            "expected a type ('pdf') or a dictionary of types by kind ({'document': 'docx', 'spreadsheet': 'csv'}), not "
            f"{type(export).__name__}"
        )
    return {_known(kind): _mime_of(given) for kind, given in export.items()}


def exported_as(info: ObjectInfo, exports: Mapping[str, str] | None) -> str | None:
    """Return the MIME type that a document is exported as; None if it is not exported."""
    kind = kind_of(info)
    return (exports.get(kind) or exports.get(_ALL)) if exports and kind and info.size is None else None


def kind_of(info: ObjectInfo) -> str:
    """Return the kind of a Google document ("document"); "" for a file with bytes."""
    mime = str(info.details.get("mimeType", ""))
    return mime.removeprefix(NATIVE) if mime.startswith(NATIVE) else ""


def types_of(kind: str) -> str:
    """Return the file extensions that a kind can be exported as, as text."""
    return ", ".join(_KINDS.get(kind, ())) or "nothing that is known here"


def _known(kind: object) -> str:
    name = str(kind).removeprefix(NATIVE)
    if name not in _KINDS:
        raise ValueError(f"no kind of document is called {kind!r}{_near(name, _KINDS)}")
    return name


def _mime_of(given: object) -> str:
    text = str(given).lower().removeprefix(".")
    mime = text if "/" in text else _TYPES.get(text)
    if mime is None:
        raise ValueError(f"no type is called {given!r}{_near(text, _TYPES)}; a MIME type does as well")
    return mime


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return (f"; did you mean {near[0]}?" if near else "") + f" (known: {', '.join(sorted(names))})"


_STOPS = "speculation", "everything"  # what daily_limit stops


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DriveOptions:
    """The options of `drive://`; `DriveFileSystem` describes them."""

    sign_in: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    endpoint_url: str = GOOGLE
    trash_only: bool = True
    acknowledge_abuse: bool = False
    export: Mapping[str, str] | None = None  # MIME types by kind of document
    daily_limit: float | None = None
    daily_limit_stops: str = "speculation"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> DriveOptions:
        """Return the options in these keywords; raise ValueError for an unknown one, naming the nearest."""
        if unknown := given.keys() - {*_PARSERS, *SIGN_IN}:
            name = min(unknown)
            raise ValueError(f"drive option {name!r} is unknown{_near(name, [*_PARSERS, *SIGN_IN])}")
        sign_in = {name: given[name] for name in SIGN_IN if given.get(name) is not None}
        return cls(
            sign_in=sign_in,
            **{name: _parsed(name, given[name]) for name in _PARSERS if given.get(name) is not None},
        )


def _share(given: Any) -> float:
    with suppress(TypeError, ValueError):  # a text comes from the environment
        if not isinstance(given, bool) and 0 < (share := float(given)) <= 1:
            return share
    raise ValueError("expected a share of Google's daily quota, above 0 and at most 1")


def _stopped(given: Any) -> str:
    if given not in _STOPS:
        raise ValueError(f"expected one of {', '.join(_STOPS)}")
    return str(given)


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "endpoint_url": lambda url: os.fspath(url).rstrip("/"),
    "trash_only": flag,
    "acknowledge_abuse": flag,
    "export": _exports,
    "daily_limit": _share,
    "daily_limit_stops": _stopped,
}


def _parsed(name: str, value: Any) -> Any:
    try:
        return _PARSERS[name](value)
    except ValueError as error:
        raise ValueError(f"drive option {name}={value!r}: {error}") from None


def refuse_live(options: Mapping[str, Any]) -> None:
    """Raise TypeError for a sign-in that is an object: it cannot be pickled, or its secret would be."""
    for name in LIVE:
        if options.get(name) is not None:
            raise TypeError(
                f"drive option {name}=: a live {type(options[name]).__name__} cannot travel to another process; "
                "give what can: token= (a file's name, 'google_default'), or client_json_file_path="
            )
