"""What a pack will read is fetched ahead, in that order, where the filesystem does so."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from cachedfs.datasets.packing.sources.base import Item, Source
from cachedfs.datasets.packing.store import BESIDE

__all__ = ["ahead"]

WINDOW = "96MiB"  # ahead of what is read: more than a shard, and little memory


@contextlib.contextmanager
def ahead(source: Source, there: Collection[str], *, is_on: bool) -> Iterator[None]:
    """Fetch ahead while the `with` block lasts; `there`: what is stored already, of which pieces nothing is fetched."""
    begin = getattr(source.files.fs, "prefetch", None) if is_on else None
    if begin is None:
        yield
        return
    with begin(_items(source, there), window=WINDOW):
        yield


def _items(source: Source, there: Collection[str]) -> Iterator[Item]:
    for piece in source.pieces():
        # What was measured by an earlier run is mostly stored too; what is not is fetched when it is read.
        if f"{BESIDE}/{piece.name}.npz" not in there:
            yield from source.items(piece)
