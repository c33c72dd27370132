"""What a pack will read is fetched ahead, in that order, where the filesystem does so."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.core import has_magic

from cachedfs.common import text
from cachedfs.datasets.file_list import URLs
from cachedfs.datasets.loading import arguments
from cachedfs.packing.array_plan import StorePlan, array_plans, attributes_of, plan_of
from cachedfs.packing.executors import DaskTaskPool, TaskPool, ThreadTaskPool, client_of, settle
from cachedfs.packing.pack_types import OFFSETS
from cachedfs.packing.shard_runner import ShardRunner
from cachedfs.packing.small_arrays import write_small
from cachedfs.packing.sources.detect import HEAD, KINDS, kind_of, source_of
from cachedfs.packing.sources.sample_source import Item, SampleSource, SourceFiles
from cachedfs.packing.store import BESIDE, ZARR, StoredObject, ZarrTarget, protocols_of
from cachedfs.packing.task import PackTask

__all__ = ["Packed", "Packing", "ahead", "pack", "part_size"]


WINDOW = "96MiB"  # ahead of what is read: more than a shard, and little memory


@contextlib.contextmanager
def ahead(source: SampleSource, there: Collection[str], *, is_on: bool) -> Iterator[None]:
    """Fetch ahead while the `with` block lasts; `there`: what is stored already, of which pieces nothing is fetched."""
    begin = getattr(source.files.fs, "prefetch", None) if is_on else None
    if begin is None:
        yield
        return
    with begin(_items(source, there), window=WINDOW):
        yield


def _items(source: SampleSource, there: Collection[str]) -> Iterator[Item]:
    for piece in source.pieces():
        # What was measured by an earlier run is mostly stored too; what is not is fetched when it is read.
        if f"{BESIDE}/{piece.name}.npz" not in there:
            yield from source.items(piece)


logger = logging.getLogger("cachedfs.packing")
THREADS = 2, 4  # fewest and most where nothing is said,
AT_ONCE = 256 << 20  # and bytes of the shards that they make: each may be in memory twice


@dataclasses.dataclass(frozen=True)
class Packed:
    """What `pack` made; as text, one line about it."""

    url: str
    """Where it is."""
    kind: str
    """What the source was taken for: "files", "jsonl" and so on."""
    samples: int
    """How many there are."""
    shapes: dict[str, tuple[int, ...]]
    """Of the arrays, by name."""
    layout: list[str]
    """How each array is cut and encoded, and why, in words."""
    objects: int
    """How many objects the samples are in; beside them are the metadata, a `zarr.json` of the group and of each array."""
    resumed: int
    """How many of them an earlier run had written."""
    source_size: int
    """Bytes of the source."""
    size: int
    """Bytes of the objects."""
    seconds: float
    """How long it took, with the look at the source before."""
    verified: str
    """How many objects were compared with a checksum of the origin, and how many were read back, in words."""

    def __str__(self) -> str:
        rate = f", {text.size(self.source_size / self.seconds)}/s" if self.seconds else ""
        again = f", {self.resumed} of them from an earlier run" if self.resumed else ""
        return (
            f"{self.samples:,} samples, {text.size(self.source_size)} of {self.kind}, in {self.objects} objects of {text.size(self.size)}"
            f"{again}; {self.seconds:.1f} s{rate}; {self.verified}"
        )


def pack(
    source: URLs,
    target: str,
    *,
    kind: str | None = None,
    decode: str | None = None,
    columns: Sequence[str] | Mapping[str, str | None] | None = None,
    chunk_bytes: int | str | None = None,
    shard_bytes: int | str | None = None,
    codec: str | None = None,
    n_workers: int | None = None,
    client: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    callback: Any = DEFAULT_CALLBACK,
    overwrite: bool = False,
) -> Packed:
    """Pack many samples into one sharded group of Zarr's third version at `target`, and verify it.

    `source`: a folder, pattern, file or list of URLs. `kind` is one of files (a sample for each, its bytes or with
    `decode="image"` its pixels), lines, jsonl, csv, parquet, hdf5 and tar (WebDataset's form); None: by names and first bytes.
    `columns`: which names to pack of those that have names, in a dictionary also as what ("float32", "float32[768]",
    "ragged int64", "utf8", "bytes", "json").

    Samples of one shape are an array; others lie one behind the other in an array of elements, and `<name>_offsets`, one
    longer than there are samples, says where each begins. Sizes of chunks and shards ("64MiB") and `codec` ("none", "lz4",
    "zstd") are chosen from some of the samples and from where they go; `Packed.layout` says why.

    A shard is written whole by one of `n_workers` threads, or by the workers of a Dask `client`, or of the scheduler at an
    address. Run again after it was interrupted or killed, it goes on with the shards that are missing; nothing looks
    finished before all is there. `overwrite`: what is at `target` is removed first, unless it is this very pack, half done.

    Raises ValueError for options that make no sense and for samples that cannot be packed, naming them; FileExistsError
    where something is at `target`; what the filesystems raise.
    """
    packing = Packing(
        source,
        target,
        kind=kind,
        decode=decode,
        columns=columns,
        chunk_bytes=chunk_bytes,
        shard_bytes=shard_bytes,
        codec=codec,
        storage_options=storage_options,
        target_options=target_options,
    )
    for line in packing.plan.lines():
        logger.info("%s", line)
    return packing.run(n_workers=n_workers, client=client, callback=callback, overwrite=overwrite)


class Packing:
    """A pack that is decided, and not begun: `plan` says what will be, and why."""

    def __init__(
        self,
        source: URLs,
        target: str,
        *,
        kind: str | None = None,
        decode: str | None = None,
        columns: Any = None,
        chunk_bytes: int | str | None = None,
        shard_bytes: int | str | None = None,
        codec: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        target_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Look at the source: its listing, and some of its samples. Nothing is written."""
        started = time.perf_counter()
        if kind is not None and kind not in KINDS:
            raise ValueError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
        self._chunk, self._shard = part_size(chunk_bytes=chunk_bytes), part_size(shard_bytes=shard_bytes)
        self.store = ZarrTarget(target, target_options)
        self.files = SourceFiles(source, storage_options)
        _must_be_apart(self.files, self.store)
        head = self.files.head(0, HEAD) if len(self.files) == 1 else b""
        self.kind = kind or kind_of(self.files.paths, head)
        self.source: SampleSource = source_of(self.kind, self.files, decode=decode, columns=columns)
        sampled = self.source.look()
        if not sum(batch.n for batch in sampled):
            raise ValueError(f"{self.files.url}: nothing to pack: there is no sample in it")
        self.plan: StorePlan = plan_of(
            self.source, sampled, self.store.protocol, chunk=self._chunk, shard=self._shard, codec=codec
        )
        self.source.fields = self.plan.fields
        columns = dict(columns) if isinstance(columns, Mapping) else columns and [*columns]
        self._told = self.plan.as_json(self.source, {"decode": decode, "columns": columns})
        self._look_s = time.perf_counter() - started

    def run(
        self,
        *,
        n_workers: int | None = None,
        client: Any = None,
        callback: Any = DEFAULT_CALLBACK,
        overwrite: bool = False,
    ) -> Packed:
        """Write the store, or what is missing of it."""
        started = time.perf_counter()
        there = self._begun(overwrite=overwrite)
        job = PackTask(self.source, self.store, self.plan.big)
        callback.set_size(self.source.total_size)
        with (
            self._pool(job, n_workers, client) as pool,
            ahead(self.source, there, is_on=client is None),
        ):
            run = ShardRunner(job, pool, there, callback.relative_update)
            run()
        return self._finished(job, run, started)

    @contextlib.contextmanager
    def _pool(self, job: PackTask, n_workers: int | None, client: Any) -> Iterator[TaskPool]:
        """Give those who work, for as long as the `with` block lasts."""
        n_workers = _n_workers(n_workers, self.plan)
        with client_of(client) if isinstance(client, str) else contextlib.nullcontext(client) as known:
            pool: TaskPool = ThreadTaskPool(job, n_workers) if known is None else DaskTaskPool(job, known)
            try:
                yield pool
            finally:
                pool.close(wait=not isinstance(sys.exception(), KeyboardInterrupt))

    def _begun(self, *, overwrite: bool) -> dict[str, StoredObject]:
        """Return what is there of this pack already, which is nothing for a new one."""
        store = self.store
        settle(store)
        store.is_given_up = False
        there = store.listing()
        kept = store.kept_plan() if f"{BESIDE}/plan.json" in there else None
        if kept is not None and kept == json.loads(json.dumps(self._told)):
            return there
        if there:
            is_ours = any(name in there for name in ZARR) or any(
                name.startswith(f"{BESIDE}/") for name in there
            )
            if not (overwrite and is_ours):
                raise FileExistsError(_why_not(store.url, kept is not None, is_ours=is_ours))
            store.clear()
        store.keep_plan(self._told)
        return {}

    def _finished(self, job: PackTask, run: ShardRunner, started: float) -> Packed:
        store, plan = self.store, self.plan
        pieces = [piece for piece, _ in run.pieces]
        small, lengths = write_small(job, pieces, dict(plan.small))
        lengths |= {name: run.length(name) for name in plan.big}
        if self.files.again().digest != self.files.digest:
            raise ValueError(
                f"{self.files.url}: files came, went or changed while they were packed; {store.url} is not finished: pack again "
                "with overwrite"
            )
        stored = {**run.stored, **{each.name: each for each in small}}
        self._verify(stored, lengths, run.n_samples)
        store.finish(array_plans(plan, lengths), attributes_of(plan, self.source, run.n_samples))
        store.remove(BESIDE)
        n_stated = sum(each.checksum is not None for each in stored.values())
        return Packed(
            url=store.url,
            kind=self.kind,
            samples=run.n_samples,
            shapes={each.name: each.shape for each in array_plans(plan, lengths)},
            layout=plan.lines(),
            objects=len(stored),
            resumed=sum(not each.is_new for each in stored.values()),
            source_size=self.files.size,
            size=sum(each.size for each in stored.values()),
            seconds=round(self._look_s + time.perf_counter() - started, 3),
            verified=f"verified: {n_stated} objects by the origin's checksum, {len(stored) - n_stated} read back",
        )

    def _verify(self, stored: Mapping[str, StoredObject], lengths: Mapping[str, int], n: int) -> None:
        """Raise OSError unless all objects are there, of their size, and all arrays have as many samples.

        The bytes of each were compared when it was written, with the origin's checksum or by reading them back.
        """
        there = self.store.listing()
        for name, each in stored.items():
            if name not in there or there[name].size != each.size:
                found = f"{there[name].size:,} bytes" if name in there else "not there"
                raise OSError(
                    f"{self.store.shown(name)}: {found}, and {each.size:,} bytes were written; run pack again"
                )
        for field in self.plan.fields:
            rows = lengths[field.name + OFFSETS] - 1 if field.is_ragged else lengths[field.name]
            if rows != n:
                raise OSError(f"{self.store.shown(field.name)}: {rows:,} samples, and {n:,} were read")


def _why_not(url: str, is_begun: bool, *, is_ours: bool) -> str:
    if is_begun:
        return f"{url}: a pack of another source, or with other options, was begun here; overwrite=True (--overwrite) removes it"
    if is_ours:
        return f"{url}: there is a Zarr store already; overwrite=True (--overwrite) removes it first"
    return f"{url}: there are files, and no Zarr store: choose another target; they are not removed, with overwrite either"


def _must_be_apart(files: SourceFiles, store: ZarrTarget) -> None:
    """Raise ValueError for a target inside the folder that is packed, and for a source inside the target.

    It would be a part of itself, or be removed with what is there.
    """
    if protocols_of(files.fs).isdisjoint(protocols_of(store.fs)):
        return
    folder = str(files.fs._strip_protocol(files.url)).rstrip("/")
    if not has_magic(folder) and store.path.startswith(f"{folder}/"):
        raise ValueError(f"{store.url}: is inside of {files.url}, which is packed: choose a target outside")
    inside = next((path for path in files.paths if f"{path}/".startswith(f"{store.path}/")), None)
    if inside is not None:
        raise ValueError(f"{store.url}: {inside}, which is packed, is inside of it: choose another target")


def _n_workers(given: int | None, plan: StorePlan) -> int:
    if given is not None:
        return arguments.at_least(1, n_workers=given)
    largest = max((encoding.shard_size for encoding in plan.big.values()), default=1)
    return max(1, min(max(arguments.n_cores(), THREADS[0]), THREADS[1], AT_ONCE // largest))


def part_size(**given: Any) -> int | None:
    """Return the bytes of a chunk or a shard that an argument names; None for None. Raises ValueError."""
    [(name, value)] = given.items()
    if value is None:
        return None
    size = arguments.size(**given)
    if not 1 << 10 <= size <= 1 << 30:
        raise ValueError(f"{name}={value!r}: expected bytes or a size like '64MiB', from 1 KiB to 1 GiB")
    return size
