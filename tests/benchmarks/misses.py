"""What a caching miss costs: seconds and CPU seconds of first reads of many chunks and of many small files.

All imports are done, and one object is read, before the clock starts. The simulated Google Cloud Storage is a process of
its own. `Lean` is the floor that a complete cache should come near to.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import os
import queue
import random
import resource
import sqlite3
import sys
import tempfile
import threading
import time
import urllib.parse
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import zarr
from fsspec.asyn import AsyncFileSystem

from cachedfs.sim import GCSServer
from tests.benchmarks.harness import Figure, Result, run_python

SIDE, N_CHUNKS = 181, 360  # chunks of 131 kB, which zstd makes half as large
N_FILES = 20_000  # of 4 to 12 kB
CONCURRENCY = 64  # chunks that zarr reads at once
NAMES = {
    "cachedfs": "**cachedfs**",
    "dataset": "**cachedfs**, `FileDataset` and `Loader`",
    "pack": "**cachedfs**, `pack`",
}
STORED_S = 0.3  # what is stored behind the read counts


class _Writer(threading.Thread):
    """Stores each object in a file with a checksum and a row in SQLite, several in one transaction."""

    def __init__(self, root: str) -> None:
        super().__init__(daemon=True)
        self._root = root
        self.queue: queue.SimpleQueue[tuple[str, str, str, bytes]] = queue.SimpleQueue()
        os.makedirs(root)
        self.start()

    def run(self) -> None:
        database = sqlite3.connect(f"{self._root}/index.db", isolation_level=None)
        database.executescript(
            "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF;"
            "CREATE TABLE block(name TEXT PRIMARY KEY, path TEXT, generation TEXT, size INT, at REAL)"
        )
        while True:
            batch = [self.queue.get()]
            time.sleep(0.005)
            while not self.queue.empty():
                batch.append(self.queue.get())
            rows = [self._stored(*each) for each in batch]
            database.execute("BEGIN IMMEDIATE")
            database.executemany("INSERT OR REPLACE INTO block VALUES (?, ?, ?, ?, ?)", rows)
            database.execute("COMMIT")

    def _stored(self, name: str, path: str, generation: str, body: bytes) -> tuple[Any, ...]:
        temporary = f"{self._root}/{name}.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.writev(fd, [body, zlib.crc32(body).to_bytes(4, "little")])
        os.close(fd)
        os.rename(temporary, f"{self._root}/{name}")
        return name, path, generation, len(body), time.time()


class Lean(AsyncFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A caching filesystem without ranges, eviction, sharing, retries, proofs and read-ahead."""

    protocol, cachable = "lean", False

    def __init__(self, endpoint_url: str, root: str, concurrency: int = 64, **options: Any) -> None:
        super().__init__(**options)
        self._endpoint_url, self._root, self._writer = endpoint_url, root, _Writer(root)
        self._metadata: dict[str, tuple[str, int] | None] = {}
        self._running: dict[str, asyncio.Future[bytes]] = {}
        self._slots, self._session = asyncio.Semaphore(concurrency), None
        self._own_loop = asyncio.new_event_loop()
        threading.Thread(target=self._own_loop.run_forever, daemon=True).start()

    async def _fetch(self, path: str) -> bytes:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        bucket, _, key = path.partition("/")
        url = f"{self._endpoint_url}/storage/v1/b/{bucket}/o/{urllib.parse.quote(key, safe='')}?alt=media"
        async with self._slots, self._session.get(url) as reply:
            if reply.status == 404:
                self._metadata[path] = None
                raise FileNotFoundError(path)
            body, generation = await reply.read(), reply.headers.get("X-Goog-Generation", "1")
        name = hashlib.blake2b(f"{path}\0{generation}".encode(), digest_size=16).hexdigest()
        self._metadata[path] = name, len(body)
        self._writer.queue.put((name, path, generation, body))
        return body

    async def _once(self, path: str) -> bytes:
        if (running := self._running.get(path)) is None:
            running = self._running[path] = asyncio.ensure_future(self._fetch(path))
            running.add_done_callback(lambda _: self._running.pop(path, None))
        return await asyncio.shield(running)

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        path = self._strip_protocol(path)
        if path in self._metadata:
            if (known := self._metadata[path]) is None:
                raise FileNotFoundError(path)
            try:
                with open(f"{self._root}/{known[0]}", "rb") as file:  # noqa: ASYNC230  as cheap as it can be
                    return file.read(known[1])[start:end]
            except FileNotFoundError:  # not stored yet
                pass
        call = asyncio.run_coroutine_threadsafe(self._once(path), self._own_loop)
        body = await asyncio.wrap_future(call)
        return body if start is None and end is None else body[start:end]


@dataclass(frozen=True, slots=True)
class Row:
    """First reads by each contender in turn; the figures of cachedfs are compared with those of the others."""

    title: str
    contenders: tuple[str, ...]
    make: Callable[[GCSServer], None]
    read: Callable[[str, str, dict[str, Any]], dict[str, float]]
    n_runs: int


def _make_chunks(server: GCSServer) -> None:
    import numpy as np

    from tests.support import files_below  # not in the processes that are measured

    shape, chunks = (N_CHUNKS, SIDE, SIDE), (1, SIDE, SIDE)
    with tempfile.TemporaryDirectory() as folder:
        array = zarr.open_array(f"{folder}/a.zarr", mode="w", shape=shape, dtype="f4", chunks=chunks)
        array[:] = (np.random.default_rng(0).random(shape) * 512).astype("i2").astype("f4")
        for name, data in files_below(Path(folder)).items():
            server.put("b", name, data)


def _make_files(server: GCSServer) -> None:
    rng = random.Random(0)
    for number in range(N_FILES):
        server.put("b", f"files/{number:05}", rng.randbytes(rng.randrange(4_000, 12_000)))


def _read_chunks(contender: str, url: str, options: dict[str, Any]) -> dict[str, float]:
    return _timed("", lambda: zarr.open_array(f"{url}/a.zarr", mode="r", storage_options=options)[:])


def _read_files(contender: str, url: str, options: dict[str, Any]) -> dict[str, float]:
    if contender == "dataset":
        return _read_dataset(f"{url}/files", options)
    if contender == "pack":
        return _pack_files(url, options)
    fs, path = fsspec.url_to_fs(f"{url}/files", **options)
    names = [f"{path}/{number:05}" for number in range(N_FILES)]
    found = _timed("", lambda: fs.cat(names))
    return found | (_timed("second ", lambda: fs.cat(names)) if contender == "cachedfs" else {})


def _read_dataset(url: str, options: dict[str, Any]) -> dict[str, float]:
    from cachedfs.datasets import FileDataset

    dataset: Any = FileDataset(url, decode=len, storage_options=options)
    return _timed("", lambda: _epoch(dataset, 0)) | _timed("second ", lambda: _epoch(dataset, 1))


def _epoch(dataset: Any, number: int) -> None:
    from cachedfs.datasets import Loader

    with Loader(dataset, batch_size=64, shuffle=True, seed=number) as loader:
        for _ in loader:
            pass


def _pack_files(url: str, options: dict[str, Any]) -> dict[str, float]:
    """Pack files, first without and then with all of them cached."""
    from cachedfs.datasets import pack

    def packed() -> None:
        target = f"{url}/packed.zarr"
        pack(f"{url}/files", target, overwrite=True, storage_options=options, target_options=options)

    return _timed("", packed) | _timed("second ", packed)


ROWS = {
    "miss_cpu": Row(
        "Zarr v3, 360 chunks of 131 kB, `[:]`", ("lean", "gcsfs", "cachedfs"), _make_chunks, _read_chunks, 7
    ),
    "many_files": Row(
        "20,000 files of 4 to 12 kB by one `fs.cat`",
        ("gcsfs", "cachedfs", "dataset", "pack"),
        _make_files,
        _read_files,
        1,
    ),
}


def _timed(name: str, read: Callable[[], object]) -> dict[str, float]:
    gc.collect()  # what the imports left, which takes 50 ms, in the time of whoever happens to be measured then
    began, used = time.perf_counter(), _cpu_s()
    read()
    took_s = time.perf_counter() - began
    time.sleep(STORED_S)
    return {f"{name}s": took_s, f"{name}cpu_s": _cpu_s() - used}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _measured(row: str, contender: str, endpoint_url: str) -> dict[str, float]:
    """Return seconds and CPU seconds. In a process of its own."""
    zarr.config.set({"async.concurrency": CONCURRENCY})
    gs = {"token": "anon", "endpoint_url": endpoint_url}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options: dict[str, Any] = {"endpoint_url": endpoint_url, "root": f"{folder}/lean"}
        url, warm = "lean://b", {**options, "root": f"{folder}/warm"}
        if contender == "lean":
            fsspec.register_implementation("lean", Lean)
        elif contender == "gcsfs":
            url, options, warm = "gs://b", gs, gs
        else:
            url, options = "cachedfs::gs://b", {"gs": gs, "cachedfs": {"cache_dir": f"{folder}/cache"}}
            warm = {"gs": gs, "cachedfs": {"cache_dir": f"{folder}/warm"}}
        fs, path = fsspec.url_to_fs(f"{url}/x", **warm)
        fs.cat_file(path)
        time.sleep(STORED_S)
        return ROWS[row].read(contender, url, options)


def measure_misses(name: str, *, ours: bool = False) -> list[Result]:
    """Return a result for each contender; that of cachedfs has its ratios to the others of the run."""
    row = ROWS[name]
    contenders = [each for each in row.contenders if not ours or each in NAMES]
    found: dict[str, list[dict[str, float]]] = {contender: [] for contender in contenders}
    with GCSServer("table", process=True) as server:
        server.put("b", "x", b"1")
        row.make(server)
        for _ in range(row.n_runs):
            for contender, runs in found.items():
                runs.append(run_python("-m", "tests.benchmarks.misses", name, contender, server.endpoint_url))
    results = {
        contender: Result(name, contender, {key: Figure.of([run[key] for run in runs]) for key in runs[0]})
        for contender, runs in found.items()
    }
    own = results["cachedfs"].figures
    for contender, result in results.items():
        for key, figure in result.figures.items():
            if contender != "cachedfs" and key in own:
                # The dataset and the pack are compared with `fs.cat`, and `fs.cat` with the others.
                one, other = (figure, own[key]) if contender in NAMES else (own[key], figure)
                own[f"{contender} {key}"] = Figure.of([one.median / other.median])
    return list(results.values())


if __name__ == "__main__":
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    print(json.dumps(_measured(*sys.argv[1:])), flush=True)
    os._exit(0)  # no thread of a contender is waited for
