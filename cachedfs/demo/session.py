"""The readers of the demo: child processes that open URLs, configured by environment variables."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

import fsspec

if TYPE_CHECKING:
    from cachedfs.sim import DriveServer, GCSServer

__all__ = [
    "BATCH",
    "MAX_AGE_S",
    "SHARD",
    "Cloud",
    "Session",
    "TimedPass",
    "digest",
    "digits",
    "drawn",
    "main",
]

BATCH = 128  # files in one call
MAX_AGE_S = 3600  # the first pass may take longer than the default of 60 s
SHARD = 128  # images in a shard, about 14 MB
TRIES = 3  # attempts of each PyDrive2 call


@dataclass(frozen=True, slots=True)
class TimedPass:
    """The measurements of one pass of one client over a dataset."""

    seconds: float
    requests: int  # all requests in the server's log
    sent: int  # bytes of content in the server's log
    hits: int  # blocks served from the cache
    digest: str  # SHA-256 of the items


@dataclass(frozen=True, slots=True)
class Cloud:
    """A simulated cloud, with the protocol and prefix of its URLs."""

    server: GCSServer | DriveServer
    protocol: str
    top: str = ""

    def url(self, path: str) -> str:
        """Return the URL of a path, without `cachedfs::`."""
        return f"{self.protocol}://{self.top}{path}"

    @property
    def settings(self) -> dict[str, str]:
        """Environment variables that direct fsspec to the simulated cloud."""
        prefix = f"FSSPEC_{self.protocol.upper()}_"
        return {f"{prefix}TOKEN": "anon", f"{prefix}ENDPOINT_URL": self.server.endpoint_url}


# Jobs, as a user would write them. `open_*` takes a URL; `read_*` takes its result and returns the items it drew, in
# the order of the dataset, so that their digest does not depend on the order of reading.


def drawn(count: int, seed: int, part: int = 1) -> list[int]:
    """Return 1/`part` of the numbers below `count`, but at least one, in random order."""
    return random.Random(seed).sample(range(count), max(1, count // part))


def open_texts(url: str) -> tuple[Any, list[str]]:
    """Return the filesystem and the paths of all files below `url`."""
    fs, folder = fsspec.url_to_fs(url)
    return fs, sorted(fs.find(folder))


def read_texts(opened: tuple[Any, list[str]], seed: int) -> list[bytes]:
    """Read all files in random order, in batches; return their names and contents."""
    fs, names = opened
    order = [names[index] for index in drawn(len(names), seed)]
    found: dict[str, bytes] = {}
    for start in range(0, len(order), BATCH):
        found |= fs.cat(order[start : start + BATCH])
    return [named(name, found[name]) for name in names]


def open_by_pydrive2(url: str) -> tuple[Any, list[str]]:
    """Return PyDrive2's filesystem and the paths of all files below `url`."""
    from pydrive2.auth import GoogleAuth
    from pydrive2.fs import GDriveFileSystem

    auth = GoogleAuth(settings=dict(GoogleAuth.DEFAULT_SETTINGS))
    auth.credentials = Redirected(os.environ["FSSPEC_DRIVE_ENDPOINT_URL"])
    fs = GDriveFileSystem("root", google_auth=auth)
    return fs, sorted(stubborn(fs.find, url.replace("drive://My Drive", "root", 1)))


def read_by_pydrive2(opened: tuple[Any, list[str]], seed: int, part: int = 1) -> list[bytes]:
    """Read 1/`part` of the files, one by one (PyDrive2 has no batch call); return names and contents."""
    fs, names = opened
    found = {index: stubborn(fs.cat_file, names[index]) for index in drawn(len(names), seed, part)}
    return [named(names[index], found[index]) for index in sorted(found)]


def named(path: str, content: bytes) -> bytes:
    """Return the name and content of a file as one item."""
    return path.rpartition("/")[2].encode() + content


def stubborn(call: Callable[[str], Any], path: str) -> Any:
    """Return `call(path)`, with up to `TRIES` attempts.

    PyDrive2 raises on HTTP 429, and a user would call it again.
    """
    for _ in range(TRIES - 1):
        with contextlib.suppress(OSError):
            return call(path)
    return call(path)


class Redirected:
    """Credentials for PyDrive2 that redirect its requests to the simulated server."""

    access_token_expired, invalid, refresh_token = False, False, None

    def __init__(self, endpoint_url: str) -> None:
        self._endpoint_url = endpoint_url

    def authorize(self, http: Any) -> Any:
        """Patch an httplib2 object to send Google's requests to the simulated server; return it."""
        ask = http.request

        def request(uri: str, *args: Any, **options: Any) -> Any:
            return ask(
                re.sub(r"^https://[a-z.]+\.googleapis\.com", self._endpoint_url, uri), *args, **options
            )

        http.request = request
        return http


def open_by_xarray(url: str) -> Any:
    """Return the images as a lazy xarray array."""
    import xarray

    return xarray.open_zarr(url, chunks=None, consolidated=False)["images"]


def read_by_xarray(images: Any, seed: int) -> list[Any]:
    """Read all images in one call, without a random order."""
    return list(images.to_numpy())


def open_by_zarr(url: str) -> Any:
    """Return the images as a Zarr array."""
    import zarr

    return zarr.open_group(url, mode="r", zarr_format=3)["images"]


def read_by_zarr(images: Any, seed: int, part: int = 1) -> list[Any]:
    """Read 1/`part` of the images, one at a time in random order, as training does."""
    found = {index: images[index] for index in drawn(images.shape[0], seed, part)}
    return [found[index] for index in sorted(found)]


def open_to_store(url: str) -> Any:
    """Create an empty Zarr group and return it."""
    import zarr

    return zarr.open_group(url, mode="w")


def store_digits(group: Any, side: int, count: int) -> list[Any]:
    """Store the digits as a sharded Zarr v3 array: one image a chunk, about 14 MB a shard."""
    images = digits(side, count)
    array = group.create_array(
        "images",
        shape=images.shape,
        dtype=images.dtype,
        dimension_names=["image", "y", "x"],
        chunks=(1, side, side),
        shards=(SHARD, side, side),
        chunk_key_encoding={"name": "default", "separator": "."},  # no folders: Drive creates 3 items/s
        compressors=None,  # enlarged pixels would compress to nearly nothing
    )
    array[:] = images
    return []


def digits(side: int, count: int) -> Any:
    """Return scikit-learn's handwritten digits, 8 x 8 pixels each, enlarged to `side` x `side` bytes."""
    import numpy as np
    from sklearn.datasets import load_digits

    small = (load_digits().images[:count] * 15).astype(np.uint8)
    return small.repeat(side // 8, axis=1).repeat(side // 8, axis=2)


def digest(items: Iterable[Any]) -> str:
    """Return the SHA-256 of all items, in order."""
    total = hashlib.sha256()
    for item in items:
        total.update(item)
    return total.hexdigest()


JOBS: dict[
    str, tuple[Callable[[str], Any], Callable[..., list[Any]], list[str]]
] = {  # open, read, and modules to import first
    "texts": (open_texts, read_texts, ["cachedfs.filesystem"]),
    "pydrive2": (open_by_pydrive2, read_by_pydrive2, ["pydrive2.fs"]),
    "xarray": (open_by_xarray, read_by_xarray, ["zarr", "xarray"]),
    "zarr": (open_by_zarr, read_by_zarr, ["zarr"]),
    "store": (open_to_store, store_digits, ["zarr", "sklearn.datasets"]),
}


class Session:
    """A child process that runs one of `JOBS` on request.

    With `cache_dir` it caches there; with None it reads without cachedfs.
    """

    def __init__(self, cloud: Cloud, cache_dir: Path | None, job: str) -> None:
        self._server, self._job, self._doing = cloud.server, job, "importing"
        package = str(Path(__file__).parents[2])
        settings = {"PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))}
        settings |= cloud.settings
        if cache_dir:
            settings |= {"FSSPEC_CACHEDFS_CACHE_DIR": str(cache_dir), "FSSPEC_CACHEDFS_KEEP_FREE": "0"}
            settings |= {"FSSPEC_CACHEDFS_CONCURRENCY": str(BATCH), "FSSPEC_CACHEDFS_MAX_AGE": str(MAX_AGE_S)}
        else:  # gcsfs would query the bucket layout by gRPC over TLS, which the simulator lacks
            settings |= {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        settings |= {"FSSPEC_CONFIG_DIR": os.devnull}  # ignore the user's fsspec settings
        own = ("FSSPEC_", "GCSFS_", "STORAGE_EMULATOR_HOST")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(own)} | settings
        command, pipe = [sys.executable, "-m", "cachedfs.demo.session", job], subprocess.PIPE
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True, env=environ
        )

    def hear(self) -> dict[str, Any]:
        """Wait for the next answer of the process and return it. The first one follows its imports.

        Raises RuntimeError with the error output of the process if it failed.
        """
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            self._errors.seek(0)
            raise RuntimeError(f"{self._job} of {self._doing} failed:\n{self._errors.read()}")
        return dict(json.loads(answer))

    def tell(self, **order: Any) -> None:
        """Send a request: `open=url`, or `read=options`."""
        assert self._process.stdin is not None
        self._doing = order.get("open", self._doing)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def read(self, url: str, *, scale: float = 1.0, **options: int) -> TimedPass:
        """Open `url`, make one pass with `options`, and return its measurements.

        `scale` multiplies all numbers but those of opening.
        """
        self._server.reset()
        self.tell(open=url)
        opened = self.hear()
        opening, opening_sent = self._server.count(), self._server.bytes_sent()
        self.tell(read=options)
        answer = self.hear()
        reading, sent = self._server.count() - opening, self._server.bytes_sent() - opening_sent
        return TimedPass(
            seconds=opened["seconds"] + answer["seconds"] * scale,
            requests=round(opening + reading * scale),
            sent=round(opening_sent + sent * scale),
            hits=answer["hits"],
            digest=answer["digest"],
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind:
            self._process.kill()
        self._process.communicate()  # closes stdin, which ends the process
        self._errors.close()


def main(job: str, orders: TextIO, answers: TextIO) -> None:
    """Run in the child process: answer the requests of a `Session` until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    to_open, to_read, modules = JOBS[job]
    for module in modules:
        importlib.import_module(module)
    answer: dict[str, Any] = {}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
    opened, stats, hits_before = None, None, 0
    for line in orders:
        order = json.loads(line)
        if "open" in order:
            stats = getattr(fsspec.url_to_fs(order["open"])[0], "stats", None)
            hits_before = stats().hits if stats else 0
            opened, seconds = timed(to_open, order["open"])
            answer = {"seconds": seconds}
        else:
            items, seconds = timed(to_read, opened, **order["read"])
            hits = stats().hits - hits_before if stats else 0
            answer = {"seconds": seconds, "hits": hits, "digest": digest(items)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def timed(act: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, float]:
    """Return the result of `act`, and its duration in seconds."""
    start = time.perf_counter()
    result = act(*args, **options)
    return result, time.perf_counter() - start


if __name__ == "__main__":
    main(sys.argv[1], sys.stdin, sys.stdout)
