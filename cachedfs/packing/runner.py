"""Run a pack: read the samples of a source in order, and write each shard when it is full."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import json
import logging
import math
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from cachedfs.packing.executors import TaskPool
from cachedfs.packing.pack_types import OFFSETS, WORK_FOLDER, Array, SampleBatch
from cachedfs.packing.sources.sample_source import Counts
from cachedfs.packing.store import StoredObject
from cachedfs.packing.task import ArrayWriter, PackTask, check_lengths

SAVED_S = 10.0  # least seconds between two writes of the progress
PROGRESS = f"{WORK_FOLDER}/progress.npz"
IN_FLIGHT = 256 << 20  # most bytes of shards that are being written: each may be in memory twice
WINDOW = "96MiB"  # prefetch window: more than one shard (64 MiB), and still little memory
logger = logging.getLogger("cachedfs.packing")


class PackProgress:
    """The counts of the first parts of a source, from which a later run continues."""

    def __init__(self) -> None:
        # The length of each big field before each part, and after the last one.
        self.starts: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}  # of each small array
        self.rows: dict[str, Array] = {}  # the last rows of each small array, which do not fill a shard
        self.skipped: dict[int, str] = {}  # the reason for each file that cannot be packed, by its number
        self.verified: dict[str, str] = {}  # versions of verified objects

    def as_bytes(self) -> bytes:
        """Return it as a NumPy npz file. Its arrays are numbered: npz confuses the names `a` and `a.npy`."""
        header = {**vars(self), "rows": [*self.rows], "skipped": [*self.skipped.items()]}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, np.array(json.dumps(header)), *self.rows.values())
        return buffer.getvalue()

    def files_with_samples(self, numbers: Iterable[int], parts: Sequence[range]) -> set[int]:
        """Return those of some files, by number, that may have samples in the store."""
        n_counted = max(map(len, self.starts.values()), default=1) - 1
        return {*numbers} & {*chain(*parts[:n_counted])} - self.skipped.keys()

    @classmethod
    def from_bytes(cls, data: bytes) -> PackProgress:
        """Return what `as_bytes` encoded; an empty one for other data, such as a truncated file."""
        found = cls()
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as stored:
                header, *rows = (stored[f"arr_{i}"] for i in range(len(stored.files)))
            values = json.loads(header.item())
            values["rows"] = dict(zip(values["rows"], rows, strict=True))
            values["skipped"] = {int(number): str(reason) for number, reason in values["skipped"]}
        except Exception:  # zip, zlib and NumPy raise different errors for damaged bytes
            return found
        vars(found).update(values)
        return found


class PackRun:
    """Writes all shards that are not in the store yet.

    A source is read part by part (`SampleSource.parts`). The samples of a shard depend on the source only, so a shard
    of an earlier run equals the one that this run would write.
    """

    def __init__(
        self,
        task: PackTask,
        pool: TaskPool,
        begin: Callable[[], None],
        existing: Mapping[str, StoredObject],
        progress: PackProgress,
        on_stored: Callable[[int], object],
        check: Callable[[], object],
        most_skipped: float,
    ) -> None:
        """`begin` must end before anything else is written. `existing` has the objects in the store, of which an
        earlier run left `progress`.

        `on_stored(n)` is called after `n` bytes of big fields are stored, and `check` in a thread once all samples are
        read (`checked`). The run stops after `most_skipped` files that cannot be packed.
        """
        self._task, self._pool, self._existing, self._on_stored = task, pool, existing, on_stored
        self._check, self._most_skipped, self._parts = check, most_skipped, task.source.parts()
        self._writing: dict[concurrent.futures.Future[list[StoredObject]], int] = {}
        self._save_at = time.monotonic() + SAVED_S
        self._begun = pool.here(begin)
        self._small = {
            name: ArrayWriter(name, encoding, self._emit)
            for name, encoding in task.encodings.items()
            if name not in task.big
        }
        self._progress = progress
        self._restore()
        self.stored: dict[str, StoredObject] = {}
        self._ends = {field.name: self.lengths[field.name] for field in task.source.fields if field.is_ragged}
        for name in self._ends:
            if not self.lengths[name + OFFSETS]:
                self._small[name + OFFSETS].add(np.zeros(1, np.int64))

    @property
    def skipped(self) -> dict[int, str]:
        """The reason for each file that cannot be packed, by its number."""
        removed = self._task.source.files.removed
        return {number: why for number, why in self._progress.skipped.items() if number not in removed}

    @property
    def lengths(self) -> dict[str, int]:
        """The length of each array."""
        starts = self._progress.starts.items()
        return {name: each[-1] for name, each in starts} | {
            name: each.length for name, each in self._small.items()
        }

    @property
    def _n_counted(self) -> int:
        return len(self._progress.starts[self._task.big[0]]) - 1

    @property
    def _is_stopped(self) -> bool:
        return len(self.skipped) >= self._most_skipped

    def __call__(self) -> None:
        """Run the pack to its end. Raises the error of a failed worker."""
        for part in self._parts[self._n_counted :]:
            if (counts := self._task.source.known(part)) is None:
                break
            self._add_counts(counts)
        if self._pool.is_remote:
            self._count()
        else:
            self._read()
        if not self._is_stopped:  # else the last shards are not complete
            if self._pool.is_remote:
                self._write()
            for writer in self._small.values():
                writer.finish()
        self._wait()
        if self._pool.is_remote:  # workers read until they have written
            self.checked = self._pool.here(self._check)
        if self.skipped:
            self._save()
        for name in self._existing.keys() & self._progress.verified.keys() - self.stored.keys():
            self.stored[name] = self._existing[name]

    def _restore(self) -> None:
        """Continue from the progress of an earlier run, as far as its objects are still there."""
        progress, existing = self._progress, self._existing
        verified = progress.verified.items()
        progress.verified = {
            name: each for name, each in verified if name in existing and existing[name].version == each
        }
        full = (
            (name, i)
            for name, n in progress.lengths.items()
            for i in range(n // self._task.encodings[name].shard[0])
        )
        if any(self._needs(*shard) for shard in full):
            self._progress = PackProgress()
        self._progress.starts = self._progress.starts or {name: [0] for name in self._task.big}
        for name, rows in self._progress.rows.items():
            self._small[name].restore(self._progress.lengths[name], rows)

    # Samples.

    def _read(self) -> None:
        """Read all parts with samples of missing shards, in threads, and write these shards."""
        starts, n_counted = self._progress.starts, self._n_counted
        encodings = self._task.encodings
        writers = [ArrayWriter(name, encodings[name], self._emit, self._needs) for name in self._task.big]
        again = {part for shard in self._missing() for part in self._parts_with(*shard)}
        order = [*sorted(again), *range(n_counted, len(self._parts))]
        with self._prefetched(order):
            for number, batches in self._pool.read_ahead(
                lambda i: self._task.source.batches(self._parts[i]), order
            ):
                for writer in writers:
                    writer.length = starts[writer.name][number]
                for batch in batches:
                    for writer in writers:
                        writer.add(batch.values[writer.name])
                    if number >= n_counted:
                        self._add_small(batch)
                if number >= n_counted:
                    for writer in writers:
                        starts[writer.name].append(writer.length)
                where = self._task.source.files.url_of(self._parts[number].start)
                check_lengths(writers, {name: each[number + 1] for name, each in starts.items()}, where)
                if self._is_stopped:
                    return
                self._save_if_due()
        self.checked = self._pool.here(self._check)
        for writer in writers:
            writer.finish()

    def _prefetched(self, order: Sequence[int]) -> contextlib.AbstractContextManager[Any]:
        source = self._task.source
        prefetch = getattr(source.files.fs, "prefetch", None) if source.is_prefetched else None
        items = source.files.prefetch_items(number for part in order for number in self._parts[part])
        return prefetch(items, window=WINDOW) if prefetch else contextlib.nullcontext()

    def _count(self) -> None:
        """Let workers count the samples of the other parts."""
        count = partial(self._pool.submit, PackTask.count)
        for _, future in self._pool.ahead(count, self._parts[self._n_counted :]):
            self._add_counts(future.result())
            if self._is_stopped:
                return
            self._save_if_due()

    def _add_counts(self, counts: Counts) -> None:
        for name, n in counts.lengths.items():
            starts = self._progress.starts[name]
            starts.append(starts[-1] + n)
        for batch in counts.batches:
            self._add_small(batch)

    def _add_small(self, batch: SampleBatch) -> None:
        files = self._task.source.files
        self._progress.skipped |= batch.skipped
        for number in batch.skipped:
            logger.warning("cannot pack %s: %s", files.url_of(number), batch.skipped[number])
        for field in self._task.source.fields:
            if field.is_small:
                self._small[field.name].add(batch.values[field.name])
            if field.is_ragged and len(sizes := batch.sizes[field.name]):
                edges = np.cumsum(sizes, dtype=np.int64) + self._ends[field.name]
                self._small[field.name + OFFSETS].add(edges)
                self._ends[field.name] = int(edges[-1])

    # Shards.

    def _needs(self, name: str, index: int) -> bool:
        keys = (f"{name}/{key}" for key, _ in self._task.encodings[name].shards_at(index))
        return any(key not in self._progress.verified for key in keys)

    def _n_shards(self, name: str) -> int:
        return -(-self._progress.starts[name][-1] // self._task.encodings[name].shard[0])

    def _missing(self) -> list[tuple[str, int]]:
        """Return the shards of big fields that have counted samples and are not in the store: name and index."""
        shards = ((name, index) for name in self._task.big for index in range(self._n_shards(name)))
        return [shard for shard in shards if self._needs(*shard)]

    def _parts_with(self, name: str, index: int) -> range:
        """Return the numbers of the parts with samples of a shard."""
        starts, rows = self._progress.starts[name], self._task.encodings[name].shard[0]
        return range(
            bisect_right(starts, index * rows) - 1, bisect_left(starts, min((index + 1) * rows, starts[-1]))
        )

    def _write(self) -> None:
        """Let workers write all missing shards: those with about the same samples in one call."""
        n_calls = max(map(self._n_shards, self._task.big))
        calls: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for name, index in self._missing():
            calls[index * n_calls // self._n_shards(name)][name].append(index)
        for call in sorted(calls):
            numbers = [
                self._parts_with(name, index) for name, indexes in calls[call].items() for index in indexes
            ]
            first, stop = min(each.start for each in numbers), max(each.stop for each in numbers)
            starts = {name: self._progress.starts[name][first : stop + 1] for name in calls[call]}
            size = sum(
                self._task.encodings[name].shard_size * len(indexes) for name, indexes in calls[call].items()
            )
            self._submit(size, PackTask.write, dict(calls[call]), self._parts[first:stop], starts)
            self._save_if_due()

    def _emit(self, name: str, index: int, rows: Array) -> None:
        if not self._needs(name, index):
            return
        if self._pool.is_remote:  # a small array
            self._begun.result()
            self.stored.update((each.name, each) for each in self._task.put(name, index, rows))
        else:
            self._submit(rows.nbytes if name in self._task.big else 0, PackTask.put, name, index, rows)

    def _submit(self, size: int, method: Callable[..., Any], *args: Any) -> None:
        self._wait(self._pool.n_workers - 1, math.inf if self._pool.is_remote else IN_FLIGHT - size)
        self._writing[self._pool.submit(method, *args)] = size

    def _wait(self, most: int = 0, most_bytes: float = math.inf) -> None:
        """Wait until at most so many calls that write shards are left, with so many bytes."""
        self._begun.result()
        while len(self._writing) > most or (self._writing and sum(self._writing.values()) > most_bytes):
            done, _ = concurrent.futures.wait(self._writing, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                self.stored.update((each.name, each) for each in future.result())
                self._on_stored(self._writing.pop(future))

    def _save_if_due(self) -> None:
        if time.monotonic() >= self._save_at:
            self._save()

    def _save(self) -> None:
        """Store what a later run needs to continue after the parts that are counted."""
        began = time.monotonic()
        self._wait()
        progress = self._progress
        progress.lengths = {name: writer.length for name, writer in self._small.items()}
        progress.rows = {name: writer.rest for name, writer in self._small.items()}
        progress.verified |= {name: each.version for name, each in self.stored.items() if each.version}
        self._task.store.put(PROGRESS, progress.as_bytes())
        self._save_at = time.monotonic() + SAVED_S * (1 + time.monotonic() - began)  # slow ones less often
