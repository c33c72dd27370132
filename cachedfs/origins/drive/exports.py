"""What Google's own documents, which have no bytes, are exported as. Pure.

The types are those of developers.google.com/workspace/drive/api/guides/ref-export-formats; whatever else Drive can
make is asked for by its MIME type.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress

from cachedfs.common.types import ObjectInfo

__all__ = ["exported_as", "kind_of", "types_of", "wanted"]

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
    """Return the MIME type for each kind of document, from the option `export`; ValueError for what cannot be.

    A type is an ending ("docx") or a MIME type; alone it is for all kinds, else in a mapping from kinds.
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
    """Return the MIME type that a document is asked for as; None for what is not to be exported."""
    kind = kind_of(info)
    return (exports.get(kind) or exports.get(_ALL)) if kind and info.size is None else None


def kind_of(info: ObjectInfo) -> str:
    """Return which of Google's own kinds this is ("document"); empty for a file with bytes."""
    mime = str(info.details.get("mimeType", ""))
    return mime.removeprefix(_APPS) if mime.startswith(_APPS) else ""


def types_of(kind: str) -> str:
    """Return the endings that a kind is exported as, in words."""
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
