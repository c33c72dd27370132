"""Measure reads of real data from simulated clouds, with and without cachedfs, and print a table.

This process starts the simulated clouds and counts their requests. The processes of `ReaderProcess` do all reads.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import multiprocessing
import os
import signal
import sys
import sysconfig
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from cachedfs.demo.jobs import BATCH, PYDRIVE2, TEXTS, ZARR, Job, begin, digest, drawn, open_url, read_opened

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cachedfs.sim import DriveServer, GCSServer, Profile

NEEDED = {"rich": "rich", "sklearn": "scikit-learn", "zarr": "zarr", "gcsfs": "gcsfs"}
# For drive://, and PyDrive2.
NEEDED |= {"google_auth_httplib2": "google-auth-httplib2", "funcy": "pydrive2[fsspec]"}
NEEDED |= {"google_crc32c": "google-crc32c"}  # checksums of the simulated clouds
WIDTH = 80
SHARD = 32  # images in a shard, about 4 MB
# Model of Google Drive mounted in Colab, from measurements that users published.
MOUNT_LIST_S, MOUNT_BIG = 20.0, 600  # seconds for the first listing of a folder of at least 600 files
MOUNT_FILE_S = 0.18  # seconds before the first byte of a file
MOUNT_COLD, MOUNT_WARM = 60e6, 125e6  # bytes/s: from Drive, and from the mount's own cache
MAX_AGE_S = 3600  # the first pass may take longer than the default of 60 s
PROCESSES = multiprocessing.get_context("spawn")  # readers begin without what this process imported
CLOUDS = {"drive": "Google Drive", "gs": "Google Cloud Storage"}
PYDRIVE2_PART, GCSFS_PART = 200, 60
LEGEND = f"""\
~: measured on 1 file in {PYDRIVE2_PART} (PyDrive2) or 1 image in {GCSFS_PART} (gcsfs), and scaled up.
Colab's mount is a model after published measurements, not measured here.
Requests and MB: counted by the simulated cloud. Hits: blocks from the cache.
Times faster: than the measured reader without cachedfs of the same data.
Starting Python and importing libraries is not counted."""
YOURS = """\
Now your own data: put cachedfs:: in front of its URL.
  xr.open_zarr("cachedfs::gs://my-bucket/a.zarr")
  fsspec.open("cachedfs::drive://My Drive/a.txt")  # after: cachedfs login drive
  cachedfs doctor gs://my-bucket/folder            # what limits reading it"""


class Case(NamedTuple):
    """A dataset in a simulated cloud, and the jobs that read it with cachedfs and without."""

    url: str  # without `cachedfs::`
    what: str
    items: Sequence[Any]  # as the jobs return them
    job: Job
    plain: str  # the name of the reader without cachedfs
    plain_job: Job
    part: int  # it reads 1/part of the items: all would take minutes
    modeled: Mapping[str, float] = {}  # seconds of Colab's mount

    @property
    def protocol(self) -> str:
        return self.url.partition("://")[0]


class Pass(NamedTuple):
    """One pass of one reader over a dataset: a line of the table."""

    who: str
    seconds: float
    requests: int  # all requests in the server's log
    sent: int  # bytes of content in the server's log
    hits: int  # blocks served from the cache
    is_right: bool  # the bytes are those of the local data


class Block(NamedTuple):
    """One dataset: a pass without cachedfs, and three passes with it."""

    case: Case
    plain: Pass
    cached: tuple[Pass, ...]


class ReaderProcess:
    """A process that reads a dataset on request.

    With `cache_dir` it caches there; with None it reads a part of the items without cachedfs.
    """

    def __init__(self, server: GCSServer | DriveServer, case: Case, cache_dir: Path | None) -> None:
        self._server, self._case, prefix = server, case, f"FSSPEC_{case.protocol.upper()}_"
        settings = {f"{prefix}TOKEN": "anon", f"{prefix}ENDPOINT_URL": server.endpoint_url}
        settings["FSSPEC_CONFIG_DIR"] = os.devnull
        if cache_dir:
            self._job, self._url, self._part = case.job, f"cachedfs::{case.url}", 1
            settings |= {"FSSPEC_CACHEDFS_CACHE_DIR": str(cache_dir), "FSSPEC_CACHEDFS_KEEP_FREE": "0"}
            settings |= {"FSSPEC_CACHEDFS_CONCURRENCY": str(BATCH), "FSSPEC_CACHEDFS_MAX_AGE": str(MAX_AGE_S)}
        else:  # gcsfs would query the bucket layout by gRPC over TLS, which the simulator lacks
            self._job, self._url, self._part = case.plain_job, case.url, case.part
            settings["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
        self._process = PROCESSES.Pool(1)
        self._begun = self._process.apply_async(begin, (self._job, settings))

    def ready(self) -> None:
        """Wait until the process has imported what it needs."""
        self._begun.get()

    def read(self, who: str, seed: int) -> Pass:
        """Open the dataset and read it in the order of `seed`; all numbers but those of opening are scaled up."""
        self.ready()
        self._server.reset()
        try:
            opening_s = self._process.apply(open_url, (self._job, self._url))
            opening, opening_sent = self._server.count(), self._server.bytes_sent()
            took_s, hits, found = self._process.apply(read_opened, (self._job, seed, self._part))
        except Exception as error:  # of any library: say which reader met it
            error.add_note(f"{self._job.module} of {self._url} failed")
            raise
        items = self._case.items
        order = drawn(len(items), seed, self._part)
        scale = len(items) / len(order)
        reading, sent = self._server.count() - opening, self._server.bytes_sent() - opening_sent
        return Pass(
            who,
            seconds=opening_s + took_s * scale,
            requests=round(opening + reading * scale),
            sent=round(opening_sent + sent * scale),
            hits=hits,
            is_right=found == digest(items[index] for index in sorted(order)),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.terminate()
        self._process.join()


def profiles() -> dict[str, Profile]:
    from cachedfs.sim import PROFILES

    # No stalls (30 s in one download of 5,000): one in the sample of PyDrive2 would be scaled to an hour.
    return {"drive": dataclasses.replace(PROFILES["drive-typical"], stall_rate=0.0), "gs": PROFILES["table"]}


def run(
    folder: Path,
    *,
    profile: str | None = None,
    n_texts: int = 1000,
    n_images: int = 1024,
    side: int = 336,
    report: Callable[[str], object] = lambda text: None,
) -> Iterator[Block]:
    """Yield the measurements of each dataset.

    The demo fills `folder`, and the caller removes it. `profile` names a profile of the simulator to use for both
    clouds. `n_texts` and `n_images` limit the datasets, `side` is the width and height of an image in pixels.
    """
    from cachedfs.sim import DriveServer, GCSServer

    of = profiles()
    texts = text_case(folder / "drive", n_texts)
    with DriveServer(profile or of["drive"], folder=folder / "drive", process=True) as drive:
        report(f"reading {len(texts.items):,} sources of Python's standard library from Drive")
        yield compare(drive, folder, texts)
    images = image_case(folder / "gs", n_images, side)
    with GCSServer(profile or of["gs"], folder=folder / "gs", process=True) as gcs:
        report(f"reading {len(images.items):,} images of a sharded Zarr array from Cloud Storage")
        yield compare(gcs, folder, images)


def text_case(drive: Path, count: int) -> Case:
    """Copy the sources of the standard library to one folder of Drive, and return them as a dataset."""
    library, folder = Path(sysconfig.get_path("stdlib")), drive / "demo/stdlib"
    files = sorted(file for file in library.rglob("*.py") if "site-packages" not in file.parts)[:count]
    folder.mkdir(parents=True)
    items, size = [], 0
    for number, file in enumerate(files):
        name, data = f"{number:05}-{file.name}", file.read_bytes()
        (folder / name).write_bytes(data)
        items.append(name.encode() + data)
        size += len(data)
    what = f"{len(files):,} Python sources, {size / 1e6:.0f} MB,\nby fs.cat, shuffled, {BATCH} a call"
    who, modeled = "PyDrive2, one file after the other", on_a_mount(len(items), size)
    url = "drive://My Drive/demo/stdlib"
    return Case(url, what, items, TEXTS, who, PYDRIVE2, PYDRIVE2_PART, modeled)


def image_case(clouds: Path, count: int, side: int) -> Case:
    """Store scikit-learn's handwritten digits as a sharded Zarr v3 array, one image a chunk; return the dataset.

    They have 8 x 8 pixels each, and are enlarged to `side` x `side` bytes.
    """
    import numpy as np
    import zarr
    from sklearn.datasets import load_digits

    small = (load_digits().images[:count] * 15).astype(np.uint8)
    images = small.repeat(side // 8, axis=1).repeat(side // 8, axis=2)
    array = zarr.open_group(clouds / "demo/digits.zarr", mode="w").create_array(
        "images",
        shape=images.shape,
        dtype=images.dtype,
        chunks=(1, side, side),
        shards=(SHARD, side, side),
        compressors=None,  # enlarged pixels would compress to nearly nothing
    )
    array[:] = images
    what = f"{len(images):,} digit images, {images.nbytes / 1e6:.0f} MB,\nby zarr, shuffled, 1 a call"
    return Case("gs://demo/digits.zarr", what, images, ZARR, "gcsfs without cachedfs", ZARR, GCSFS_PART)


def on_a_mount(n_files: int, size: int) -> dict[str, float]:
    """Return the modeled seconds of Drive mounted in Colab: the first pass, and a pass from its cache."""
    cold = n_files * MOUNT_FILE_S + size / MOUNT_COLD + (MOUNT_LIST_S if n_files >= MOUNT_BIG else 0.0)
    return {"first pass": cold, "again": size / MOUNT_WARM}


def compare(server: GCSServer | DriveServer, folder: Path, case: Case) -> Block:
    """Measure three passes with cachedfs, starting with an empty cache, and one without."""
    cache_dir = folder / f"{case.protocol}-cache"
    with ExitStack() as stack:
        # They import at the same time, before the first measurement.
        first, new, plain = (
            stack.enter_context(ReaderProcess(server, case, where)) for where in (cache_dir, cache_dir, None)
        )
        for reader in (first, new, plain):
            reader.ready()
        passes = {"first pass": first, "second pass": first, "new process": new}
        cached = [
            reader.read(f"cachedfs, {when}", seed) for seed, (when, reader) in enumerate(passes.items())
        ]
        return Block(case, plain.read(case.plain, seed=1), tuple(cached))


def table_of(blocks: Sequence[Block]) -> Table:
    """Return the table of all measurements, at most 80 columns wide."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    table.add_column("simulated clouds", no_wrap=True, width=37)
    heads = {"\nseconds": 8, "\nrequests": 9, "\nMB": 5, "\nhits": 7, "times\nfaster": 8}
    for head, width in heads.items():
        table.add_column(head, justify="right", no_wrap=True, width=width)
    for case, plain, cached in blocks:
        table.add_row(f"{CLOUDS[case.protocol]}:\n{case.what}", style="bold")
        cells = (f"~{plain.seconds:,.0f}", f"~{plain.requests:,}")
        table.add_row(f"  {plain.who}", *cells, style=style_of(plain))
        for when, seconds in case.modeled.items():
            table.add_row(f"  Colab's mount (model), {when}", f"{seconds:,.2f}")
        for each in cached:
            times = plain.seconds / each.seconds
            shown = (f"{each.seconds:,.2f}", f"{each.requests:,}", f"{each.sent / 1e6:.0f}", f"{each.hits:,}")
            faster = f"{times:,.{0 if times >= 10 else 1}f}"
            table.add_row(f"  {each.who}", *shown, faster, style=style_of(each))
        table.add_section()
    return table


def style_of(each: Pass) -> str | None:
    return None if each.is_right else "bold red"


def describe(cloud: str, profile: Profile) -> str:
    from cachedfs.sim import PROFILES

    less = " without its stalls" if PROFILES[profile.name].stall_rate > profile.stall_rate else ""
    budget, quota = "any number of requests", profile.quota
    if quota.requests_per_user < math.inf:
        budget = f"at most {quota.requests_per_user:,.0f} requests a minute and {quota.creates_per_s:.0f} new files a second"
    errors = f"{profile.error_rate:.1%} of them fail" if profile.error_rate else "none fails"
    kinds = {"file": profile.media, "metadata": profile.metadata, "list": profile.listing}
    delays = ", ".join(f"{kind} {delay.median_s * 1e3:.0f}" for kind, delay in kinds.items())
    text = (
        f'{cloud} is SIMULATED: profile "{profile.name}"{less}, seed 0. Milliseconds to the first byte, median: {delays} '
        f"and {profile.list_item_s * 1e3:g} an item. {profile.stream_rate / 1e6:.0f} MB/s a stream, "
        f"{profile.total_rate / 1e6:.0f} MB/s in all; {budget}; {errors}."
    )
    return textwrap.fill(text, WIDTH) + "\n"


def show(console: Console) -> int:
    """Run the demo and print its results; return the exit status (1: wrong bytes)."""
    start = time.perf_counter()
    for protocol, profile in profiles().items():
        console.print(describe(CLOUDS[protocol], profile), highlight=False)
    with tempfile.TemporaryDirectory(prefix="cachedfs-demo-") as folder, console.status("starting") as status:
        report = status.update if console.is_terminal else lambda text: console.print(f"... {text}")
        blocks = list(run(Path(folder), report=report))
    console.print(table_of(blocks))
    console.print(f"\n{LEGEND}", highlight=False)
    passes = [(block.case.what, each) for block in blocks for each in (block.plain, *block.cached)]
    wrong = [f"{' '.join(what.split())}: {each.who}" for what, each in passes if not each.is_right]
    if wrong:
        console.print(f"WRONG BYTES: {'; '.join(wrong)}", style="bold red")
        return 1
    took = time.perf_counter() - start
    right = f"All {len(passes)} measured passes gave the right bytes (SHA-256). {took:.0f} s in all."
    console.print(right, highlight=False)
    console.print(f"\n{YOURS}", highlight=False, markup=False)
    return 0


def main() -> int:
    """Run the demo from the command line; return the exit status (1: wrong bytes)."""
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        sys.exit(f"The demo needs {', '.join(missing)}: pip install 'cachedfs[demo]'")
    from rich.console import Console

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # an exit removes the temporary files
    try:
        return show(Console())
    except KeyboardInterrupt:
        return 130
