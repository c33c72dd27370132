"""Rows of JSON values as bytes: compressed frames, each with its length and checksum, read as they come."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from cachedfs.common.types import ObjectKey, Range

__all__ = [
    "BadBundle",
    "BundleEntry",
    "FORMAT",
    "HEADER",
    "BundleLayout",
    "FrameReader",
    "cut",
    "entries_of",
    "framed",
    "layout_of",
    "runs",
]


_FRAME_HEAD = struct.Struct("<II")  # length of the compressed rows, their CRC-32
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
    yield _FRAME_HEAD.pack(0, 0)


def _frame(lines: list[bytes]) -> bytes:
    packed = zlib.compress(b"\n".join(lines), 6)
    return _FRAME_HEAD.pack(len(packed), zlib.crc32(packed)) + packed


class FrameReader:
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
        while len(waiting) >= _FRAME_HEAD.size and not self.is_over:
            size, checksum = _FRAME_HEAD.unpack_from(waiting)
            if size > _MOST:
                raise BadBundle("a frame has an impossible length")
            if len(waiting) < _FRAME_HEAD.size + size:
                return
            packed = bytes(waiting[_FRAME_HEAD.size : _FRAME_HEAD.size + size])
            del waiting[: _FRAME_HEAD.size + size]
            if zlib.crc32(packed) != checksum:
                raise BadBundle("a frame is damaged")
            if size == 0:
                self.is_over = True
            else:
                plain = _plain(packed)
                self._n_plain += len(plain)
                if self._most is not None and self._n_plain > self._most:
                    raise BadBundle("it has too many rows")
                yield _decoded_rows(plain)
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


def _decoded_rows(plain: bytes) -> list[Any]:
    try:
        return [json.loads(line) for line in plain.split(b"\n")]
    except (ValueError, RecursionError) as error:
        raise BadBundle(f"a frame makes no sense: {error}") from error


FORMAT = 1
_HEAD = struct.Struct("<8sII")  # magic, format, zero
_FOOT = struct.Struct("<QQII8s")  # where the index begins, number of blocks, format, zero, magic
_MAGIC = b"cfsbundl"
HEADER = _HEAD.pack(_MAGIC, FORMAT, 0)

LEAST = 64 << 20  # bytes of a bundle before it may end
MEAN = 64 << 20  # bytes behind them at which it ends, in the mean
MOST = 256 << 20
MOST_BLOCKS = 50_000  # so that an index is a few MB,
MOST_INDEX = 64 << 20  # and never more, compressed or not
RUN = 32 << 20  # bytes of one request: a lost one costs little, and a few of them fill a link
GAP = 256 << 10  # bytes between two missing blocks that are read rather than asked around


class BundleEntry(NamedTuple):
    """One block: its key, and the bytes that it takes in a bundle and on the disk."""

    key: ObjectKey
    number: int
    size: int


class BundleLayout(NamedTuple):
    """A bundle before it is made. Its name follows from the keys of its blocks, which never change; `tail` is its index."""

    name: str
    entries: Sequence[BundleEntry]
    index_at: int
    tail: bytes
    size: int

    @property
    def data(self) -> int:
        """The bytes of the blocks."""
        return self.index_at - len(HEADER)


def cut(entries: Iterable[BundleEntry]) -> Iterator[list[BundleEntry]]:
    """Yield the entries as bundles. Where one ends depends on its last blocks, not on what came long before.

    So a block more or less changes the bundle that it is in, and perhaps the next: the others are already there.
    """
    bundle: list[BundleEntry] = []
    size = 0
    for entry in entries:
        if bundle and (size + entry.size > MOST or len(bundle) == MOST_BLOCKS):
            yield bundle
            bundle, size = [], 0
        bundle.append(entry)
        size += entry.size
        if size >= LEAST and entry.key.hash64(entry.number) < entry.size * 2**64 // MEAN:
            yield bundle
            bundle, size = [], 0
    if bundle:
        yield bundle


def layout_of(entries: Sequence[BundleEntry]) -> BundleLayout:
    """Return the bundle of these blocks."""
    names = hashlib.blake2b(digest_size=16)
    for entry in entries:
        names.update(f"{entry.key.name(entry.number)} {entry.size}\n".encode())
    index_at = len(HEADER) + sum(entry.size for entry in entries)
    frames = b"".join(framed(_rows(entries)))
    tail = frames + _FOOT.pack(index_at, len(entries), FORMAT, 0, _MAGIC)
    return BundleLayout(f"blocks-{names.hexdigest()}", entries, index_at, tail, index_at + len(tail))


def _rows(entries: Iterable[BundleEntry]) -> Iterator[list[Any]]:
    """Yield a row of the index for each object version: its key, then number and size of each block."""
    row: list[Any] = []
    last: ObjectKey | None = None
    for key, number, size in entries:
        if key != last or len(row) > 1000:  # rows of many blocks are cut too
            if row:
                yield row
            row, last = [key.identity, key.path, key.fingerprint, key.block_size], key
        row += [number, size]
    if row:
        yield row


def entries_of(index: bytes, *, index_at: int, identity: str, block_size: int) -> list[BundleEntry]:
    """Return what a bundle's index says, first block first. Raises BadBundle for what cannot be."""
    if len(index) < _FOOT.size:
        raise BadBundle("it is cut off")
    begins, n_blocks, version, zero, magic = _FOOT.unpack(index[-_FOOT.size :])
    if (magic, version, zero) != (_MAGIC, FORMAT, 0):
        raise BadBundle("it is no bundle of this format")
    if n_blocks > MOST_BLOCKS:
        raise BadBundle("its index has more blocks than any bundle")
    unframer = FrameReader(MOST_INDEX)
    entries: list[BundleEntry] = []
    for rows in unframer.feed(index[: -_FOOT.size]):
        for row in rows:
            entries += _entries(row, identity, block_size)
            if len(entries) > n_blocks:  # at once: a few kB of index may hold millions
                raise BadBundle("its index is not whole")
    if not unframer.is_over or len(entries) != n_blocks or begins != index_at:
        raise BadBundle("its index is not whole")
    if len(HEADER) + sum(entry.size for entry in entries) != index_at:
        raise BadBundle("its index does not add up")
    return entries


def _entries(row: Any, identity: str, block_size: int) -> Iterator[BundleEntry]:
    if not isinstance(row, list) or len(row) < 6 or len(row) % 2:
        raise BadBundle("its index makes no sense")
    whose, path, fingerprint, size_of_blocks, *numbers = row
    if not isinstance(path, str) or not isinstance(fingerprint, str):
        raise BadBundle("its index makes no sense")
    if (whose, size_of_blocks) != (identity, block_size):
        raise BadBundle("it has blocks of something else than it should")
    key = ObjectKey(identity, path, fingerprint, block_size)
    most = block_size + 64 + 4 * (block_size // 65536 + 1) + 4 * len(identity + path + fingerprint)
    for number, size in zip(numbers[::2], numbers[1::2], strict=True):
        if (
            type(number) is not int
            or type(size) is not int
            or number < 0
            or number >> 62
            or not 0 < size <= most
        ):
            raise BadBundle("its index has an impossible block")
        yield BundleEntry(key, number, size)


def runs(
    entries: Sequence[BundleEntry], wanted: Sequence[bool]
) -> Iterator[tuple[Range, list[tuple[int, BundleEntry]]]]:
    """Yield the ranges to ask for, and which wanted entries, with their offsets, are in each."""
    begin = end = 0
    inside: list[tuple[int, BundleEntry]] = []
    at = len(HEADER)
    for entry, is_wanted in zip(entries, wanted, strict=True):
        if is_wanted:
            if inside and (at - end > GAP or at + entry.size - begin > RUN):
                yield Range(begin, end), inside
                inside = []
            if not inside:
                begin = at
            inside.append((at, entry))
            end = at + entry.size
        at += entry.size
    if inside:
        yield Range(begin, end), inside
