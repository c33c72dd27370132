"""Count what several nodes download in each epoch: `python -m tests.benchmarks.nodes`.

Prints the table of docs/guide-cluster.md, in units of the data. Nodes are caches of one process, which read in turn.
"""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

from cachedfs.sim import GCSServer
from tests.support import noise

EPOCHS, N, UNIT = 4, 120, 16 << 10
ROOM = 1.2  # of all local caches together, in units of the data


def downloaded(server: GCSServer, total: int, n_nodes: int, shuffle: str, folder: str) -> list[float]:
    """Return what all nodes together download in each epoch, in units of the data."""
    from cachedfs.datasets import FileDataset, Loader

    gs = {"token": "anon", "endpoint_url": server.endpoint_url}
    options: dict[str, Any] = {"cache_size": int(ROOM * total / n_nodes), "keep_free": 0}
    loaders, fetched = [], []
    with contextlib.ExitStack() as stack:
        for node in range(n_nodes):
            own = {"cachedfs": {"cache_dir": f"{folder}/{node}", **options}, "gs": gs}
            data = FileDataset("cachedfs::gs://bucket/data", decode=len, storage_options=own)
            place: dict[str, Any] = {"rank": node, "world_size": n_nodes}
            if shuffle == "node":
                place["n_nodes"] = n_nodes
            loaders.append(stack.enter_context(Loader(data, batch_size=8, shuffle=shuffle, **place)))
        for _ in range(EPOCHS):
            server.reset()
            for loader in loaders:
                for _batch in loader:
                    loader.dataset.fs._objects.engine.drain(
                        120
                    )  # else blocks that wait for the disk are a second cache
            fetched.append(server.bytes_sent() / total)
    return fetched


def main() -> None:
    sizes = [(16 + 37 * i % 48) * UNIT for i in range(N)]
    with GCSServer(profile="off") as server:
        server.make_bucket("bucket")
        for i, size in enumerate(sizes):
            server.put("bucket", f"data/{i:03}", noise(size, i))
        print(
            f"{N} objects, {sum(sizes) >> 20} MiB; local caches of {ROOM} times the data, divided by the nodes"
        )
        for n_nodes in (1, 2, 4):
            for shuffle in ("full", "node"):
                with tempfile.TemporaryDirectory(prefix="cachedfs-bench-") as folder:
                    found = downloaded(server, sum(sizes), n_nodes, shuffle, folder)
                print(f"{n_nodes} nodes, shuffle={shuffle!r}: {'  '.join(f'{each:.2f}' for each in found)}")


if __name__ == "__main__":
    main()
