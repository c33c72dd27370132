"""What one process costs: importing cachedfs, and reading 10 GB through one handle; and what others took of the processor."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from cachedfs.sim import GCSServer
from tests.benchmarks.harness import clean_environment
from tests.benchmarks.services import BUCKET

__all__ = ["Processor", "import_cost", "memory_growth"]

_RSS = """
import os, sys, time
def resident():
    if sys.platform == "linux":
        return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import psutil
    return psutil.Process().memory_info().rss
"""
_IMPORT = (
    _RSS
    + """
import fsspec, aiohttp
before, start = resident(), time.perf_counter()
fsspec.get_filesystem_class("cachedfs")
took = time.perf_counter() - start
print(f'[{took}, {resident() - before}]')
"""
)
_READ = (
    _RSS
    + """
import fsspec
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
)
_OBJECT_SIZE = 2 << 30


def import_cost(n: int) -> tuple[list[float], list[float]]:
    """Return the seconds and bytes that cachedfs adds to fsspec and aiohttp, each in n fresh processes."""
    pairs = [_run(_IMPORT, {}) for _ in range(n + 1)][1:]  # the first one warms the disk
    return [seconds for seconds, _ in pairs], [float(size) for _, size in pairs]


def memory_growth(folder: Path, size: int) -> tuple[float, float]:
    """Return the seconds of reading `size` bytes through one handle, and the growth of the process in bytes.

    Growth: its largest size in the second half of the reading over that in the first half. The object is a sparse file
    of 2 GiB and the cache holds 1 GiB of it, so that passes fetch, store, hit and evict; the simulated network is off.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name:
        bucket = Path(name) / "cloud" / BUCKET
        bucket.mkdir(parents=True)
        with open(bucket / "sparse.bin", "wb") as file:
            file.truncate(_OBJECT_SIZE)
        with GCSServer("off", folder=bucket.parent, process=True) as server:
            environ = {"FSSPEC_GS_TOKEN": "anon", "FSSPEC_GS_ENDPOINT_URL": server.endpoint_url}
            environ |= {f"FSSPEC_CACHEDFS_{k}": v for k, v in _options(name).items()}
            seconds, growth = _run(_READ, environ, f"cachedfs::gs://{BUCKET}/sparse.bin", str(size))
    return seconds, growth


def _options(name: str) -> dict[str, str]:
    return {"CACHE_DIR": f"{name}/cache", "CACHE_SIZE": "1GiB", "KEEP_FREE": "0"}


def _run(code: str, environ: dict[str, str], *arguments: str) -> tuple[float, float]:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command, env=clean_environment() | environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    seconds, size = json.loads(done.stdout)
    return seconds, size


class Processor:
    """What of the processor time that this machine wants goes to other machines of its host."""

    def __init__(self) -> None:
        self._before = self._looked()

    def stolen(self) -> float:
        """Return the share of it since this was asked last; 0 where nobody tells."""
        before, self._before = self._before, self._looked()
        used, stolen = (now - earlier for now, earlier in zip(self._before, before, strict=True))
        return stolen / max(1, used + stolen)

    @staticmethod
    def _looked() -> tuple[int, int]:
        """Return the ticks that were used and stolen since the start of the machine: proc_stat(5)."""
        path = Path("/proc/stat")
        if not path.exists():
            return 0, 0
        user, nice, system, _, _, irq, softirq, steal = map(int, path.read_text().split()[1:9])
        return user + nice + system + irq + softirq, steal
