"""The jobs of the demo's readers, as a user would write them, and what the process of a reader does with one.

`open_*` takes a URL; `read_*` takes its result, and returns the drawn items in the order of the dataset, so that
their digest does not depend on the order of reading.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

BATCH = 128  # files in one call
TRIES = 3  # attempts of each PyDrive2 call


def drawn(count: int, seed: int, part: int) -> list[int]:
    """Return 1/`part` of the numbers below `count`, but at least one, in random order."""
    return random.Random(seed).sample(range(count), max(1, count // part))


def digest(items: Iterable[Any]) -> str:
    """Return the SHA-256 of all items, in order."""
    total = hashlib.sha256()
    for item in items:
        total.update(item)
    return total.hexdigest()


def open_texts(url: str) -> tuple[Any, list[str]]:
    """Return the filesystem and the paths of all files below `url`."""
    import fsspec

    fs, folder = fsspec.url_to_fs(url)
    return fs, sorted(fs.find(folder))


def read_texts(opened: tuple[Any, list[str]], seed: int, part: int) -> list[bytes]:
    """Read files in batches; return their names and contents."""
    fs, names = opened
    order = [names[index] for index in drawn(len(names), seed, part)]
    found: dict[str, bytes] = {}
    for start in range(0, len(order), BATCH):
        found |= fs.cat(order[start : start + BATCH])
    return [named(name, found[name]) for name in sorted(found)]


def open_by_pydrive2(url: str) -> tuple[Any, list[str]]:
    """Return PyDrive2's filesystem and the paths of all files below `url`."""
    from pydrive2.auth import GoogleAuth
    from pydrive2.fs import GDriveFileSystem

    auth = GoogleAuth(settings=dict(GoogleAuth.DEFAULT_SETTINGS))
    auth.credentials = Redirected(os.environ["FSSPEC_DRIVE_ENDPOINT_URL"])
    fs = GDriveFileSystem("root", google_auth=auth)
    return fs, sorted(stubborn(fs.find, url.replace("drive://My Drive", "root", 1)))


def read_by_pydrive2(opened: tuple[Any, list[str]], seed: int, part: int) -> list[bytes]:
    """Read files one by one (PyDrive2 has no batch call); return their names and contents."""
    fs, names = opened
    found = {names[index]: stubborn(fs.cat_file, names[index]) for index in drawn(len(names), seed, part)}
    return [named(name, found[name]) for name in sorted(found)]


def named(path: str, content: bytes) -> bytes:
    return path.rpartition("/")[2].encode() + content


def stubborn(call: Callable[[str], Any], path: str) -> Any:
    """Return `call(path)`, with up to `TRIES` attempts: PyDrive2 raises on HTTP 429, and a user would call it again."""
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
            uri = re.sub(r"^https://[a-z.]+\.googleapis\.com", self._endpoint_url, uri)
            return ask(uri, *args, **options)

        http.request = request
        return http


def open_by_zarr(url: str) -> Any:
    import zarr

    return zarr.open_group(url, mode="r", zarr_format=3)["images"]


def read_by_zarr(images: Any, seed: int, part: int) -> list[Any]:
    """Read images one at a time, as training does."""
    found = {index: images[index] for index in drawn(images.shape[0], seed, part)}
    return [found[index] for index in sorted(found)]


class Job(NamedTuple):
    """One way to read: `open` a URL, then `read` all, or 1 / part, of what that returned, in the order of a seed."""

    module: str  # imported before the time is taken
    open: Callable[[str], Any]
    read: Callable[[Any, int, int], list[Any]]


TEXTS = Job("cachedfs.filesystem", open_texts, read_texts)
PYDRIVE2 = Job("pydrive2.fs", open_by_pydrive2, read_by_pydrive2)
ZARR = Job("zarr", open_by_zarr, read_by_zarr)


# What the process of a reader does: `begin`, then `open_url` and `read_opened` in turn.

_opened: Any = None  # the result of `open_url`
_stats: Callable[[], Any] | None = None  # of the filesystem that reads it


def begin(job: Job, settings: Mapping[str, str]) -> None:
    """Prepare the process to run a job: `settings` are fsspec's, in place of the user's own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    for name in list(os.environ):
        if name.startswith(("FSSPEC_", "GCSFS_", "STORAGE_EMULATOR_HOST")):
            del os.environ[name]
    os.environ.update(settings)
    import fsspec

    fsspec.config.conf.clear()
    fsspec.config.set_conf_env(fsspec.config.conf)
    importlib.import_module(job.module)


def open_url(job: Job, url: str) -> float:
    """Open a URL; return how long it took, in seconds."""
    global _opened, _stats
    import fsspec

    _stats = getattr(fsspec.url_to_fs(url)[0], "stats", None)
    # Finalizers of libraries print a traceback if the process is ended meanwhile.
    atexit.register(os._exit, 0)
    started = time.perf_counter()
    _opened = job.open(url)
    return time.perf_counter() - started


def read_opened(job: Job, seed: int, part: int) -> tuple[float, int, str]:
    """Read 1/`part` of the items; return how long it took, the hits, and the digest of the items."""
    before = _stats().hits if _stats else 0
    started = time.perf_counter()
    items = job.read(_opened, seed, part)
    took_s = time.perf_counter() - started
    if engines := sys.modules.get("cachedfs.core.engines"):
        engines.drain_all()  # for the next process
    return took_s, (_stats().hits - before if _stats else 0), digest(items)
