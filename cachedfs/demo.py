"""The main job on real data, against a simulated cloud on this machine: `python -m cachedfs.demo`.

The parent starts the cloud, counts its requests and prints. Whatever is read is read by a `Session`: a Python process
of its own, which is configured by its environment and knows nothing but URLs.
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
TEXTS, IMAGES = "demo/stdlib", "demo/digits.zarr"
BATCH = 64  # files that one call asks for
PART = 20  # gcsfs reads one image in so many where all would take minutes
PASSES = ("first", "second", "new process")
LEGEND = f"""
req. (requests), MB: by the cloud's own log; hits: blocks served from the cache.
gcsfs: the same reading without cachedfs, measured once, as it keeps nothing;
~: on one image in {PART}, and scaled. Python's start and imports are not counted.
cachedfs has {BATCH} requests in flight here, a batch; its default is 16.
The images are scikit-learn's digits of 8 x 8 pixels, enlarged; the Zarr v3
array is sharded and not compressed."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One pass over a data set, by one client."""

    seconds: float
    requests: int  # of any kind, as the server logged them
    sent: int  # bytes of content, as the server logged them
    hits: int  # blocks served from the cache
    digest: str  # SHA-256 of what was read


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a pass through cachedfs, beside one of gcsfs alone."""

    what: str
    when: str
    cached: Reading
    plain: Reading
    part: int  # gcsfs read one in so many
    expected: str  # the digest of the local data

    @property
    def is_right(self) -> bool:
        return self.cached.digest == self.expected

    @property
    def times_faster(self) -> float:
        return self.plain.seconds * self.part / self.cached.seconds


# What a user would write: each takes a URL and returns what it read, in an order that does not depend on the seed.


def read_texts(url: str, seed: int) -> list[bytes]:
    """Return names and contents of the files below `url`; read in random order, a batch at a time."""
    fs, folder = fsspec.url_to_fs(url)
    names = fs.find(folder)
    random.Random(seed).shuffle(names)
    found: dict[str, bytes] = {}
    for start in range(0, len(names), BATCH):
        found |= fs.cat(names[start : start + BATCH])
    return [piece for name in sorted(found) for piece in (name.rpartition("/")[2].encode(), found[name])]


def read_by_xarray(url: str, seed: int) -> list[Any]:
    """Return the whole array, read at once: there is no order to draw."""
    import xarray

    return [xarray.open_zarr(url, chunks=None, consolidated=False)["images"].to_numpy()]


def read_by_zarr(url: str, seed: int, part: int = 1) -> list[Any]:
    """Return the images (one in `part`), read as a training does: one at a time, in random order."""
    import zarr

    images: Any = zarr.open_group(url, mode="r", zarr_format=3)["images"]
    order = random.Random(seed).sample(range(images.shape[0]), images.shape[0] // part)
    found = {index: images[index] for index in order}
    return [found[index] for index in sorted(found)]


def store_digits(url: str, side: int, count: int) -> list[Any]:
    """Store the digits as a sharded Zarr v3 array: a chunk is one image, a shard some 14 MB."""
    import zarr

    images = digits(side, count)
    array = zarr.open_group(url, mode="w").create_array(
        "images",
        shape=images.shape,
        dtype=images.dtype,
        dimension_names=["image", "y", "x"],
        chunks=(1, side, side),
        shards=(128, side, side),
        compressors=None,  # enlarged pixels would pack to nothing, and nothing would cross the link
    )
    array[:] = images
    return []


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
        total.update(piece)
    return total.hexdigest()


JOBS: dict[str, tuple[Callable[..., list[Any]], list[str]]] = {  # what to call, and what it imports
    "texts": (read_texts, ["gcsfs"]),
    "xarray": (read_by_xarray, ["gcsfs", "zarr", "xarray"]),
    "zarr": (read_by_zarr, ["gcsfs", "zarr"]),
    "store": (store_digits, ["gcsfs", "zarr", "sklearn.datasets"]),
}


class Session:
    """A Python process that reads when told: through a cache directory, or (None) by gcsfs alone."""

    def __init__(self, server: GCSServer, cache_dir: Path | None) -> None:
        self._server, self._prefix = server, "cachedfs::gs://" if cache_dir else "gs://"
        package = str(Path(__file__).parents[1])
        settings = {"PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))}
        settings |= {"FSSPEC_GS_TOKEN": "anon", "FSSPEC_GS_ENDPOINT_URL": server.endpoint_url}
        if cache_dir:
            settings |= {"FSSPEC_CACHEDFS_CACHE_DIR": str(cache_dir), "FSSPEC_CACHEDFS_KEEP_FREE": "0"}
            settings |= {"FSSPEC_CACHEDFS_CONCURRENCY": str(BATCH)}  # a batch at once, as gcsfs sends it
        else:  # gcsfs asks for a bucket's layout by gRPC over TLS, which the simulated cloud does not speak
            settings |= {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        settings |= {"FSSPEC_CONFIG_DIR": os.devnull}  # the user's own settings stay out
        own = ("FSSPEC_", "GCSFS_", "STORAGE_EMULATOR_HOST")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(own)} | settings
        command, pipe = [sys.executable, "-m", "cachedfs.demo", "--session"], subprocess.PIPE
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True, env=environ
        )

    def read(self, job: str, path: str, **options: int) -> Reading:
        """Return what one pass took; RuntimeError with the process's own words when it failed."""
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

    n, size, expected = put_texts(folder / "cloud" / TEXTS, n_texts)
    with GCSServer(profile, folder=folder / "cloud", process=True) as server:
        what = f"{n:,} Python sources\n{size / 1e6:.0f} MB by fs.cat,\nshuffled, {BATCH} a call"
        say(f"reading {n:,} sources of Python's standard library")
        yield from compare(server, folder / "texts", "texts", TEXTS, what, expected)
        say(f"storing {n_images:,} images as a sharded Zarr array, through cachedfs")
        with Session(server, folder / "writer") as session:
            session.read("store", IMAGES, side=side, count=n_images)
        size, expected = n_images * side**2, digest([digits(side, n_images)])
        what = f"{n_images:,} digit images\n{size / 1e6:.0f} MB by xarray,\nall at once"
        say("reading them by xarray")
        yield from compare(server, folder / "xarray", "xarray", IMAGES, what, expected)
        what = f"{n_images:,} digit images\n{size / 1e6:.0f} MB by zarr,\nshuffled, 1 a call"
        say("reading them by zarr")
        yield from compare(server, folder / "zarr", "zarr", IMAGES, what, expected, part=PART)


def put_texts(folder: Path, count: int | None) -> tuple[int, int, str]:
    """Copy the standard library's sources to one folder; return how many, their bytes and the digest of all."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in library.rglob("*.py") if "site-packages" not in file.parts)[:count]
    folder.mkdir(parents=True)
    pieces: list[bytes] = []
    for number, file in enumerate(files):
        name, data = f"{number:05}-{file.name}", file.read_bytes()
        (folder / name).write_bytes(data)
        pieces += [name.encode(), data]
    return len(files), sum(map(len, pieces[1::2])), digest(pieces)


def compare(
    server: GCSServer, cache_dir: Path, job: str, path: str, what: str, expected: str, part: int = 1
) -> Iterator[Row]:
    """Yield the three passes of one job with a cache that is empty at first, beside one of gcsfs alone."""
    with Session(server, cache_dir) as session:
        passes = [session.read(job, path, seed=seed) for seed in (1, 2)]
    with Session(server, cache_dir) as session:
        passes.append(session.read(job, path, seed=3))
    with Session(server, None) as session:
        sampled = {"part": part} if part > 1 else {}
        plain = session.read(job, path, seed=1, **sampled)
    for when, cached in zip(PASSES, passes, strict=True):
        yield Row(what, when, cached, plain, part, expected)


def table_of(rows: list[Row]) -> Table:
    """Return the one table, 80 columns wide at most."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    table.add_column("\nwhat is read", no_wrap=True)
    table.add_column("\npass", no_wrap=True)
    for head in (
        "cachedfs\nseconds",
        "\nreq.",
        "\nMB",
        "\nhits",
        "gcsfs\nseconds",
        "\nreq.",
        "times\nfaster",
    ):
        table.add_column(head, justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        ours, plain, about = row.cached, row.plain, "~" if row.part > 1 else ""
        cells = [f"{ours.seconds:.2f}", f"{ours.requests:,}", f"{ours.sent / 1e6:.0f}", f"{ours.hits:,}"]
        cells += [f"{about}{plain.seconds * row.part:.1f}", f"{about}{plain.requests * row.part:,}"]
        cells += [f"{row.times_faster:.{0 if row.times_faster >= 10 else 1}f}"]
        what = row.what.splitlines()[PASSES.index(row.when)]
        style = None if row.is_right else "bold red"
        table.add_row(what, row.when, *cells, style=style, end_section=number % 3 == 2)
    return table


def describe(profile: Profile, seed: int) -> str:
    """Return the simulated cloud in words."""
    return (
        f'The cloud is SIMULATED: Google Cloud Storage on this machine, profile "{profile.name}":\n'
        f"{profile.media.median_s * 1e3:.0f} ms to the first byte (lognormal, sigma {profile.media.sigma:g}), "
        f"{profile.stream_rate / 1e6:.0f} MB/s a stream,\n{profile.total_rate / 1e6:.0f} MB/s in all, seed {seed}.\n"
    )


def show(console: Console) -> int:
    """Run and print everything; return the exit status."""
    from cachedfs.sim import PROFILES

    start = time.perf_counter()
    console.print(describe(PROFILES["table"], seed=0), highlight=False)
    with tempfile.TemporaryDirectory(prefix="cachedfs-demo-") as folder, console.status("starting") as status:
        say = status.update if console.is_terminal else lambda text: console.print(f"... {text}")
        rows = list(run(Path(folder), say=say))
    console.print(table_of(rows))
    console.print(LEGEND, highlight=False)
    wrong = [f"{' '.join(row.what.splitlines())} ({row.when})" for row in rows if not row.is_right]
    if wrong:
        console.print(f"WRONG BYTES: {'; '.join(wrong)}", style="bold red")
        return 1
    took = time.perf_counter() - start
    console.print(
        f"All {len(rows)} passes gave the right bytes (SHA-256). {took:.0f} s in all.", highlight=False
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
