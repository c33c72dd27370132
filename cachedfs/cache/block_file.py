"""The file of one cached block: data, then a trailer with the key and a CRC-32 for each page of 64 KiB.

Consecutive whole pages are checked with one CRC-32 over all of them, compared with the page checksums combined.
Each CRC-32 call releases the GIL, and getting it back from busy threads takes longer than the checksum itself.
zlib-ng computes the same CRC-32 as zlib, ten times as fast.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from zlib_ng.zlib_ng import crc32, crc32_combine

from cachedfs.cache import disk
from cachedfs.cache.disk import Buffer
from cachedfs.common.types import BlockKey, ObjectKey
from cachedfs.errors import BadBlock

PAGE = 65536  # bytes per checksum: small enough to check for a 4 KiB read (2 us)

FORMAT = 3
_MAGIC = b"cachedfs"
_HEAD = struct.Struct("<8sHHQ")  # magic, format, 1 if it came from a shared cache, length of the data
PLACE = struct.Struct("<QQ")  # index, block size: with the encoded object version, the key in a trailer
_TAIL = struct.Struct("<II")  # CRC-32 of the trailer up to here, size of the whole trailer
_LENGTH = struct.Struct("<I")
_PROBE = 4096  # bytes read from the end at open: the whole trailer, unless block or path are huge


def wrong_page(data: memoryview, checksums: Sequence[int]) -> int | None:
    """Return the index of the first page that does not match its checksum; None when all pages match."""
    n_whole, total = len(data) // PAGE, 0
    for checksum in checksums[:n_whole]:
        total = crc32_combine(total, checksum, PAGE)
    right = n_whole if crc32(data[: n_whole * PAGE]) == total else 0
    for page in range(right, len(checksums)):
        if crc32(data[page * PAGE : (page + 1) * PAGE]) != checksums[page]:
            return page
    return None


def block_path(digest: str, index: int) -> str:
    """Return the path of a block below the root; 16 folders: making one costs as much as writing 2 MiB (ext4)."""
    return f"blocks/{digest[0]}/{digest}-{index:x}"


class BlockTrailer(NamedTuple):
    """The parsed trailer of a block file: the length of its data, its page checksums, and its encoded key.

    `is_shared`: it came from a shared cache or an import, whose authors could choose what is in it.
    """

    length: int
    checksums: tuple[int, ...]
    encoded_key: bytes
    is_shared: bool

    @property
    def key(self) -> BlockKey:
        """The key of the block. Raises BadBlock if it makes no sense."""
        at, fields = 0, []
        try:
            for _ in range(3):
                (size,) = _LENGTH.unpack_from(self.encoded_key, at)
                fields.append(self.encoded_key[at + 4 : at + 4 + size].decode("utf-8", "surrogatepass"))
                at += 4 + size
            index, block_size = PLACE.unpack(self.encoded_key[at:])
        except (struct.error, UnicodeDecodeError) as error:
            raise BadBlock(f"its trailer makes no sense: {error}") from error
        if max(index, block_size) >> 63:  # SQLite integers are signed 64-bit
            raise BadBlock("it has an impossible place")
        identity, path, fingerprint = fields
        return ObjectKey(identity, path, fingerprint, block_size).block(index)


def encode_trailer(key: ObjectKey, index: int, *pieces: Buffer, is_shared: bool = False) -> bytes:
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
    body = _HEAD.pack(_MAGIC, FORMAT, is_shared, size) + struct.pack(f"<{len(checksums)}I", *checksums)
    body += key.encoded + PLACE.pack(index, key.block_size)
    return body + _TAIL.pack(zlib.crc32(body), len(body) + _TAIL.size)


def file_size(key: ObjectKey, size: int) -> int:
    """Return the size of the file of a block with `size` bytes of data."""
    return size + _HEAD.size + 4 * -(-size // PAGE) + len(key.encoded) + PLACE.size + _TAIL.size


def parse_trailer(trailer: bytes) -> BlockTrailer:
    """Parse a trailer. Raises `BadBlock` if any part of it is damaged."""
    body, tail = trailer[: -_TAIL.size], trailer[-_TAIL.size :]
    if len(body) < _HEAD.size + PLACE.size or not body.startswith(_MAGIC):
        raise BadBlock("it has no trailer")
    if _TAIL.unpack(tail) != (zlib.crc32(body), len(trailer)):
        raise BadBlock("its trailer is damaged")
    _, version, is_shared, length = _HEAD.unpack_from(body)
    if version != FORMAT:
        raise BadBlock(f"it has format {version}, not {FORMAT}")
    at = _HEAD.size + 4 * (n_pages := -(-length // PAGE))
    if at > len(body):
        raise BadBlock("its trailer has the wrong size")
    checksums = struct.unpack_from(f"<{n_pages}I", body, _HEAD.size)
    return BlockTrailer(length, checksums, body[at:], bool(is_shared))


class OpenBlock:
    """An open block file with a valid trailer. Threads may share it; it is closed with the last reference to it.

    `start` is its offset in the object, `offset` that of its data in the file. Bit n of `unchecked` is set until page n has
    been checked since the file was opened; of two threads that clear bits at once, one may fail to, and its pages are
    checked once more.
    """

    __slots__ = ("fd", "length", "offset", "path", "start", "trailer", "unchecked")

    def __init__(self, fd: int, path: str, trailer: BlockTrailer, offset: int = 0) -> None:
        self.fd = fd
        self.path = path
        self.offset = offset
        self.trailer = trailer
        self.length = trailer.length
        self.start = 0
        self.unchecked = (1 << len(trailer.checksums)) - 1

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        # Reset `fd` first: an interrupt may leak a descriptor, but never closes a reused number.
        fd, self.fd = self.fd, -1
        if fd >= 0:
            _close(fd)

    def __del__(self) -> None:
        if _close is not None and hasattr(self, "fd"):  # None: the interpreter ends
            self.close()

    def read(self, start: int, stop: int, *, nowait: bool = False, verify: bool = False) -> bytes:
        """Return bytes `[start, stop)` of the block, clipped to its length.

        Raises BadBlock, BlockingIOError, OSError.
        """
        if stop > self.length:
            stop = self.length
        if start >= stop:
            return b""
        first, last, low, high = start // PAGE, (stop - 1) // PAGE, start, stop
        is_unchecked = verify or self.unchecked >> first & (1 << last - first + 1) - 1
        if is_unchecked:  # whole pages
            low, high = first * PAGE, min((last + 1) * PAGE, self.length)
        data = (disk.read_cached if nowait else os.pread)(self.fd, high - low, self.offset + low)
        if len(data) != high - low:
            raise BadBlock("it is shorter than it says")
        if is_unchecked:
            self._check(first, memoryview(data))
        return data[start - low : stop - low]

    def read_into(self, start: int, buffer: memoryview, *, nowait: bool = False, verify: bool = False) -> int:
        """Fill `buffer` from offset `start`; return the number of bytes read. Raises the same errors as `read`."""
        size = min(len(buffer), self.length - start)
        if size <= 0:
            return 0
        if size < len(buffer):
            buffer = buffer[:size]
        first, stop = start // PAGE, start + size
        is_unchecked = verify or (self.unchecked >> first & (1 << (stop - 1) // PAGE - first + 1) - 1)
        if is_unchecked and (start % PAGE or (stop % PAGE and stop != self.length)):
            buffer[:] = self.read(start, stop, nowait=nowait, verify=verify)
            return size
        at = self.offset + start
        n = disk.read_cached_into(self.fd, buffer, at) if nowait else os.preadv(self.fd, [buffer], at)
        if n != size:
            raise BadBlock("it is shorter than it says")
        if is_unchecked:
            self._check(first, buffer)
        return size

    def _check(self, page: int, data: memoryview) -> None:
        """Compare whole pages, starting with `page`, with their checksums and mark them as checked."""
        n_pages = -(-len(data) // PAGE)
        wrong = wrong_page(data, self.trailer.checksums[page : page + n_pages])
        if wrong is not None:
            raise BadBlock(f"its page {page + wrong} is damaged")
        self.unchecked &= ~((1 << n_pages) - 1 << page)


def open_block(
    fd: int, path: str, encoded_key: bytes | None = None, *, nowait: bool = False, owner: int | None = None
) -> OpenBlock:
    """Return the block in the file at `path`, opened as `fd`, which is closed on errors.

    It must have this `encoded_key` if given, and belong to user `owner` if given, as checksums do not prove authorship. Raises
    BadBlock, BlockingIOError, OSError.
    """
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise BadBlock("it is not a file")
        if owner is not None and status.st_uid != owner:
            raise BadBlock(f"it belongs to user {status.st_uid}")
        trailer = _read_trailer(fd, status.st_size, nowait)
        if encoded_key is not None and trailer.encoded_key != encoded_key:
            raise BadBlock("it is another block")
    except BaseException:  # an interrupt too: no other code would close the descriptor
        _close(fd)
        raise
    return OpenBlock(fd, path, trailer)


def _close(fd: int) -> None:
    """Close a read-only descriptor and ignore errors: the descriptor is closed and no data can be lost."""
    with contextlib.suppress(OSError):
        os.close(fd)


def _read_trailer(fd: int, file_size: int, nowait: bool) -> BlockTrailer:
    read, n = (disk.read_cached if nowait else os.pread), min(_PROBE, file_size)
    end = read(fd, n, file_size - n)
    if len(end) != n or n < _TAIL.size:
        raise BadBlock("it is cut off")
    size = int(_TAIL.unpack_from(end, n - _TAIL.size)[1])
    if not _TAIL.size < size <= file_size:
        raise BadBlock("it has no trailer")
    if size > n:
        end = read(fd, size, file_size - size)
        if len(end) != size:
            raise BadBlock("it is shorter than it says")
    trailer = parse_trailer(end[-size:])
    if trailer.length + size != file_size:
        raise BadBlock("it has the wrong size")
    return trailer
