"""Metadata in an export: objects, listings and change feeds as rows, each with its time.

- `["feed", part, token, checked_at]`: `part` is the first component of a path.
- `["folder", path, way]`: `way` has path and id of the folder and of each folder above it.
- `["listing", folder, checked_at, is_watched, n]`, followed by n rows `["child", path, info]`.
- `["fact", path, checked_at, is_watched, info]`: an object or folder.

`is_watched`: a change feed covers the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cachedfs.cache.index.metadata_records import (
    FeedConfirmation,
    FeedPosition,
    FeedSnapshot,
    ListingRecord,
    MetadataRecord,
    decode_info,
    encode_info,
    hash_of,
)
from cachedfs.cache.metadata_store import MetadataStore
from cachedfs.common.types import ObjectInfo
from cachedfs.fetch.metadata_cache import folder_of
from cachedfs.fetch.source import Source
from cachedfs.metadata.change_feed import ChangeFeeds
from cachedfs.snapshot.archive import BadBundle
from cachedfs.snapshot.manifest import LATEST_S

__all__ = ["MetadataImport", "age_kept", "told_of"]

_AT_ONCE = 4096  # metadata records stored in one transaction
_MOST_AT_ONCE = 4 << 20  # and the most characters of their text
# Approximate bytes of memory for the children of one listing, and for the ways of all folders.
_MOST_HELD = 512 << 20
_MOST_FEEDS = 1000  # far more than the drives of an account
_DEEPEST = 16  # nesting of details; code that reads them later may have little stack left

Way = tuple[tuple[str, str], ...]


def told_of(source: Source, roots: Iterable[str], paths: Iterable[str]) -> Iterator[list[Any]]:
    """Yield the valid metadata of the objects at `paths`, of the folders above, and below `roots`.

    Listings are those of `roots` and of the folders below. Feeds come first: no other row is older than the
    token of its feed, so the feed reports every change made after that row was read.
    """
    return _Gathering(source).rows(list(roots), list(paths))


class _Gathering:
    """One pass over the metadata of some objects."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._known, self._identity = source.runtime.cache.metadata, source.identity
        self._change_feeds = ChangeFeeds(source)
        self._seen: dict[str, FeedPosition | None] = {}
        self._listed: dict[str, float] = {}

    def rows(self, roots: list[str], paths: list[str]) -> Iterator[list[Any]]:
        above = {folder: None for path in [*roots, *paths] for folder in _folders_above(path)}
        for part in sorted({path.partition("/")[0] for path in [*above, *roots, *paths]}):
            self._seen[part] = feed = self._change_feeds.seen(part)
            if feed is not None:
                yield ["feed", part, feed.token, feed.checked_at]
        pending = list({**dict.fromkeys(roots), **{each: None for each in above if _is_below(each, roots)}})
        told: set[str] = set()
        ways: set[str] = set()
        named: dict[str, None] = dict.fromkeys(above)
        while pending:
            folder = pending.pop()
            if folder in told:
                continue
            told.add(folder)
            named[folder] = None
            listing = self._listing(folder)
            if listing is not None:
                yield from self._way(folder, ways)
                yield from self._told_listing(folder, listing)
                pending += [info.path for info in listing.infos if info.kind == "directory"]
        for path in {**named, **dict.fromkeys(paths)}:
            record = self._known.lookup(self._identity, path) if path else None
            if record is None or record.info is None or record.mark != self._known.mark(self._identity, path):
                continue
            folder = folder_of(path)
            if self._listed.get(folder) != record.checked_at:
                yield from self._way(folder, ways)
                yield [
                    "fact",
                    path,
                    record.checked_at,
                    self._is_watched(folder, record.told),
                    encode_info(record.info),
                ]

    def _listing(self, folder: str) -> ListingRecord | None:
        listing = self._known.listing(self._identity, folder)
        return (
            listing if listing and listing.mark == self._known.listing_mark(self._identity, folder) else None
        )

    def _told_listing(self, folder: str, listing: ListingRecord) -> Iterator[list[Any]]:
        self._listed[folder] = listing.checked_at
        is_watched = self._is_watched(folder, listing.told)
        yield ["listing", folder, listing.checked_at, is_watched, len(listing.infos)]
        for info in listing.infos:
            yield ["child", info.path, encode_info(info)]

    def _way(self, folder: str, told: set[str]) -> Iterator[list[Any]]:
        """Yield the row with the folders by which a feed finds what is in `folder`; once per folder."""
        if folder in told or not folder:  # objects at the top are in no folder
            return
        told.add(folder)
        seen = self._seen.get(folder.partition("/")[0])
        known = self._source.metadata.get(folder)
        if seen is None or known is None or known.info is None:
            return
        watch = self._change_feeds.watch(seen, known.info)
        if watch is not None:
            yield ["folder", folder, watch.way]

    def _is_watched(self, folder: str, told: FeedConfirmation | None) -> bool:
        """Return whether the confirmation of a feed is about the folder that has this name now."""
        if told is None or not folder:
            return told is not None
        known = self._source.metadata.get(folder)
        id = None if known is None or known.info is None else known.info.id
        return id is not None and told.folder == hash_of(self._identity, id)


def _folders_above(path: str) -> Iterator[str]:
    while path := folder_of(path):
        yield path


def _is_below(path: str, roots: Iterable[str]) -> bool:
    return any(not root or path == root or path.startswith(f"{root}/") for root in roots)


def age_kept(checked_at: float, *, made_at: float, now: float) -> float:
    """Return the local time of an imported answer, which keeps the age it had when it was exported.

    That age is `made_at - checked_at`. The answer never gets younger, even if the clock of the other machine
    is wrong.
    """
    return min(checked_at, now, now - (made_at - checked_at))


class MetadataImport:
    """Store the metadata rows of another machine as they arrive: call `take` in a thread, then `end`.

    A change of a path that this cache saw after the row's time wins over the row.
    """

    def __init__(self, known: MetadataStore, identity: str, made_at: float) -> None:
        self._known, self.identity, self._made_at = known, identity, made_at
        self.feeds: dict[str, FeedPosition | None] = {}
        self.n_facts = 0
        self._ways: dict[str, Way] = {}
        self._size_of_ways = 0
        self._facts: list[MetadataRecord] = []
        self._size_of_facts = 0
        self._listing: tuple[str, float, bool] | None = None
        self._children: list[ObjectInfo] = []
        self._n_missing = self._size_of_children = 0

    def feed_in(self, row: Any) -> tuple[str, str, float] | None:
        """Return part, token and time of a feed's row; None for another row. Raises BadBundle."""
        if not isinstance(row, list) or row[:1] != ["feed"]:
            return None
        try:
            _, part, token, checked_at = row
        except ValueError as error:
            raise BadBundle("a feed makes no sense") from error
        return _text(part), _text(token), self._at(checked_at)

    def takes_feed(self, part: str) -> bool:
        """Return whether to import the feed of a part: each part once, and a bounded number of parts."""
        return part not in self.feeds and len(self.feeds) < _MOST_FEEDS

    def take(self, rows: Iterable[Any]) -> None:
        """Store rows. Raises BadBundle and CacheError."""
        known_kinds: dict[str, Callable[..., None]] = {
            "folder": self._folder,
            "listing": self._begin,
            "child": self._child,
            "fact": self._record,
        }
        try:
            for row in rows:
                kind, *values = row
                known_kinds[kind](*values)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise BadBundle(f"a row makes no sense: {error!r}") from error
        if len(self._facts) >= _AT_ONCE or self._size_of_facts > _MOST_AT_ONCE:
            self._keep()

    def end(self) -> None:
        """Store the remaining rows. Raises BadBundle for an incomplete listing, and CacheError."""
        if self._listing is not None:
            raise BadBundle("a listing is cut off")
        self._keep()

    def _keep(self) -> None:
        self._known.keep_records(self._facts)
        self.n_facts += len(self._facts)
        self._facts, self._size_of_facts = [], 0

    def _folder(self, path: Any, way: Any) -> None:
        steps = tuple((_text(folder), _text(id)) for folder, id in way)
        self._size_of_ways += 200 + len(_text(path))
        self._size_of_ways += sum(200 + len(folder) + len(id) for folder, id in steps)
        if self._size_of_ways <= _MOST_HELD:  # without its way, a folder is just not watched
            self._ways[path] = steps

    def _record(self, path: Any, checked_at: Any, is_watched: Any, text: Any) -> None:
        info, at = _info(path, text), self._at(checked_at)
        mark = self._mark(path, at)
        if mark is not None:
            watch = self._watch(path, folder_of(path)) if is_watched is True else None
            self._facts.append(MetadataRecord(self.identity, path, info, at, mark, watch))
            self._size_of_facts += len(text)

    def _begin(self, folder: Any, checked_at: Any, is_watched: Any, n: Any) -> None:
        if self._listing is not None or type(n) is not int or n < 0:
            raise BadBundle("a listing makes no sense")
        self._listing, self._n_missing = (_text(folder), self._at(checked_at), is_watched is True), n
        self._children, self._size_of_children = [], 0
        self._end_listing()

    def _child(self, path: Any, text: Any) -> None:
        if self._listing is None or folder_of(_text(path)) != self._listing[0]:
            raise BadBundle("a child is in no listing")
        info = _info(path, text)
        self._n_missing -= 1
        self._size_of_children += len(path) + _memory_of(text)
        if self._size_of_children <= _MOST_HELD:
            self._children.append(info)
        else:  # a partial listing is useless: the folder will be listed again
            self._children.clear()
        self._end_listing()

    def _end_listing(self) -> None:
        assert self._listing is not None
        if self._n_missing:
            return
        folder, at, is_watched = self._listing
        children, self._listing, self._children = self._children, None, []
        if self._size_of_children > _MOST_HELD:
            return
        mark = self._known.listing_mark(self.identity, folder)
        here = self._known.listing(self.identity, folder)
        is_newer = here is not None and here.mark == mark and here.checked_at >= at
        if is_newer or self._known.changed_at(self.identity, f"{folder}/") >= int(at):
            return
        marks = {info.path: own for info in children if (own := self._mark(info.path, at)) is not None}
        watch = self._watch(folder, folder) if is_watched else None
        self._known.keep_listings(
            self.identity,
            {folder: children},
            checked_at=at,
            marks=marks,
            folder_marks={folder: mark},
            watch=watch,
        )
        self.n_facts += len(children)

    def _mark(self, path: str, at: float) -> int | None:
        """Return the change counter to store with metadata of `path`; None if it changed since `at`."""
        mark: int = self._known.mark(self.identity, path)
        return None if self._known.changed_at(self.identity, path) >= int(at) else mark

    def _watch(self, path: str, folder: str) -> FeedSnapshot | None:
        """Return the feed, and the way to `folder`, that watch metadata of `path`; None without them."""
        feed = self.feeds.get(path.partition("/")[0])
        way = self._ways.get(folder) if folder else ()
        return None if feed is None or way is None else FeedSnapshot(feed.id, feed.number, way)

    def _at(self, checked_at: Any) -> float:
        if type(checked_at) not in (int, float) or not 0 <= checked_at < LATEST_S:
            raise BadBundle("a time makes no sense")
        return age_kept(float(checked_at), made_at=self._made_at, now=time.time())


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadBundle("a name makes no sense")
    return value


def _memory_of(text: str) -> int:
    """Estimate the bytes of memory of decoded JSON details: `[[],[]]` takes 25 times its length."""
    return 200 + len(text) + 100 * (text.count(",") + text.count("[") + text.count("{"))


def _info(path: Any, text: Any) -> ObjectInfo:
    """Decode the metadata of a path. Raises BadBundle for values that `ObjectInfo` cannot have."""
    info = decode_info(_text(path), _text(text))
    texts: Sequence[Any] = (info.fingerprint, info.id)
    is_sound = (
        info.kind in ("file", "directory")
        and (info.size is None or (type(info.size) is int and 0 <= info.size < 1 << 62))
        and all(each is None or isinstance(each, str) for each in texts)
        and isinstance(info.details, dict)
        and _is_flat(info.details, _DEEPEST)
    )
    if not is_sound:
        raise BadBundle(f"what is said of {path!r} makes no sense")
    return info


def _is_flat(value: Any, most: int) -> bool:
    """Return whether lists and dicts are nested at most `most` levels deep."""
    if not isinstance(value, dict | list):
        return True
    return most > 0 and all(
        _is_flat(each, most - 1) for each in (value.values() if isinstance(value, dict) else value)
    )
