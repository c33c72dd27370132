"""Who reads in the demo: Python processes of their own, which are configured by their environment and know only URLs."""

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

__all__ = ["BATCH", "MAX_AGE_S", "SHARD", "Cloud", "Reading", "Session", "digest", "digits", "drawn", "main"]

BATCH = 64  # files that one call asks for
MAX_AGE_S = 3600  # the first pass over a data set may take longer than the default of 60 s
SHARD = 128  # images: some 14 MB
TRIES = 3


@dataclass(frozen=True, slots=True)
class Reading:
    """One pass over a data set, by one client."""

    seconds: float
    requests: int  # of any kind, as the server logged them
    sent: int  # bytes of content, as the server logged them
    hits: int  # blocks served from the cache
    digest: str  # SHA-256 of what was read


@dataclass(frozen=True, slots=True)
class Cloud:
    """A simulated cloud, and how its URLs begin."""

    server: GCSServer | DriveServer
    protocol: str
    top: str = ""

    def url(self, path: str) -> str:
        """Return the URL without cachedfs of a path."""
        return f"{self.protocol}://{self.top}{path}"

    @property
    def settings(self) -> dict[str, str]:
        """The environment variables that lead fsspec here."""
        prefix = f"FSSPEC_{self.protocol.upper()}_"
        return {f"{prefix}TOKEN": "anon", f"{prefix}ENDPOINT_URL": self.server.endpoint_url}


# What a user would write. What opens takes a URL; what reads takes what was opened, and returns the items that it
# drew in their own order, so that it does not depend on the seed.


def drawn(count: int, seed: int, part: int = 1) -> list[int]:
    """Return the numbers below `count` (one in `part`, but at least one) in random order."""
    return random.Random(seed).sample(range(count), max(1, count // part))


def open_texts(url: str) -> tuple[Any, list[str]]:
    """Return the filesystem, and the names of the files below `url`."""
    fs, folder = fsspec.url_to_fs(url)
    return fs, sorted(fs.find(folder))


def read_texts(opened: tuple[Any, list[str]], seed: int) -> list[bytes]:
    """Return names and contents of all files; read in random order, a batch at a time."""
    fs, names = opened
    order = [names[index] for index in drawn(len(names), seed)]
    found: dict[str, bytes] = {}
    for start in range(0, len(order), BATCH):
        found |= fs.cat(order[start : start + BATCH])
    return [named(name, found[name]) for name in names]


def open_by_pydrive2(url: str) -> tuple[Any, list[str]]:
    """Return PyDrive2's filesystem, and the names of the files below `url`."""
    from pydrive2.auth import GoogleAuth
    from pydrive2.fs import GDriveFileSystem

    auth = GoogleAuth(settings=dict(GoogleAuth.DEFAULT_SETTINGS))
    auth.credentials = Redirected(os.environ["FSSPEC_DRIVE_ENDPOINT_URL"])
    fs = GDriveFileSystem("root", google_auth=auth)
    return fs, sorted(stubborn(fs.find, url.replace("drive://My Drive", "root", 1)))


def read_by_pydrive2(opened: tuple[Any, list[str]], seed: int, part: int = 1) -> list[bytes]:
    """Return names and contents of the files (one in `part`); read one after the other, as it has no other way."""
    fs, names = opened
    found = {index: stubborn(fs.cat_file, names[index]) for index in drawn(len(names), seed, part)}
    return [named(names[index], found[index]) for index in sorted(found)]


def named(path: str, content: bytes) -> bytes:
    """Return a file's name and content as one item."""
    return path.rpartition("/")[2].encode() + content


def stubborn(call: Callable[[str], Any], path: str) -> Any:
    """Return what `call` returns, at the third try at last: PyDrive2 gives up at a 429, its user does not."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(OSError):
            return call(path)
    return call(path)


class Redirected:
    """Credentials that PyDrive2 takes, which send its requests to another server than Google's."""

    access_token_expired, invalid, refresh_token = False, False, None

    def __init__(self, endpoint_url: str) -> None:
        self._endpoint_url = endpoint_url

    def authorize(self, http: Any) -> Any:
        """Return the http object, sending what is for Google to the other server."""
        ask = http.request

        def request(uri: str, *args: Any, **options: Any) -> Any:
            return ask(
                re.sub(r"^https://[a-z.]+\.googleapis\.com", self._endpoint_url, uri), *args, **options
            )

        http.request = request
        return http


def open_by_xarray(url: str) -> Any:
    import xarray

    return xarray.open_zarr(url, chunks=None, consolidated=False)["images"]


def read_by_xarray(images: Any, seed: int) -> list[Any]:
    """Return all images, read at once: there is no order to draw."""
    return list(images.to_numpy())


def open_by_zarr(url: str) -> Any:
    import zarr

    return zarr.open_group(url, mode="r", zarr_format=3)["images"]


def read_by_zarr(images: Any, seed: int, part: int = 1) -> list[Any]:
    """Return the images (one in `part`), read as a training does: one at a time, in random order."""
    found = {index: images[index] for index in drawn(images.shape[0], seed, part)}
    return [found[index] for index in sorted(found)]


def open_to_store(url: str) -> Any:
    import zarr

    return zarr.open_group(url, mode="w")


def store_digits(group: Any, side: int, count: int) -> list[Any]:
    """Store the digits as a sharded Zarr v3 array: a chunk is one image, a shard some 14 MB."""
    images = digits(side, count)
    array = group.create_array(
        "images",
        shape=images.shape,
        dtype=images.dtype,
        dimension_names=["image", "y", "x"],
        chunks=(1, side, side),
        shards=(SHARD, side, side),
        chunk_key_encoding={"name": "default", "separator": "."},  # no folders: Drive makes 3 items a second
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


def digest(items: Iterable[Any]) -> str:
    """Return the SHA-256 of all items, in order."""
    total = hashlib.sha256()
    for item in items:
        total.update(item)
    return total.hexdigest()


JOBS: dict[
    str, tuple[Callable[[str], Any], Callable[..., list[Any]], list[str]]
] = {  # and what to import before
    "texts": (open_texts, read_texts, ["cachedfs.filesystem"]),
    "pydrive2": (open_by_pydrive2, read_by_pydrive2, ["pydrive2.fs"]),
    "xarray": (open_by_xarray, read_by_xarray, ["zarr", "xarray"]),
    "zarr": (open_by_zarr, read_by_zarr, ["zarr"]),
    "store": (open_to_store, store_digits, ["zarr", "sklearn.datasets"]),
}


class Session:
    """A Python process that does one job when told: through a cache directory, or (None) without cachedfs."""

    def __init__(self, cloud: Cloud, cache_dir: Path | None, job: str) -> None:
        self._server, self._job, self._doing = cloud.server, job, "importing"
        package = str(Path(__file__).parents[1])
        settings = {"PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))}
        settings |= cloud.settings
        if cache_dir:
            settings |= {"FSSPEC_CACHEDFS_CACHE_DIR": str(cache_dir), "FSSPEC_CACHEDFS_KEEP_FREE": "0"}
            settings |= {"FSSPEC_CACHEDFS_CONCURRENCY": str(BATCH), "FSSPEC_CACHEDFS_MAX_AGE": str(MAX_AGE_S)}
        else:  # gcsfs asks for a bucket's layout by gRPC over TLS, which the simulated cloud does not speak
            settings |= {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        settings |= {"FSSPEC_CONFIG_DIR": os.devnull}  # the user's own settings stay out
        own = ("FSSPEC_", "GCSFS_", "STORAGE_EMULATOR_HOST")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(own)} | settings
        command, pipe = [sys.executable, "-m", "cachedfs.demo.session", job], subprocess.PIPE
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True, env=environ
        )

    def hear(self) -> dict[str, Any]:
        """Return the next answer; the first says that all is imported.

        RuntimeError with the process's own words when it failed.
        """
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            self._errors.seek(0)
            raise RuntimeError(f"{self._job} of {self._doing} failed:\n{self._errors.read()}")
        return dict(json.loads(answer))

    def tell(self, **order: Any) -> None:
        """Let it `open` a URL, or `read` with some options."""
        assert self._process.stdin is not None
        self._doing = order.get("open", self._doing)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def read(self, url: str, *, scale: float = 1.0, **options: int) -> Reading:
        """Return what one pass took, all but its opening times `scale`."""
        self._server.reset()
        self.tell(open=url)
        opened = self.hear()
        opening, opening_sent = self._server.count(), self._server.bytes_sent()
        self.tell(read=options)
        answer = self.hear()
        reading, sent = self._server.count() - opening, self._server.bytes_sent() - opening_sent
        return Reading(
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
        self._process.communicate()  # it ends when its orders end
        self._errors.close()


def main(job: str, orders: TextIO, answers: TextIO) -> None:
    """Do what a `Session` tells this process, until there are no more orders."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
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
    """Return what `act` returns, and the seconds that it took."""
    start = time.perf_counter()
    result = act(*args, **options)
    return result, time.perf_counter() - start


if __name__ == "__main__":
    main(sys.argv[1], sys.stdin, sys.stdout)
