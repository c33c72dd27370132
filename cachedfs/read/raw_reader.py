"""The block that an open file reads from: borrowed from the cache until the next one is taken."""

from __future__ import annotations

import errno
import io
from collections import deque
from collections.abc import Iterable
from os import getpid
from typing import Any

from cachedfs.cache.block_cache import BlockCache
from cachedfs.cache.block_file import BadBlock, OpenBlock
from cachedfs.common.blocks import covering
from cachedfs.common.event_log import waiting
from cachedfs.common.types import ObjectInfo, ObjectKey, Range
from cachedfs.errors import ChecksumMismatch
from cachedfs.fetch.inflight import InflightRequest, RequestStopped
from cachedfs.fetch.metadata_cache import MetadataEntry
from cachedfs.read.reader import Reader
from cachedfs.readahead.object_history import OutstandingReadahead
from cachedfs.readahead.sequential import ENOUGH, ReadHistory, ahead

__all__ = ["BUFFER_SIZE", "CurrentBlock", "RawReader"]


class CurrentBlock:
    """One block of an object at most: `[start, stop)` of the object are the bytes that it holds. Not locked: its file is."""

    __slots__ = ("_block", "_cache", "_key", "_size", "_verify", "start", "stop")

    def __init__(self, cache: BlockCache, key: ObjectKey | None, size: int, *, verify: bool) -> None:
        self._cache, self._key, self._size, self._verify = cache, key, size, verify
        self._block: OpenBlock | None = None
        self.start = self.stop = 0

    def copy(self, position: int, into: memoryview) -> int:
        """Copy from `position` on, and return how many bytes; 0 where it holds none, or is bad: then it is put down."""
        block = self._block
        if block is None:
            return 0
        try:
            return block.read_into(position - self.start, into, verify=self._verify)
        except (BadBlock, OSError) as error:
            self.put_down(error)
            return 0

    def take(self, index: int) -> bool:
        """Take a block in the place of the last one; False when it is not here, and then there is none."""
        key = self._key
        if key is None:
            return False
        size = key.block_size
        old = None if self._block is None else (self.start // size, self._block)
        # Let go before giving back: an interrupt in between loses a descriptor, but never leaves it in two hands.
        self._let_go()
        block = self._cache.borrow(key, index, old)
        if block is None:
            return False
        # A short block in the middle would be found, and found too short, for ever.
        if block.length < size and block.length < self._size - index * size:
            self._cache.give_back(key, index, block, BadBlock("it is shorter than its object"))
            return False
        self._block, self.start, self.stop = block, index * size, index * size + block.length
        return True

    def put_down(self, error: BaseException | None = None) -> None:
        """Give the block back to the cache, which drops it where it is bad."""
        block, start = self._block, self.start
        self._let_go()
        if block is not None and self._key is not None:
            self._cache.give_back(self._key, start // self._key.block_size, block, error)

    def leave(self, cache: BlockCache) -> None:
        """Go on with another cache, as after a fork; it gets the block."""
        self._cache = cache
        self.put_down()

    def _let_go(self) -> None:
        self._block, self.start, self.stop = None, 0, 0


BUFFER_SIZE = 32 * 1024  # half a checksum page: small reads in Python's C code, without reading far too much
JUMP_SIZE = 4 * 1024  # read into the buffer after a jump: most random reads want less than all of it
_CLOSED = "I/O operation on closed file"
AT_HOME = 64  # other blocks in a row from the disk, and nothing of ours on its way: this file is here
FIRST_DEMAND = 2  # the request that opened a file runs this many times ahead of its reader


class RawReader(io.RawIOBase):
    """Read position and history of one open file; every read is answered by a block or a request in flight.

    Not locked: the BufferedReader over it is.
    """

    def __init__(self, reader: Reader, known: MetadataEntry, inflight: InflightRequest | None) -> None:
        assert known.info is not None
        self.info: ObjectInfo = known.info
        self._reader = reader
        self._known = known
        self._key = reader.source.key(known)
        self._runtime = reader.source.runtime
        self._cache = self._runtime.cache
        self._block_size = reader.source.config.block_size
        self._refusal = self._last_refusal()
        self._position = 0
        verify = reader.source.config.verify_always
        self._hand = CurrentBlock(self._runtime.cache, self._key, known.info.size or 0, verify=verify)
        self._jumped = False  # the next read is not where the last one ended,
        self._left = self._landed = 0  # which was here; and where the last read after a jump began
        self._last = -1  # the block that was read last
        self._history = ReadHistory(self._block_size)  # kept up to date once something had to be fetched
        self._n_reads = 0  # of other blocks, since something had to be waited for
        # Blocks that we sent for: that they come from the disk then is not another hit.
        self._asked: set[int] = set()
        if inflight is not None:
            self._ask(inflight.start, inflight.stop)
        self._cold = inflight is not None  # something of this file had to be fetched lately: then look ahead
        self._n_here = 0  # other blocks that came from the disk, since anything came from elsewhere
        self._opening = inflight  # the request that open() sent; ours to stop
        self._inflight = inflight  # the last request that served us
        self._sent = OutstandingReadahead()
        if known.info.size is None:
            data = reader.source.runtime.run(reader.collect(known, None, None))
            self._whole: bytes | None = data
            self.size = len(data)
        else:
            self._whole = None
            self.size = known.info.size

    @property
    def name(self) -> str:
        return self._known.path

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
            raise OSError(errno.EINVAL, f"cannot seek to {offset}: before the start of {self._known.path}")
        if offset != self._position:
            if not self._jumped:
                self._jumped, self._left = True, self._position
            self._position = offset
        return offset

    def tell(self) -> int:
        self._must_be_open()
        return self._position

    def _must_be_open(self) -> None:
        if self.closed:
            raise ValueError(_CLOSED)

    def readinto(self, buffer: Any, /) -> int:
        """Fill `buffer` with what comes first: at least a byte, unless the file ends here."""
        into = buffer if type(buffer) is memoryview else memoryview(buffer).cast("B")
        position, hand = self._position, self._hand
        if self._jumped:
            self._jumped, self._landed = False, position
            if len(into) == BUFFER_SIZE:
                into = into[:JUMP_SIZE]
        # The commonest case first: more of the block in hand.
        if hand.start <= position < hand.stop:
            n = hand.copy(position, into)
        elif self.closed:  # by another thread, while the BufferedReader over us waited for it
            raise ValueError(_CLOSED)
        elif self._cold or self._runtime.pid != getpid():
            n = 0
        else:
            n = self._from_cache(position, into)
        if n <= 0:
            if position >= self.size or not len(into):
                return 0
            n = self._read(position, into[: self.size - position])
        self._position = position + n
        self._runtime.bytes_served += n
        return n

    def readall(self) -> bytes:
        """Return everything from here to the end, fetched at once."""
        if self.closed:
            raise ValueError(_CLOSED)
        if self._position >= self.size:
            return b""
        if self._whole is not None:
            data = self._whole[self._position :]
        else:
            want = Range(self._position, self.size)
            if self._runtime.pid != getpid():
                self._leave_parent()
            if self._inflight is None or not self._inflight.covers(self._position):
                self._let_go()
            here = self._reader.cached_reads.of_version(self._key, want) if self._key is not None else None
            data = here if here is not None else self._collect(self._position)
        self._position = self.size
        return data

    def close(self) -> None:
        if not self.closed:
            self._hand.put_down()
            self._let_go()
            self._inflight = None
            if self._runtime.pid == getpid():
                self._forget(self._sent.clear())
        super().close()

    # Where the bytes come from.

    def _read(self, position: int, into: memoryview) -> int:
        if self._whole is not None:
            n = min(len(into), self.size - position)
            into[:n] = self._whole[position : position + n]
            return n
        if self._runtime.pid != getpid():
            self._leave_parent()
        index = position // self._block_size
        if self._cold:
            self._refuse_wrong()
        n = self._from_requests(index, position, into) if self._cold else 0
        if n == 0:
            n = self._from_cache(position, into)
            if n and self._cold:
                self._find_here()
        while n == 0:
            self._n_here = 0
            if not self._cold:
                self._cold = True
                self._begin_history(position)
            self._inflight = self._runtime.run(self._fetch(position, len(into)))
            self._n_reads = 0
            self._refuse_wrong()
            n = (
                self._from_inflight(position, into)
                if self._inflight is not None
                else self._from_cache(position, into)
            )
        return n

    def _last_refusal(self) -> ChecksumMismatch | None:
        return None if self._key is None else self._runtime.corrupt_versions.last(self._key)

    def _refuse_wrong(self) -> None:
        """Raise WrongBytes if all of the object came meanwhile and was wrong: what was read of it may be, too.

        The request that brought the last bytes was perhaps nobody's: one that reads ahead.
        """
        if self._key is not None:
            self._runtime.corrupt_versions.check(self._key, self._refusal)

    def _from_cache(self, position: int, into: memoryview) -> int:
        """Copy from the block at `position`, which becomes the one in hand; 0 for a miss."""
        index = position // self._block_size
        if not self._hand.take(index):
            return 0
        last, self._last = self._last, index
        n = self._hand.copy(position, into)
        if n > 0 and index in self._asked:
            self._asked.discard(index)
        elif n > 0 and index != last:
            self._runtime.hits += 1
        return n

    def _from_requests(self, index: int, position: int, into: memoryview) -> int:
        """Copy from a request in flight; another block also moves the history of this file, and what is sent ahead."""
        if index != self._history.last:
            left = self._left if self._landed == position else position
            stop = min(position + len(into), (index + 1) * self._block_size)
            self._history, unwanted = self._sent.over(self._history.after(position, stop, left=left))
            self._forget(unwanted)
            self._n_reads += 1
            self._look_ahead()
        return self._from_inflight(position, into)

    def _find_here(self) -> None:
        """Note a block that was here; after many of them nothing is looked for anywhere else, until one is missing.

        What is looked for at each block costs more than all the rest of a small read.
        """
        self._n_here = 0 if next(iter(self._sent), None) else self._n_here + 1
        if self._n_here >= AT_HOME:
            self._let_go()
            self._cold, self._n_here, self._inflight = False, 0, None

    def _begin_history(self, position: int) -> None:
        """Begin, or go on, with the block that was read last, which was here."""
        size, last = self._block_size, self._last
        history = self._history
        if last >= 0:
            history = history.after(last * size, (last + 1) * size)
        self._history = history.after(position, position + 1)

    def _from_inflight(self, position: int, into: memoryview) -> int:
        """Copy what a request in flight has at `position`; 0 when none covers it, or it is not there yet."""
        inflight = self._inflight = self._inflight_at(position)
        if inflight is None:
            self._let_go()
            return 0
        # Never past the block: each that is read has to be seen, or reading on looks like a jump.
        n = inflight.take(position, into[: self._block_size - position % self._block_size])
        self._n_here = 0
        if n and position // self._block_size != self._last and self._key is not None:
            self._last = position // self._block_size
            self._asked.discard(self._last)
            self._cache.touch(self._key, self._last)
        if inflight is self._opening and not inflight.done:
            run = FIRST_DEMAND * (position + n - inflight.start)
            if run > inflight.demand - inflight.start:
                whole = -(-(inflight.start + FIRST_DEMAND * run) // self._block_size) * self._block_size
                self._runtime.call_soon(inflight.want, min(inflight.stop, whole))
        return n

    def _inflight_at(self, position: int) -> InflightRequest | None:
        """Return the request that brings the byte at `position`: ours, or anybody's."""
        if self._inflight is not None and self._inflight.covers(position):
            return self._inflight
        name = self._key.name(position // self._block_size) if self._key is not None else ""
        shared = self._runtime.inflight_requests.get(name)
        if shared is not None and shared.covers(position):
            return shared
        return next((inflight for inflight in self._sent if inflight.covers(position)), None)

    async def _fetch(self, position: int, size: int) -> InflightRequest | None:
        """Wait for the bytes at `position`; None when they are in the cache now. On the loop."""
        reader, key, known = self._reader, self._key, self._known
        index, offset = divmod(position, self._block_size)
        if key is not None and size <= BUFFER_SIZE and key.name(index) in self._runtime.inflight_requests:
            # To fill the buffer is more than was asked for: what is behind the block that comes is sent for when it is
            # read, or the pace of the bytes would decide which blocks are.
            size = min(size, self._block_size - offset)
        # Not the block that is being read: it was told when it began to be.
        self._ask((index + (index == self._last)) * self._block_size, position + size)
        if key is None:
            return await self._fetch_uncached(position, size)
        if (here := self._inflight_at(position)) is not None and here.filled > position:
            return here  # it came since we looked: where nothing can be stored, nobody else would find it
        want = Range(position, min(position + size, self.size))
        up_to = 0
        # As the request of an unknown object, whose opening is one; not another's, as we stop it when we go elsewhere.
        if position == 0 and self._last < 0 and key.name(0) not in self._runtime.inflight_requests:
            up_to = min(self.size, reader.source.config.whole_request)
        inflight = await reader.fetch(
            known, key, want, check=self._refuse_wrong, n_reads=self._n_reads, up_to=up_to
        )
        if up_to and inflight is not None and inflight.demand < inflight.stop:
            self._opening = inflight
        return inflight

    async def _fetch_uncached(self, position: int, size: int) -> InflightRequest:
        """Wait for bytes at `position` of an object that is not cached: from our request, or a new one when that ended."""
        inflight = self._inflight
        while True:
            if inflight is None or not inflight.covers(position):
                inflight = self._reader.fetcher.launch_uncached(self._known, position)
            try:
                with waiting(self._known.path, position, position + size):
                    await inflight.arrival(min(position + size, inflight.stop))
                return inflight
            except RequestStopped:
                inflight = None

    def _look_ahead(self) -> None:
        """Send what the history of this file says will be read next."""
        config = self._reader.source.config
        window = self._runtime.window(config)
        self._history, wanted = ahead(
            self._history,
            n_blocks=-(-self.size // self._block_size),
            # Two requests at least make a window, so that one comes while the other is read.
            blocks_per_request=max(1, min(config.request_size, window // 2) // self._block_size),
            most=window // self._block_size,
        )
        run = self._history.runs[0]
        if self._opening is not None and run.number == 0 and run.n_steps >= ENOUGH:
            self._runtime.call_soon(self._opening.want, self._opening.stop)
            self._sent.of(run).append(self._opening)
            self._opening = None
        if wanted and self._key is not None:
            has, key = self._cache.has, self._key
            self._asked.update(index for blocks in wanted for index in blocks if not has(key, index))
            fetcher, keep = self._reader.fetcher, self._sent.of(run)
            self._runtime.call_soon(
                fetcher.launch_speculative, self._known, self._key, wanted, keep, self._refusal
            )

    def _forget(self, unwanted: Iterable[deque[InflightRequest]]) -> None:
        """Nothing of what was sent ahead so is wanted."""
        for inflight_requests in unwanted:
            self._runtime.call_soon(self._reader.fetcher.forget_speculative, inflight_requests)

    def _ask(self, start: int, stop: int) -> None:
        """Note that we send for these bytes."""
        if start < stop:
            self._asked.update(covering(Range(start, stop), self._block_size))

    def _collect(self, start: int) -> bytes:
        return self._runtime.run(self._reader.collect(self._known, start, None, self._inflight))

    def _let_go(self) -> None:
        """The request that opened the file is not what is read: it ends after the block in flight."""
        inflight, self._opening = self._opening, None
        if inflight is not None and not inflight.done and self._runtime.pid == getpid():
            block_end = -(-max(inflight.filled, 1) // self._block_size) * self._block_size
            self._runtime.call_soon(inflight.stop_soon, block_end)

    def _leave_parent(self) -> None:
        """After a fork: requests in flight stayed with the parent."""
        self._runtime = self._reader.source.runtime
        self._cache = self._runtime.cache
        self._hand.leave(self._cache)
        self._inflight = self._opening = None
        self._sent = OutstandingReadahead()
        self._refusal = self._last_refusal()
