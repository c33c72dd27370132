"""Conversions between byte ranges and blocks, and the merging of missing blocks into requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cachedfs.common.types import Range, Suffix


def clip(start: int | None, stop: int | None, size: int) -> Range:
    """Return the byte range that Python's slice `[start:stop]` selects in an object of `size` bytes."""
    if start is not None and stop is not None and 0 <= start <= stop <= size:
        return Range(start, stop)  # fast path for most calls
    first, last, _ = slice(start, stop).indices(size)
    return Range(first, max(first, last))


def covering(want: Range, block_size: int) -> range:
    """Return the indexes of the blocks that contain `want`; empty for an empty range."""
    if want.start == want.stop:
        return range(0)
    return range(want.start // block_size, (want.stop - 1) // block_size + 1)


def block_range(index: int, block_size: int, size: int) -> Range:
    """Return the byte range of block `index` in an object of `size` bytes.

    Only the last block may be short. Raises ValueError if the object has no such block. An empty object has block 0.
    """
    start = index * block_size
    if not 0 <= start < max(size, 1):
        raise ValueError(f"block {index} of {block_size} bytes is not in an object of {size} bytes")
    return Range(start, min(start + block_size, size))


def beginning(start: int | None, stop: int | None, *, block_size: int, most: int) -> Range:
    """Return the range of the first blocks of slice `[start:stop]` of an object of unknown size.

    The range has up to `most` bytes, but at least one block. A negative `start` counts as 0, and a negative `stop` is
    ignored, because the object's end is unknown.
    """
    first = max(start or 0, 0) // block_size
    n = max(1, most // block_size)
    if stop is not None and stop >= 0:
        n = min(n, max(1, -(-stop // block_size) - first))
    return Range(first * block_size, (first + n) * block_size)


def first_range(start: int | None, stop: int | None, block_size: int, most: int) -> Range | Suffix:
    """Return what to request first of slice `[start:stop]` of an object of unknown size.

    For a negative `start` it is enough to have the blocks of the last bytes complete, whatever the size of the object.
    """
    if start is not None and start < 0:
        return Suffix(block_size - 1 - start)
    return beginning(start, stop, block_size=block_size, most=most)


def merge(missing: Iterable[int], block_size: int, *, size: int, request_size: int) -> Iterator[Range]:
    """Yield the byte ranges to request for `missing` blocks, merging adjacent blocks.

    `missing` has the indexes in ascending order. A range covers whole missing blocks only, has at most `request_size`
    bytes, and ends at the object's `size` at the latest. A `request_size` below `block_size` counts as one block.
    """
    limit = max(1, request_size // block_size)
    first = count = 0
    for index in missing:
        if count and index == first + count and count < limit:
            count += 1
            continue
        if count:
            yield Range(first * block_size, min((first + count) * block_size, size))
        first, count = index, 1
    if count:
        yield Range(first * block_size, min((first + count) * block_size, size))
