"""Rows of JSON values as bytes: compressed frames, each with its length and checksum, read as they come."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["BadBundle", "Unframer", "framed"]

_HEAD = struct.Struct("<II")  # length of the compressed rows, their CRC-32
_ROWS = 2048  # in a frame
_PLAIN = 1 << 20  # bytes of rows after which a frame ends
_MOST = 32 << 20  # bytes of rows that a frame may have: a row is the details of one object, some 3 kB


class BadBundle(Exception):
    """What was carried is not what was exported; the message says in what."""


def framed(rows: Iterable[Any]) -> Iterator[bytes]:
    """Yield `rows` as frames, and last an empty one: what lacks it was cut off."""
    lines: list[bytes] = []
    size = 0
    for row in rows:
        lines.append(json.dumps(row, separators=(",", ":")).encode())
        size += len(lines[-1])
        if len(lines) == _ROWS or size > _PLAIN:
            yield _frame(lines)
            lines, size = [], 0
    if lines:
        yield _frame(lines)
    yield _HEAD.pack(0, 0)


def _frame(lines: list[bytes]) -> bytes:
    packed = zlib.compress(b"\n".join(lines), 6)
    return _HEAD.pack(len(packed), zlib.crc32(packed)) + packed


class Unframer:
    """The rows of frames that come in pieces of any size. `is_over`: the last frame was here."""

    def __init__(self) -> None:
        self.is_over = False
        self._waiting = bytearray()

    def feed(self, piece: bytes) -> Iterator[list[Any]]:
        """Yield the rows of each frame that is complete now. Raises BadBundle."""
        waiting = self._waiting
        waiting += piece
        while len(waiting) >= _HEAD.size and not self.is_over:
            size, checksum = _HEAD.unpack_from(waiting)
            if size > _MOST:
                raise BadBundle("a frame has an impossible length")
            if len(waiting) < _HEAD.size + size:
                return
            packed = bytes(waiting[_HEAD.size : _HEAD.size + size])
            del waiting[: _HEAD.size + size]
            if zlib.crc32(packed) != checksum:
                raise BadBundle("a frame is damaged")
            if size == 0:
                self.is_over = True
            else:
                yield _rows(packed)
        if self.is_over and waiting:
            raise BadBundle("something follows the last frame")


def _rows(packed: bytes) -> list[Any]:
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(packed, _MOST)
        if inflater.unconsumed_tail or not inflater.eof:
            raise BadBundle("a frame has too many rows")
        return [json.loads(line) for line in plain.split(b"\n")]
    except (zlib.error, ValueError, RecursionError) as error:
        raise BadBundle(f"a frame makes no sense: {error}") from error
