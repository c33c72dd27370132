"""The processes of the training rows: loops over batches with a sleep as computing, by a Loader or torch's own."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import fsspec

AFTER = 3  # first batches, not part of a steady state
HALF = 256  # of the blocks, for each of two processes
BATCH = 64  # random samples of the rows that read from a warm cache
_KEPT: list[Any] = []  # made once and kept between two orders


def train(row: str, contender: str, base: str, **options: Any) -> dict[str, Any]:
    """Return the results of one row, in seconds unless stated otherwise."""
    figures = _ROWS[row](contender, base, **options)
    for loader in _KEPT:
        loader.close()
    _KEPT.clear()
    return {"figures": figures}


# Loops.


def loaded(contender: str, dataset: Any, *, batch: int, workers: int = 4, **options: Any) -> Any:
    """Return an iterable of batches of a dataset: our Loader, or torch's with n processes."""
    if contender in ("cachedfs", "local"):
        from cachedfs.datasets import Loader

        _KEPT.append(Loader(dataset, batch_size=batch, **{"shuffle": True} | options))
        return _KEPT[-1]
    from torch.utils.data import DataLoader

    context = get_context("forkserver")  # forking a process with an event loop hangs
    context.set_forkserver_preload(["torch", "gcsfs", "tests.benchmarks.trained"])
    return DataLoader(
        dataset,
        batch_size=batch,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context=context,
        persistent_workers=True,
    )


def ends(batches: Iterable[Any], step_s: float) -> list[float]:
    """Return when the computing with each batch ended, in seconds since the first was requested."""
    began, found = time.perf_counter(), []
    for _ in batches:
        time.sleep(step_s)
        found.append(time.perf_counter() - began)
    return found


def steady(found: list[float], step_s: float) -> float:
    """Return the time of the batches from the fourth on, divided by the computing."""
    return (found[-1] - found[AFTER - 1]) / (step_s * (len(found) - AFTER))


class Files:
    """Small files read one by one, as in a simple dataset for torch."""

    def __init__(self, urls: list[str]) -> None:
        self._urls = urls

    def __len__(self) -> int:
        return len(self._urls)

    def __getitem__(self, index: int) -> int:
        with fsspec.open(self._urls[index], "rb") as file:
            return len(file.read())


class Slow:
    """Samples without bytes whose batches take a given time."""

    def __init__(self, n: int, load_s: float) -> None:
        self._n, self._load_s = n, load_s

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> int:
        time.sleep(self._load_s)
        return index


# Rows.


def small(contender: str, base: str, *, n: int, batch: int, step_s: float, workers: int) -> dict[str, float]:
    """Return the time of `n` files in all, and that from the fourth batch on divided by computing."""
    fs, root = fsspec.url_to_fs(f"{base}/files")
    urls = [f"{base}/files/{path.rpartition('/')[2]}" for path in sorted(fs.find(root))[:n]]
    if contender == "cachedfs":
        from cachedfs.datasets import FileDataset

        dataset: Any = FileDataset(urls, decode=len)
    else:
        dataset = Files(urls)
    found = ends(loaded(contender, dataset, batch=batch, workers=workers), step_s)
    return {"seconds": found[-1], "over": steady(found, step_s)}


def ratio(contender: str, base: str, *, step_s: float, shares: list[float]) -> dict[str, float]:
    """Return the worst iteration divided by the longer of loading and computing, for each share."""
    n, threads = 60, 4
    found = {}
    for share in shares:
        slow = Slow(n, share * step_s * threads)  # four of them make a batch in `share` of a step
        batches = loaded(contender, slow, batch=1, workers=threads, n_threads=threads, shuffle=False)
        times = ends(batches, step_s)
        first = 2 * threads  # the first ones of all threads come together
        each = (times[-1 - threads] - times[first - 1]) / (n - threads - first)
        found[f"at {share:g}"] = each / (step_s * max(1.0, share))
    return {"over": max(found.values()), **found}


def images(
    contender: str, base: str, *, step_s: float, local: str, epochs: int, **options: Any
) -> dict[str, float]:
    """Return the time of each epoch, and the second divided by one of the local disk, in turn."""
    from cachedfs.datasets import ZarrDataset

    remote = loaded("cachedfs", ZarrDataset(f"{base}/images.zarr"), batch=16, **options)
    beside = loaded("local", ZarrDataset(f"{local}/images.zarr"), batch=16, **options)
    times = ends(remote, step_s)
    took = {"first": times[-1], "over": steady(times, step_s)}
    ends(beside, step_s)
    pairs = [(ends(remote, step_s)[-1], ends(beside, step_s)[-1]) for _ in range(epochs)]
    took["second"] = statistics.median(ours for ours, _ in pairs)
    took["beside"] = statistics.median(theirs for _, theirs in pairs)
    return took


def random_samples(contender: str, base: str, *, local: str, n: int) -> dict[str, float]:
    """Return microseconds per random sample in batches from the warm cache, and those of a bare loop over the same file."""
    if contender == "zarr":
        return by_zarr(local, n)
    import numpy as np

    from cachedfs.datasets import ZarrDataset

    dataset = ZarrDataset(f"{base}/samples.zarr")
    bare = Bare(Path(local) / "samples.zarr")
    order = np.random.default_rng(0).permutation(len(dataset))
    batches = [order[at : at + BATCH].tolist() for at in range(0, n, BATCH)]
    for batch in batches:  # from here on cached, and in the page cache
        assert (dataset.batch(batch).numpy() == bare.batch(batch)).all()
    read = {"us": dataset.batch, "bare_us": bare.batch}
    best = dict.fromkeys(read, float("inf"))
    for _ in range(9):
        for name, call in read.items():
            began = time.perf_counter()
            for batch in batches:
                call(batch)
            best[name] = min(best[name], (time.perf_counter() - began) / (len(batches) * BATCH) * 1e6)
    return {**best, "over": best["us"] / best["bare_us"]}


class Bare:
    """The least cost of random samples: a `pread` of open files with known indexes, and decoding."""

    def __init__(self, path: Path) -> None:
        import numcodecs
        import numpy as np
        import zarr

        array = zarr.open_array(path, mode="r")
        self._shape, self._per_shard = array.shape, array.shards[0]
        n_shards = -(-array.shape[0] // self._per_shard)
        names = [path / ".".join(["c", str(number), *["0"] * (array.ndim - 1)]) for number in range(n_shards)]
        self._files = [os.open(name, os.O_RDONLY) for name in names]
        self._index = []
        for name in names:
            data = name.read_bytes()[-(16 * self._per_shard + 4) : -4]
            self._index.append(np.frombuffer(data, "<u8").reshape(-1, 2).tolist())
        self._codec = numcodecs.Zstd()

    def batch(self, indexes: list[int]) -> Any:
        import numpy as np

        out = np.empty((len(indexes), *self._shape[1:]), "u1")
        for row, index in enumerate(indexes):
            shard, inner = divmod(index, self._per_shard)
            start, size = self._index[shard][inner]
            data = self._codec.decode(os.pread(self._files[shard], size, start))
            out[row] = np.frombuffer(data, "u1").reshape(self._shape[1:])
        return out


def by_zarr(local: str, n: int) -> dict[str, float]:
    """Return microseconds per random sample through zarr, from the local file."""
    import zarr

    array = zarr.open_array(f"{local}/samples.zarr", mode="r")
    indexes = [index * 7919 % array.shape[0] for index in range(n // 10)]
    began = time.perf_counter()
    for index in indexes:
        array[index]
    return {"us": (time.perf_counter() - began) / len(indexes) * 1e6}


def whole(contender: str, base: str, *, local: str) -> dict[str, float]:
    """Return CPU seconds per decoded GB of all samples in order, from the warm cache."""
    import zarr

    from cachedfs.datasets import ZarrDataset

    array = zarr.open_array(f"{local}/whole.zarr", mode="r")

    def by_zarr(indexes: range) -> Any:
        return array[indexes.start : indexes.stop]

    read = by_zarr if contender == "zarr" else ZarrDataset(f"{base}/whole.zarr").batch
    best = float("inf")
    for _ in range(5):  # the first one fills the cache
        began = time.process_time()
        for at in range(0, array.shape[0], 16):
            read(range(at, at + 16))
        best = min(best, time.process_time() - began)
    return {"cpu_s_a_gb": best / array.nbytes * 1e9}


def epochs(contender: str, base: str, *, n: int, step_s: float) -> dict[str, float]:
    """Read some epochs in random order; return the bytes fetched after the first, by our count."""
    if contender != "cachedfs":
        from tests.benchmarks import rivals

        size = int(os.environ["FSSPEC_CACHEDFS_CACHE_SIZE"])
        began = time.perf_counter()
        rivals.epochs(contender, base.removeprefix("cachedfs::"), n=n, step_s=step_s, cache_size=size)
        return {"seconds": time.perf_counter() - began}
    from cachedfs.datasets import FileDataset

    dataset = FileDataset(f"{base}/blocks", decode=len)
    began = time.perf_counter()
    fetched = fetched_by_epochs(dataset, n=n, step_s=step_s)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "later": float(fetched[-1] - fetched[0])}


def fetched_by_epochs(dataset: Any, *, n: int, step_s: float) -> list[int]:
    """Read epochs in random order, by batches of 8; return the bytes fetched until the end of each."""
    loader, fetched = loaded("cachedfs", dataset, batch=8), []
    for _ in range(n):
        ends(loader, step_s)
        fetched.append(dataset.fs.stats().bytes_fetched)
    loader.close()
    return fetched


def two_plans(contender: str, base: str, *, n: int, step_s: float) -> dict[str, float]:
    """Read some epochs in two processes at a time, each half of the data; return their hit ratios after the first."""
    began = time.perf_counter()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        halves = [pool.submit(epochs_of_half, base, half, n=n, step_s=step_s) for half in range(2)]
        hits = sorted(half.result() for half in halves)
    return {"seconds": time.perf_counter() - began, "hits": hits[0], "more hits": hits[1]}


def epochs_of_half(base: str, half: int, *, n: int, step_s: float) -> float:
    """Read one half of the data in random order, epoch after epoch; return the hit ratio after the first."""
    from cachedfs.datasets import FileDataset

    names = range(half * HALF, (half + 1) * HALF)
    dataset = FileDataset([f"{base}/blocks/{name:04}" for name in names], decode=len)
    fetched = fetched_by_epochs(dataset, n=n, step_s=step_s)
    return 1 - (fetched[-1] - fetched[0]) / ((n - 1) * HALF << 20)


def packed(contender: str, base: str, *, local: str, read_s: float, is_local: bool) -> dict[str, float]:
    """Return the seconds of packing texts, and those of reading, encoding and writing alone."""
    from cachedfs.datasets import pack

    source = Path(local) / "texts"
    with tempfile.TemporaryDirectory(dir=source.parent.parent) as folder:
        target = Path(folder) / "texts.zarr"
        began = time.perf_counter()
        done = pack(str(source) if is_local else f"{base}/texts", str(target), kind="files", codec="zstd")
        seconds = time.perf_counter() - began
        assert done.samples == len(os.listdir(source))
        sharded = json.loads((target / "data/zarr.json").read_text())["codecs"][0]["configuration"]
        stored = [path.read_bytes() for path in target.glob("data/c.*")]
        began = time.perf_counter()
        for number, data in enumerate(stored):
            (Path(folder) / str(number)).write_bytes(data)
        write_s = time.perf_counter() - began
    if is_local:
        began = time.perf_counter()
        for path in source.iterdir():
            path.read_bytes()
        read_s = time.perf_counter() - began
    bounds = {"read": read_s, "encode": encoding_s(source, sharded), "write": write_s}
    return {"seconds": seconds, "over": seconds / max(bounds.values()), **bounds}


def encoding_s(source: Path, sharded: dict[str, Any]) -> float:
    """Return the seconds of only encoding all files by the chunks of a store on all cores."""
    from numcodecs import Blosc

    (blosc,) = (codec["configuration"] for codec in sharded["codecs"] if codec["name"] == "blosc")
    codec = Blosc(blosc["cname"], blosc["clevel"], Blosc.NOSHUFFLE, blosc["blocksize"])
    data, size = b"".join(path.read_bytes() for path in sorted(source.iterdir())), sharded["chunk_shape"][0]
    chunks = [data[at : at + size] for at in range(0, len(data), size)]
    with ThreadPoolExecutor() as pool:
        began = time.perf_counter()
        for _ in pool.map(codec.encode, chunks):
            pass
        return time.perf_counter() - began


def resumed(contender: str, base: str, *, places: list[float], seed: int = 3) -> dict[str, float]:
    """Return the seconds from a state to the first batch after it, at each position, and their maximum."""
    from cachedfs.datasets import ZarrDataset

    dataset = ZarrDataset(f"{base}/samples.zarr")
    for at in range(0, len(dataset), BATCH):  # all of it is cached
        dataset.batch(range(at, min(len(dataset), at + BATCH)))
    found = {}
    for place in places:
        found[f"at {place:g}"] = statistics.median(
            _to_first(contender, dataset, place, seed) for _ in range(3)
        )
    return {"worst": max(found.values()), "spread": max(found.values()) - min(found.values()), **found}


def _to_first(contender: str, dataset: Any, place: float, seed: int) -> float:
    position = int(place * len(dataset)) // 16 * 16
    if contender == "cachedfs":
        from cachedfs.datasets import Loader

        with Loader(dataset, batch_size=16, shuffle=True, seed=seed) as loader:
            state = loader.state_dict() | {"position": position}
            began = time.perf_counter()
            loader.load_state_dict(state)
            next(iter(loader))
            return time.perf_counter() - began
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make() -> Any:
        torch.manual_seed(seed)
        return StatefulDataLoader(dataset, batch_size=16, shuffle=True)

    first: Iterator[Any] = iter(loader := make())
    for _ in range(position // 16):
        next(first)
    state = loader.state_dict()
    again = make()
    began = time.perf_counter()
    again.load_state_dict(state)
    next(iter(again))
    return time.perf_counter() - began


_ROWS: dict[str, Callable[..., dict[str, float]]] = {
    "small": small,
    "ratio": ratio,
    "images": images,
    "random_samples": random_samples,
    "whole": whole,
    "epochs": epochs,
    "two_plans": two_plans,
    "packed": packed,
    "resumed": resumed,
}
