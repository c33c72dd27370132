"""Bundle format of an export: blocks and their index, and frames of JSON rows.

A frame is some rows, compressed, with their length and checksum. Frames are parsed while their bytes arrive.
"""

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


_FRAME_HEAD = struct.Struct("<II")  # length of the compressed rows, and their CRC-32
_ROWS = 2048  # rows in a frame
_PLAIN = 1 << 20  # bytes of rows after which a frame ends
_LONGEST_ROW = 1 << 20  # bytes; the details of one object take about 3 kB
_MOST = _PLAIN + _LONGEST_ROW + _ROWS  # most bytes of rows, line ends included, in a frame


class BadBundle(Exception):
    """Exported data is damaged or invalid; the message says how."""


def framed(rows: Iterable[Any]) -> Iterator[bytes]:
    """Yield `rows` as frames, and then an empty frame. Without that last frame, the data is truncated."""
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
    """Parse frames that arrive in pieces of any size. `is_over` is True after the last frame.

    `most` bounds the bytes of rows in all frames together; None: unbounded.
    """

    def __init__(self, most: int | None = None) -> None:
        self.is_over = False
        self._most, self._n_plain = most, 0
        self._waiting = bytearray()

    def feed(self, piece: bytes) -> Iterator[list[Any]]:
        """Add bytes, and yield the rows of each frame that is complete now. Raises BadBundle."""
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
    """Decompress a frame, within the size and number of rows that an export writes.

    The limit is needed because a few kB may expand to millions of rows.
    """
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
_HEAD = struct.Struct("<8sII")  # magic, format, 0
_FOOT = struct.Struct("<QQII8s")  # offset of the index, number of blocks, format, 0, magic
_MAGIC = b"cfsbundl"
HEADER = _HEAD.pack(_MAGIC, FORMAT, 0)

LEAST = 64 << 20  # bytes a bundle has before it may end
MEAN = 64 << 20  # mean number of bytes after LEAST until a bundle ends
MOST = 256 << 20
MOST_BLOCKS = 50_000  # keeps an index to a few MB
MOST_INDEX = 64 << 20  # most bytes of an index, compressed or not
RUN = 32 << 20  # bytes per request: cheap to repeat, and a few of them fill a link
GAP = 256 << 10  # up to this many unneeded bytes between two missing blocks are read, to save a request


class BundleEntry(NamedTuple):
    """One block: its key, its index in the object, and its bytes in a bundle, as on disk."""

    key: ObjectKey
    number: int
    size: int


class BundleLayout(NamedTuple):
    """The layout of a bundle before it is written.

    Its name is a hash of the names and sizes of its blocks; the content of a named block never changes.
    `tail` is the index and the footer.
    """

    name: str
    entries: Sequence[BundleEntry]
    index_at: int
    tail: bytes
    size: int

    @property
    def data(self) -> int:
        """Bytes of the blocks."""
        return self.index_at - len(HEADER)


def cut(entries: Iterable[BundleEntry]) -> Iterator[list[BundleEntry]]:
    """Split the entries into bundles, at blocks chosen by their hashes.

    Where a bundle ends depends on its last blocks, not on those long before. So an added or removed block
    changes its own bundle and perhaps the next; the others are in the export already.
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
    """Return the layout of a bundle with these blocks."""
    names = hashlib.blake2b(digest_size=16)
    for entry in entries:
        names.update(f"{entry.key.name(entry.number)} {entry.size}\n".encode())
    index_at = len(HEADER) + sum(entry.size for entry in entries)
    frames = b"".join(framed(_rows(entries)))
    tail = frames + _FOOT.pack(index_at, len(entries), FORMAT, 0, _MAGIC)
    return BundleLayout(f"blocks-{names.hexdigest()}", entries, index_at, tail, index_at + len(tail))


def _rows(entries: Iterable[BundleEntry]) -> Iterator[list[Any]]:
    """Yield the index rows, one per object version: its key, then number and size of each block."""
    row: list[Any] = []
    last: ObjectKey | None = None
    for key, number, size in entries:
        if key != last or len(row) > 1000:  # long rows are split
            if row:
                yield row
            row, last = [key.identity, key.path, key.fingerprint, key.block_size], key
        row += [number, size]
    if row:
        yield row


def entries_of(index: bytes, *, index_at: int, identity: str, block_size: int) -> list[BundleEntry]:
    """Parse the index of a bundle and return its entries in file order.

    `index` has the bytes from the offset `index_at` to the end of the bundle. Raises BadBundle if it is
    invalid.
    """
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
            if len(entries) > n_blocks:  # checked for each row: a few kB of index may hold millions
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
    """Yield the byte ranges to request, each with the wanted entries inside it and their offsets."""
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
