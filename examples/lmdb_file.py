"""Read an LMDB file that lies in the cloud: LMDB takes a path and maps what is there, so `fs.local_path` lends it one.

The first session fetches the file, in requests of 8 MiB, 16 at a time. The next ones find it in the cache, and ask only
whether it has changed, at most once in `max_age`. Needs lmdb.

python examples/lmdb_file.py                         # on a simulated Google Cloud Storage
python examples/lmdb_file.py gs://bucket/train.lmdb  # on your own: the file itself, data.mdb where LMDB made a folder
"""

import random
import sys
import time

import fsspec
import lmdb


def read_all(path: str, seed: int) -> tuple[int, int]:
    """Return how many records there are, and their bytes; read by their keys, in random order."""
    with (
        lmdb.open(path, subdir=False, readonly=True, lock=False, readahead=False) as database,
        database.begin() as records,
    ):
        keys = [*records.cursor().iternext(values=False)]
        random.Random(seed).shuffle(keys)
        return len(keys), sum(len(records.get(key)) for key in keys)


def main(url: str) -> None:
    fs, path = fsspec.url_to_fs(f"cachedfs::{url}")
    asked = 0
    for session in range(2):
        began = time.perf_counter()
        with fs.local_path(path) as local:  # a file of this machine, until the end of the block
            lent = time.perf_counter() - began
            n, size = read_all(local, seed=session)
        seconds, before, asked = time.perf_counter() - began, asked, fs.stats().requests
        print(
            f"session {session}: {n:,} records, {size:,} bytes in {seconds:.2f} s, {asked - before} requests"
        )
        print(f"  {lent:.2f} s of it until there was a path")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        import simulated

        with simulated.cloud("gs", simulated.digits_lmdb):
            main("gs://demo/digits.lmdb")
