"""Train on two nodes with torchrun: with shuffle="node", each node fetches and keeps its own part of the files only.

Here the nodes are processes of this machine, with a cache each. On your own nodes, run this on each; HOST is one of them:

torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 examples/nodes.py "gs://bucket/*/*.npy"

python examples/nodes.py                               # on a simulated Google Cloud Storage
python examples/nodes.py "gs://bucket/digits/*/*.npy"  # on your own: arrays of one shape, in a folder for each class
"""

import io
import os
import socket
import subprocess
import sys
import tempfile

import numpy as np
import torch
from torch import distributed

from cachedfs.datasets import FileDataset, Loader

EPOCHS, N_NODES = 2, 2
# The data do not change: nobody is asked whether they have.
OPTIONS = {"cachedfs": {"max_age": "immutable"}}


def decode(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.load(io.BytesIO(data))).float()


def train(url: str) -> None:
    """Train as one of the processes that torchrun started."""
    distributed.init_process_group("gloo")  # on GPUs: "nccl", and device= to the Loader
    dataset = FileDataset(f"cachedfs::{url}", decode=decode, label=str, storage_options=OPTIONS)
    node, asked = int(os.environ["GROUP_RANK"]), dataset.fs.stats().requests  # of the listing
    with Loader(dataset, batch_size=10, shuffle="node", seed=0) as loader:
        for epoch in range(EPOCHS):
            mine = []
            for _inputs, paths in loader:  # your training step: examples/ddp.py has a model
                mine += paths
            before, asked = asked, dataset.fs.stats().requests
            ranks = [None] * distributed.get_world_size()
            distributed.all_gather_object(ranks, (node, mine, asked - before))
            if distributed.get_rank() == 0:
                for each in range(N_NODES):
                    paths = {path for where, read, _ in ranks if where == each for path in read}
                    n = sum(requests for where, _, requests in ranks if where == each)
                    print(f"epoch {epoch}, node {each}: {len(paths)} different files, {n} requests")
    distributed.destroy_process_group()


def main(url: str) -> None:
    """Start torchrun twice on this machine, as two nodes with a cache each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = ["--master-addr=127.0.0.1", f"--master-port={free.getsockname()[1]}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--nnodes={N_NODES}"]
    with tempfile.TemporaryDirectory() as folder:
        nodes = []
        for node in range(N_NODES):
            own = os.environ | {"FSSPEC_CACHEDFS_CACHE_DIR": f"{folder}/{node}"}
            command = [*torchrun, *address, f"--node-rank={node}", __file__, url]
            nodes.append(subprocess.Popen(command, env=own))
        if max([node.wait() for node in nodes]):
            sys.exit("a node failed")


if __name__ == "__main__":
    if "GROUP_RANK" in os.environ:
        train(sys.argv[1])
    elif len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        import simulated

        with simulated.cloud("gs", simulated.digits_npy):
            main("gs://demo/digits/*/*.npy")
