"""The bytes of one read, put together from blocks in whatever order they come."""

from __future__ import annotations

import io

from cachedfs.model import Range

__all__ = ["Assembly"]


class Assembly:
    """The bytes of one read, put together in place."""

    def __init__(self, want: Range) -> None:
        self._want = want
        # A BytesIO gives its bytes away without copying them once more; seek and write size it in one step.
        self._bytes = io.BytesIO()
        if want.size:
            self._bytes.seek(want.size - 1)
            self._bytes.write(b"\0")

    def part(self, index: int, block_size: int) -> Range:
        """Return the bytes of block `index` that are wanted."""
        return Range(
            max(self._want.start, index * block_size), min(self._want.stop, (index + 1) * block_size)
        )

    def place(self, index: int, block_size: int) -> tuple[memoryview, int]:
        """Return where the wanted bytes of block `index` belong, and their offset in the block."""
        part = self.part(index, block_size)
        start = part.start - self._want.start
        return self._bytes.getbuffer()[start : start + part.size], part.start - index * block_size

    def fill(self, part: Range, data: memoryview) -> None:
        start = part.start - self._want.start
        with self._bytes.getbuffer() as view:
            view[start : start + part.size] = data

    def finish(self) -> bytes:
        return self._bytes.getvalue()
