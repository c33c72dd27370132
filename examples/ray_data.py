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
    fs, path = fsspec.url_to_fs(
        f"cachedfs::{url}", cachedfs=OPTIONS
    )  # pickled with its options for each task
    ray.init(logging_level=logging.ERROR, log_to_driver=False)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    for session in range(2):
        began = time.perf_counter()
        nodes = [
            NodeAffinitySchedulingStrategy(each["NodeID"], soft=False)
            for each in ray.nodes()
            if each["Alive"]
        ]
        fetched = ray.get([prefetch.options(scheduling_strategy=node).remote(fs, path) for node in nodes])
        for number, (n, requests) in enumerate(fetched):
            print(f"session {session}, node {number}: {n} files, {requests} requests")
        table = ray.data.read_parquet(path, filesystem=fs)
        n, sum_ = 0, 0
        for batch in table.iter_batches(batch_size=256):
            n, sum_ = n + len(batch["n"]), sum_ + int(batch["n"].sum())
        print(f"session {session}: {n:,} rows in {time.perf_counter() - began:.2f} s; their sum: {sum_:,}")
    ray.shutdown()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        import simulated

        with simulated.cloud("gs", simulated.table):
            main("gs://demo/table")
