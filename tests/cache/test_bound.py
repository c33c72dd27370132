"""The size limit of the cache: several processes, a disk that others fill, and readers that never wait."""

import contextlib
import subprocess

import pytest

from cachedfs.cache import disk, space
from cachedfs.cache.index import database
from cachedfs.common.types import CacheBounds
from cachedfs.errors import CacheError
from tests.cache.audit import audit
from tests.cache.helpers import AMPLE, BLOCK, content, disk_usage, key_of, put, room_for, whole
from tests.support import until


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 16 MiB of its own."""
    point = tmp_path / "disk"
    point.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(point)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("this user cannot mount a disk of its own")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


def test_on_a_disk_that_is_full_to_the_last_byte_reads_are_right_and_storing_comes_back(
    open_cache, small_disk
):
    cache, key, bounds = open_cache(small_disk / "c"), key_of(), CacheBounds(size=1 << 30, keep_free=0)
    put(cache, key, *range(20), bounds=bounds)
    with open(small_disk / "of others", "wb", buffering=0) as others, contextlib.suppress(OSError):
        while True:
            others.write(bytes(BLOCK))
    for index in range(20, 40):
        with contextlib.suppress(CacheError):
            put(cache, key, index, bounds=bounds)
        for each in range(index):
            assert whole(cache, key, each) in (None, content(key, each))
    other = open_cache(small_disk / "c")
    assert whole(other, key, 0) in (None, content(key, 0))
    (small_disk / "of others").unlink()
    cache._own.look_at = 0.0  # a second later
    put(cache, key, *range(20), bounds=bounds)
    assert [whole(cache, key, index) for index in range(20)] == [content(key, index) for index in range(20)]
    assert audit(cache).ok


@pytest.mark.parametrize("how", ["put", "lease"])
def test_an_interrupted_eviction_keeps_its_progress(cache, monkeypatch, how):
    """One transaction for all would be undone, and done again by the next: short programs would never store anything."""
    monkeypatch.setattr(space, "REMOVED_AT_ONCE", 20)
    bounds, key, unlink, n_unlinked = room_for(cache, 2), key_of("b/many"), disk.unlink, 0
    put(cache, key, *range(200))

    def interrupted(path):
        nonlocal n_unlinked
        n_unlinked += "/blocks/" in path
        if n_unlinked == 110:
            raise KeyboardInterrupt
        return unlink(path)

    def use():
        if how == "put":
            put(cache, key_of("b/new"), 0, bounds=bounds)
        else:
            cache.lease(1, bounds).close()

    monkeypatch.setattr(disk, "unlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        use()
    assert cache.usage()[0] == 100
    use()
    assert cache.usage()[0] <= 2
    assert audit(cache).ok


def test_each_makes_room_for_its_own_bound_before_its_own_write(open_cache, folder):
    wide, narrow = open_cache(folder), open_cache(folder)
    large, small = room_for(wide, 32), room_for(wide, 8)
    for step in range(60):
        put(wide, key_of("wide"), step, bounds=large)
        assert disk_usage(wide) <= large.size
        if step % 20 == 19:
            assert wide.usage()[0] > 8
            put(narrow, key_of("narrow"), step, bounds=small)
            assert disk_usage(narrow) <= small.size
            assert whole(wide, key_of("narrow"), step) == content(key_of("narrow"), step)


def test_who_makes_room_never_stops_a_reader(open_cache, folder, fork_server, monkeypatch):
    """Another process is in the middle of an eviction, with all that it locks, for as long as we read."""
    cache, key, ready, go_on = open_cache(folder / "c"), key_of(), folder / "ready", folder / "go on"
    put(cache, key, *range(8))
    process = fork_server.start(
        "tests.cache.kills:hold_the_index", str(folder / "c"), 2, str(ready), str(go_on)
    )
    until(ready.exists)
    reader = open_cache(folder / "c")
    buffer = bytearray(BLOCK)
    assert [whole(reader, key, index) for index in (0, 1)] == [None, None]
    assert [whole(reader, key, index) for index in range(2, 8)] == [
        content(key, index) for index in range(2, 8)
    ]
    assert reader.read_into(key, 3, 0, memoryview(buffer)) == BLOCK
    assert reader.open(key, 4)
    assert reader.usage()[0] == 8  # what was true before that transaction
    assert reader.metadata.lookup("gs://test", "b/x") is None
    monkeypatch.setattr(database, "_WRITER_WAIT_S", 0.01)
    with pytest.raises(CacheError, match="locked"):
        put(reader, key, 9)
    monkeypatch.undo()
    assert whole(reader, key, 2) == content(key, 2)
    go_on.touch()
    fork_server.wait(process)
    put(reader, key, 9, bounds=AMPLE)
    assert audit(reader).ok
