"""Train on several processes and nodes with DistributedDataParallel: each sample comes once in an epoch.
With shuffle="node", a node fetches and keeps its own part of the files only. If every disk has room for all files,
shuffle=True mixes all samples in each epoch. On GPUs say "nccl", and `device=` to the Loader. Run this on each node:

torchrun --nnodes 2 --nproc-per-node 8 --master-addr HOST --master-port 29400 --node-rank 0 examples/ddp.py "gs://bucket/*/*.npy"

python examples/ddp.py                               # two nodes on this machine, on a simulated Google Cloud Storage
python examples/ddp.py "gs://bucket/digits/*/*.npy"  # on your own: images of one size, in a folder for each class
"""

import io
import os
import socket
import subprocess
import sys
import tempfile

import numpy as np
import torch
from torch import distributed, nn

from cachedfs.datasets import FileDataset, Loader

EPOCHS, CLASSES, PIXELS = 2, 10, 28 * 28
# The data do not change: nobody is asked whether they have.
OPTIONS = {"cachedfs": {"max_age": "immutable"}}


def decode(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.load(io.BytesIO(data))).float()


def train(url: str) -> None:
    """Train as one of the processes that torchrun started."""
    distributed.init_process_group("gloo")
    dataset = FileDataset(f"cachedfs::{url}", decode=decode, label=str, storage_options=OPTIONS)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, CLASSES)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    asked = dataset.fs.stats().requests  # of the listing
    with Loader(dataset, batch_size=10, shuffle="node", seed=0) as loader:  # 10 a process
        for epoch in range(EPOCHS):
            mine = []
            for inputs, paths in loader:
                classes = torch.tensor([int(path.split("/")[-2]) for path in paths])  # folders
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs / 255), classes)
                loss.backward()  # and the gradients of all processes are averaged
                optimizer.step()
                mine += paths
            ranks, before, asked = [None] * distributed.get_world_size(), asked, dataset.fs.stats().requests
            distributed.all_gather_object(ranks, (len({*mine}), asked - before))
            if distributed.get_rank() == 0:
                print(f"epoch {epoch}: (files, requests) of each rank {ranks}")
    distributed.destroy_process_group()


def main(url: str) -> None:
    """Start two nodes of one process on this machine, with a cache each and the variables that torchrun sets."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    command, nodes = [sys.executable, __file__, url], []
    with tempfile.TemporaryDirectory() as folder:
        for node in "01":
            own = {"RANK": node, "GROUP_RANK": node, "FSSPEC_CACHEDFS_CACHE_DIR": f"{folder}/{node}"}
            nodes.append(subprocess.Popen(command, env=os.environ | shared | own | {"LOCAL_WORLD_SIZE": "1"}))
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
