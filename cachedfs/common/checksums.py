"""Checksums of whole objects: read the one that an origin states, and compute it from bytes.

CRC-32C is preferred to MD5: every object of Google Cloud Storage has one, and it takes 0.06 s of CPU per GB. It
requires the compiled google-crc32c, which gcsfs installs; in pure Python, one GB would take minutes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

from cachedfs.common.optional_imports import importing

HASHERS: dict[str, Callable[[], Any]] = {"md5": partial(hashlib.md5, usedforsecurity=False)}
"""By the name of a checksum, what makes an object that computes it; `has_crc32c` adds "crc32c"."""


class StatedChecksum(NamedTuple):
    """A whole object's checksum as its origin states it.

    `name` is "crc32c" or "md5"; `value` is in hex.
    """

    name: str
    value: str


def stated_of(details: Mapping[str, Any]) -> StatedChecksum | None:
    """Return the checksum in an object's `details`, CRC-32C first; None if none can be computed here."""
    text = details.get("crc32c")
    if isinstance(text, str) and has_crc32c():
        with suppress(binascii.Error):
            crc32c = base64.b64decode(text, validate=True)
            if len(crc32c) == 4:
                return StatedChecksum("crc32c", crc32c.hex())
    md5 = details.get("md5Checksum") or _hex(details.get("md5Hash"), 16)
    return StatedChecksum("md5", md5) if isinstance(md5, str) else None


def _hex(text: object, size: int) -> str | None:
    """Convert a checksum from base64, as Google states it, to hex; None if it is not `size` bytes."""
    try:
        data = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except binascii.Error:
        return None
    return data.hex() if len(data) == size else None


class RunningChecksum:
    """A checksum computed incrementally, to be compared with the stated one."""

    def __init__(self, stated: StatedChecksum) -> None:
        self._stated = stated
        if stated.name == "crc32c":
            has_crc32c()
        self._hasher = HASHERS[stated.name]()

    def add(self, data: bytes) -> None:
        """Add the next bytes of the object."""
        self._hasher.update(data)

    def contradiction(self) -> str | None:
        """Return a message with both checksums if they differ, else None."""
        name, value = self._stated
        found = self._hasher.digest().hex()
        if found == value:
            return None
        return f"the {name.upper()} of its bytes is {found}, and should be {value}"


def google_checksum(pieces: Iterable[bytes]) -> dict[str, str]:
    """Return the checksum of an object's bytes as Google Cloud Storage states it in JSON: `crc32c`, else `md5Hash`."""
    name, kind = ("crc32c", "crc32c") if has_crc32c() else ("md5Hash", "md5")
    hasher = HASHERS[kind]()
    for piece in pieces:
        hasher.update(piece)
    return {name: base64.b64encode(hasher.digest()).decode()}


@cache
def has_crc32c() -> bool:
    """Return whether the compiled google-crc32c is installed, so that CRC-32C is fast enough to use."""
    try:
        with importing():
            import google_crc32c
    except (ImportError, RuntimeWarning):  # the pure Python version warns, and warnings may be errors
        return False
    if google_crc32c.implementation != "c":
        return False
    HASHERS["crc32c"] = google_crc32c.Checksum
    return True


def crc32c_of(data: bytes, before: int = 0) -> int:
    """Return the CRC-32C of `data` appended to bytes whose CRC-32C is `before`.

    Requires `has_crc32c()`.
    """
    from google_crc32c import extend

    return int(extend(before, data))
