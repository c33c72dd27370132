"""Metadata that goes to other machines: objects and listings, each with its time, as JSON lines in gzip.

- `["listing", folder, checked_at, n]`, followed by n lines `["child", path, info]`.
- `["object", path, checked_at, info]`: an object or folder.
- `["version", path, info]`: what an object was when it was read; it may be another by now.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any

from cachedfs.cache.index.metadata_records import (
    FeedConfirmation,
    MetadataRecord,
    decode_info,
    encode_info,
    new_version_at,
)
from cachedfs.cache.metadata_store import MetadataStore
from cachedfs.common.types import ObjectInfo
from cachedfs.common.urls import folder_of

LATEST_S = 1e12  # seconds; later times, infinities and NaN are invalid
_BATCH_BYTES = 4 << 20  # approximate bytes of the metadata stored in one transaction
_MAX_LISTING = 512 << 20  # approximate bytes of memory for the children of one listing
_LONGEST_ROW = 1 << 20  # bytes; the details of one object take about 3 kB
_encode = json.JSONEncoder(separators=(",", ":")).encode
_MAX_DEPTH = 16  # nesting of details; code that reads them later may have little stack left


class DamagedFile(Exception):
    """Data of another machine is damaged or invalid; the message says how."""


def encoded_rows(rows: Iterable[Any]) -> bytes:
    """Return the bytes of a file with these rows."""
    return gzip.compress("".join([f"{_encode(row)}\n" for row in rows]).encode(), 6, mtime=0)


def decoded_rows(file: IO[bytes]) -> Iterator[Any]:
    """Yield the rows of a file. Raises DamagedFile."""
    try:
        with gzip.GzipFile(fileobj=file, mode="rb") as lines:
            while line := lines.readline(_LONGEST_ROW):
                if not line.endswith(b"\n"):
                    raise DamagedFile("a row is too long or truncated")
                yield json.loads(line)
    except (EOFError, OSError, RecursionError, ValueError, zlib.error) as error:
        raise DamagedFile(f"it is invalid: {error}") from error


def rows_about(
    store: MetadataStore,
    identity: str,
    paths: Iterable[str],
    is_due: Callable[[str], bool],
    *,
    roots: Iterable[str] = (),
    hides_queries: bool = True,
    confirmed_until: Callable[[str, float, FeedConfirmation | None], float] = lambda folder, at, feed: at,
) -> Iterator[list[Any]]:
    """Yield the valid metadata of objects and of the folders above them, and listings.

    Of the folders above and of `roots`, the listings that are due are yielded. `hides_queries` leaves out listings with
    names that may be secret. `confirmed_until` returns up to when a change feed has confirmed an answer about a path in a
    folder.
    """
    paths = list(paths)
    above = dict.fromkeys(folder for path in [*roots, *paths] for folder in _folders_above(path))
    pending, seen, listed_at = [*above, *roots], dict[str, None](), dict[str, float]()
    while pending:
        folder = pending.pop()
        if folder in seen or not is_due(folder):
            continue
        seen[folder] = None
        listing = store.listing(identity, folder)
        if listing is None or listing.counter != store.listing_counter(identity, folder):
            continue
        pending += [info.path for info in listing.infos if info.kind == "directory"]
        at = confirmed_until(folder, listing.checked_at, listing.confirmation)
        if store.newest_version(identity, folder) > at or (
            hides_queries and _has_query(folder, listing.infos)
        ):
            continue  # names may be missing from it, or secret
        listed_at[folder] = listing.checked_at
        yield ["listing", folder, at, len(listing.infos)]
        for info in listing.infos:
            yield ["child", info.path, encode_info(info)]
    for path in dict.fromkeys([*above, *seen, *paths]):
        record = store.lookup(identity, path) if path else None
        if record is None or record.info is None or record.counter != store.counter(identity, path):
            continue
        if listed_at.get(folder_of(path)) != record.checked_at:  # else it is in the listing
            at = confirmed_until(folder_of(path), record.checked_at, record.confirmation)
            with contextlib.suppress(TypeError):  # details that JSON does not have
                yield ["object", path, at, encode_info(record.info)]


def _folders_above(path: str) -> Iterator[str]:
    while path := folder_of(path):
        yield path


def _has_query(folder: str, infos: Iterable[ObjectInfo]) -> bool:
    return "://" in folder and any("?" in info.path for info in infos)


class MetadataImport:
    """Store the metadata rows of another machine.

    `local_time` turns the time of a row into one by the clock of this machine. A change that this cache saw after that
    time wins over the row.
    """

    def __init__(self, store: MetadataStore, identity: str, local_time: Callable[[float], float]) -> None:
        self._store, self._identity, self._local_time = store, identity, local_time
        self.n_records, self.oldest = 0, math.inf

    def take(self, rows: Iterator[Any]) -> None:
        """Store rows. Raises DamagedFile and CacheError; what came before is stored then."""
        records: list[MetadataRecord] = []
        size = 0
        try:
            for row in rows:
                match row:
                    case ["listing", str(folder), float() | int() as checked_at, int(n)]:
                        self._take_listing(folder, self._at(checked_at), n, rows)
                    case ["object", str(path), float() | int() as checked_at, str(text)]:
                        info, at = _info(path, text), self._at(checked_at)
                        if (counter := self._counter(path, at)) is not None:
                            old = self._store.lookup(self._identity, path)
                            new_at = new_version_at(info, old and old.info, at, is_first=old is None)
                            records.append(
                                MetadataRecord(self._identity, path, info, at, counter, new_at=new_at)
                            )
                            size += 1000 + len(text)
                    case ["version", str(), str()]:
                        pass
                    case _:
                        raise DamagedFile("a row is invalid")
                if size > _BATCH_BYTES:
                    self._keep(records)
                    records, size = [], 0
            self._keep(records)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise DamagedFile(f"a row is invalid: {error!r}") from error

    def _keep(self, records: Sequence[MetadataRecord]) -> None:
        self._store.keep_records(records)
        self.n_records += len(records)

    def _take_listing(self, folder: str, at: float, n: int, rows: Iterator[Any]) -> None:
        children: list[ObjectInfo] = []
        memory = 0
        for _ in range(n):
            match next(rows, None):
                case ["child", str(path), str(text)] if folder_of(path) == folder:
                    child = _info(path, text)
                case _:
                    raise DamagedFile("a listing is incomplete")
            memory += len(path) + _memory_of(text)
            if memory <= _MAX_LISTING:
                children.append(child)
            else:  # a partial listing is useless: the folder will be listed again
                children.clear()
        listed = self._store.listing_counter(self._identity, folder)
        cached = self._store.listing(self._identity, folder)
        is_newer = cached is not None and cached.counter == listed and cached.checked_at >= at
        is_changed = self._store.changed_at(self._identity, f"{folder}/") >= int(at)
        if memory > _MAX_LISTING or is_newer or is_changed:
            return
        counters = {
            info.path: counter for info in children if (counter := self._counter(info.path, at)) is not None
        }
        self._store.keep_listings(
            self._identity,
            {folder: children},
            checked_at=at,
            counters=counters,
            folder_counters={folder: listed},
        )
        self.n_records += n

    def _counter(self, path: str, at: float) -> int | None:
        """Return the change counter to store with metadata of `path`; None if it changed since `at`."""
        counter = self._store.counter(self._identity, path)
        return None if self._store.changed_at(self._identity, path) >= int(at) else counter

    def _at(self, checked_at: float) -> float:
        if not 0 <= checked_at < LATEST_S:
            raise DamagedFile("a time is invalid")
        at = self._local_time(float(checked_at))
        self.oldest = min(at, self.oldest)
        return at


def infos_in(rows: Iterable[Any]) -> Iterator[ObjectInfo]:
    """Yield what the rows say of objects and folders. Raises DamagedFile."""
    try:
        for row in rows:
            match row:
                case ["child" | "version", str(path), str(text)] | ["object", str(path), _, str(text)]:
                    yield _info(path, text)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedFile(f"a row is invalid: {error!r}") from error


def _memory_of(text: str) -> int:
    """Estimate the bytes of memory of decoded JSON details: `[[],[]]` takes 25 times its length."""
    return 200 + len(text) + 100 * (text.count(",") + text.count("[") + text.count("{"))


def _info(path: str, text: str) -> ObjectInfo:
    """Decode the metadata of a path. Raises DamagedFile for values that `ObjectInfo` cannot have."""
    info = decode_info(path, text)
    texts: Sequence[Any] = (info.fingerprint, info.id)
    is_sound = (
        info.kind in ("file", "directory")
        and (info.size is None or (type(info.size) is int and 0 <= info.size < 1 << 62))
        and all(each is None or isinstance(each, str) for each in texts)
        and isinstance(info.details, dict)
        and _is_flat(info.details, _MAX_DEPTH)
    )
    if not is_sound:
        raise DamagedFile(f"the metadata of {path!r} is invalid")
    return info


def _is_flat(value: Any, most: int) -> bool:
    """Return whether lists and dicts are nested at most `most` levels deep."""
    if not isinstance(value, dict | list):
        return True
    return most > 0 and all(
        _is_flat(each, most - 1) for each in (value.values() if isinstance(value, dict) else value)
    )
