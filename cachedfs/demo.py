"""The main job on real data, against a simulated cloud on this machine: `python -m cachedfs.demo`.

The parent starts the cloud, counts its requests and prints; every reading is done by a `Session`, a Python process
of its own that is configured by its environment alone and knows nothing but URLs.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

import fsspec

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cachedfs.sim import GCSServer, Profile

__all__ = ["Reading", "Row", "Session", "main", "run"]

NEEDED = {"rich": "rich", "sklearn": "scikit-learn", "xarray": "xarray", "zarr": "zarr", "gcsfs": "gcsfs"}
NEEDED |= {"google_crc32c": "google-crc32c"}  # the simulated cloud's checksums
BATCH = 64  # files or images that one call asks for
TEXTS, IMAGES = "demo/stdlib", "demo/digits.zarr"
LEGEND = """\
requests, MB: by the cloud's own log. hits: blocks served from the cache. gcsfs: the same reading without cachedfs.
new process: the cache is on disk, so another Python has it too. Python's start and imports are not counted.
The images are scikit-learn's digits of 8 x 8 pixels, enlarged; stored uncompressed as a sharded Zarr v3 array."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One pass over a data set, by one client."""

    seconds: float
    requests: int  # of any kind, by the server's own log
    sent: int  # bytes of content, by the server's own log
    hits: int  # blocks served from the cache
    digest: str  # SHA-256 of what was read


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: the same pass with cachedfs and without."""

    what: str
    when: str
    cached: Reading
    plain: Reading
    expected: str  # the digest of the local data

    @property
    def is_right(self) -> bool:
        return self.cached.digest == self.plain.digest == self.expected

    @property
    def times_faster(self) -> float:
        return self.plain.seconds / self.cached.seconds


# What a user would write. Each returns what it read, as pieces in an order that does not depend on the seed.


def read_texts(url: str, seed: int) -> list[bytes]:
    """Return the files below `url`, by name; read in random order, a batch at a time."""
    fs, folder = fsspec.url_to_fs(url)
    names = fs.find(folder)
    random.Random(seed).shuffle(names)
    found: dict[str, bytes] = {}
    for start in range(0, len(names), BATCH):
        found |= fs.cat(names[start : start + BATCH])
    return [piece for name in sorted(found) for piece in (name.rpartition("/")[2].encode(), found[name])]


def read_by_xarray(url: str, seed: int) -> list[Any]:
    """Return the whole array, read at once; there is no order to draw."""
    import xarray

    images = xarray.open_zarr(url, chunks=None, consolidated=False)["images"]
    return [images.to_numpy()]


def read_by_zarr(url: str, seed: int) -> list[Any]:
    """Return the whole array, read as a training does: images in random order, a batch at a time."""
    import numpy as np
    import zarr

    images: Any = zarr.open_group(url, mode="r")["images"]
    order = np.random.default_rng(seed).permutation(images.shape[0])
    found = np.empty(images.shape, images.dtype)
    for start in range(0, len(order), BATCH):
        batch = np.sort(order[start : start + BATCH])
        found[batch] = images.oindex[batch]
    return [found]


def store_digits(url: str, *, side: int, count: int) -> list[Any]:
    """Store the digits as a sharded Zarr v3 array: a chunk is one image, a shard some 14 MB."""
    import zarr

    images = digits(side, count)
    array = zarr.open_group(url, mode="w").create_array(
        "images",
        shape=images.shape,
        dtype=images.dtype,
        chunks=(1, side, side),
        shards=(min(count, 128), side, side),
        compressors=None,  # enlarged pixels would pack to nothing, and nothing would cross the link
        dimension_names=["image", "y", "x"],
    )
    array[:] = images
    return [images]


JOBS: dict[str, tuple[Callable[..., list[Any]], list[str]]] = {  # what to do, and what it imports
    "texts": (read_texts, ["gcsfs"]),
    "xarray": (read_by_xarray, ["gcsfs", "xarray", "zarr"]),
    "zarr": (read_by_zarr, ["gcsfs", "zarr"]),
    "store": (store_digits, ["gcsfs", "zarr", "sklearn.datasets"]),
}


def digits(side: int, count: int) -> Any:
    """Return scikit-learn's handwritten digits, 8 x 8 pixels each, enlarged to `side` x `side` bytes."""
    import numpy as np
    from sklearn.datasets import load_digits

    small = (load_digits().images[:count] * 15).astype(np.uint8)
    return small.repeat(side // 8, axis=1).repeat(side // 8, axis=2)


def digest(pieces: list[Any]) -> str:
    """Return the SHA-256 of all pieces, in order."""
    total = hashlib.sha256()
    for piece in pieces:
        total.update(memoryview(piece).cast("B"))
    return total.hexdigest()


# Processes.


class Session:
    """A Python process that reads when told, through a cache directory or (None) by gcsfs alone."""

    def __init__(self, server: GCSServer, cache_dir: Path | None) -> None:
        self._server, self._prefix = server, "cachedfs::gs://" if cache_dir else "gs://"
        own = ("FSSPEC_", "GCSFS_", "STORAGE_EMULATOR_HOST")  # the user's own settings stay out
        environ = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        environ |= {"FSSPEC_GS_TOKEN": "anon", "FSSPEC_GS_ENDPOINT_URL": server.endpoint_url}
        environ |= {"FSSPEC_CONFIG_DIR": os.devnull}
        if cache_dir:
            environ |= {"FSSPEC_CACHEDFS_CACHE_DIR": str(cache_dir), "FSSPEC_CACHEDFS_KEEP_FREE": "0"}
        else:  # gcsfs asks for a bucket's layout by gRPC over TLS, which the simulated cloud does not speak
            environ |= {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        package = str(Path(__file__).parents[1])
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "cachedfs.demo", "--session"]
        pipe, self._errors = subprocess.PIPE, tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True, env=environ
        )

    def read(self, job: str, path: str, **options: int) -> Reading:
        """Return what one pass took, Python's start and imports not counted."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._server.reset()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([job, self._prefix + path, options]) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._errors.seek(0)
            raise RuntimeError(f"{job} of {self._prefix}{path} failed:\n{self._errors.read()}")
        return Reading(requests=self._server.count(), sent=self._server.bytes_sent(), **json.loads(answer))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind:
            self._process.kill()
        self._process.communicate()  # it ends when its orders end
        self._errors.close()


def serve_session(orders: TextIO, answers: TextIO) -> None:
    """Do what a `Session` tells this process, until there are no more orders."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    for line in orders:
        job, url, options = json.loads(line)
        act, modules = JOBS[job]
        for module in modules:
            importlib.import_module(module)
        fs, _ = fsspec.url_to_fs(url)
        hits_before = fs.stats().hits if hasattr(fs, "stats") else 0
        start = time.perf_counter()
        pieces = act(url, **options)
        seconds = time.perf_counter() - start
        hits = fs.stats().hits - hits_before if hasattr(fs, "stats") else 0
        answers.write(json.dumps({"seconds": seconds, "hits": hits, "digest": digest(pieces)}) + "\n")
        answers.flush()


# The demo itself.


def run(
    folder: Path,
    *,
    profile: str = "table",
    n_texts: int | None = None,
    n_images: int = 1797,
    side: int = 336,
    say: Callable[[str], object] = lambda text: None,
) -> Iterator[Row]:
    """Yield the rows of the table as they are measured; `folder` is filled, and the caller's to remove."""
    from cachedfs.sim import GCSServer

    cloud = folder / "cloud"
    say("putting the sources of Python's standard library into the cloud")
    n, size, expected = put_texts(cloud / TEXTS, n_texts)
    with GCSServer(profile, folder=cloud, process=True) as server:
        what = f"{n:,} Python sources\n{size / 1e6:.1f} MB, shuffled,\n{BATCH} a batch"
        yield from compare(server, folder / "texts", "texts", what, expected, say)
        say("storing the digits as a sharded Zarr array, through cachedfs")
        with Session(server, folder / "writer") as session:
            session.read("store", IMAGES, side=side, count=n_images)
        expected = digest([digits(side, n_images)])
        for job, how in (("xarray", "all at once"), ("zarr", f"shuffled,\n{BATCH} a batch")):
            what = f"{n_images:,} digit images\n{n_images * side**2 / 1e6:.0f} MB, {job}, {how}"
            yield from compare(server, folder / job, job, what, expected, say)


def compare(
    server: GCSServer, cache_dir: Path, job: str, what: str, expected: str, say: Callable[[str], object]
) -> Iterator[Row]:
    """Yield one job's rows: with a cache that is empty at first, and by gcsfs alone."""
    path, readings = TEXTS if job == "texts" else IMAGES, []
    for directory in (cache_dir, None):
        say(f"reading {what.splitlines()[0]} ({job}) {'through cachedfs' if directory else 'by gcsfs alone'}")
        with Session(server, directory) as session:
            passes = [session.read(job, path, seed=seed) for seed in (1, 2)]
        with Session(server, directory) as session:
            readings.append([*passes, session.read(job, path, seed=3)])
    for when, cached, plain in zip(("first", "second", "new process"), *readings, strict=True):
        yield Row(what, when, cached, plain, expected)


def put_texts(folder: Path, count: int | None) -> tuple[int, int, str]:
    """Copy the standard library's sources to one folder; return how many, their bytes and the digest of all."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in library.rglob("*.py") if "site-packages" not in file.parts)[:count]
    folder.mkdir(parents=True)
    pieces = []
    for number, file in enumerate(files):
        pieces += [f"{number:05}-{file.name}".encode(), file.read_bytes()]
        (folder / pieces[-2].decode()).write_bytes(pieces[-1])
    return len(files), sum(map(len, pieces[1::2])), digest(pieces)


# What is printed.


def table_of(rows: list[Row]) -> Table:
    """Return the one table."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("what is read", no_wrap=True)
    table.add_column("pass", no_wrap=True)
    for name in (
        "cachedfs\nseconds",
        "\nrequests",
        "\nMB",
        "\nhits",
        "gcsfs\nseconds",
        "\nrequests",
        "times\nfaster",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        ours, plain = row.cached, row.plain
        cells = [f"{ours.seconds:.2f}", f"{ours.requests:,}", f"{ours.sent / 1e6:.1f}", f"{ours.hits:,}"]
        cells += [f"{plain.seconds:.2f}", f"{plain.requests:,}", f"{row.times_faster:.1f}"]
        last = number % 3 == 2
        what = (row.what.splitlines() + ["", ""])[number % 3]
        table.add_row(what, row.when, *cells, style=None if row.is_right else "red", end_section=last)
    return table


def describe(profile: Profile, seed: int) -> str:
    """Return the simulated cloud in words."""
    return (
        f'The cloud is SIMULATED: Google Cloud Storage on this machine, profile "{profile.name}": '
        f"{profile.media.median_s * 1e3:.0f} ms to the first byte (lognormal, sigma {profile.media.sigma:g}), "
        f"{profile.stream_rate / 1e6:.0f} MB/s a stream, {profile.total_rate / 1e6:.0f} MB/s in all; seed {seed}."
    )


def show(console: Console) -> int:
    """Run and print everything; return the exit status."""
    from cachedfs.sim import PROFILES

    console.print(describe(PROFILES["table"], seed=0), highlight=False)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="cachedfs-demo-") as folder, console.status("starting") as status:
        say = status.update if console.is_terminal else lambda text: console.print(f"... {text}")
        rows = list(run(Path(folder), say=say))
    console.print(table_of(rows))
    console.print(LEGEND, highlight=False)
    wrong = [f"{row.what.splitlines()[0]}, {row.when}" for row in rows if not row.is_right]
    if wrong:
        console.print(f"WRONG BYTES: {'; '.join(wrong)}", style="bold red")
        return 1
    took = time.perf_counter() - start
    console.print(
        f"All {len(rows)} passes returned the right bytes (SHA-256 against the local data). {took:.0f} s in all."
    )
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 1 when bytes were wrong."""
    if (sys.argv[1:] if arguments is None else arguments) == ["--session"]:
        serve_session(sys.stdin, sys.stdout)
        return 0
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        sys.exit(f"The demo needs {', '.join(missing)}: pip install {' '.join(missing)}")
    from rich.console import Console

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # so that nothing is left behind
    try:
        return show(Console())
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
