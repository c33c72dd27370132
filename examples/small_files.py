"""Read every file below a folder twice, a batch at a time: once from the cloud, once from the cache.

python examples/small_files.py                       # on a simulated Google Cloud Storage
python examples/small_files.py gs://bucket/folder    # on your own
"""

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
import time

import fsspec

BATCH = 64


@contextlib.contextmanager
def simulated_folder():
    """Give the URL of 200 small files at a simulated cloud that is 45 ms away."""
    from cachedfs.sim import GCSServer

    with GCSServer(profile="table", process=True) as server:
        for i in range(200):
            server.put("demo", f"texts/{i:03}.txt", b"one line of text\n" * 100)
        os.environ["FSSPEC_GS_TOKEN"], os.environ["FSSPEC_GS_ENDPOINT_URL"] = "anon", server.endpoint_url
        fsspec.config.set_conf_env(fsspec.config.conf)
        cache_dir = tempfile.mkdtemp()
        atexit.register(
            shutil.rmtree, cache_dir, ignore_errors=True
        )  # after cachedfs has stored its last block
        fsspec.config.conf["cachedfs"] = {"cache_dir": cache_dir}
        yield "gs://demo/texts"


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
    with contextlib.nullcontext(sys.argv[1]) if len(sys.argv) > 1 else simulated_folder() as url:
        main(url)
