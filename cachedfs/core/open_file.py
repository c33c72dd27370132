"""The raw reader under an open file, and the cached block it keeps open between reads."""

from __future__ import annotations

import errno
import io
from os import getpid
from typing import Any

from cachedfs.cache.block_file import BadBlock, OpenBlock
from cachedfs.cache.block_store import BlockStore
from cachedfs.common.blocks import covering
from cachedfs.common.event_log import waiting
from cachedfs.common.types import ObjectInfo, Range
from cachedfs.core.download import Download, DownloadStopped
from cachedfs.core.object_history import RangeReadahead
from cachedfs.core.objects import Entry
from cachedfs.core.reader import Reader
from cachedfs.core.version import Version
from cachedfs.errors import ChecksumMismatch
from cachedfs.readahead.sequential import ENOUGH

__all__ = ["BUFFER_SIZE", "CurrentBlock", "RawFile"]

BUFFER_SIZE = 32 * 1024  # half a checksum page: serves small reads in C without reading far too much
JUMP_SIZE = 4 * 1024  # buffered by the first read after a seek: random reads rarely need more
_CLOSED = "I/O operation on closed file"
CACHED_AFTER = 64  # a file counts as cached after this many blocks in a row from disk, without readahead
FIRST_DEMAND = 2  # the request that opened a file reads to this multiple of its reader's progress


class CurrentBlock:
    """The cached block an open file is currently reading, kept open between reads; or none.

    `[start, stop)` is its byte range in the object, empty without a block. Not thread-safe: the file is locked.
    """

    __slots__ = ("_block", "_cache", "_verify", "_version", "start", "stop")

    def __init__(self, cache: BlockStore, version: Version | None, *, verify: bool) -> None:
        self._cache, self._version, self._verify = cache, version, verify
        self._block: OpenBlock | None = None
        self.start = self.stop = 0

    def copy(self, position: int, into: memoryview) -> int:
        """Copy bytes from `position` on; return their number, 0 without a block.

        A damaged block is released.
        """
        block = self._block
        if block is None:
            return 0
        try:
            return block.read_into(position - self.start, into, verify=self._verify)
        except (BadBlock, OSError) as error:
            self.release(error)
            return 0

    def take(self, index: int) -> bool:
        """Replace the block by block `index`; return False, and hold no block, if that is not cached."""
        version = self._version
        if version is None:
            return False
        size = version.block_size
        old = None if self._block is None else (self.start // size, self._block)
        # Clear before giving back: an interrupt in between may leak a descriptor, but it never has two users.
        self._clear()
        block = self._cache.borrow(version, index, old)
        if block is None:
            return False
        # Too short for its object: remove it, or every read would find it again.
        if block.length < size and block.length < version.size - index * size:
            self._cache.release_block(version, index, block, BadBlock("it is shorter than its object"))
            return False
        self._block, self.start, self.stop = block, index * size, index * size + block.length
        return True

    def release(self, error: BaseException | None = None) -> None:
        """Release the block to the cache, which removes it if `error` shows that it is damaged."""
        block, start = self._block, self.start
        self._clear()
        if block is not None and self._version is not None:
            self._cache.release_block(self._version, start // self._version.block_size, block, error)

    def move_to(self, cache: BlockStore) -> None:
        """Switch to another cache, as after a fork, and release the block to it."""
        self._cache = cache
        self.release()

    def _clear(self) -> None:
        self._block, self.start, self.stop = None, 0, 0


class RawFile(io.RawIOBase):
    """Read position and read history of one open file.

    Reads come from a cached block or a download. Not thread-safe: the BufferedReader around it has a lock.
    """

    def __init__(self, reader: Reader, entry: Entry, download: Download | None) -> None:
        self.info: ObjectInfo = entry.object
        self._reader = reader
        self._entry = entry
        self._version = reader.objects.version(entry)
        self._engine = reader.objects.engine
        self._cache = self._engine.cache
        self._block_size = reader.objects.config.block_size
        self._position = 0
        verify = reader.objects.config.verify_always
        self._current_block = CurrentBlock(self._cache, self._version, verify=verify)
        self._has_seeked = False  # a seek moved the position since the last read
        self._seek_from = self._seek_to = 0  # position before the last seek; start of the first read after it
        self._last = -1  # index of the block read last
        self._n_reads = 0  # reads that moved to another block since the last wait
        # Blocks that this file requested: reading them from disk later does not count as a hit.
        self._requested: set[int] = set()
        if download is not None:
            self._add_requested(download.start, download.stop)
        # This file needed a fetch recently: check downloads and read ahead.
        self._is_fetching = download is not None
        self._n_cached = 0  # blocks read from disk since one came from elsewhere
        self._opening = download  # the request sent by open(); this file may stop it
        self._download = download  # the request that served the last read
        self._readahead = RangeReadahead(self._block_size)  # kept up to date only while `_is_fetching`
        if self.info.size is None:
            data = reader.objects.engine.run(reader.collect(entry, None, None))
            self._data: bytes | None = data
            self.size = len(data)
        else:
            self._data = None
            self.size = self.info.size

    @property
    def name(self) -> str:
        # A URL: libraries such as PIL open the local file of this name if one exists.
        return self._reader.objects.url(self._entry.path)

    @property
    def mode(self) -> str:
        return "rb"

    def readable(self) -> bool:
        self._must_be_open()
        return True

    def seekable(self) -> bool:
        self._must_be_open()
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if whence == 1:
            offset += self._position
        elif whence == 2:
            offset += self.size
        elif whence != 0:
            raise ValueError(f"whence is 0, 1 or 2, not {whence}")
        if offset < 0:
            raise OSError(errno.EINVAL, f"cannot seek to {offset}: before the start of {self._entry.path}")
        if offset != self._position:
            if not self._has_seeked:
                self._has_seeked, self._seek_from = True, self._position
            self._position = offset
        return offset

    def tell(self) -> int:
        self._must_be_open()
        return self._position

    def _must_be_open(self) -> None:
        if self.closed:
            raise ValueError(_CLOSED)

    def readinto(self, buffer: Any, /) -> int:
        """Read up to `len(buffer)` bytes, as soon as some are available.

        Return 0 only at the end of the file.
        """
        into = buffer if type(buffer) is memoryview else memoryview(buffer).cast("B")
        position, block = self._position, self._current_block
        if self._has_seeked:
            self._has_seeked, self._seek_to = False, position
            if len(into) == BUFFER_SIZE:
                into = into[:JUMP_SIZE]
        # The most common case first: more of the current block.
        if block.start <= position < block.stop:
            n = block.copy(position, into)
        elif self.closed:  # by another thread while this one waited for the BufferedReader's lock
            raise ValueError(_CLOSED)
        elif self._is_fetching or self._engine.pid != getpid():
            n = 0
        else:
            n = self._from_cache(position, into)
        if n <= 0:
            if position >= self.size or not len(into):
                return 0
            n = self._read(position, into[: self.size - position])
        self._position = position + n
        self._engine.bytes_served += n
        return n

    def readall(self) -> bytes:
        """Return all bytes from the position to the end, fetched together."""
        if self.closed:
            raise ValueError(_CLOSED)
        if self._position >= self.size:
            return b""
        if self._data is not None:
            data = self._data[self._position :]
        else:
            if self._engine.pid != getpid():
                self._after_fork()
            if self._download is None or not self._download.covers(self._position):
                self._stop_opening()
            cached = None
            if self._version is not None:
                cached = self._reader.cached_bytes(self._version, self._position, self.size)
            data = cached if cached is not None else self._collect(self._position)
        self._position = self.size
        return data

    def close(self) -> None:
        if not self.closed:
            self._current_block.release()
            self._stop_opening()
            self._download = None
            if self._engine.pid == getpid():
                self._readahead.close(self._reader.downloads)
        super().close()

    # Sources of the bytes.

    def _read(self, position: int, into: memoryview) -> int:
        if self._data is not None:
            n = min(len(into), self.size - position)
            into[:n] = self._data[position : position + n]
            return n
        if self._engine.pid != getpid():
            self._after_fork()
        index = position // self._block_size
        n = self._from_requests(index, position, into) if self._is_fetching else 0
        if n == 0:
            n = self._from_cache(position, into)
            if n and self._is_fetching:
                self._count_cached_block()
        while n == 0:
            self._n_cached = 0
            if not self._is_fetching:
                self._is_fetching = True
                self._begin_history(position)
            self._download = self._engine.run(self._fetch(position, len(into)))
            self._n_reads = 0
            n = (
                self._from_download(position, into)
                if self._download is not None
                else self._from_cache(position, into)
            )
        return n

    def _from_cache(self, position: int, into: memoryview) -> int:
        """Make the cached block at `position` the current block, and copy from it; return 0 for a miss."""
        index = position // self._block_size
        if not self._current_block.take(index):
            return 0
        last, self._last = self._last, index
        n = self._current_block.copy(position, into)
        if n > 0 and index in self._requested:
            self._requested.discard(index)
        elif n > 0 and index != last:
            self._engine.hits += 1
        return n

    def _from_requests(self, index: int, position: int, into: memoryview) -> int:
        """Copy from a download; on a new block, first update the history and read ahead."""
        if index != self._readahead.history.last:
            came_from = self._seek_from if self._seek_to == position else position
            stop = min(position + len(into), (index + 1) * self._block_size)
            self._readahead.observe(self._reader.downloads, position, stop, left=came_from)
            self._n_reads += 1
            self._read_ahead()
        return self._from_download(position, into)

    def _count_cached_block(self) -> None:
        """Count a cached block; after AT_HOME of them, read from the cache only until a block is missing.

        Checking downloads at each block costs more than the rest of a small read.
        """
        self._n_cached = 0 if next(iter(self._readahead), None) else self._n_cached + 1
        if self._n_cached >= CACHED_AFTER:
            self._stop_opening()
            self._is_fetching, self._n_cached, self._download = False, 0, None

    def _begin_history(self, position: int) -> None:
        """Update the history with the block read last, which was cached, and with `position`."""
        size, last, downloads = self._block_size, self._last, self._reader.downloads
        if last >= 0:
            self._readahead.observe(downloads, last * size, (last + 1) * size)
        self._readahead.observe(downloads, position, position + 1)

    def _from_download(self, position: int, into: memoryview) -> int:
        """Copy what a download has received at `position`; return 0 if there is nothing yet."""
        download = self._download = self._download_at(position)
        if download is None:
            self._stop_opening()
            return 0
        # Never past the block: the history must see each block, or a sequential read looks like a seek.
        n = download.take(position, into[: self._block_size - position % self._block_size])
        self._n_cached = 0
        if n and position // self._block_size != self._last and self._version is not None:
            self._last = position // self._block_size
            self._requested.discard(self._last)
            self._cache.touch(self._version, self._last)
        if download is self._opening and not download.done:
            run = FIRST_DEMAND * (position + n - download.start)
            if run > download.demand - download.start:
                wanted_to = -(-(download.start + FIRST_DEMAND * run) // self._block_size) * self._block_size
                self._engine.call_soon(download.want, min(download.stop, wanted_to))
        return n

    def _download_at(self, position: int) -> Download | None:
        """Return a download that covers `position`, of this file or of any other reader.

        Raises ChecksumMismatch if the last one turned out to have brought wrong bytes.
        """
        if self._download is not None:
            if self._download.covers(position):
                return self._download
            if isinstance(self._download.error, ChecksumMismatch):
                raise self._download.error
        digest = "" if self._version is None else self._version.digest
        shared = self._engine.by_block.get((digest, position // self._block_size))
        if shared is not None and shared.covers(position):
            return shared
        return next((download for download in self._readahead if download.covers(position)), None)

    async def _fetch(self, position: int, size: int) -> Download | None:
        """Wait for bytes at `position`; return None if they are cached now. Event loop thread only."""
        reader, version = self._reader, self._version
        index, offset = divmod(position, self._block_size)
        if version is not None and size <= BUFFER_SIZE and (version.digest, index) in self._engine.by_block:
            # A full buffer is more than the caller asked for. Do not request the next block for it: otherwise the
            # speed of the link would decide which blocks are fetched.
            size = min(size, self._block_size - offset)
        # Without the current block: it was counted when its reading began.
        self._add_requested((index + (index == self._last)) * self._block_size, position + size)
        if version is None:
            return await self._fetch_uncached(position, size)
        if (found := self._download_at(position)) is not None and found.filled > position:
            return found  # received since the last check; may exist only here if it could not be stored
        want = Range(position, min(position + size, self.size))
        up_to = 0
        # Request more, as open() does for an unknown object. Not if another reader requested block 0: this file may
        # only stop its own request.
        if position == 0 and self._last < 0 and (version.digest, 0) not in self._engine.by_block:
            up_to = min(self.size, reader.objects.config.whole_request)
        download = await reader.fetch(version, want, n_reads=self._n_reads, up_to=up_to)
        if up_to and download is not None and download.demand < download.stop:
            self._opening = download
        return download

    async def _fetch_uncached(self, position: int, size: int) -> Download:
        """Wait for bytes at `position` of an object without a key.

        They come from this file's request, or else from a new one.
        """
        download = self._download
        while True:
            if download is None or not download.covers(position):
                download = self._reader.downloads.launch_uncached(self.info, position)
            try:
                with waiting(self._entry.path, position, position + size):
                    await download.wait_until(min(position + size, download.stop))
                return download
            except DownloadStopped:
                download = None

    def _read_ahead(self) -> None:
        """Request the blocks that the read history predicts."""
        run = self._readahead.history.runs[0]
        if self._opening is not None and run.number == 0 and run.n_steps >= ENOUGH:
            self._engine.call_soon(self._opening.want, self._opening.stop)
            self._readahead.requests_of(run).append(self._opening)
            self._opening = None
        if (version := self._version) is not None:
            wanted, has = self._readahead.predict(self._reader.objects, version), self._cache.has
            self._requested.update(index for blocks in wanted for index in blocks if not has(version, index))
            self._readahead.request(self._reader.downloads, version, wanted)

    def _add_requested(self, start: int, stop: int) -> None:
        """Record that this file requests the bytes `[start, stop)`."""
        if start < stop:
            self._requested.update(covering(Range(start, stop), self._block_size))

    def _collect(self, start: int) -> bytes:
        return self._engine.run(self._reader.collect(self._entry, start, None, self._download))

    def _stop_opening(self) -> None:
        """Stop the request of open() after its current block, because the reads are elsewhere."""
        download, self._opening = self._opening, None
        if download is not None and not download.done and self._engine.pid == getpid():
            block_end = -(-max(download.filled, 1) // self._block_size) * self._block_size
            self._engine.call_soon(download.stop_soon, block_end)

    def _after_fork(self) -> None:
        """Switch to the child's engine after a fork.

        The downloads stay with the parent.
        """
        self._engine = self._reader.objects.engine
        self._cache = self._engine.cache
        self._current_block.move_to(self._cache)
        self._download = self._opening = None
        self._readahead = RangeReadahead(self._block_size)
