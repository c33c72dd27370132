"""The pages of a block, each under a checksum of its own. Pure.

Whole pages that follow one another are checked by one checksum of all of them, which is compared with theirs joined:
computing one lets go of the interpreter's lock, and where other threads are at work, getting it back takes longer than
the checksum itself. zlib-ng computes what zlib does, ten times as fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import stat
import struct
import zlib
from collections.abc import Sequence
from functools import cache

from zlib_ng.zlib_ng import crc32

from cachedfs.cache import disk
from cachedfs.cache.disk import Buffer
from cachedfs.common.types import BlockKey, ObjectKey

__all__ = [
    "BadBlock",
    "FORMAT",
    "OpenBlock",
    "PAGE",
    "BlockTrailer",
    "checksums_of",
    "encode_trailer",
    "joined",
    "let_go",
    "open_block",
    "parse_trailer",
    "place",
    "trailer_size",
    "unpack",
    "wrong_page",
]


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


FORMAT = 1  # part of the directory's name: another format never sees these files

_MAGIC = b"cachedfs"
_HEAD = struct.Struct("<8sIQ")  # magic, format, length of the data
_PLACE = struct.Struct("<QQ")  # index, block size
_TAIL = struct.Struct("<II")  # CRC-32 of the trailer up to here, size of the whole trailer
_LENGTH = struct.Struct("<I")
_PROBE = 4096  # bytes read from the file's end at open: all of the trailer, unless block or path are huge


class BadBlock(Exception):
    """The file is not the block that its name promises; the message says in what."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockTrailer:
    """What a block's file says of itself."""

    identity: str
    path: str
    fingerprint: str
    block_size: int
    index: int
    length: int
    checksums: tuple[int, ...]

    @property
    def key(self) -> ObjectKey:
        return ObjectKey(self.identity, self.path, self.fingerprint, self.block_size)


def place(digest: str, index: int) -> str:
    """Return where the block lies below the root: fanned out over 256 folders, neighbours in different ones."""
    return f"blocks/{int(digest[:2], 16) + index & 255:02x}/{digest}-{index:x}"


def encode_trailer(key: ObjectKey, index: int, data: Buffer) -> bytes:
    """Return the bytes that follow `data` in the file of block `index`."""
    view = memoryview(data).cast("B")
    checksums = checksums_of(view)
    parts = [_HEAD.pack(_MAGIC, FORMAT, len(view)), struct.pack(f"<{len(checksums)}I", *checksums)]
    for text in (key.identity, key.path, key.fingerprint):
        field = text.encode("utf-8", "surrogatepass")
        parts += [_LENGTH.pack(len(field)), field]
    parts.append(_PLACE.pack(index, key.block_size))
    body = b"".join(parts)
    return body + _TAIL.pack(zlib.crc32(body), len(body) + _TAIL.size)


def trailer_size(key: ObjectKey, size: int) -> int:
    """Return the bytes that follow `size` bytes of data of any block of an object version."""
    texts = (text.encode("utf-8", "surrogatepass") for text in (key.identity, key.path, key.fingerprint))
    fields = sum(_LENGTH.size + len(text) for text in texts)
    return _HEAD.size + 4 * -(-size // PAGE) + fields + _PLACE.size + _TAIL.size


def parse_trailer(trailer: bytes) -> BlockTrailer:
    """Return what the trailer says, or raise `BadBlock`: nothing of a damaged trailer is believed."""
    body, tail = trailer[: -_TAIL.size], trailer[-_TAIL.size :]
    if len(trailer) < _HEAD.size + _PLACE.size + _TAIL.size or not body.startswith(_MAGIC):
        raise BadBlock("it has no trailer")
    if _TAIL.unpack(tail) != (zlib.crc32(body), len(trailer)):
        raise BadBlock("its trailer is damaged")
    try:
        return _parse_body(body)
    except (struct.error, UnicodeDecodeError) as error:
        raise BadBlock(f"its trailer makes no sense: {error}") from error


def unpack(packed: Buffer) -> tuple[BlockKey, memoryview]:
    """Return the key and the data of the bytes of a block's file, all of them checked. Raises BadBlock."""
    view = memoryview(packed).cast("B")
    if len(view) < _TAIL.size:
        raise BadBlock("it is cut off")
    size = _TAIL.unpack(view[-_TAIL.size :])[1]
    if not _TAIL.size < size <= len(view):
        raise BadBlock("it has no trailer")
    trailer, data = parse_trailer(bytes(view[-size:])), view[:-size]
    if trailer.length != len(data):
        raise BadBlock("it has the wrong size")
    if (page := wrong_page(data, trailer.checksums)) is not None:
        raise BadBlock(f"page {page} is damaged")
    return trailer.key.block(trailer.index), data


def _parse_body(body: bytes) -> BlockTrailer:
    _, version, length = _HEAD.unpack_from(body)
    if version != FORMAT:
        raise BadBlock(f"it has format {version}, not {FORMAT}")
    n_pages = -(-length // PAGE)
    checksums = struct.unpack_from(f"<{n_pages}I", body, _HEAD.size)
    at, fields = _HEAD.size + 4 * n_pages, []
    for _ in range(3):
        (size,) = _LENGTH.unpack_from(body, at)
        fields.append(body[at + 4 : at + 4 + size].decode("utf-8", "surrogatepass"))
        at += 4 + size
    index, block_size = _PLACE.unpack_from(body, at)
    if at + _PLACE.size != len(body):
        raise BadBlock("its trailer has the wrong size")
    if max(index, block_size) >> 63:  # what the index of the cache cannot count
        raise BadBlock("it has an impossible place")
    return BlockTrailer(fields[0], fields[1], fields[2], block_size, index, length, checksums)


class OpenBlock:
    """An open block whose trailer was found right. One thread uses it at a time; dropped, it closes itself.

    `unchecked` has bit n set while page n was not checked by this process; `stamp` names this very file, so that
    what was checked of it is not believed of another one in its place.
    """

    __slots__ = ("checksums", "fd", "inode", "length", "path", "stamp", "trailer", "unchecked")

    def __init__(self, fd: int, path: str, trailer: BlockTrailer, stamp: tuple[int, int]) -> None:
        self.fd = fd
        self.path = path
        self.trailer = trailer
        self.length = trailer.length
        self.checksums = trailer.checksums
        self.unchecked = (1 << len(trailer.checksums)) - 1
        self.stamp = stamp
        self.inode = stamp[0]

    def close(self) -> None:
        """Close the file; closed before, this does nothing."""
        # First: an interrupt in between loses a descriptor, but never closes one that is another's by then.
        fd, self.fd = self.fd, -1
        if fd >= 0:
            let_go(fd)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            self.close()

    def read(self, start: int, stop: int, *, nowait: bool = False, verify: bool = False) -> bytes:
        """Return bytes `[start, stop)` of the block, clipped to its length. Raises BadBlock, BlockingIOError, OSError."""
        if stop > self.length:
            stop = self.length
        if start >= stop:
            return b""
        if verify or (self.unchecked and self._unchecked_of(start, stop)):
            first, last = start // PAGE, (stop - 1) // PAGE
            data = self._load(first * PAGE, min((last + 1) * PAGE, self.length), nowait)
            self._check(first, memoryview(data))
            return data[start - first * PAGE : stop - first * PAGE]
        return self._load(start, stop, nowait)

    def read_into(self, start: int, buffer: memoryview, *, nowait: bool = False, verify: bool = False) -> int:
        """Fill `buffer` from offset `start` on; return how many bytes the block had. Raises as `read` does."""
        size = min(len(buffer), self.length - start)
        if size <= 0:
            return 0
        if size < len(buffer):
            buffer = buffer[:size]
        read = disk.read_cached_into if nowait else disk.read_into
        if read(self.fd, buffer, start) != size:
            raise self._short(nowait)
        if verify or (self.unchecked and self._unchecked_of(start, start + size)):
            self._check_filled(start, buffer, nowait)
        return size

    def check_all(self) -> None:
        """Check every page, whatever was checked before. Raises BadBlock, OSError."""
        for first in range(0, len(self.checksums), 16):
            start = first * PAGE
            self._check(first, memoryview(self._load(start, min(start + 16 * PAGE, self.length), False)))

    def _unchecked_of(self, start: int, stop: int) -> int:
        first, last = start // PAGE, (stop - 1) // PAGE
        return self.unchecked >> first & (1 << last - first + 1) - 1

    def _load(self, start: int, stop: int, nowait: bool) -> bytes:
        data = (disk.read_cached if nowait else disk.read)(self.fd, stop - start, start)
        if len(data) != stop - start:
            raise self._short(nowait)
        return data

    def _short(self, nowait: bool) -> Exception:
        """Return the error for fewer bytes than asked for: the page cache lacks the rest, or the file does."""
        return (
            BlockingIOError("not all of it is in memory")
            if nowait
            else BadBlock("it is shorter than it says")
        )

    def _check_filled(self, start: int, buffer: memoryview, nowait: bool) -> None:
        """Check `buffer`, just filled from offset `start`: whole pages in place, edge pages through a copy.

        The bytes of an edge page are then taken from the copy: what was checked is what is handed out.
        """
        stop = start + len(buffer)
        whole = range(-(-start // PAGE), len(self.checksums) if stop == self.length else stop // PAGE)
        if whole:
            low, high = whole.start * PAGE, min(whole.stop * PAGE, self.length)
            self._check(whole.start, buffer[low - start : high - start])
        for page in {start // PAGE, (stop - 1) // PAGE}.difference(whole):
            low, high = page * PAGE, min((page + 1) * PAGE, self.length)
            edge = memoryview(self._load(low, high, nowait))
            self._check(page, edge)
            begin, end = max(start, low), min(stop, high)
            buffer[begin - start : end - start] = edge[begin - low : end - low]

    def _check(self, page: int, data: memoryview) -> None:
        """Compare whole pages, `page` first, with their checksums and remember that they are right."""
        n_pages = -(-len(data) // PAGE)
        wrong = wrong_page(data, self.checksums[page : page + n_pages])
        if wrong is not None:
            raise BadBlock(f"its page {page + wrong} is damaged")
        self.unchecked &= ~((1 << n_pages) - 1 << page)


def open_block(path: str, *, nowait: bool = False, owner: int | None = None) -> OpenBlock:
    """Open the block at `path`, which must belong to `owner` if one is given: checksums do not tell who made them.

    Raises BadBlock, BlockingIOError, OSError; FileNotFoundError: it is not there.
    """
    fd = disk.open_to_read(path)
    try:
        status = disk.state_of_open(fd)
        if not stat.S_ISREG(status.st_mode):
            raise BadBlock("it is not a file")
        if owner is not None and status.st_uid != owner:
            raise BadBlock(f"it belongs to user {status.st_uid}")
        trailer = _read_trailer(fd, status.st_size, nowait)
    except BaseException:  # an interrupt too: nobody else knows of the descriptor
        let_go(fd)
        raise
    return OpenBlock(fd, path, trailer, (status.st_ino, status.st_mtime_ns))


def let_go(fd: int) -> None:
    """Close a file that was only read: whatever the disk says to it, the descriptor is gone and nothing is lost."""
    with contextlib.suppress(OSError):
        disk.close(fd)


def _read_trailer(fd: int, file_size: int, nowait: bool) -> BlockTrailer:
    tail = _read_end(fd, file_size, min(_PROBE, file_size), nowait)
    if len(tail) < _TAIL.size:
        raise BadBlock("it is cut off")
    size = _TAIL.unpack_from(tail, len(tail) - _TAIL.size)[1]
    if not _TAIL.size < size <= file_size:
        raise BadBlock("it has no trailer")
    if size > len(tail):
        tail = _read_end(fd, file_size, size, nowait)
    trailer = parse_trailer(tail[-size:])
    if trailer.length + size != file_size:
        raise BadBlock("it has the wrong size")
    return trailer


def _read_end(fd: int, file_size: int, size: int, nowait: bool) -> bytes:
    end = (disk.read_cached if nowait else disk.read)(fd, size, file_size - size)
    if nowait and len(end) != size:
        raise BlockingIOError("not all of it is in memory")
    return end
