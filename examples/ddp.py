"""Train on two processes with DistributedDataParallel: the Loader finds rank and world size, and each sample comes once.

The files are listed once, here; the processes share the cache, so that what one fetched the other never asks for. On GPUs
say "nccl", and `device=rank` to the Loader. Under torchrun, which starts the processes itself, the Loader is the same.

python examples/ddp.py                               # on a simulated Google Cloud Storage
python examples/ddp.py "gs://bucket/digits/*/*.npy"  # on your own: arrays of one shape, in a folder for each class
"""

import io
import os
import sys
import tempfile
import time

import numpy as np
import torch
from torch import distributed, multiprocessing, nn

from cachedfs.datasets import FileDataset, Loader

EPOCHS, WORLD_SIZE, CLASSES = 2, 2, 10
# The data do not change: nobody is asked whether they have.
OPTIONS = {"cachedfs": {"max_age": "immutable"}}


def decode(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.load(io.BytesIO(data))).float()


def label(path: str) -> tuple[int, str]:
    """Return the class, which is the name of the folder, and the path, to see which samples came."""
    return int(path.split("/")[-2]), path


def say(line: str) -> None:
    print(f"{line}\n", end="", flush=True)  # in one piece: both processes print


def train(rank: int, dataset: FileDataset, meeting: str) -> None:
    distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=WORLD_SIZE)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(dataset[0][0].numel(), CLASSES))
    model = nn.parallel.DistributedDataParallel(model)
    optimizer, asked = torch.optim.Adam(model.parameters(), lr=0.01), 0
    with Loader(dataset, batch_size=10, shuffle=True, seed=0) as loader:  # 10 a process
        for epoch in range(EPOCHS):
            began, mine = time.perf_counter(), []
            for inputs, (classes, paths) in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs / 255), classes)
                loss.backward()  # and the gradients of all processes are averaged
                optimizer.step()
                mine += paths
            seconds, before, asked = time.perf_counter() - began, asked, dataset.fs.stats().requests
            took = f"{len(mine)} samples in {seconds:.2f} s, {asked - before} requests"
            say(f"epoch {epoch}, rank {rank}: {took}")
            gathered = [None] * WORLD_SIZE
            distributed.all_gather_object(gathered, mine)
            if rank == 0:
                seen = [path for paths in gathered for path in paths]
                say(f"epoch {epoch}: {len(seen)} samples, {len({*seen})} different, of {len(dataset)}")
    distributed.destroy_process_group()


def main(url: str) -> None:
    dataset = FileDataset(f"cachedfs::{url}", decode=decode, label=label, storage_options=OPTIONS)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(train, (dataset, os.path.join(folder, "meeting")), nprocs=WORLD_SIZE)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        import simulated

        with simulated.cloud("gs", simulated.digits_npy):
            main("gs://demo/digits/*/*.npy")
