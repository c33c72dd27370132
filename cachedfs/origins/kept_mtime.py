"""The modification time of a file that its object keeps, in the metadata that rclone and gsutil use too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

_MTIME = "mtime"  # RFC 3339 with nanoseconds, as rclone writes it
_SECONDS = "goog-reserved-file-mtime"  # whole seconds, as gsutil writes it
_RFC3339 = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)", re.ASCII)
_NUMBER = re.compile(r"-?\d{1,12}", re.ASCII)
_S = 1_000_000_000  # nanoseconds in a second


def kept_mtime_ns(details: Mapping[str, Any]) -> int | None:
    """Return the kept modification time of an object, in nanoseconds since the epoch.

    `details` are those of its `ObjectInfo`, or fsspec's `info`. None if it keeps none, or none that can be read.
    """
    metadata = details.get("metadata")
    if not isinstance(metadata, Mapping):
        return None
    at_ns = _from_rfc3339(metadata.get(_MTIME))
    if at_ns is None and _NUMBER.fullmatch(seconds := str(metadata.get(_SECONDS))):
        at_ns = int(seconds) * _S
    return at_ns


def mtime_metadata(mtime_ns: int | None) -> dict[str, str]:
    """Return the custom metadata of an object that keeps this time; empty for None, and outside the years 1 to 9999."""
    at = rfc3339(mtime_ns, 9)
    return {} if at is None or mtime_ns is None else {_MTIME: at, _SECONDS: str(mtime_ns // _S)}


def rfc3339(at_ns: int | None, n_digits: int) -> str | None:
    """Return a time as text, with so many digits of the second's fraction; None outside the years 1 to 9999."""
    if at_ns is None:
        return None
    seconds, fraction = divmod(at_ns, _S)
    try:
        # isoformat, because strftime does not fill up years before 1000.
        text = datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None).isoformat()
    except (ValueError, OverflowError, OSError):
        return None
    return f"{text}.{fraction:09d}"[: len(text) + 1 + n_digits] + "Z"


def _from_rfc3339(text: object) -> int | None:
    found = _RFC3339.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    try:
        at = datetime.fromisoformat(f"{found[1]}{found[3]}")
        elapsed = at - datetime.fromtimestamp(0, UTC)
    except (ValueError, OverflowError):
        return None
    fraction = int((found[2] or "0")[:9].ljust(9, "0"))
    return (elapsed.days * 86400 + elapsed.seconds) * _S + fraction
