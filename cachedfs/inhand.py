"""The block that an open file reads from: borrowed from the cache until the next one is taken."""

from __future__ import annotations

from cachedfs.cache import BadBlock, BlockCache, Handle
from cachedfs.model import ObjectKey

__all__ = ["InHand"]


class InHand:
    """One block of an object at most: `[start, stop)` of the object are the bytes that it holds. Not locked: its file is."""

    __slots__ = ("_block", "_cache", "_key", "_size", "_verify", "start", "stop")

    def __init__(self, cache: BlockCache, key: ObjectKey | None, size: int, *, verify: bool) -> None:
        self._cache, self._key, self._size, self._verify = cache, key, size, verify
        self._block: Handle | None = None
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
