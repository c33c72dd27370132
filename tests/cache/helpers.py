"""Helpers of the tests of the cache: keys, bytes, other processes, files."""

import contextlib
import encodings.unicode_escape  # noqa: F401 - Python itself may be for root alone to read: see `use_as`
import os
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

from cachedfs.cache.block_store import BlockStore
from cachedfs.common.types import CacheBounds, ObjectKey
from cachedfs.errors import CacheError
from tests.cache.audit import audit

BLOCK = 64 << 10
PAGE = 64 << 10
AMPLE = CacheBounds(size=1 << 30, keep_free=0)
ROOT = Path(__file__).parents[2]


def key_of(path="b/x", version="v1", *, block_size=BLOCK, identity="gs://test"):
    return ObjectKey(identity, path, version, block_size)


def content(key, index, size=None):
    """Return the bytes of a block: always the same for the same block, different for different ones."""
    return random.Random(f"{key.digest}-{index}").randbytes(key.block_size if size is None else size)


def put(cache, key, *indexes, bounds=AMPLE, size=None):
    cache.put([(key.block(index), content(key, index, size)) for index in indexes], bounds)


def put_after_noticing(cache, key, *indexes, bounds=AMPLE):
    """Store blocks; a damaged index may be noticed only by the first try."""
    with contextlib.suppress(CacheError):
        return put(cache, key, *indexes, bounds=bounds)
    return put(cache, key, *indexes, bounds=bounds)


def whole(cache, key, index, **options):
    return cache.read(key, index, 0, key.block_size, **options)


def file_of(cache, key, index):
    (found,) = Path(cache.root or "").glob(f"blocks/*/{key.name(index)}")
    return found


def flip(path, offset):
    """Damage one byte of a file in place."""
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0xFF]))


def disk_usage(cache):
    """Return the bytes of all files of the cache at one moment: nobody makes room or reserves while we look."""
    for _ in range(20):  # a loaded machine may give us no turn for seconds
        with contextlib.suppress(sqlite3.OperationalError), cache._own.index.writing():
            return _bytes_of_files(cache.root or "")
    raise AssertionError("no turn to look at the files came")


def _bytes_of_files(root):
    sizes: dict[int, int] = {}  # by inode, as a file may move from one folder to the next under our eyes
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                status = os.lstat(os.path.join(folder, name))
            except FileNotFoundError:
                continue
            sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def room_for(cache, n_blocks):
    """Return bounds within which `n_blocks` and no more fit beside the bookkeeping that is there now."""
    key = key_of("probe")
    put(cache, key, 0)
    size = file_of(cache, key, 0).stat().st_size
    cache.evict(key.identity, None)
    overhead = overhead_of(cache, CacheBounds(size=1 << 23, keep_free=0))  # with the smallest log
    return CacheBounds(size=overhead + n_blocks * (size + 64) + BLOCK // 2, keep_free=0)


def overhead_of(cache, bounds):
    """Return how many bytes of the limit the bookkeeping takes now."""
    cache.allowance(bounds)
    return cache.space.overhead


def use_as(cache_dir, user, umask):
    """Use all of a cache as another user; return its root."""
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    os.umask(umask)
    cache, key = BlockStore(cache_dir, explicit=True), key_of()
    blocks = [content(key, 0), content(key, 1)]
    assert [whole(cache, key, index) for index in (0, 1)] in ([None, None], blocks)
    put(cache, key, 0, 1)
    assert [whole(cache, key, index) for index in (0, 1)] == blocks
    cache.pin("gs://test", "b/x")
    cache.metadata.counter("gs://test", "b/x")
    assert not cache.metadata.counters.is_private
    assert not cache.accesses.open().is_private
    assert cache.locks.take(7)
    assert cache.locks.works_across_processes
    with cache.lease(1000, AMPLE) as lease:
        lease.seal()
        assert len(Path(lease.path).read_bytes()) == 1000
    assert audit(cache).ok
    return str(cache.root)


def start(code, *args):
    """Run `code` in another process; it finds this module's names imported and its arguments in `sys.argv[1:]`."""
    prelude = "import os, sys\nimport tests.long_timeouts\nfrom tests.cache.helpers import *\nfrom cachedfs.cache.block_store import BlockStore\n"
    command = [sys.executable, "-W", "error", "-c", prelude + code, *map(str, args)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)


def finish(process, text=""):
    """Let the process end, and return what it printed."""
    output, _ = process.communicate(text, timeout=600)
    assert process.returncode == 0
    return output
