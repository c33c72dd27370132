"""Train on images and labels in one HDF5 file, in random order, without downloading it first.

A chunk brings all of its samples, so the order is drawn among windows of 8 chunks, each of which is read and decompressed once.
The report at the end says what limited the last epoch.

python examples/hdf5_rows.py                                      # on a simulated Google Cloud Storage
python examples/hdf5_rows.py gs://bucket/train.h5 images labels   # on your own, and the names of its two datasets
"""

import sys
import time

import torch

from cachedfs.datasets import HDF5Dataset, Loader

EPOCHS, CLASSES = 3, 10
# The data do not change: nobody is asked whether they have.
OPTIONS = {"cachedfs": {"max_age": "immutable"}}


def main(url: str, image: str = "image", label: str = "label") -> None:
    train = HDF5Dataset(f"cachedfs::{url}", (image, label), storage_options=OPTIONS)
    print(
        f"{len(train):,} samples, {train.shapes[image]} of {train.dtypes[image]}; {train.group_size} a chunk"
    )
    asked = 0
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with Loader(train, batch_size=50, shuffle="window", window=8, seed=0) as loader:
        for epoch in range(EPOCHS):
            began, n, n_right = time.perf_counter(), 0, 0
            for images, labels in loader:
                guessed = model(images / 255)
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(guessed, labels).backward()
                optimizer.step()
                n, n_right = n + len(labels), n_right + int((guessed.argmax(1) == labels).sum())
            seconds, before, asked = time.perf_counter() - began, asked, train.fs.stats().requests
            print(
                f"epoch {epoch}: {n:,} samples in {seconds:.2f} s, {asked - before} requests, {n_right / n:.0%} right"
            )
        print(loader.report())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(*sys.argv[1:])
    else:
        import simulated

        with simulated.cloud("gs", simulated.digits_hdf5):
            main("gs://demo/digits.h5")
