"""Microseconds per operation of the cache on a warm page cache; the argument is a directory on the disk to measure."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable

from cachedfs.cache.block_store import BlockStore
from cachedfs.cache.change_counters import slots_of
from cachedfs.cache.index.metadata_records import MetadataRecord
from cachedfs.common.types import CacheBounds, ObjectInfo, ObjectKey

MIB = 1 << 20
BOUNDS = CacheBounds(size=2 << 30, keep_free=0)


def per_op(label: str, work: Callable[[int], object], n: int, *, target_us: float | None = None) -> None:
    """Print the best of five runs of `n` calls."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for i in range(n):
            work(i)
        best = min(best, time.perf_counter() - start)
    target = "" if target_us is None else f"   (target {target_us} us)"
    print(f"{label:44} {best / n * 1e6:9.2f} us{target}")


def put_rate(cache: BlockStore) -> None:
    """Print the rate of putting batches of 8 new blocks of 1 MiB: median and best of 12."""
    data = os.urandom(MIB)
    rates = []
    for batch in range(12):
        key = ObjectKey("bench", f"put/{batch}", "v1", MIB)
        blocks = [(key.block(i), data) for i in range(8)]
        start = time.perf_counter()
        cache.put(blocks, BOUNDS)
        rates.append(8 * MIB / 1e6 / (time.perf_counter() - start))
    rates.sort()
    print(f"{'put, 8 blocks of 1 MiB':44} {rates[6]:9.0f} MB/s median, {rates[-1]:.0f} best   (target 600)")


def main(folder: str) -> None:
    cache = BlockStore(folder, explicit=True)
    put_rate(cache)
    key = ObjectKey("bench", "read", "v1", MIB)
    cache.put([(key.block(i), os.urandom(MIB)) for i in range(8)], BOUNDS)
    buffer = memoryview(bytearray(32768))
    cache.read(key, 0, 0, MIB)
    per_op("read 4 KiB, warm handle", lambda i: cache.read(key, 0, 4096, 8192), 20000, target_us=2.5)
    per_op("read 4 KiB, warm handle, nowait", lambda i: cache.read(key, 0, 4096, 8192, nowait=True), 20000)
    per_op("read 4 KiB, warm handle, verify", lambda i: cache.read(key, 0, 4096, 8192, verify=True), 5000)
    per_op("read 1 MiB, warm handle", lambda i: cache.read(key, 0, 0, MIB), 500)
    per_op(
        "read_into 32 KiB, warm handle",
        lambda i: cache.read_into(key, 0, 65536, buffer),
        20000,
        target_us=3.0,
    )

    def reopened(i: int) -> None:
        cache.close_open()
        cache.read(key, 1, 4096, 8192)

    per_op("read 4 KiB, opened again (64 KiB checked)", reopened, 3000)
    per_op("read of an absent block", lambda i: cache.read(key, 99, 0, 4096), 5000)
    per_op("has", lambda i: cache.has(key, 0), 20000)
    per_op("touch", lambda i: cache.touch(key, 0), 50000, target_us=0.5)
    now = time.time()
    info = ObjectInfo("b/x", size=7, fingerprint="1", details={"etag": "x", "generation": "1"})
    known = cache.metadata
    known.keep_records(
        [MetadataRecord("bench", f"b/{i}", info, now, known.counter("bench", f"b/{i}")) for i in range(1000)]
    )
    per_op("lookup of a fact", lambda i: known.lookup("bench", f"b/{i % 1000}"), 5000, target_us=15)
    per_op(
        "keep one fact", lambda i: known.keep_records([MetadataRecord("bench", f"b/{i}", info, now, 1)]), 300
    )
    slots = slots_of("bench", "b/x")
    per_op("counter_at", lambda i: known.counter_at(slots), 50000)
    per_op("counter", lambda i: known.counter("bench", "b/x"), 20000)
    per_op("changed, 3 levels deep", lambda i: known.changed("bench", ["b/c/d/x"]), 5000)
    per_op("fetch lock taken and released", lambda i: (cache.locks.take(i), cache.locks.release(i)), 5000)
    cache.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
