"""A day in the life of a cache: all that it is used for. Faults and kills are tried at its steps."""

import contextlib
import os
import time
from pathlib import Path

from cachedfs.cache.access_stats import AccessStats
from cachedfs.cache.block_store import BlockStore
from cachedfs.cache.index.metadata_records import MetadataRecord
from cachedfs.common.types import CacheBounds, ObjectInfo
from cachedfs.errors import CacheError
from tests.cache.helpers import BLOCK, content, key_of, put, whole

KEY, OTHER = key_of("b/x"), key_of("b/other")
N_OTHER = 24  # more blocks than fit
FACT = MetadataRecord("gs://test", "b/x", ObjectInfo("b/x", size=3 * BLOCK, fingerprint="v1"), time.time(), 5)
SMALL = CacheBounds(size=7 << 19, keep_free=0)  # a few blocks, beside the bookkeeping


@contextlib.contextmanager
def tried():
    """What writes may be a CacheError, and nothing else."""
    with contextlib.suppress(CacheError):
        yield


def is_right(data, key, index):
    return data is None or data == content(key, index)


def day(directory):
    """Use a cache, from opening to closing, and once more after another program was there; return it."""
    cache = BlockStore(str(directory), explicit=True)
    use(cache)
    leave_remnants(cache)
    again = BlockStore(str(directory), explicit=True)
    assert is_right(whole(again, OTHER, 22), OTHER, 22)
    with tried():
        again.allowance(SMALL)
    again.close()
    return cache


def use(cache, bounds=SMALL):
    """Do everything that a cache is for, and close it; what is read is right or a miss."""
    store_and_read(cache, bounds)
    keep_metadata(cache)
    pin_lock_and_lend(cache, bounds)
    make_room(cache, bounds)
    cache.close()


def store_and_read(cache, bounds):
    with tried():
        put(cache, KEY, 0, 1, bounds=bounds)
    with tried():
        absent = MetadataRecord("gs://test", "b/y", None, time.time(), 5)
        cache.put([(KEY.block(2), content(KEY, 2))], bounds, records=[absent])
    buffer = memoryview(bytearray(BLOCK))
    for index in range(3):
        assert is_right(whole(cache, KEY, index), KEY, index)
        if cache.read_into(KEY, index, 0, buffer) > 0:
            assert buffer == content(KEY, index)
        with contextlib.suppress(BlockingIOError):
            assert is_right(whole(cache, KEY, index, nowait=True), KEY, index)
        cache.open(KEY, index)
    cache.close()
    assert is_right(whole(cache, KEY, 0), KEY, 0)


def keep_metadata(cache):
    counter = cache.metadata.counter("gs://test", "b/x")
    with tried():
        cache.metadata.keep_records([FACT._replace(counter=counter)])
    found = cache.metadata.lookup("gs://test", "b/x")
    assert found is None or found.info == FACT.info
    with tried():
        cache.metadata.keep_listings(
            "gs://test", {"b": [FACT.info]}, checked_at=1e9, counters={}, folder_counters={"b": 3}
        )
    assert (cache.metadata.listing("gs://test", "b") or (0, 0, 3))[2] == 3
    cache._own.look_at = 0.0
    cache.metadata.changed("gs://test", ["b/x"])
    assert cache.metadata.counter("gs://test", "b/x") != counter
    cache.metadata.counters.tables[0].invalidate()  # as a process does that cannot write them
    AccessStats().touch(KEY, 7)


def pin_lock_and_lend(cache, bounds):
    with tried():
        cache.pin("gs://test", "b/x")
    assert cache.pins() in ([], [("gs://test", "b/x")])
    if cache.locks.take(7):
        cache.locks.release(7)
    with tried(), cache.lease(1000, bounds) as lease:
        lease.write_at(0, b"x")
        lease.seal()


def make_room(cache, bounds):
    with tried():
        put(cache, OTHER, *range(N_OTHER), bounds=bounds)
    assert is_right(whole(cache, OTHER, 23), OTHER, 23)
    cache.remove_damaged(OTHER, 23)
    with tried():
        cache.unpin("gs://test", "b/x")
    with tried():
        cache.evict("gs://test", "b/x")
    with tried():
        cache.allowance(CacheBounds())
    cache.usage()
    cache.has(KEY, 0)
    cache._own.look_at = 0.0
    cache.close_deleted()
    cache.metadata.lookup("gs://test", "b/x")


def leave_remnants(cache):
    """What others left in the folder of temporary files long ago: a file, and a folder that was in a block's place."""
    for name in ("folder", "folder/file", "file"):
        path = Path(cache.root or "", "tmp", name)
        with contextlib.suppress(OSError):  # there is none on such a day
            path.mkdir() if name == "folder" else path.touch()
    for path in Path(cache.root or "", "tmp").glob("*"):
        os.utime(path, (0, 0))
