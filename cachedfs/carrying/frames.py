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
_LONGEST_ROW = 1 << 20  # bytes: the details of one object are some 3 kB
_MOST = _PLAIN + _LONGEST_ROW + _ROWS  # bytes of rows, and of the ends of their lines, that a frame may have


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
    """The rows of frames that come in pieces of any size. `is_over`: the last frame was here.

    `most`: bytes of rows that all frames together may have; None: any number.
    """

    def __init__(self, most: int | None = None) -> None:
        self.is_over = False
        self._most, self._n_plain = most, 0
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
                plain = _plain(packed)
                self._n_plain += len(plain)
                if self._most is not None and self._n_plain > self._most:
                    raise BadBundle("it has too many rows")
                yield _rows(plain)
        if self.is_over and waiting:
            raise BadBundle("something follows the last frame")


def _plain(packed: bytes) -> bytes:
    """Return the lines of a frame: no more bytes, and no more lines, than an export writes. A few kB may hold millions."""
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(packed, _MOST)
    except zlib.error as error:
        raise BadBundle(f"a frame makes no sense: {error}") from error
    if inflater.unconsumed_tail or not inflater.eof or plain.count(b"\n") >= _ROWS:
        raise BadBundle("a frame has too many rows")
    return plain


def _rows(plain: bytes) -> list[Any]:
    try:
        return [json.loads(line) for line in plain.split(b"\n")]
    except (ValueError, RecursionError) as error:
        raise BadBundle(f"a frame makes no sense: {error}") from error
