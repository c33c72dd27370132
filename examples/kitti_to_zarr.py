"""Pack a folder of images into a few objects once, and train on those: no epoch asks for each image again.

7,481 images of KITTI are 7,481 requests, which Drive answers at 27 to 200 a second; packed they are tens of objects, decoded
already. KITTI's images differ by some pixels in size, so those of a batch are cut to the smallest of them. Needs Pillow.

python examples/kitti_to_zarr.py                          # on a simulated Google Drive
python examples/kitti_to_zarr.py "drive://My Drive/kitti/image_2" "drive://My Drive/kitti.zarr"  # your images, and where to
"""

import sys
import time

import fsspec
import torch

from cachedfs.datasets import Loader, ZarrDataset, pack

EPOCHS = 2
# The data do not change: nobody is asked whether they have.
OPTIONS = {"cachedfs": {"max_age": "immutable"}}


def cut(samples: list) -> tuple[torch.Tensor, list[str]]:
    """Return a batch: images of one size, channels first as a network takes them, and the names of their files."""
    height, width = (min(image.shape[axis] for image, _ in samples) for axis in (0, 1))
    pixels = torch.stack([torch.from_numpy(image[:height, :width]) for image, _ in samples])
    return pixels.permute(0, 3, 1, 2), [name for _, name in samples]


def main(source: str, target: str) -> None:
    source, target = f"cachedfs::{source}", f"cachedfs::{target}"
    fs, path = fsspec.url_to_fs(target)
    if not fs.exists(f"{path}/zarr.json"):  # written last: what has it is complete
        print(pack(source, target, decode="image"))
    asked = fs.stats().requests
    images = ZarrDataset(target, storage_options=OPTIONS)
    with Loader(images, batch_size=16, shuffle=True, seed=0, collate_fn=cut) as loader:
        for epoch in range(EPOCHS):
            began, seen, colour = time.perf_counter(), set(), torch.zeros(3)
            for pixels, names in loader:
                # Train on them; here their mean is taken, by which one normalises them.
                colour += pixels.float().mean(dim=(2, 3)).sum(dim=0)
                seen |= {*names}
            seconds, before, asked = time.perf_counter() - began, asked, fs.stats().requests
            print(
                f"epoch {epoch}: {len(seen):,} different images in {seconds:.2f} s, {asked - before} requests"
            )
    print(
        f"the last batch: {tuple(pixels.shape)}; the mean colour:",
        *(colour / len(images)).round().int().tolist(),
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(*sys.argv[1:])
    else:
        import simulated

        with simulated.cloud("drive", simulated.street_images):
            main("drive://My Drive/kitti", "drive://My Drive/kitti.zarr")
