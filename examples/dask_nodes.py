"""Read files on a Dask cluster again and again: every worker fetches its own part once, and keeps it on its local disk.

A file always goes to the same worker, so that a local disk holds a part of the data only. Here the nodes are two processes
of this machine; for your own cluster, give `Client` the address of its scheduler. Needs distributed.

python examples/dask_nodes.py                      # on a simulated Google Cloud Storage
python examples/dask_nodes.py "gs://bucket/texts"  # on your own
"""

import hashlib
import os
import sys
import tempfile
import time

import fsspec
from distributed import Client, LocalCluster, Worker, get_worker

# The data do not change: nobody is asked whether they have.
OPTIONS = {"max_age": "immutable"}


def count(url: str, paths: list[str], caches: str) -> tuple[int, int]:
    """Return how many lines these files have, and how many requests it took."""
    # Workers of one machine share its cache, so these, which stand for two, need one each. Leave `cache_dir` out on yours.
    own = os.path.join(caches, name_of(get_worker()))
    fs, _ = fsspec.url_to_fs(f"cachedfs::{url}", cachedfs={"cache_dir": own, **OPTIONS})
    before = fs.stats().requests
    lines = sum(data.count(b"\n") for data in fs.cat(paths).values())  # all files at once
    return lines, fs.stats().requests - before


def parts_of(paths: list[str], workers: list[str]) -> dict[str, list[str]]:
    """Return the files of each worker. If a worker comes or goes, no file moves between the others."""
    parts: dict[str, list[str]] = {worker: [] for worker in workers}
    for path in paths:
        best = max(workers, key=lambda worker: hashlib.md5(f"{worker} {path}".encode()).digest())
        parts[best].append(path)
    return parts


def name_of(dask_worker: Worker) -> str:
    return str(dask_worker.name)


def main(url: str) -> None:
    fs, folder = fsspec.url_to_fs(f"cachedfs::{url}", cachedfs=OPTIONS)
    paths = sorted(fs.find(folder))
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    with tempfile.TemporaryDirectory() as caches, cluster, Client(cluster) as client:
        workers = {called: address for address, called in client.run(name_of).items()}
        for epoch in range(2):
            began, tasks = time.perf_counter(), []
            for worker, part in parts_of(paths, sorted(workers)).items():
                tasks.append(client.submit(count, url, part, caches, workers=workers[worker], pure=False))
            lines, requests = (sum(each) for each in zip(*client.gather(tasks), strict=True))
            seconds = time.perf_counter() - began
            print(
                f"epoch {epoch}: {lines:,} lines of {len(paths)} files in {seconds:.2f} s, {requests} requests"
            )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        import simulated

        with simulated.cloud("gs", simulated.texts):
            main("gs://demo/texts")
