"""Read a folder of small files twice, as a training without torch does: list it once, then read in random order, in batches.

python examples/small_files.py                                 # on a simulated Google Drive
python examples/small_files.py "drive://My Drive/data/images"  # on your own, signed in as docs/guide-drive.md says
python examples/small_files.py gs://bucket/folder              # the same on Cloud Storage
"""

import random
import sys
import time

import fsspec

BATCH = 32


def epoch(fs, names: list[str], seed: int) -> int:
    """Return the bytes of all files, read in another order each time, a batch at a time."""
    names = random.Random(seed).sample(names, len(names))
    batches = [names[start : start + BATCH] for start in range(0, len(names), BATCH)]
    return sum(len(data) for batch in batches for data in fs.cat(batch).values())


def main(url: str) -> None:
    # The cloud is asked once for each file, and never whether it has changed: a data set does not.
    fs, folder = fsspec.url_to_fs(f"cachedfs::{url}", max_age="immutable", concurrency=BATCH)
    began = time.perf_counter()
    files = fs.find(folder, detail=True)
    names = [name for name, info in files.items() if info["size"] is not None]  # Google's documents have none
    print(f"{len(names)} files listed in {time.perf_counter() - began:.2f} s")
    for number in range(2):
        requests, began = fs.stats().requests, time.perf_counter()
        size = epoch(fs, names, seed=number)
        seconds = time.perf_counter() - began
        print(f"epoch {number}: {size:,} bytes in {seconds:.2f} s, {fs.stats().requests - requests} requests")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        import simulated

        with simulated.cloud("drive", simulated.images):
            main("drive://My Drive/images")
