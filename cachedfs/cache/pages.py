"""The pages of a block, each under a checksum of its own. Pure.

Whole pages that follow one another are checked by one checksum of all of them, which is compared with theirs joined:
computing one lets go of the interpreter's lock, and where other threads are at work, getting it back takes longer than
the checksum itself. zlib-ng computes what zlib does, ten times as fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from zlib_ng.zlib_ng import crc32

__all__ = ["PAGE", "checksums_of", "joined", "wrong_page"]

PAGE = 65536  # bytes under one checksum: small enough to check for a 4 KiB read (2 us)


def checksums_of(data: memoryview) -> list[int]:
    """Return the CRC-32 of each page of a block's data."""
    return [crc32(data[at : at + PAGE]) for at in range(0, len(data), PAGE)]


def wrong_page(data: memoryview, checksums: Sequence[int]) -> int | None:
    """Return the first of these pages that is not what its checksum says; None when all are right."""
    n_whole = len(data) // PAGE
    right = n_whole if crc32(data[: n_whole * PAGE]) == joined(checksums[:n_whole]) else 0
    for page in range(right, len(checksums)):
        if crc32(data[page * PAGE : (page + 1) * PAGE]) != checksums[page]:
            return page
    return None


def joined(checksums: Sequence[int]) -> int:
    """Return the CRC-32 of whole pages that follow one another, from theirs."""
    low, second, third, high = _behind_a_page()
    total = 0
    for checksum in checksums:
        moved = (
            low[total & 255] ^ second[total >> 8 & 255] ^ third[total >> 16 & 255] ^ high[total >> 24 & 255]
        )
        total = moved ^ checksum
    return total


@cache
def _behind_a_page() -> list[list[int]]:
    """Return what each byte of a CRC-32, the lowest first, becomes behind a page; what all become is their exclusive or."""
    zeros = bytes(PAGE)
    nothing = crc32(zeros)
    bits = [crc32(zeros, 1 << bit) ^ nothing for bit in range(32)]
    tables = []
    for byte in range(4):
        table = [0]
        for bit in bits[8 * byte : 8 * byte + 8]:
            table += [value ^ bit for value in table]
        tables.append(table)
    return tables
