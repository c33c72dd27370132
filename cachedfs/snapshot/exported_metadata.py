"""The metadata in an export: one file of rows, each with the time of its last check."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from cachedfs.cache.index.metadata_records import encode_info, is_within
from cachedfs.core.objects import Objects, folder_of

__all__ = ["age_kept", "name_of", "rows_of"]


def name_of(digest: hashlib.blake2b) -> str:
    """Return the name of the file with this hash of its bytes."""
    return f"metadata-{digest.hexdigest()}.jsonl.gz"


def rows_of(objects: Objects, roots: Sequence[str], paths: Sequence[str]) -> Iterator[list[Any]]:
    """Yield the valid metadata of the objects at `paths`, of the folders above, and below `roots`.

    Listings are those of `roots` and of the folders below. Each time is that of the last check, by the origin's change
    feed or by a request.
    """
    store, identity = objects.engine.cache.metadata, objects.identity
    confirmed_until = objects.confirmed_until
    above = {folder: None for path in [*roots, *paths] for folder in _folders_above(path)}
    pending = list(
        {
            **dict.fromkeys(roots),
            **{each: None for each in above if any(is_within(each, root) for root in roots)},
        }
    )
    folders: dict[str, None] = {}
    listed_at: dict[str, float] = {}
    while pending:
        folder = pending.pop()
        if folder in folders:
            continue
        folders[folder] = None
        listing = store.listing(identity, folder)
        if listing is None or listing.counter != store.listing_counter(identity, folder):
            continue
        pending += [info.path for info in listing.infos if info.kind == "directory"]
        at = confirmed_until(folder, listing.checked_at, listing.confirmation)
        if store.newest_version(identity, folder) > at:
            continue  # names may be missing from it
        listed_at[folder] = listing.checked_at
        yield ["listing", folder, at, len(listing.infos)]
        for info in listing.infos:
            yield ["child", info.path, encode_info(info)]
    for path in {**above, **folders, **dict.fromkeys(paths)}:
        record = store.lookup(identity, path) if path else None
        if record is None or record.info is None or record.counter != store.counter(identity, path):
            continue
        folder = folder_of(path)
        if listed_at.get(folder) != record.checked_at:  # else it is in the listing
            at = confirmed_until(folder, record.checked_at, record.confirmation)
            yield ["object", path, at, encode_info(record.info)]


def _folders_above(path: str) -> Iterator[str]:
    while path := folder_of(path):
        yield path


def age_kept(checked_at: float, *, made_at: float, now: float) -> float:
    """Return the local time of an imported answer, which keeps the age it had when it was exported.

    That age is `made_at - checked_at`. The answer never gets younger, even if the clock of the other machine is wrong.
    """
    return min(checked_at, now, now - (made_at - checked_at))
