"""Compare `Loader` and torch's `DataLoader` on a warm cache: `python -m tests.benchmarks.loaders`.

Prints the table of docs/guide-training.md: samples per second, the best of several passes in turn.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cachedfs.common.executor import n_cores
from tests.benchmarks import training
from tests.benchmarks.services import BUCKET, SERVICES

BATCH, PASSES = 64, 7
N, SIZE = training.SAMPLES, 12 << 10  # files and lines, as many and as large as the samples of the Zarr array
N_SLOW, DECODE_S = 512, 0.001


def slow(data: bytes) -> int:
    """Run Python code for a millisecond of this thread."""
    end = time.thread_time() + DECODE_S
    while time.thread_time() < end:
        pass
    return len(data)


def datasets(base: str) -> dict[str, tuple[Any, int]]:
    """Return the datasets by name, each with the number of samples of one pass."""
    from cachedfs.datasets import FileDataset, LineDataset, ZarrDataset

    files = f"{base}/small_files"
    return {
        "Zarr": (ZarrDataset(f"{base}/samples.zarr"), N),
        "files": (FileDataset(files, decode=len), N),
        "files, 1 ms of Python each": (
            FileDataset([f"{files}/{number:05}" for number in range(N_SLOW)], decode=slow),
            N_SLOW,
        ),
        "lines": (LineDataset(f"{base}/lines.txt", decode=len), N),
    }


def contenders(dataset: Any) -> dict[str, Iterable[Any]]:
    """Return the loops over a dataset by name. Only torch's DataLoader takes an iterable dataset."""
    from torch.utils.data import DataLoader, IterableDataset

    from cachedfs.datasets import Loader

    context = get_context("forkserver")  # forking a process with an event loop hangs
    context.set_forkserver_preload(["torch", "cachedfs.filesystem"])
    is_iterable = isinstance(dataset, IterableDataset)
    options: dict[str, Any] = {"batch_size": BATCH, **({} if is_iterable else {"shuffle": True})}
    several = {"num_workers": 2, "multiprocessing_context": context, "persistent_workers": True}
    loops: dict[str, Iterable[Any]] = {}
    if not is_iterable:
        loops["Loader"] = Loader(dataset, **options)
        loops |= {f"n_threads={n}": Loader(dataset, **options, n_threads=n) for n in (4, 1)}
    loops["DataLoader, 0 workers"] = DataLoader(dataset, **options)
    loops["DataLoader, 2 workers"] = DataLoader(dataset, **options, **several)
    return loops


def pass_s(loop: Iterable[Any], n: int) -> float:
    """Return the seconds of one pass; it must give `n` samples."""
    began, found = time.perf_counter(), 0
    for batch in loop:
        found += len(batch)
    assert found == n, (found, n)
    return time.perf_counter() - began


def make(folder: Path) -> None:
    """Make the data: the files of the Zarr row, small files, and lines."""
    training.make(folder, {"samples.zarr"})
    files = folder / "small_files"
    files.mkdir()
    for number in range(N):
        (files / f"{number:05}").write_bytes(os.urandom(SIZE))
    with (folder / "lines.txt").open("wb") as file:
        file.writelines(b"%012d" % number * (SIZE // 12) + b"\n" for number in range(N))


def measured(dataset: Any, n: int) -> tuple[dict[str, float], float]:
    """Return the seconds of the best pass of each loop, and by how much workers made their first one longer.

    The first pass of each loop, which fills caches and starts workers, does not count.
    """
    loops = contenders(dataset)
    found: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(PASSES + 1):
        for name, loop in loops.items():
            found[name].append(pass_s(loop, n))
    best = {name: min(times[1:]) for name, times in found.items()}
    workers = [*loops][-1]
    return best, found[workers][0] - best[workers]


def main() -> None:
    service = SERVICES["gcs"]
    with tempfile.TemporaryDirectory(prefix="cachedfs-bench-") as name:
        folder = Path(name) / "data" / BUCKET
        folder.mkdir(parents=True)
        make(folder)
        with service.server(training.OFF, folder=folder.parent, process=True) as server:
            os.environ |= service.environment(server)
            os.environ |= {"FSSPEC_CACHEDFS_CACHE_DIR": f"{name}/cache", "FSSPEC_CACHEDFS_KEEP_FREE": "0"}
            import fsspec.config

            fsspec.config.set_conf_env(fsspec.config.conf)
            print(f"samples/s, {n_cores()} cores, batches of {BATCH}, {N} samples of {SIZE >> 10} KiB")
            for row, (dataset, n) in datasets(f"cachedfs::gs://{BUCKET}").items():
                times, start_s = measured(dataset, n)
                rates = [f"{name} {n / s:,.0f}" for name, s in times.items()]
                print(f"{row:28}  {'  '.join(rates)} (and {start_s:.1f} s to start)")


if __name__ == "__main__":
    main()
