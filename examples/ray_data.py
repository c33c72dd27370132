"""Read a table with Ray Data again and again: every node fetches what it reads once, and keeps it on its local disk.

First, a task on each node fetches the table at the full speed of the link. Here the cluster is this machine; on your own,
`ray.init` connects to it. Needs ray[data].

python examples/ray_data.py                      # on a simulated Google Cloud Storage
python examples/ray_data.py "gs://bucket/table"  # on your own: a folder of Parquet files
"""

import logging
import sys
import time

import fsspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

# The data do not change: nobody is asked whether they have.
OPTIONS = {"max_age": "immutable"}


@ray.remote(num_cpus=0)
def prefetch(fs: fsspec.AbstractFileSystem, path: str) -> tuple[int, int]:
    """Fetch all files into the cache of this node; return their number, and the requests that it took."""
    before = fs.stats().requests
    return fs.prefetch(path).wait().items, fs.stats().requests - before


def main(url: str) -> None:
    # The filesystem is pickled with its options for each task.
    fs, path = fsspec.url_to_fs(f"cachedfs::{url}", cachedfs=OPTIONS)
    ray.init(logging_level=logging.ERROR, log_to_driver=False)
    for session in range(2):
        began, tasks = time.perf_counter(), []
        for node in ray.nodes():
            if node["Alive"]:
                there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                tasks.append(prefetch.options(scheduling_strategy=there).remote(fs, path))
        for number, (n, requests) in enumerate(ray.get(tasks)):
            print(f"session {session}, node {number}: {n} files, {requests} requests")
        batches = ray.data.read_parquet(path, filesystem=fs).iter_batches(batch_size=256)
        n = sum(len(next(iter(batch.values()))) for batch in batches)  # a batch has an array for each column
        print(f"session {session}: {n:,} rows in {time.perf_counter() - began:.2f} s")
    ray.shutdown()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        import simulated

        with simulated.cloud("gs", simulated.table):
            main("gs://demo/table")
