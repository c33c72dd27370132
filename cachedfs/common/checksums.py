"""Checksums that origins state of whole objects, and those of the bytes that came. Pure.

CRC-32C is preferred to MD5: every object of Google Cloud Storage has one, it costs 0.06 s of CPU a GB, and those of
the parts of an object combine to that of the whole. It needs google-crc32c in its compiled form, which comes with gcsfs;
in pure Python a GB would take minutes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

from cachedfs.common.optional_imports import importing

__all__ = [
    "RunningChecksum",
    "StatedChecksum",
    "combined",
    "crc32c_of",
    "has_crc32c",
    "stated_crc32c",
    "stated_of",
]


class StatedChecksum(NamedTuple):
    """What an origin says of all bytes of an object: the name of a checksum, and its value in hex."""

    name: str
    value: str


def stated_of(details: Mapping[str, Any]) -> StatedChecksum | None:
    """Return the checksum that the details of an object state and that can be computed here; None without one."""
    crc32c = stated_crc32c(details)
    if crc32c is not None:
        return StatedChecksum("crc32c", f"{crc32c:08x}")
    md5 = details.get("md5Checksum") or _hex(details.get("md5Hash"), 16)
    return StatedChecksum("md5", md5) if isinstance(md5, str) else None


def stated_crc32c(details: Mapping[str, Any]) -> int | None:
    """Return the CRC-32C that the details of an object state; None without one, and where it cannot be computed."""
    value = _hex(details.get("crc32c"), 4)
    return int(value, 16) if value is not None and has_crc32c() else None


def _hex(text: object, size: int) -> str | None:
    """Return in hex what Google gives in base64; None for what is not `size` bytes."""
    try:
        data = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except binascii.Error:
        return None
    return data.hex() if len(data) == size else None


class RunningChecksum:
    """The checksum of bytes as they pass, to be compared with the stated one."""

    def __init__(self, stated: StatedChecksum) -> None:
        self._stated = stated
        self._crc32c = 0
        self._md5 = hashlib.md5(usedforsecurity=False)

    def add(self, data: bytes) -> None:
        if self._stated.name == "crc32c":
            self._crc32c = crc32c_of(data, self._crc32c)
        else:
            self._md5.update(data)

    def copy(self) -> RunningChecksum:
        other = RunningChecksum(self._stated)
        other._crc32c, other._md5 = self._crc32c, self._md5.copy()
        return other

    def contradiction(self, stated: StatedChecksum | None = None) -> str | None:
        """Return what is wrong with all the bytes that were added, with both values; None when they are right.

        `stated` is of the same name, and was not known before.
        """
        name, value = stated or self._stated
        if name != self._stated.name:
            return f"a {name.upper()} in place of {self._stated.name.upper()}"
        found = f"{self._crc32c:08x}" if name == "crc32c" else self._md5.hexdigest()
        if found == value:
            return None
        return f"the {name.upper()} of its bytes is {found}, and should be {value}"


@cache
def has_crc32c() -> bool:
    """Return whether CRC-32C can be computed at the speed of a disk."""
    try:
        with importing():
            import google_crc32c
    except (ImportError, RuntimeWarning):  # it warns where it is pure Python, which some make an error
        return False
    return bool(google_crc32c.implementation == "c")


def crc32c_of(data: bytes, before: int = 0) -> int:
    """Return the CRC-32C of `data`, or of it behind bytes that have the CRC-32C `before`. REQUIRES: has_crc32c()."""
    from google_crc32c import extend

    return int(extend(before, data))


def combined(first: int, second: int, size: int) -> int:
    """Return the CRC-32C of two parts of which the second, of `size` bytes, follows the first. REQUIRES: has_crc32c()."""
    if first == 0:
        return second  # nothing is before it, as in every object of one block; no two of those need be of one size
    for bit, moved in enumerate(_moved_by(size)):
        if first >> bit & 1:
            second ^= moved
    return second


@lru_cache(8)  # sizes: of a block, and of last blocks
def _moved_by(size: int) -> list[int]:
    """Return what each bit of a CRC-32C becomes behind `size` more bytes; what many become is the exclusive or of these."""
    zeros = bytes(size)
    nothing = crc32c_of(zeros)
    return [crc32c_of(zeros, 1 << bit) ^ nothing for bit in range(32)]
