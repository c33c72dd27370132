"""What a caching miss costs: a cold Zarr array of 360 chunks, read by a bare caching filesystem, by gcsfs and by cachedfs.

    python -m tests.benchmarks.miss_cpu [--runs N] [--concurrency N]

It prints seconds and CPU seconds, as medians, with all imports done and one object read before the clock starts. The
simulated Google Cloud Storage is a process of its own. `Lean` is the floor that a complete cache should come near to.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import queue
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import zlib
from pathlib import Path
from typing import Any

import fsspec
import zarr
from fsspec.asyn import AsyncFileSystem

from cachedfs.sim import GCSServer

__all__ = ["Lean", "main"]

SIDE, N_CHUNKS = 181, 360  # chunks of 131 kB, which zstd makes half as large
CONTENDERS = ("lean", "gcsfs", "cachedfs")
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


def measured(contender: str, endpoint_url: str, concurrency: int) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of one cold pass. In a process of its own."""
    zarr.config.set({"async.concurrency": concurrency})
    gs = {"token": "anon", "endpoint_url": endpoint_url}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options: dict[str, Any] = {"endpoint_url": endpoint_url, "root": f"{folder}/lean"}
        url, warm = "lean://b/a.zarr", {**options, "root": f"{folder}/warm"}
        if contender == "lean":
            fsspec.register_implementation("lean", Lean)
        elif contender == "gcsfs":
            url, options, warm = "gs://b/a.zarr", gs, gs
        else:
            url, options = "cachedfs::gs://b/a.zarr", {"gs": gs, "cachedfs": {"cache_dir": f"{folder}/cache"}}
            warm = {"gs": gs, "cachedfs": {"cache_dir": f"{folder}/warm"}}
        fs, path = fsspec.url_to_fs(url.replace("a.zarr", "x"), **warm)
        fs.cat_file(path)
        time.sleep(STORED_S)
        began, used = time.perf_counter(), _cpu_s()
        zarr.open_array(url, mode="r", storage_options=options)[:]
        took_s = time.perf_counter() - began
        time.sleep(STORED_S)
        return took_s, _cpu_s() - used


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def make(server: GCSServer) -> None:
    import numpy as np

    server.put("b", "x", b"1")
    options = {"token": "anon", "endpoint_url": server.endpoint_url}
    shape, chunks = (N_CHUNKS, SIDE, SIDE), (1, SIDE, SIDE)
    array = zarr.open_array(
        "gs://b/a.zarr", mode="w", shape=shape, dtype="f4", chunks=chunks, storage_options=options
    )
    array[:] = (np.random.default_rng(0).random(shape) * 512).astype("i2").astype("f4")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7, help="of each contender, in turn")
    parser.add_argument("--concurrency", type=int, default=64, help="chunks that zarr reads at once")
    parser.add_argument("--one", nargs=2, metavar=("CONTENDER", "ENDPOINT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    if options.one:
        print(json.dumps(measured(*options.one, options.concurrency)), flush=True)
        os._exit(0)  # no thread of a contender is waited for
    results: dict[str, list[list[float]]] = {contender: [] for contender in CONTENDERS}
    with GCSServer("table", process=True) as server:
        make(server)
        for _ in range(options.runs):
            for contender, found in results.items():
                command = [sys.executable, "-m", "tests.benchmarks.miss_cpu", "--one", contender]
                command += [server.endpoint_url, "--concurrency", str(options.concurrency)]
                done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=_ROOT)
                found.append(json.loads(done.stdout))
    print(table(results))
    return 0


def table(results: dict[str, list[list[float]]]) -> str:
    medians = {
        name: [statistics.median(each) for each in zip(*found, strict=True)]
        for name, found in results.items()
    }
    lines = [f"{N_CHUNKS} cold chunks; load of the machine {os.getloadavg()[0]:.1f}; medians.", ""]
    lines += ["| contender | seconds | of gcsfs | CPU seconds | of lean |", "|---|---|---|---|---|"]
    for name, (took_s, cpu_s) in medians.items():
        ratios = took_s / medians["gcsfs"][0], cpu_s / medians["lean"][1]
        lines.append(f"| {name} | {took_s:.3f} | {ratios[0]:.2f} | {cpu_s:.3f} | {ratios[1]:.2f} |")
    return "\n".join(lines)


_ROOT = Path(__file__).parents[2]

if __name__ == "__main__":
    sys.exit(main())
