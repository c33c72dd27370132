"""Decode and resize images with NVIDIA's DALI while the Loader reads them, the next batches ahead.

DALI reads no fsspec URL. Its `external_source` takes the Loader's batches of encoded images as they are in their files, and it
decodes them: on the GPU where there is one, else on the CPU. `loader.state_dict()` counts the batches that DALI asked for.

pip install nvidia-dali-cuda120                                # for CUDA 12
python examples/dali_images.py                                 # on a simulated Google Drive
python examples/dali_images.py "drive://My Drive/kitti/*.png"  # on your own
"""

import contextlib
import sys
import time

import numpy as np
import torch

from cachedfs.datasets import FileDataset, Loader

try:
    from nvidia.dali import fn, pipeline_def, types
except ModuleNotFoundError:
    sys.exit("This example needs NVIDIA's DALI: pip install nvidia-dali-cuda120")

EPOCHS, BATCH = 2, 16
OPTIONS = {"cachedfs": {"max_age": "immutable"}}  # the data do not change
GPU, WHERE = (0, "GPU") if torch.cuda.is_available() else (None, "CPU")


def number(path: str) -> int:
    """Return a label: here the number that the file is named by."""
    return int("".join(filter(str.isdigit, path.rpartition("/")[2])))


class Fed(Loader):
    """A Loader whose batches are NumPy arrays, as DALI takes them."""

    def __iter__(self):
        for encoded, label in super().__iter__():
            yield [np.frombuffer(image, np.uint8) for image in encoded], label.numpy()


@pipeline_def(batch_size=BATCH, num_threads=2, device_id=GPU)
def pipeline(source):
    encoded, label = fn.external_source(
        source, num_outputs=2, dtype=[types.UINT8, types.INT64], batch=True, cycle="raise"
    )
    pixels = fn.decoders.image(encoded, device="cpu" if GPU is None else "mixed")
    pixels = fn.crop_mirror_normalize(fn.resize(pixels, size=[128, 416]), dtype=types.FLOAT, std=[255.0] * 3)
    return pixels, label


def main(url: str) -> None:
    images = FileDataset(f"cachedfs::{url}", label=number, storage_options=OPTIONS)
    asked = images.fs.stats().requests
    with Fed(images, batch_size=BATCH, shuffle=True, seed=0) as loader:
        pipe = pipeline(loader)
        pipe.build()
        for epoch in range(EPOCHS):
            began, seen = time.perf_counter(), set()
            with contextlib.suppress(StopIteration):  # the end of the epoch
                while True:
                    pixels, labels = pipe.run()
                    seen |= {*labels.as_array().tolist()}
            pipe.reset()
            seconds, before, asked = time.perf_counter() - began, asked, images.fs.stats().requests
            found = f"{len(seen)} different images in {seconds:.2f} s"
            print(f"epoch {epoch}: {found}, {asked - before} requests")
    print(f"an image of the last batch: {pixels.shape()[0]}, decoded on the {WHERE}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        import simulated

        with simulated.cloud("drive", simulated.street_images):
            main("drive://My Drive/kitti/*.png")
