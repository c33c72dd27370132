"""Checksums of received bytes, compared with the origin's once a whole object was received."""

from __future__ import annotations

from cachedfs.common.blocks import block_range
from cachedfs.common.checksums import combined, crc32c_of, stated_crc32c
from cachedfs.common.types import ObjectInfo, ObjectKey
from cachedfs.errors import ChecksumMismatch

__all__ = ["BlockChecksums", "CorruptVersions", "StreamingChecksum"]


MAX_CHECKSUMS = 100_000  # block checksums kept: 10 MB of memory, enough for objects of 100 GB

MAX_CORRUPT = 1000  # object versions whose last error is kept for their open files


class BlockChecksums:
    """CRC-32C checksums of the fetched blocks of incomplete objects. Event loop thread only.

    An object is compared only if this process fetched all its blocks. Blocks cached earlier, or fetched by another
    process, leave it incomplete here.
    """

    def __init__(self) -> None:
        # Key digest -> block index -> CRC-32C, oldest object first.
        self._sums: dict[str, dict[int, int]] = {}
        self._n = 0  # Invariant: the number of checksums in _sums

    def block_received(self, key: ObjectKey, info: ObjectInfo, index: int, crc32c: int) -> str | None:
        """Record a block's checksum; return an error text if the object is now found corrupt.

        The object is checked when the block completes it.
        """
        stated, size = stated_crc32c(info.details), info.size or 0
        if stated is None:
            return None
        sums = self._sums.setdefault(key.digest, {})
        self._n += index not in sums
        sums[index] = crc32c
        if len(sums) < -(-size // key.block_size):
            while self._n > MAX_CHECKSUMS:
                self._forget(next(iter(self._sums)))
            return None
        self._forget(key.digest)
        total = 0
        for number in range(len(sums)):
            total = combined(total, sums[number], block_range(number, key.block_size, size).size)
        if total == stated:
            return None
        return f"the CRC32C of its bytes is {total:08x}, and should be {stated:08x}"

    def _forget(self, digest: str) -> None:
        self._n -= len(self._sums.pop(digest))


class StreamingChecksum:
    """Computes the CRC-32C of each block while the bytes of one request are received."""

    def __init__(self, block_checksums: BlockChecksums, key: ObjectKey, info: ObjectInfo, start: int) -> None:
        self._block_checksums, self._key, self._info = block_checksums, key, info
        self._position = start
        # False if the request began in the middle of the current block.
        self._from_start = start % key.block_size == 0
        self._crc32c = 0

    def add(self, data: bytes) -> str | None:
        """Add received bytes; return an error text if they complete the object and the object is corrupt."""
        wrong, size = None, self._info.size or 0
        while data and self._position < size:
            index = self._position // self._key.block_size
            stop = block_range(index, self._key.block_size, size).stop
            part, data = data[: stop - self._position], data[stop - self._position :]
            self._crc32c = crc32c_of(part, self._crc32c)
            self._position += len(part)
            if self._position == stop:
                if self._from_start:
                    wrong = (
                        self._block_checksums.block_received(self._key, self._info, index, self._crc32c)
                        or wrong
                    )
                self._crc32c, self._from_start = 0, True
        return wrong


class CorruptVersions:
    """Object versions whose received bytes failed their checksum, with the last error of each.

    Each failure is a new error object. It becomes visible only after all blocks of the version were removed. Read
    from any thread, changed on the event loop thread.
    """

    def __init__(self) -> None:
        self._last: dict[str, ChecksumMismatch] = {}  # by key digest
        self._removing: set[str] = set()

    def last(self, key: ObjectKey) -> ChecksumMismatch | None:
        """Return the last checksum error of this version, or None."""
        return self._last.get(key.digest)

    def check(self, key: ObjectKey, known: ChecksumMismatch | None) -> None:
        """Raise ChecksumMismatch if this version failed its checksum after the error `known`.

        With `known=None`: if it failed at any time.
        """
        last = self.last(key)
        if last is not None and last is not known:
            raise ChecksumMismatch(last.message)

    def is_removing(self, key: ObjectKey) -> bool:
        """Return whether a version failed its checksum and its blocks are being removed now."""
        return key.digest in self._removing

    def begin(self, key: ObjectKey) -> None:
        self._removing.add(key.digest)

    def end(self, key: ObjectKey, error: ChecksumMismatch) -> None:
        self._removing.discard(key.digest)
        self._last[key.digest] = error
        while len(self._last) > MAX_CORRUPT:
            self._last.pop(next(iter(self._last)))
