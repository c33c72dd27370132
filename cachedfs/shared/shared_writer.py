"""Put what was fetched into the shared cache, in a thread of its own: it reads the blocks from the local cache."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from zlib_ng.zlib_ng import crc32

from cachedfs.cache import disk
from cachedfs.cache.block_file import PAGE, PLACE, block_path, open_block
from cachedfs.cache.block_store import BlockStore
from cachedfs.cache.index.metadata_records import encode_info
from cachedfs.common.clock import clock
from cachedfs.common.executor import AT_ONCE, each_in_threads
from cachedfs.common.types import BlockKey, ObjectInfo
from cachedfs.common.urls import folder_of, stored_path
from cachedfs.errors import BadBlock, CachedFSError
from cachedfs.shared.gatherer import BlockGroup, Gatherer, runs_of
from cachedfs.shared.leases import Leases, lease_of
from cachedfs.shared.metadata_rows import DamagedFile, rows_about
from cachedfs.shared.piece import LARGE, Piece, PlacedPiece, encoded_index, name_of_file, shareable_key
from cachedfs.shared.shared_bucket import SharedBucket
from cachedfs.shared.shared_folder import SharedFolder
from cachedfs.shared.shared_index import SharedIndex
from cachedfs.shared.shared_store import SharedStore
from cachedfs.shared.upkeep import clean

logger = logging.getLogger("cachedfs.shared")

FULL_S = 60.0  # from a full disk until it is tried again
LOOK_S = 0.25  # between two looks at what waits
CLEAN_S = 3600.0  # between two times that the place is cleaned, if it has a size
STALLED_S = 60.0  # without a file written, until a caller waits no longer
LARGEST = 10  # an object of more than this part of the size is not put there
METADATA_S = 2.0  # between two files that have only metadata
MOST_ROWS = 2000  # of metadata in a file that is written again with what comes next
AGAIN_S = 600.0  # after this time, a listing is put there again
_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


class _SmallFile(NamedTuple):
    """A file of this process that is so small that the next one replaces it, with all that is in both."""

    name: str
    groups: list[BlockGroup]
    rows: list[Any]


class SharedWriter:
    """Writes the blocks that `note` names to a place. An error of the place only means that they are not shared."""

    def __init__(
        self,
        place: SharedFolder | SharedBucket,
        cache: BlockStore,
        index: SharedIndex,
        leases: Leases,
        *,
        most: int | None,
    ) -> None:
        self._place, self._cache, self._index, self._leases = place, cache, index, leases
        self._most, self._clean_at = most, 0.0
        self._lock = threading.Lock()  # guards the three next ones
        self._gatherer = Gatherer()
        self._thread: threading.Thread | None = None
        self._flushes: list[threading.Event] = []
        self._wake, self._hurry = threading.Event(), threading.Event()
        self._is_closed = False
        self._n_put = 0  # files that were written, or could not be
        self._full_until = 0.0
        self._small: dict[str, _SmallFile] = {}  # by origin
        # When this process put the listing of a folder there (monotonic), and the time of that listing; 0: it looked for one.
        self._listed: dict[tuple[str, str], tuple[float, float]] = {}
        # Of large objects, pieces come first: the keys of those whose metadata was due, and by origin what is due now.
        self._seen: set[str] = set()
        self._metadata_due: dict[str, list[ObjectInfo]] = {}
        self._metadata_at = 0.0

    def accepts(self, info: ObjectInfo) -> bool:
        """Return whether what is fetched of an object is put there now."""
        place, most = self._place, self._most
        if place.is_read_only or place.is_off or time.monotonic() < self._full_until:
            return False
        return self._cache.cannot_store is None and (most is None or (info.size or 0) <= most // LARGEST)

    def note(self, blocks: Iterable[tuple[BlockKey, ObjectInfo, Sequence[memoryview]]]) -> None:
        """Remember blocks that are in the local cache now, and were fetched: those of the origin are put there soon."""
        now = time.monotonic()
        with self._lock:
            for (version, index), info, data in blocks:
                key = shareable_key(version.identity, info) if self.accepts(info) else None
                if key is not None and self._index.known.find(key, index * version.block_size) is None:
                    self._gatherer.note(version, info, key, index, now, data)
            if self._gatherer and self._thread is None and not self._is_closed:
                self._start()
        self._wake.set()

    def flush(self, timeout_s: float) -> bool:
        """Write all that waits, and wait for that; return False if it takes longer."""
        if self._thread is None:
            return True
        written = threading.Event()
        with self._lock:
            self._flushes.append(written)
        self._hurry.set()
        self._wake.set()
        return written.wait(timeout_s)

    def finish(self) -> bool:
        """Write all that waits; return False if the place is left alone or full, or writes no file for STALLED_S."""
        n_before = -1
        while not (is_done := self.flush(STALLED_S)) and self._n_put > n_before:
            n_before = self._n_put
        return is_done and not self._place.is_off and time.monotonic() >= self._full_until

    def close(self) -> None:
        """Write what waits, for as long as an answer of the place may take, and end the thread."""
        if not self._place.is_off and not self.flush(self._place.answers_s):
            logger.warning(
                "the process ends before all that it fetched is in the shared cache %s: `cachedfs export` adds the rest",
                self._place.url,
            )
        self._is_closed = True
        self._hurry.set()
        self._wake.set()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="cachedfs-share", daemon=True)
        with contextlib.suppress(RuntimeError):  # too many threads: the next block tries again
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait()
            self._hurry.wait(LOOK_S)
            self._wake.clear()
            self._hurry.clear()
            hurries = self._leases.is_awaited()
            with self._lock:
                flushes, self._flushes = self._flushes, []
                files = self._gatherer.take(
                    time.monotonic(), everything=bool(flushes), hurries=hurries, is_coming=self._is_coming
                )
                if self._gatherer:
                    self._wake.set()
            self._put_all(files)
            if flushes or time.monotonic() >= self._metadata_at:
                for identity in list(self._metadata_due):
                    self._put(identity, [])
            if self._metadata_due and not self._place.is_read_only:
                self._wake.set()
            for written in flushes:
                written.set()

    def _put_all(self, files: list[list[BlockGroup]]) -> None:
        """Write files, the large ones to a bucket together: one after the other takes longer than reading them did."""

        def put(groups: list[BlockGroup]) -> None:
            self._put(groups[0].version.identity, groups)

        together = self._place.times_itself and not self._place.counts_requests
        large = [groups for groups in files if together and groups[0].size >= LARGE]
        while large:
            n = 1 if self._leases.reads else AT_ONCE  # more would be in the way of reads
            each_in_threads(put, large[:n])
            del large[:n]
        for groups in files:
            if not (together and groups[0].size >= LARGE):
                put(groups)

    def _put(self, identity: str, groups: list[BlockGroup]) -> None:
        """Write a file of these blocks: one large piece, or several small ones with the metadata that nobody has yet."""
        try:
            if self._place.is_off:
                return
            self._place.check()
            self._place.check_room()
            if groups and groups[0].size >= LARGE:
                self._write(identity, groups, [])
                if groups[0].key not in self._seen:
                    self._metadata_due.setdefault(identity, []).append(groups[0].info)
                    self._seen.add(groups[0].key)
            else:
                self._gather(identity, groups)
            if self._most is not None and time.monotonic() >= self._clean_at:
                self._clean_at = time.monotonic() + CLEAN_S
                clean(self._place, self._most, now=self._place.now() or time.time())
        except (DamagedFile, OSError) as error:
            number = error.errno if isinstance(error, OSError) else None
            if number in _FULL:
                self._full_until = time.monotonic() + FULL_S
                self._place.warn("full", f"{self._place.url} is full, so nothing is shared there: {error}")
            elif number in _READ_ONLY:
                self._place.is_read_only, self._place.trouble = True, f"it can only be read: {error}"
            elif isinstance(error, CachedFSError) and not self._is_closed:
                self._place.warn(
                    "unwritten", f"nothing is put into the shared cache {self._place.url}: {error}"
                )
            logger.debug("not shared: %s", error)
        except Exception as error:  # the thread must go on
            if self._is_closed:
                logger.debug("not shared, as the process ends: %s", error)
            else:
                logger.exception("blocks could not be shared")
        finally:
            self._n_put += 1
            for group in groups:
                self._leases.release(lease_of(group.key, group.start))

    def _is_coming(self, group: BlockGroup) -> bool:
        return self._leases.reads[lease_of(group.key, group.start)] > 0

    def _has(self, group: BlockGroup) -> bool:
        return all(self._cache.has(group.version, index, only_own=True) for index in group.blocks)

    def _gather(self, identity: str, groups: list[BlockGroup]) -> None:
        """Write small pieces and metadata, together with those of the last file if that is small."""
        infos = [*self._metadata_due.get(identity, ()), *(group.info for group in groups)]
        self._metadata_at = time.monotonic() + METADATA_S
        versions = self._versions(identity, infos)
        paths = [info.path for info in infos if info.path not in versions]
        looked_for: list[str] = []

        def is_due(folder: str) -> bool:
            if time.monotonic() - self._listed.get((identity, folder), (-AGAIN_S, 0.0))[0] < AGAIN_S:
                return False
            looked_for.append(folder)
            return True

        rows = list(rows_about(self._cache.metadata, identity, paths, is_due))
        rows += versions.values()
        before = self._small.pop(identity, None)
        if before is not None and all(self._has(group) for group in before.groups):
            groups, rows = before.groups + groups, before.rows + rows
        else:
            before = None  # it stays as it is: the local cache has evicted some
        written = self._write(identity, groups, rows)  # after an error, all of it is due again
        self._metadata_due.pop(identity, None)
        self._listed |= {(identity, folder): (time.monotonic(), 0.0) for folder in looked_for}
        if written is None:
            return
        name, size = written
        for kind, folder, at, *_ in rows:
            if kind == "listing":
                self._listed[identity, folder] = time.monotonic(), at
        if before is not None and before.name != name:
            self._place.remove(before.name)
            self._index.known.remove(before.name)
        if size < LARGE and len(rows) < MOST_ROWS:
            self._small[identity] = _SmallFile(name, groups, rows)

    def _write(self, identity: str, groups: list[BlockGroup], rows: list[Any]) -> tuple[str, int] | None:
        """Write a file; return its name and the bytes of its pieces, or None if there is nothing to write."""
        placed = put_file(self._place, self._cache, identity, groups, rows, bad=self._index.known.bad)
        if placed is None:
            return None
        self._index.wrote(*placed)
        return placed[0], sum(each.piece.stop - each.piece.start for each in placed[1])

    def _versions(self, identity: str, infos: Sequence[ObjectInfo]) -> dict[str, list[Any]]:
        """Return a row for each object of which a listing that was put there is the last answer, by path."""
        store, by_folder, rows = self._cache.metadata, dict[str, list[ObjectInfo]](), dict[str, list[Any]]()
        for info in infos:
            by_folder.setdefault(folder_of(info.path), []).append(info)
        for folder, members in by_folder.items():
            put_at, at = self._listed.get((identity, folder), (-AGAIN_S, 0.0))
            listed = store.find(identity, members[0].path)[1]
            if listed is None or listed.checked_at != at or time.monotonic() - put_at >= AGAIN_S:
                continue
            newer = store.newer_than(at, identity, [info.path for info in members])
            for info in members:
                if stored_path(info.path) not in newer:
                    with contextlib.suppress(TypeError):  # details that JSON does not have
                        rows[info.path] = ["version", info.path, encode_info(info)]
        return rows


def put_file(
    store: SharedStore,
    cache: BlockStore,
    identity: str,
    groups: Sequence[BlockGroup],
    rows: Sequence[Any],
    *,
    bad: set[str],
) -> tuple[str, list[PlacedPiece]] | None:
    """Write a file of cached blocks and metadata to a shared cache, unless it is there and not `bad`.

    Return its name and what is in it; None if no block is cached any more, and there is no metadata. Raises OSError and
    DamagedFile.
    """
    pieces, data = list[Piece](), list[bytes]()
    for group in groups:
        blocks = {index: block for index in group.blocks if (block := _block(cache, group, index))}
        for run in runs_of(sorted(blocks)):
            start, checksums = run[0] * group.version.block_size, list[int]()
            for index in run:
                data.append(blocks[index][0])
                checksums += blocks[index][1]
            stop = start + sum(len(blocks[index][0]) for index in run)
            pieces.append(Piece(group.key, group.info.size or 0, start, stop, checksums))
    if not pieces and not rows:
        return None
    name = name_of_file(pieces, rows)
    store.write(name, data, lambda: encoded_index(identity, clock.now(), pieces, rows), replaces=name in bad)
    bad.discard(name)
    offset, placed = 0, list[PlacedPiece]()
    for piece in pieces:
        placed.append(PlacedPiece(piece, name, offset))
        offset += piece.stop - piece.start
    return name, placed


def _block(cache: BlockStore, group: BlockGroup, index: int) -> tuple[bytes, Sequence[int]] | None:
    """Return a block and its checksums, from memory or the local cache; None if it is gone."""
    pieces = group.blocks[index]
    if pieces is not None and cache.has(group.version, index, only_own=True):  # else it was removed meanwhile
        data = b"".join(pieces)
        return data, [crc32(memoryview(data)[at : at + PAGE]) for at in range(0, len(data), PAGE)]
    size = group.version.block_size
    key = group.version.encoded + PLACE.pack(index, size)
    path = f"{cache.root}/{block_path(group.version.digest, index)}"
    with contextlib.suppress(BadBlock, OSError):  # not among the open blocks of readers
        block = open_block(os.open(path, disk.READ), path, key, owner=os.geteuid())
        if block.length == min(size, (group.info.size or 0) - index * size):
            return block.read(0, block.length, verify=True), block.trailer.checksums
    return None
