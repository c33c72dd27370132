"""The file of one cached block: data, then a trailer with the key and a CRC-32 for each page of 64 KiB.

Consecutive whole pages are checked with one CRC-32 over all of them, compared with the page checksums combined.
Each CRC-32 call releases the GIL, and getting it back from busy threads takes longer than the checksum itself.
zlib-ng computes the same CRC-32 as zlib, ten times as fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import struct
import zlib
from collections.abc import Sequence
from functools import cache

from zlib_ng.zlib_ng import crc32

from cachedfs.cache import disk
from cachedfs.cache.disk import Buffer
from cachedfs.common.types import BlockKey, ObjectKey
from cachedfs.errors import BadBlock

__all__ = [
    "FORMAT",
    "PAGE",
    "BadBlock",
    "BlockTrailer",
    "OpenBlock",
    "encode_trailer",
    "file_size",
    "joined",
    "let_go",
    "open_block",
    "parse_trailer",
    "place",
    "unpack",
    "wrong_page",
]


PAGE = 65536  # bytes per checksum: small enough to check for a 4 KiB read (2 us)

FORMAT = 3
_MAGIC = b"cachedfs"
_HEAD = struct.Struct("<8sIQ")  # magic, format, length of the data
_PLACE = struct.Struct("<QQ")  # index, block size
_TAIL = struct.Struct("<II")  # CRC-32 of the trailer up to here, size of the whole trailer
_LENGTH = struct.Struct("<I")
_PROBE = 4096  # bytes read from the end at open: the whole trailer, unless block or path are huge


def wrong_page(data: memoryview, checksums: Sequence[int]) -> int | None:
    """Return the index of the first page that does not match its checksum; None when all pages match."""
    n_whole = len(data) // PAGE
    right = n_whole if crc32(data[: n_whole * PAGE]) == joined(checksums[:n_whole]) else 0
    for page in range(right, len(checksums)):
        if crc32(data[page * PAGE : (page + 1) * PAGE]) != checksums[page]:
            return page
    return None


def joined(checksums: Sequence[int]) -> int:
    """Combine the CRC-32s of consecutive whole pages into the CRC-32 of all of them."""
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
    """Return 4 tables that advance a CRC-32 over one page of data, one table for each byte of the CRC, lowest first.

    XOR the four table entries to advance a whole CRC-32.
    """
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


@dataclasses.dataclass(frozen=True, slots=True)
class BlockTrailer:
    """The parsed trailer of a block file: the block's key, the length of its data and its page checksums."""

    identity: str
    path: str
    fingerprint: str
    block_size: int
    index: int
    length: int
    checksums: tuple[int, ...]

    @property
    def place(self) -> tuple[str, str, str, int, int]:
        """The parts of the key of the block."""
        return self.identity, self.path, self.fingerprint, self.block_size, self.index

    @property
    def key(self) -> ObjectKey:
        return ObjectKey(self.identity, self.path, self.fingerprint, self.block_size)


def place(digest: str, index: int) -> str:
    """Return the path of a block below the root; 16 folders: making one costs as much as writing 2 MiB (ext4)."""
    return f"blocks/{digest[0]}/{digest}-{index:x}"


def encode_trailer(key: ObjectKey, index: int, *pieces: Buffer) -> bytes:
    """Return the trailer that follows the data, given in one or more pieces, in the file of block `index`."""
    size, checksums, checksum, room = 0, [], 0, PAGE
    for piece in pieces:
        rest = memoryview(piece).cast("B")
        size += len(rest)
        while rest:
            part, rest = rest[:room], rest[room:]
            checksum, room = crc32(part, checksum), room - len(part)
            if not room:
                checksums.append(checksum)
                checksum, room = 0, PAGE
    if room < PAGE:
        checksums.append(checksum)
    parts = [_HEAD.pack(_MAGIC, FORMAT, size), struct.pack(f"<{len(checksums)}I", *checksums)]
    for text in (key.identity, key.path, key.fingerprint):
        field = text.encode("utf-8", "surrogatepass")
        parts += [_LENGTH.pack(len(field)), field]
    parts.append(_PLACE.pack(index, key.block_size))
    body = b"".join(parts)
    return body + _TAIL.pack(zlib.crc32(body), len(body) + _TAIL.size)


def file_size(key: ObjectKey, size: int) -> int:
    """Return the size of the file of a block with `size` bytes of data."""
    texts = (text.encode("utf-8", "surrogatepass") for text in (key.identity, key.path, key.fingerprint))
    fields = sum(_LENGTH.size + len(text) for text in texts)
    return size + _HEAD.size + 4 * -(-size // PAGE) + fields + _PLACE.size + _TAIL.size


def parse_trailer(trailer: bytes) -> BlockTrailer:
    """Parse a trailer. Raises `BadBlock` if any part of it is damaged."""
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
    """Return the key and the data of the bytes of a block file, after checking all of them. Raises BadBlock."""
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
    if max(index, block_size) >> 63:  # SQLite integers are signed 64-bit
        raise BadBlock("it has an impossible place")
    return BlockTrailer(fields[0], fields[1], fields[2], block_size, index, length, checksums)


class OpenBlock:
    """An open block file with a valid trailer, used by one thread at a time; closes itself when collected.

    Bit n of `unchecked` is set until this process has checked page n. `stamp` (inode, mtime in ns) identifies the file,
    so that checks of one file do not count for another file that replaced it.
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
        """Close the file; a second call does nothing."""
        # Reset `fd` first: an interrupt may leak a descriptor, but never closes a reused number.
        fd, self.fd = self.fd, -1
        if fd >= 0:
            let_go(fd)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            self.close()

    def read(self, start: int, stop: int, *, nowait: bool = False, verify: bool = False) -> bytes:
        """Return bytes `[start, stop)` of the block, clipped to its length.

        Raises BadBlock, BlockingIOError, OSError.
        """
        if stop > self.length:
            stop = self.length
        if start >= stop:
            return b""
        first, last = start // PAGE, (stop - 1) // PAGE
        if verify or (self.unchecked >> first & (1 << last - first + 1) - 1):
            data = self._load(first * PAGE, min((last + 1) * PAGE, self.length), nowait)
            self._check(first, memoryview(data))
            return data[start - first * PAGE : stop - first * PAGE]
        if nowait:
            return self._load(start, stop, nowait)
        data = os.pread(self.fd, stop - start, start)
        if len(data) != stop - start:
            raise self._short(nowait)
        return data

    def read_into(self, start: int, buffer: memoryview, *, nowait: bool = False, verify: bool = False) -> int:
        """Fill `buffer` from offset `start`; return the number of bytes read. Raises the same errors as `read`."""
        size = min(len(buffer), self.length - start)
        if size <= 0:
            return 0
        if size < len(buffer):
            buffer = buffer[:size]
        if nowait:
            n = disk.read_cached_into(self.fd, buffer, start)
        else:
            n = os.preadv(self.fd, [buffer], start)
        if n != size:
            raise self._short(nowait)
        if verify or (self.unchecked and self._unchecked_of(start, start + size)):
            self._check_filled(start, buffer, nowait)
        return size

    def _unchecked_of(self, start: int, stop: int) -> int:
        first, last = start // PAGE, (stop - 1) // PAGE
        return self.unchecked >> first & (1 << last - first + 1) - 1

    def _load(self, start: int, stop: int, nowait: bool) -> bytes:
        data = (disk.read_cached if nowait else os.pread)(self.fd, stop - start, start)
        if len(data) != stop - start:
            raise self._short(nowait)
        return data

    def _short(self, nowait: bool) -> Exception:
        """Return the error for a short read: the page cache lacks the rest (`nowait`), or the file is too short."""
        return (
            BlockingIOError("not all of it is in memory")
            if nowait
            else BadBlock("it is shorter than it says")
        )

    def _check_filled(self, start: int, buffer: memoryview, nowait: bool) -> None:
        """Check the pages in `buffer`, filled from offset `start`: whole pages in place, edge pages from a copy.

        The bytes of an edge page are then copied from the checked page, so only checked bytes are returned.
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
        """Compare whole pages, starting with `page`, with their checksums and mark them as checked."""
        n_pages = -(-len(data) // PAGE)
        wrong = wrong_page(data, self.checksums[page : page + n_pages])
        if wrong is not None:
            raise BadBlock(f"its page {page + wrong} is damaged")
        self.unchecked &= ~((1 << n_pages) - 1 << page)


def open_block(fd: int, path: str, *, nowait: bool = False, owner: int | None = None) -> OpenBlock:
    """Return the block in the file at `path`, opened as `fd`, which is closed on errors.

    It must belong to user `owner` if given, as checksums do not prove authorship. Raises BadBlock, BlockingIOError, OSError.
    """
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise BadBlock("it is not a file")
        if owner is not None and status.st_uid != owner:
            raise BadBlock(f"it belongs to user {status.st_uid}")
        trailer = _read_trailer(fd, status.st_size, nowait)
    except BaseException:  # an interrupt too: no other code would close the descriptor
        let_go(fd)
        raise
    return OpenBlock(fd, path, trailer, (status.st_ino, status.st_mtime_ns))


def let_go(fd: int) -> None:
    """Close a read-only descriptor and ignore errors: the descriptor is closed and no data can be lost."""
    with contextlib.suppress(OSError):
        os.close(fd)


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
    end = (disk.read_cached if nowait else os.pread)(fd, size, file_size - size)
    if nowait and len(end) != size:
        raise BlockingIOError("not all of it is in memory")
    return end
