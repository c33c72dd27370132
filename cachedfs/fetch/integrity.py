"""What came of each object version, as checksums: when all of one has come, is it what the origin says?"""

from __future__ import annotations

from cachedfs.common.blocks import block_range
from cachedfs.common.checksums import combined, crc32c_of, stated_crc32c
from cachedfs.common.types import ObjectInfo, ObjectKey
from cachedfs.errors import ChecksumMismatch

__all__ = ["BlockChecksums", "StreamingChecksum", "CorruptVersions"]


MOST_STREAMED = 100_000  # blocks whose checksums are remembered: 10 MB of memory, objects of 100 GB


class BlockChecksums:
    """The CRC-32C of every block that this process fetched of objects that it did not fetch all of yet. On the loop.

    Blocks that came before, or that other processes fetch, leave an object incomplete here: then nothing is compared.
    """

    def __init__(self) -> None:
        self._sums: dict[str, dict[int, int]] = {}  # by digest, the object that came first in front
        self._n = 0  # Invariant: the number of all sums

    def block_received(self, key: ObjectKey, info: ObjectInfo, index: int, crc32c: int) -> str | None:
        """Remember a block; return what is wrong with the whole object, if this was its last block and anything is."""
        stated, size = stated_crc32c(info.details), info.size or 0
        if stated is None:
            return None
        sums = self._sums.setdefault(key.digest, {})
        self._n += index not in sums
        sums[index] = crc32c
        if len(sums) < -(-size // key.block_size):
            while self._n > MOST_STREAMED:
                self._forget(next(iter(self._sums)))
            return None
        self._forget(key.digest)
        whole = 0
        for number in range(len(sums)):
            whole = combined(whole, sums[number], block_range(number, key.block_size, size).size)
        if whole == stated:
            return None
        return f"the CRC32C of its bytes is {whole:08x}, and should be {stated:08x}"

    def _forget(self, digest: str) -> None:
        self._n -= len(self._sums.pop(digest))


class StreamingChecksum:
    """The bytes that one request brings, added up to blocks as they pass."""

    def __init__(self, block_checksums: BlockChecksums, key: ObjectKey, info: ObjectInfo, start: int) -> None:
        self._arrivals, self._key, self._info = block_checksums, key, info
        self._position = start
        # False: the block at the position began before the request.
        self._is_whole = start % key.block_size == 0
        self._crc32c = 0

    def add(self, data: bytes) -> str | None:
        """Take the next bytes; return what is wrong with the whole object, if they complete it and anything is."""
        wrong, size = None, self._info.size or 0
        while data and self._position < size:
            index = self._position // self._key.block_size
            stop = block_range(index, self._key.block_size, size).stop
            part, data = data[: stop - self._position], data[stop - self._position :]
            self._crc32c = crc32c_of(part, self._crc32c)
            self._position += len(part)
            if self._position == stop:
                if self._is_whole:
                    wrong = self._arrivals.block_received(self._key, self._info, index, self._crc32c) or wrong
                self._crc32c, self._is_whole = 0, True
        return wrong


MOST_CORRUPT = 1000  # versions whose open handles are told


class CorruptVersions:
    """What a process refused: each time that a version came wrong is another error.

    Looked at from any thread, changed on the loop. Before a refusal is to be seen, all of the version was removed.
    """

    def __init__(self) -> None:
        self._last: dict[str, ChecksumMismatch] = {}  # by the digest of the key
        self._removing: set[str] = set()

    def last(self, key: ObjectKey) -> ChecksumMismatch | None:
        """Return the error of the last time that this version came wrong."""
        return self._last.get(key.digest)

    def check(self, key: ObjectKey, known: ChecksumMismatch | None) -> None:
        """Raise WrongBytes if all of a version came and was wrong since its last refusal was the one `known`."""
        last = self.last(key)
        if last is not None and last is not known:
            raise ChecksumMismatch(last.message)

    def is_removing(self, key: ObjectKey) -> bool:
        """Return whether a version came wrong, and its blocks are just being removed."""
        return key.digest in self._removing

    def begin(self, key: ObjectKey) -> None:
        self._removing.add(key.digest)

    def end(self, key: ObjectKey, error: ChecksumMismatch) -> None:
        self._removing.discard(key.digest)
        self._last[key.digest] = error
        while len(self._last) > MOST_CORRUPT:
            self._last.pop(next(iter(self._last)))
