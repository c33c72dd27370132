"""The raw reader under an open file: it reads from cached blocks and from downloads."""

from __future__ import annotations

import contextlib
import errno
import io
from functools import partial
from typing import TYPE_CHECKING, Any

from cachedfs.common.blocks import covering
from cachedfs.common.event_log import waiting
from cachedfs.common.types import ObjectInfo, Range
from cachedfs.common.version import Version
from cachedfs.core.download import Download, DownloadStopped
from cachedfs.errors import BadBlock

if TYPE_CHECKING:
    from cachedfs.cache.block_file import OpenBlock
    from cachedfs.core.objects import Entry
    from cachedfs.core.reader import Reader

BUFFER_SIZE = 32 * 1024  # half a checksum page: serves small reads in C without reading far too much
FIRST_DEMAND = 2  # the request that opened a file reads to this multiple of its reader's progress


class RawFile(io.RawIOBase):
    """Read position and read history of one open file.

    Reads come from a cached block or a download. Not thread-safe, except `at`: the BufferedReader around it has a lock.
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
        self._verify = reader.objects.config.verify_always
        self._block: OpenBlock | None = None  # the cached block that was read last
        self._seek_from = self._seek_to = 0  # of the last seek that moved the position
        self._last = -1  # index of the block read last
        self._observed = -1  # the last block of which the history of the object knows
        self._opening = download  # the request sent by open(); this file may stop it
        self._download = download  # the request that served the last read
        self._readahead = reader.readahead
        may_go_on = self._version is not None and self._version.n_blocks > 1
        self._reads_ahead = may_go_on and reader.objects.config.read_ahead > 0
        if self.info.size is None:
            data = reader.objects.engine.run(reader.read_version(entry, None, None))
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
        self._checkClosed()
        return True

    def seekable(self) -> bool:
        self._checkClosed()
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
            self._seek_from, self._seek_to = self._position, offset
            self._position = offset
        return offset

    def tell(self) -> int:
        self._checkClosed()
        return self._position

    def at(self, position: int, size: int) -> bytes | None:
        """Return `size` bytes at `position` if an open block has all of them, and its reads are not observed; else None.

        From any thread, and without a lock.
        """
        block = self._block
        if block is None:
            return None
        start = position - block.start
        if not 0 <= start <= block.length - size:
            block = self._open_block(position)
            if block is None or size > block.length - (start := position - block.start):
                return None
        try:
            data = block.read(start, start + size, verify=self._verify)
        except (BadBlock, OSError):  # the read that is not from here finds the same, and removes the block
            return None
        self._engine.bytes_served += size
        return data

    def _open_block(self, position: int) -> OpenBlock | None:
        """Return the block at `position`, now the current one, if it is open and its reads are not observed."""
        version, index = self._version, position // self._block_size
        if version is None or self._download is not None:
            return None
        block = self._cache.open_blocks.get((version.digest, index))
        history = self._engine.histories.get(version.digest)
        if block is None or (history is not None and (history.n_to_observe >= 0 or history.requested)):
            return None
        self._cache.touch(version, index)
        if index != self._last:
            self._last = index
            self._engine.hits += 1
        self._block = block
        return block

    def readinto(self, buffer: Any, /) -> int:
        """Read up to `len(buffer)` bytes, as soon as some are available.

        Return 0 only at the end of the file.
        """
        into = buffer if type(buffer) is memoryview else memoryview(buffer).cast("B")
        position = self._position
        n = self._copy(position, into)  # the most common case first: more of the current block
        if not n:
            self._checkClosed()  # by another thread, while this one waited for the BufferedReader's lock
            if self._download is None and not self._engine.by_block and self._engine.is_open:
                n = self._from_cache(position, into)
        if not n:
            if position >= self.size or not len(into):
                return 0
            n = self._read(position, into[: self.size - position])
        self._position = position + n
        self._engine.bytes_served += n
        return n

    def readall(self) -> bytes:
        """Return all bytes from the position to the end, fetched together."""
        self._checkClosed()
        if self._position >= self.size:
            return b""
        data: bytes | None
        if self._data is not None:
            data = self._data[self._position :]
        else:
            if not self._engine.is_open:
                self._switch_engine()
            if self._download is None or not self._download.covers(self._position):
                self._stop_opening()
            start, version = self._position, self._version
            data = None if version is None else self._reader.cached_bytes(version, start, self.size)
            if data is None:
                data = self._engine.run(self._reader.read_version(self._entry, start, None, self._download))
            else:
                self._engine.hits += len(covering(Range(start, self.size), self._block_size))
                self._engine.bytes_served += len(data)
            self._download_at(self._position)  # raises if the bytes before these were wrong
        self._position = self.size
        return data

    def close(self) -> None:
        if not self.closed:
            self._block = None
            self._stop_opening()
            self._download = None
            if self._version is not None and self._observed >= 0 and self._engine.is_open:
                self._engine.call_soon(self._readahead.close_file, self._version, id(self))
        super().close()

    # Sources of the bytes.

    def _read(self, position: int, into: memoryview) -> int:
        if self._data is not None:
            n = min(len(into), self.size - position)
            into[:n] = self._data[position : position + n]
            return n
        if not self._engine.is_open:
            self._switch_engine()
        n = self._from_download(position, into) or self._from_cache(position, into)
        while n == 0:
            self._download = self._engine.run(self._fetch(position, len(into)))
            is_coming = self._download is not None
            n = self._from_download(position, into) if is_coming else self._from_cache(position, into)
        return n

    def _from_cache(self, position: int, into: memoryview) -> int:
        """Make the cached block at `position` the current block, and copy from it; return 0 for a miss."""
        version, size = self._version, self._block_size
        index = position // size
        block = self._block = None if version is None else self._cache.open(version, index)
        if version is None or block is None:
            return 0
        self._cache.touch(version, index)
        # Too short for its object: remove it, or every read would find it again.
        if block.length < size and block.length < version.size - block.start:
            self._exclude(block, BadBlock("it is shorter than its object"))
        n = self._copy(position, into)
        if n > 0 and index != self._last:
            self._moved(index, position, n, is_cached=True)
        return n

    def _copy(self, position: int, into: memoryview) -> int:
        """Copy what the current block has at `position`; return 0 if that is nothing. A damaged block is removed."""
        block = self._block
        if block is None or not block.start <= position < block.start + block.length:
            return 0
        try:
            return block.read_into(position - block.start, into, verify=self._verify)
        except (BadBlock, OSError) as error:
            self._exclude(block, error)
            return 0

    def _exclude(self, block: OpenBlock, error: BadBlock | OSError) -> None:
        self._block = None
        if self._version is not None:
            self._cache.exclude(self._version, block.start // self._block_size, block.path, error)

    def _moved(self, index: int, position: int, n: int, *, is_cached: bool) -> None:
        """Count a read in another block than the last one; report it while the object is not known to be cached."""
        self._last, version = index, self._version
        history = None if version is None else self._engine.histories.get(version.digest)
        was_requested = history is not None and history.take(range(index, index + 1))
        self._engine.hits += is_cached and not was_requested
        is_observed = self._reads_ahead and history is not None and history.n_to_observe >= 0
        if is_observed and index != self._observed:
            self._observed = index
            observe = partial(self._readahead.observe, last_stop=self._last_stop(position), file=id(self))
            self._engine.call_soon(observe, version, position, position + n)

    def _last_stop(self, position: int) -> int:
        """Return where the reads before the one at `position` ended."""
        return self._seek_from if self._seek_to == position else position

    def _from_download(self, position: int, into: memoryview) -> int:
        """Copy what a download has received at `position`; return 0 if there is nothing yet."""
        download = self._download = self._download_at(position)
        if download is None:
            self._stop_opening()
            return 0
        # Never past the block: the history must see each block, or a sequential read looks like a seek.
        n = download.take(position, into[: self._block_size - position % self._block_size])
        index = position // self._block_size
        if n and index != self._last:
            self._moved(index, position, n, is_cached=False)
            if self._version is not None:
                self._cache.touch(self._version, index)
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
            if self._download.mismatch is not None:
                raise self._download.mismatch
        digest = "" if self._version is None else self._version.digest
        shared = self._engine.by_block.get((digest, position // self._block_size))
        if shared is not None and shared.covers(position):
            return shared
        history = self._engine.histories.get(digest)
        return None if history is None else history.download_at(position)

    async def _fetch(self, position: int, size: int) -> Download | None:
        """Wait for bytes at `position`; return None if they are cached now. Event loop thread only."""
        version = self._version
        # A full buffer is more than the caller asked for: do not request the next block for it.
        if size <= BUFFER_SIZE:
            size = min(size, self._block_size - position % self._block_size)
        if version is None:
            return await self._fetch_uncached(position, size)
        if (found := self._download_at(position)) is not None and found.filled > position:
            return found  # received since the last check; may exist only here if it could not be stored
        return await self._fetch_blocks(version, Range(position, min(position + size, self.size)))

    async def _fetch_blocks(self, version: Version, want: Range) -> Download | None:
        """Request `want`, and wait for the bytes of its first block; return None if they are cached now."""
        reader, path, size = self._reader, self._entry.path, self._block_size
        blocks, demand = covering(want, size), None
        first, config = blocks[0], reader.objects.config
        if self._reads_ahead:
            self._observe_miss(version, want)
        if config.read_ahead and not first:
            reader.readahead.observe_object(path, 0, size)
        # Request more, as open() does for an unknown object. Not if another reader requested block 0: this file may
        # only stop its own request.
        if want.start == 0 and self._last < 0 and (version.digest, 0) not in self._engine.by_block:
            demand = blocks.stop * size
            blocks = covering(Range(0, max(want.stop, min(self.size, config.whole_request))), size)
        # Without the current block: it was counted when its reading began.
        self._readahead.history(version).requested.update(blocks[first == self._last :])
        with waiting(path, want.start, want.stop):
            while not self._cache.has(version, first):
                download = (await reader.downloads.get(version, blocks, demand=demand)).get(first)
                if download is not None:
                    with contextlib.suppress(DownloadStopped):
                        await download.wait_until(min(want.stop, download.stop))
                        if demand is not None and download.demand < download.stop:
                            self._opening = download
                        return download
        return None

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

    def _observe_miss(self, version: Version, want: Range) -> None:
        """Report a miss, and the last block that was read if it was cached, and so not reported."""
        last, size, observe = self._last, self._block_size, partial(self._readahead.observe, file=id(self))
        if last not in (-1, self._observed):
            observe(version, last * size, (last + 1) * size)
        self._observed = want.start // size
        stop = min(want.stop, (self._observed + 1) * size)
        observe(version, want.start, stop, last_stop=self._last_stop(want.start), missed=covering(want, size))

    def _stop_opening(self) -> None:
        """Stop the request of open() after its current block, because the reads are elsewhere."""
        download, self._opening = self._opening, None
        if download is not None and not download.done and self._engine.is_open:
            block_end = -(-max(download.filled, 1) // self._block_size) * self._block_size
            self._engine.call_soon(download.stop_soon, block_end)

    def _switch_engine(self) -> None:
        """Switch to the current engine: the old one was closed, or is the parent process's. Its downloads are dropped."""
        self._engine = self._reader.objects.engine
        self._cache = self._engine.cache
        self._block = self._download = self._opening = None
