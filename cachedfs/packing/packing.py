"""`pack`, the public function, with `Packing` (a planned pack) and `Packed` (its result)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.core import has_magic

from cachedfs.common import text
from cachedfs.datasets import arguments
from cachedfs.datasets.file_list import URLs
from cachedfs.packing.executors import TaskPool, dask_client
from cachedfs.packing.layout import StorePlan, metadata_of, plan_of
from cachedfs.packing.pack_types import OFFSETS, WORK_FOLDER
from cachedfs.packing.runner import PROGRESS, PackProgress, PackRun
from cachedfs.packing.sources.detect import HEAD, KINDS, kind_of, source_of
from cachedfs.packing.sources.sample_source import SampleSource
from cachedfs.packing.sources.source_files import SourceFiles
from cachedfs.packing.store import ZARR, StoredObject, ZarrTarget, protocols_of
from cachedfs.packing.task import PackTask

logger = logging.getLogger("cachedfs.packing")

ATTRIBUTE = "cachedfs_pack"  # name of the group attribute that describes the source
FORMAT = 1  # of this attribute
PLAN_FORMAT = 5  # of the working files: a run continues none of another format
PLAN = f"{WORK_FOLDER}/plan.json"
FILES = f"{WORK_FOLDER}/files.npz"  # the list of source files that the pack began with
SKIPPED = "skipped.json"  # object of the store with the files that were left out
MOST_NAMED = 20  # files that cannot be packed, after which a pack stops


@dataclasses.dataclass(frozen=True)
class Packed:
    """The result of `pack`; `str()` of it is a one-line summary."""

    url: str
    """URL of the Zarr store."""
    kind: str
    """Kind of the source: "files", "jsonl" and so on."""
    samples: int
    """Number of samples."""
    shapes: dict[str, tuple[int, ...]]
    """Shape of each array, by name."""
    layout: list[str]
    """Chunks, shards and codec of each array, with the reasons; one line for each array."""
    objects: int
    """Number of objects (shards) with samples, without the `zarr.json` metadata."""
    resumed: int
    """Number of those objects that an earlier, interrupted run had written."""
    source_size: int
    """Size of the source, in bytes."""
    size: int
    """Size of the objects, in bytes."""
    seconds: float
    """Duration of planning and packing, in seconds."""
    verified: str
    """Number of objects verified by checksum, and by reading them back, as text."""
    skipped: list[str] = dataclasses.field(default_factory=list)
    """Files that were left out because they cannot be read or decoded, each with the reason."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Decisions that you may want to know, such as the name of a column that has none."""

    def __str__(self) -> str:
        rate = f", {text.size(self.source_size / self.seconds)}/s" if self.seconds else ""
        resumed = f", {self.resumed} of them from an earlier run" if self.resumed else ""
        skipped = f"; {text.counted(len(self.skipped), 'file')} left out" if self.skipped else ""
        return (
            f"{self.samples:,} samples, {text.size(self.source_size)} of {self.kind}, in {self.objects} objects of {text.size(self.size)}"
            f"{resumed}{skipped}; {self.seconds:.1f} s{rate}; {self.verified}"
        )


def pack(
    source: URLs,
    target: str,
    *,
    kind: str | None = None,
    decode: str | None = None,
    columns: Sequence[Any] | Mapping[str, str | None] | None = None,
    rename: Mapping[str, str] | None = None,
    csv: Mapping[str, Any] | None = None,
    chunk_bytes: int | str | None = None,
    shard_bytes: int | str | None = None,
    codec: str | None = None,
    n_workers: int | None = None,
    client: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    callback: Any = DEFAULT_CALLBACK,
    overwrite: bool = False,
    on_error: str = "raise",
) -> Packed:
    """Pack many samples into one sharded Zarr v3 group at `target`, and verify it.

    For example, pack a folder of images as pixels:

        packed = pack("cachedfs::gs://bucket/cats", "gs://bucket/cats.zarr", decode="image")
        print(packed)

    `source` is a folder, a pattern, a file or a list of URLs. `kind` is "files" (one sample for each file), "lines",
    "jsonl", "csv", "parquet", "feather", "hdf5" or "tar" (WebDataset). None detects it from file names and first bytes. Files are
    packed as bytes; `decode="image"` packs their pixels, turned by their EXIF orientation, and "image-raw" as they are
    stored. Hidden files (`.DS_Store`, `Thumbs.db`) of folders and patterns are left out. `columns` lists the columns, endings or datasets to pack. Columns
    of lines and tables may be pairs of a name and a type: "float32", "float32[768]", "ragged int64", "utf8", "bytes",
    "json" or None (detect it). A dictionary gives types, and keeps all other columns. For images,
    `{"image": "ragged"}` allows any mix of shapes. `rename` is a dictionary from columns to names of arrays; `csv` has
    options of CSV files: "delimiter", "encoding", "comment" and "skipinitialspace".

    Samples of one shape become an array of shape `(samples, *shape)`. Samples of different lengths are concatenated
    into one 1-D array of elements: sample `i` is `data[offsets[i]:offsets[i + 1]]`, where `<name>_offsets` has one
    entry more than there are samples. `chunk_bytes` and `shard_bytes` are sizes before compression, in bytes or as
    text ("64MiB"), from 1 KiB to 1 GiB. `codec` is "none", "lz4" or "zstd". None chooses them from some samples and
    from the protocol of `target`; `Packed.layout` gives the reasons.

    `n_workers` threads write the shards (4 by default). With `client`, a Dask client, the address of a Dask
    scheduler or any `concurrent.futures.Executor`, its workers write them. `storage_options` are the fsspec options of `source`,
    `target_options` those of `target`. `callback` is an fsspec callback that counts bytes of samples.

    `on_error` says what to do about files that cannot be read or decoded. "raise" raises ValueError that names up to
    twenty of them, after it has packed the others: remove them, and run it again to finish. "skip" leaves them out, and
    lists them in `Packed.skipped` and in the object `skipped.json` of the store.

    A second run after an interrupted one writes only the missing shards. The group's `zarr.json` is written last, so a
    group that opens is complete. `overwrite=True` first removes a Zarr store at `target`, unless it is the same
    pack, incomplete.

    Raises ValueError for invalid options and for samples that cannot be packed, FileExistsError if `target` is not
    empty, OSError if the written bytes fail verification, and any error of the filesystems.
    """
    given = {**locals()}
    of_run = {"n_workers": n_workers, "client": client, "callback": callback, "overwrite": overwrite}
    packing = Packing(**{name: value for name, value in given.items() if name not in of_run})
    for line in [*packing.notes, *packing.plan.lines]:
        logger.info("%s", line)
    return packing.run(**of_run)


class Packing:
    """A planned pack: `plan` describes the arrays to write and the reasons, `run` writes them."""

    def __init__(
        self,
        source: URLs,
        target: str,
        *,
        kind: str | None = None,
        chunk_bytes: int | str | None = None,
        shard_bytes: int | str | None = None,
        codec: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        target_options: Mapping[str, Any] | None = None,
        on_error: str = "raise",
        **options: Any,
    ) -> None:
        """List the source, read some samples and plan the arrays. Nothing is written.

        The parameters and errors are those of `pack`; `options` are those of the kind of source.
        """
        started = time.perf_counter()
        if kind is not None and kind not in KINDS:
            raise ValueError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error={on_error!r}: expected 'raise' or 'skip'")
        self._is_skipping = on_error == "skip"
        sizes = {
            "chunk": storage_size(chunk_bytes=chunk_bytes),
            "shard": storage_size(shard_bytes=shard_bytes),
        }
        self.store = ZarrTarget(target, target_options)
        self.files = SourceFiles(source, storage_options)
        _must_be_apart(self.files, self.store)
        head = self.files.head(0, HEAD) if len(self.files) == 1 else b""
        self.kind = kind or kind_of(self.files.paths, head)
        self.source: SampleSource = source_of(self.kind, self.files, **options)
        if self.source.may_skip and (earlier := self.store.read(FILES)) is not None:
            self.files.adopt(earlier)
        sampled = self.source.look()
        if not sum(batch.n for batch in sampled):
            raise ValueError(f"{self.files.url}: nothing to pack: it has no samples")
        self.plan: StorePlan = plan_of(self.source.fields, sampled, self.store.protocol, codec=codec, **sizes)
        self.source.fields = self.plan.fields
        self.notes: list[str] = [*self.source.notes]
        # A run continues an earlier one only if this is equal.
        described = {
            "digest": self.files.digest,
            "kind": self.kind,
            "parts": len(self.source.parts()),
            **options,
        }
        plan = {"format": PLAN_FORMAT, "source": described, **self.plan.as_json()}
        self._plan_json = json.dumps(
            plan, default=lambda each: dict(each) if isinstance(each, Mapping) else [*each]
        ).encode()
        self._planning_s = time.perf_counter() - started

    def run(
        self,
        *,
        n_workers: int | None = None,
        client: Any = None,
        callback: Any = DEFAULT_CALLBACK,
        overwrite: bool = False,
    ) -> Packed:
        """Write the store, or the missing shards of it, and verify it.

        The parameters are those of `pack`.
        """
        started = time.perf_counter()
        if n_workers is not None:
            arguments.at_least(1, n_workers=n_workers)
        existing, progress, first, replaces = self._prepare(overwrite=overwrite)
        begin = partial(self.store.begin, first, self.plan.encodings, replaces=replaces)
        task = PackTask(self.source, self.store, self.plan.encodings)
        self.store.is_interrupted = False
        callback.set_size(self.source.total_size)
        most_skipped = math.inf if self._is_skipping else MOST_NAMED
        with (
            dask_client(client) as executor,
            contextlib.closing(TaskPool(task, executor, n_workers)) as pool,
        ):
            check, on_stored = self._check_source, callback.relative_update
            run = PackRun(task, pool, begin, existing, progress, on_stored, check, most_skipped)
            run()
            if run.skipped and not self._is_skipping:
                raise ValueError(_why_not_packed(self.files, run.skipped))
            return self._finish(run, started)

    def _prepare(
        self, *, overwrite: bool
    ) -> tuple[dict[str, StoredObject], PackProgress, dict[str, bytes], bool]:
        """Return the objects and the progress of an earlier run of this pack, and the objects to write first.

        The last value says whether another store is to be removed before. Raises FileExistsError if anything else is at
        the target and may not be removed.
        """
        store = self.store
        existing = store.listing()
        stored_plan = store.read(PLAN) if PLAN in existing else None
        progress = PackProgress.from_bytes((store.read(PROGRESS) or b"") if PROGRESS in existing else b"")
        first = {PLAN: self._plan_json} | ({FILES: self.files.as_bytes()} if self.source.may_skip else {})
        if stored_plan == self._plan_json and not progress.files_with_samples(
            self.files.removed, self.source.parts()
        ):
            missing = {name: data for name, data in first.items() if name not in existing}
            return existing, progress, missing, False
        if existing:
            is_ours = any(name in ZARR or name.startswith(f"{WORK_FOLDER}/") for name in existing)
            if not (overwrite and is_ours):
                raise FileExistsError(_why_not_empty(store.url, stored_plan is not None, is_ours=is_ours))
        return {}, PackProgress(), first, bool(existing)

    def _finish(self, run: PackRun, started: float) -> Packed:
        store, lengths = self.store, run.lengths
        n_samples = self._n_samples(lengths)
        about = {"format": FORMAT, "source": self.files.url, "kind": self.kind, "samples": n_samples}
        about |= {"skipped": len(run.skipped)} if run.skipped else {}
        groups = {**self.source.group_attributes}
        groups[""] = {**groups.get("", {}), ATTRIBUTE: about}
        documents, chunks = metadata_of(self.plan, lengths, groups, self.source.shared)
        stored = run.stored | {name: store.put_checked(name, data) for name, data in chunks.items()}
        skipped = {self.files.url_of(number): run.skipped[number] for number in sorted(run.skipped)}
        if skipped:
            store.put(SKIPPED, json.dumps(skipped, indent=2, ensure_ascii=False).encode())
        store.finish(documents, run.checked.result)
        store.remove(WORK_FOLDER)
        n_stated = sum(each.is_stated for each in stored.values())
        return Packed(
            url=store.url,
            kind=self.kind,
            samples=n_samples,
            shapes={
                name.removesuffix("/zarr.json"): tuple(each["shape"])
                for name, each in documents.items()
                if each["node_type"] == "array"
            },
            layout=self.plan.lines,
            objects=len(stored),
            resumed=sum(not each.is_new for each in stored.values()),
            source_size=self.files.size,
            size=sum(each.size for each in stored.values()),
            seconds=round(self._planning_s + time.perf_counter() - started, 3),
            verified=f"verified: {n_stated} objects by the origin's checksum, {len(stored) - n_stated} read back",
            skipped=[f"{name}: {reason}" for name, reason in skipped.items()],
            notes=self.notes,
        )

    def _check_source(self) -> None:
        if self.files.list_again().listing_digest != self.files.listing_digest:
            raise ValueError(
                f"{self.files.url}: files were added, removed or changed during packing; {self.store.url} is incomplete: "
                "pack again with overwrite"
            )

    def _n_samples(self, lengths: Mapping[str, int]) -> int:
        """Return the number of samples. Raises OSError unless it is the same in all fields."""
        found = {
            field.name: lengths[field.name + OFFSETS] - 1 if field.is_ragged else lengths[field.name]
            for field in self.plan.fields
        }
        if len({*found.values()}) > 1:
            raise OSError(f"{self.store.url}: the fields have different numbers of samples: {found}")
        return next(iter(found.values()))


def _why_not_packed(files: SourceFiles, skipped: Mapping[int, str]) -> str:
    named = [f"{files.url_of(number)}: {skipped[number]}" for number in sorted(skipped)[:MOST_NAMED]]
    least = "at least " if len(skipped) >= MOST_NAMED else ""
    return (
        f"{files.url}: {least}{text.counted(len(skipped), 'file')} cannot be packed. Remove them and pack again, which goes on "
        "from here, or leave them out with on_error='skip' (--on-error skip):\n" + "\n".join(named)
    )


def _why_not_empty(url: str, is_begun: bool, *, is_ours: bool) -> str:
    if is_begun:
        return f"{url}: an incomplete pack of another source, or with other options, is here; overwrite=True (--overwrite) removes it"
    if is_ours:
        return f"{url}: there is a Zarr store here already; overwrite=True (--overwrite) removes it first"
    return f"{url}: there are files here that are not a Zarr store, and overwrite does not remove them: choose another target"


def _must_be_apart(files: SourceFiles, store: ZarrTarget) -> None:
    """Raise ValueError if the target is inside the source or the source is inside the target.

    The store would be packed into itself, or the source would be removed with `overwrite`.
    """
    if set(protocols_of(files.fs)).isdisjoint(protocols_of(store.fs)):
        return
    folder = str(files.fs._strip_protocol(files.url)).rstrip("/")
    if not has_magic(folder) and store.path.startswith(f"{folder}/"):
        raise ValueError(f"{store.url}: the target is inside the source {files.url}: choose a target outside")
    inside = next((path for path in files.paths if f"{path}/".startswith(f"{store.path}/")), None)
    if inside is not None:
        raise ValueError(f"{store.url}: the source {inside} is inside the target: choose another target")


def storage_size(**given: Any) -> int | None:
    """Return the bytes of `chunk_bytes` or `shard_bytes`, given by name; None for None.

    Raises ValueError for anything but a size from 1 KiB to 1 GiB.
    """
    [(name, value)] = given.items()
    if value is None:
        return None
    size = arguments.size(**given)
    if not 1 << 10 <= size <= 1 << 30:
        raise ValueError(f"{name}={value!r}: expected bytes or a size like '64MiB', from 1 KiB to 1 GiB")
    return size
