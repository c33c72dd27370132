"""Read every file below a folder twice, a batch at a time: once from the cloud, once from the cache.

python examples/small_files.py                       # on a simulated Google Cloud Storage
python examples/small_files.py gs://bucket/folder    # on your own
"""

import sys
import time

import fsspec

BATCH = 64


def read_all(fs, folder: str) -> int:
    """Return the bytes of all files below `folder`, read a batch at a time."""
    names = fs.find(folder)
    batches = [names[start : start + BATCH] for start in range(0, len(names), BATCH)]
    return sum(len(data) for batch in batches for data in fs.cat(batch).values())


def main(url: str) -> None:
    fs, folder = fsspec.url_to_fs(f"cachedfs::{url}", concurrency=BATCH)
    for when in ("first pass", "second pass"):
        requests, began = fs.stats().requests, time.perf_counter()
        size = read_all(fs, folder)
        seconds = time.perf_counter() - began
        print(f"{when}: {size:,} bytes in {seconds:.2f} s, {fs.stats().requests - requests} requests")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        import simulated

        with simulated.cloud("gs", simulated.texts):
            main("gs://demo/texts")
