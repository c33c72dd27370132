"""The cost of one process: importing cachedfs, and reading 10 GB through one file."""

from __future__ import annotations

import tempfile
from pathlib import Path

from cachedfs.sim import GCSServer
from tests.benchmarks.harness import run_python
from tests.benchmarks.services import BUCKET

_IMPORT = """
import time
import aiohttp, fsspec, psutil
resident = lambda: psutil.Process().memory_info().rss
before, start = resident(), time.perf_counter()
fsspec.get_filesystem_class("cachedfs")
took = time.perf_counter() - start
print(f'[{took}, {resident() - before}]')
"""
_READ = """
import sys, time
import fsspec, psutil
resident = lambda: psutil.Process().memory_info().rss
url, size, piece = sys.argv[1], int(sys.argv[2]), bytearray(1 << 20)
total, start, samples = 0, time.perf_counter(), []
with fsspec.open(url) as file:
    while total < size:
        n = file.readinto(piece)
        if n == 0:
            file.seek(0)
        total += n
        if total >= size * (len(samples) + 1) / 60:
            samples.append(resident())
print(f'[{time.perf_counter() - start}, {max(samples[30:]) - max(samples[:30])}]')
"""
_OBJECT_SIZE = 2 << 30


def import_cost(n: int) -> tuple[list[float], list[float]]:
    """Return the seconds and bytes that cachedfs adds to fsspec and aiohttp, each in n new processes."""
    pairs = [run_python("-c", _IMPORT) for _ in range(n + 1)][1:]  # the first one warms the page cache
    return [seconds for seconds, _ in pairs], [float(size) for _, size in pairs]


def memory_growth(folder: Path, size: int) -> tuple[float, float]:
    """Return the seconds of reading `size` bytes through one file, and the growth of the process in bytes.

    Growth is its largest size in the second half of the reading minus that in the first half. The object is a sparse file
    of 2 GiB and the cache holds 1 GiB, so that passes fetch, store, hit and evict; the simulated network has no latency.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name:
        bucket = Path(name) / "cloud" / BUCKET
        bucket.mkdir(parents=True)
        with open(bucket / "sparse.bin", "wb") as file:
            file.truncate(_OBJECT_SIZE)
        with GCSServer("off", folder=bucket.parent, process=True) as server:
            environ = {"FSSPEC_GS_TOKEN": "anon", "FSSPEC_GS_ENDPOINT_URL": server.endpoint_url}
            options = {"CACHE_DIR": f"{name}/cache", "CACHE_SIZE": "1GiB", "KEEP_FREE": "0"}
            environ |= {f"FSSPEC_CACHEDFS_{k}": v for k, v in options.items()}
            url = f"cachedfs::gs://{BUCKET}/sparse.bin"
            seconds, growth = run_python("-c", _READ, url, str(size), environ=environ)
    return seconds, growth
