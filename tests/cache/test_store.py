"""Storing and evicting blocks: size limit, order, pins, leases, and disks that are full or gone."""

import contextlib
import errno
import os
import shutil
import sqlite3
import stat
import time
from pathlib import Path

import pytest

from cachedfs.cache import block_store, directory, disk
from cachedfs.cache.index import database
from cachedfs.cache.index.block_rows import IndexRows
from cachedfs.common.types import CacheBounds
from cachedfs.errors import CacheError
from tests.cache.audit import audit, recount
from tests.cache.faults import replace_call
from tests.cache.helpers import (
    AMPLE,
    BLOCK,
    content,
    disk_usage,
    file_of,
    key_of,
    put,
    put_after_noticing,
    room_for,
    start,
    whole,
)

MIB = 1 << 20


def test_files_are_for_us_alone(cache):
    put(cache, key_of(), 0)
    root = Path(cache.root)
    for path in [root, *root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (
            0o700 if path.is_dir() else 0o600
        ) or path.name.startswith("index")
        assert not stat.S_IMODE(root.stat().st_mode) & 0o077


def test_blocks_are_evicted_in_exact_lru_order(cache):
    bounds, key = room_for(cache, 32), key_of()
    for index in range(32):
        put(cache, key, index, bounds=bounds)
    for index in (0, 5, 9, 20):
        assert whole(cache, key, index) is not None
    order = [index for index in range(32) if index not in (0, 5, 9, 20)] + [0, 5, 9, 20]
    assert cache.evictions == 1  # the probe
    for n, index in enumerate(order, start=1):
        put(cache, key_of("other"), index, bounds=bounds)
        assert not cache.has(key, index)
        assert sum(cache.has(key, each) for each in range(32)) == 32 - n


def test_a_block_larger_than_the_bound_is_refused_and_costs_nobody_his_place(cache):
    put(cache, key_of(), 0)
    with pytest.raises(CacheError, match="does not fit"):
        put(cache, key_of("large", block_size=MIB), 0, bounds=CacheBounds(size=MIB, keep_free=0))
    assert cache.has(key_of(), 0)
    assert "does not fit" in cache.cannot_store
    put(cache, key_of(), 1)
    assert cache.cannot_store is None


def test_the_automatic_bound_is_half_of_what_was_free_and_is_recorded(cache, monkeypatch):
    space = disk.DiskSpace(total=100 * MIB, free=16 * MIB)
    monkeypatch.setattr(disk, "space", lambda path: space)
    put(cache, key_of(), 0, bounds=CacheBounds(None, 0))
    with cache._own.index.reading() as rows:
        assert rows.load_totals().automatic_size == 8 * MIB
    space = disk.DiskSpace(total=100 * MIB, free=90 * MIB)
    for index in range(200):
        put(cache, key_of(), index, bounds=CacheBounds(None, 0))
    assert disk_usage(cache) <= 8 * MIB
    assert cache.evictions > 50


def test_space_is_kept_free_even_at_the_cost_of_blocks(cache, monkeypatch):
    key = key_of()
    put(cache, key, *range(16))
    bounds = CacheBounds(size=1 << 30, keep_free=0.1)
    before = cache.usage()[1]

    free = (
        10 * MIB + cache.space.growth
    )  # what the bookkeeping may come to have stays free beside `keep_free`
    monkeypatch.setattr(disk, "space", lambda path: disk.DiskSpace(total=100 * MIB, free=free))
    put(cache, key, 16, bounds=bounds)
    assert cache.usage() == (16, before)
    free = 10 * MIB + cache.space.growth - 4 * BLOCK
    cache._own.look_at = 0.0  # a second later
    put(cache, key, 17, bounds=bounds)
    assert cache.usage()[0] in (11, 12)
    free = 0
    cache._own.look_at = 0.0
    with pytest.raises(CacheError):
        put(cache, key, 18, bounds=bounds)


def test_space_is_kept_free_also_when_the_rows_that_go_have_no_files(cache, monkeypatch):
    """They give no space back, whatever they were counted for."""
    ghosts, key, others, room = key_of("ghosts"), key_of(), 0, 100 * MIB
    put(cache, ghosts, *range(4))
    for index in range(4):
        file_of(cache, ghosts, index).unlink()
    put(cache, key, *range(8))

    def used():
        return others + sum(path.stat().st_size for path in Path(cache.root, "blocks").glob("*/*"))

    monkeypatch.setattr(disk, "space", lambda path: disk.DiskSpace(total=room, free=room - used()))
    others = int(0.9 * room) - used() - cache.space.growth  # not a byte more may be written
    for index in range(8, 16):
        put(cache, key, index, bounds=CacheBounds(size=1 << 30, keep_free=0.1))
        assert used() <= 0.9 * room


def test_pinned_blocks_stay_and_unpinned_ones_go(cache, open_cache):
    bounds, key, other = room_for(cache, 4), key_of("pinned"), key_of("other")
    put(cache, key, 0, bounds=bounds)
    cache.pin(key.identity, key.path)
    cache.close()
    cache = open_cache()
    put(cache, key, 1, bounds=bounds)  # born pinned
    put(cache, other, *range(10), bounds=bounds)
    assert cache.has(key, 0)
    assert cache.has(key, 1)
    assert cache.pins() == [(key.identity, key.path)]
    cache.unpin(key.identity, key.path)
    put(cache, other, *range(10, 20), bounds=bounds)
    assert not cache.has(key, 0)
    assert cache.pins() == []


def test_pins_that_cannot_fit_are_refused_at_the_put(cache):
    bounds, key = room_for(cache, 2), key_of("pinned")
    cache.pin(key.identity, key.path)
    put(cache, key, 0, 1, bounds=bounds)
    with pytest.raises(CacheError, match="are pinned"):
        put(cache, key, 2, bounds=bounds)
    with pytest.raises(CacheError, match="are pinned"):
        put(cache, key_of("other"), 0, bounds=bounds)
    assert cache.has(key, 0)
    assert cache.has(key, 1)


def test_evicting_a_path_takes_all_versions_of_it_and_of_what_is_below_and_nothing_else(cache, monkeypatch):
    monkeypatch.setattr(block_store, "REMOVED_AT_ONCE", 2)
    below, others = ["b/x", "b/x/1", "b/x/2/3"], ["b/x.txt", "b/x0", "b/y"]
    elsewhere = key_of(identity="gs://elsewhere")
    for key in [key_of(version="v2"), elsewhere, *map(key_of, below + others)]:
        put(cache, key, 0, 1)
    cache.pin("gs://test", "b/x")
    before = cache.usage()[1]
    assert cache.usage() == (16, before)
    freed = cache.evict("gs://test", "b/x")
    assert cache.usage() == (8, before - freed)
    assert not any(cache.has(key, 1) for key in [key_of(version="v2"), *map(key_of, below)])
    assert all(cache.has(key_of(path), 1) for path in others)
    assert cache.evict("gs://test", None) > 0
    assert cache.has(elsewhere, 0)
    assert cache.evict(None) > 0
    assert cache.usage() == (0, 0)


def test_a_reader_keeps_the_bytes_of_an_evicted_block_and_space_comes_back(cache, open_cache):
    key = key_of()
    put(cache, key, 0)
    other = open_cache()
    assert whole(other, key, 0) is not None
    cache.evict(key.identity, key.path)
    assert whole(other, key, 0) == content(key, 0)
    assert len(other.open_blocks) == 1
    other._own.look_at = other.accesses._flush_at = 0.0  # a second later
    assert whole(other, key, 0) == content(key, 0)
    assert len(other.open_blocks) == 0
    assert whole(other, key, 0) is None


def test_a_lease_is_counted_private_and_gone_when_closed(cache):
    lease = cache.lease(100_000, AMPLE)
    assert os.stat(lease.path).st_size == 100_000
    lease.write_at(50_000, b"y" * 50_000)
    lease.write_at(0, b"x" * 50_000)
    with pytest.raises(CacheError, match="reserved for"):
        lease.write_at(99_999, b"xx")
    lease.seal()
    with pytest.raises(CacheError, match="sealed"):
        lease.write_at(0, b"x")
    assert stat.S_IMODE(os.stat(lease.path).st_mode) == 0o400
    assert Path(lease.path).read_bytes() == b"x" * 50_000 + b"y" * 50_000
    lease.close()
    lease.close()
    assert not os.path.exists(lease.path)


def test_leases_make_room_and_are_refused_without(cache):
    bounds, key = room_for(cache, 8), key_of()
    put(cache, key, *range(8), bounds=bounds)
    with cache.lease(4 * BLOCK, bounds):
        assert 3 <= cache.usage()[0] <= 4
        put(cache, key, *range(8), bounds=bounds)
        assert cache.usage()[0] <= 4
        assert disk_usage(cache) <= bounds.size
        with pytest.raises(CacheError, match="no room"):
            cache.lease(8 * BLOCK, bounds)


def leasing(folder, before=""):
    """Return another process that has a lease, and the path of that."""
    code = "lease = BlockStore(sys.argv[1], explicit=True).lease(5000, AMPLE)\nprint(lease.path, flush=True)\nsys.stdin.read()"
    process = start(before + code, folder)
    return process, process.stdout.readline().strip()


def test_the_lease_of_a_killed_process_makes_room(cache):
    process, path = leasing(Path(cache.root).parent)
    bounds = room_for(cache, 2)
    put(cache, key_of(), 0, 1, 2, bounds=bounds)
    assert os.path.exists(path)
    assert audit(cache).ok
    process.kill()
    process.communicate()
    assert audit(cache).leftovers == (path,)
    cache._own.look_at = 0.0  # a second later
    put(cache, key_of(), 3, 4, bounds=bounds)
    assert not os.path.exists(path)


def test_on_a_network_disk_the_lease_of_a_killed_process_makes_room_after_a_day(
    open_cache, tmp_path, monkeypatch
):
    monkeypatch.setattr(disk, "is_network", lambda path: True)
    cache = open_cache(tmp_path)
    on_network = "from cachedfs.cache import disk\ndisk.is_network = lambda path: True\n"
    process, path = leasing(tmp_path, on_network)
    with cache.lease(100, AMPLE) as ours:
        process.kill()
        process.communicate()
        assert audit(cache).ok  # in another container its process may live
        for leased in (path, ours.path):
            os.utime(leased, (0, time.time() - 86401))
        assert audit(cache).leftovers == (path,)
        cache.allowance(AMPLE)
        assert not os.path.exists(path)
        assert os.path.exists(ours.path)
    assert audit(cache).ok
    assert cache.usage() == (0, 0)


def full(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("step", ["write_file", "os.rename"])
def test_a_full_disk_is_a_cache_error_leaves_nothing_and_evicts_once_a_minute(
    cache, monkeypatch, step, caplog
):
    put(cache, key_of(), *range(5))
    with monkeypatch.context() as patch:
        replace_call(patch, step, full)
        for n_left in (3, 3, 1):
            if n_left == 1:
                cache._evict_again_at = 0.0  # a minute later
            with pytest.raises(CacheError, match="No space left"):
                put(cache, key_of("new"), 1)
            assert cache.usage()[0] == n_left  # others were evicted, in vain
    assert list(Path(cache.root, "tmp").iterdir()) == []
    assert audit(cache).ok
    assert "No space left" in cache.cannot_store
    assert len([record for record in caplog.records if "not cached" in record.message]) == 1
    put(cache, key_of("new"), 1)
    assert cache.cannot_store is None


def test_a_disk_without_inodes_evicts_the_oldest_blocks_for_new_ones(cache, monkeypatch):
    """A new file or folder takes one, and a removed file gives one back."""
    old, new, unlink, free = key_of("old"), key_of("new"), disk.unlink, 0
    put(cache, old, *range(20))

    def taking(call):
        def take(path, *args):
            nonlocal free
            if free < 1:
                full()
            free -= 1
            return call(path, *args)

        return take

    def give(path):
        nonlocal free
        was_there = unlink(path)
        free += was_there
        return was_there

    make_folder = taking(disk.make_folder)
    monkeypatch.setattr(disk, "make_folder", lambda path: os.path.isdir(path) or make_folder(path))
    monkeypatch.setattr(disk, "write_file", taking(disk.write_file))
    monkeypatch.setattr(disk, "unlink", give)
    put(cache, new, 0, 1, 2)
    assert [cache.has(new, index) for index in range(3)] == [True] * 3
    n_evicted = 20 - sum(cache.has(old, index) for index in range(20))
    assert n_evicted == 6  # a file and a folder for each
    assert [cache.has(old, index) for index in range(7)] == [False] * 6 + [True]
    assert cache.cannot_store is None
    assert audit(cache).ok


def test_a_disk_that_fails_in_the_middle_keeps_the_blocks_that_are_whole(cache, monkeypatch):
    calls, write_file = [], disk.write_file

    def failing(*args):
        calls.append(args)
        if len(calls) == 3:
            raise OSError(errno.EIO, "Input/output error")
        write_file(*args)

    monkeypatch.setattr(disk, "write_file", failing)
    put(cache, key_of("first"), 99)
    calls.clear()
    with pytest.raises(CacheError):
        put(cache, key_of(), 0, 1, 2, 3)
    assert [cache.has(key_of(), index) for index in range(4)] == [True, True, False, False]
    assert cache.usage()[0] == 3
    assert audit(cache).ok


def test_another_process_that_is_writing_a_block_keeps_its_reservation(cache, open_cache, monkeypatch):
    bounds, key, other = room_for(cache, 1), key_of(), open_cache()
    looks, admitted_after = [], IndexRows.admitted_after
    monkeypatch.setattr(
        IndexRows, "admitted_after", lambda self, *args: looks.append(args) or admitted_after(self, *args)
    )

    def meanwhile(source, target):
        with pytest.raises(CacheError, match="are writing"):
            put(other, key_of("other"), 0, bounds=bounds)
        os.rename(source, target)

    with monkeypatch.context() as patch:
        replace_call(patch, "os.rename", meanwhile)
        put(cache, key, 0, bounds=bounds)
    assert whole(cache, key, 0) == content(key, 0)
    assert audit(cache).ok
    assert len(looks) < 20  # a few for each attempt to find what may be evicted


@pytest.mark.parametrize("harm", ["sleep", "no index", "count", "no locks, sleep"])
def test_a_block_that_loses_its_row_while_it_is_written_is_counted_again(
    cache, open_cache, monkeypatch, clock, harm
):
    """If the machine sleeps and another process wakes first, the reservation is one of a dead process to it."""
    other, renamed = open_cache(), []
    put(other, key_of("other"), 1)

    def meanwhile(source, target):
        if not renamed and "/blocks/" in target:
            renamed.append(target)
            if harm == "count":
                recount(other)
            elif harm == "no index":
                Path(other.root, "index.db").unlink()
                put(other, key_of("other"), 0)
            else:
                if harm != "sleep":
                    Path(other.root, "locks").unlink()
                clock(61)
                other.evict(key_of().identity, key_of().path)
        os.rename(source, target)

    with monkeypatch.context() as patch:
        replace_call(patch, "os.rename", meanwhile)
        put(cache, key_of(), 0, 1)
    assert [whole(cache, key_of(), index) for index in (0, 1)] == [content(key_of(), 0), content(key_of(), 1)]
    assert audit(other).ok
    assert cache.usage() == other.usage()


def test_a_removed_directory_is_made_again(cache):
    key = key_of()
    put(cache, key, 0)
    whole(cache, key, 0)
    shutil.rmtree(Path(cache.root).parent)
    cache.read(key, 0, 0, 10)
    assert whole(cache, key, 1) is None
    put(cache, key, 1)
    assert whole(cache, key, 1) == content(key, 1)
    assert audit(cache).ok


def test_nothing_appears_in_folders_that_are_being_deleted(cache, monkeypatch):
    monkeypatch.setattr(directory, "DELETION_S", 600.0)
    put(cache, key_of(), 0)
    parent, pauses = Path(cache.root).parent, []
    for file in [path for path in parent.rglob("*") if path.is_file()]:
        file.unlink()  # as `rmtree` does it: folders follow when they are empty

    def delete_folders(seconds):
        pauses.append(seconds)
        if len(pauses) == 1:
            for folder in sorted(Path(cache.root).rglob("*"), reverse=True):
                folder.rmdir()
            os.rmdir(cache.root)
        else:
            parent.rmdir()

    replace_call(monkeypatch, "time.sleep", delete_folders)
    put(cache, key_of(), 1)
    assert pauses == [directory.PAUSE_S, directory.QUIET_S]
    assert whole(cache, key_of(), 1) == content(key_of(), 1)
    assert audit(cache).ok


def test_metadata_is_not_stored_while_the_cache_is_being_deleted(cache, monkeypatch):
    monkeypatch.setattr(directory, "DELETION_S", 10.0)
    put(cache, key_of(), 0)
    for found in Path(cache.root).iterdir():
        shutil.rmtree(found) if found.is_dir() else found.unlink()
    for _ in range(2):
        with pytest.raises(CacheError, match="is being deleted"):
            cache.metadata.begin_feed("gs://test", "b", "token", time.time())
    assert os.listdir(cache.root) == []
    now = time.monotonic()
    replace_call(monkeypatch, "time.monotonic", lambda: now + directory.DELETION_S)  # only a part was deleted
    cache.metadata.begin_feed("gs://test", "b", "token", time.time())
    assert cache.metadata.feed("gs://test", "b") is not None
    assert not cache._own._is_being_deleted()


def harm_index(path, how):
    """Damage the index, or replace it by one of a later version."""
    if how == "overwritten":
        path.write_bytes(b"no database, " * 1000)
    elif how in ("truncated", "cut"):
        os.truncate(path, 0 if how == "truncated" else 5000)
    else:
        path.unlink()
    if how == "of the future":
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        other = sqlite3.connect(path)
        other.execute("PRAGMA user_version = 99")
        other.close()


@pytest.mark.parametrize(
    ("is_open", "how"),
    [*((False, how) for how in ("overwritten", "deleted", "of the future")), *((True, how) for how in ("truncated", "cut", "deleted"))],
)  # fmt: skip
def test_a_lost_index_costs_no_read_and_heals(cache, open_cache, is_open, how, caplog):
    """SQLite may notice only when it needs a page that it does not have in memory."""
    key = key_of()
    put(cache, key, 0, 1)
    cache.metadata.lookup("gs://test", "b/x")
    if not is_open:
        cache.close()
    harm_index(Path(cache.root, "index.db"), how)
    assert whole(cache, key, 0) == content(key, 0)
    assert whole(open_cache(), key, 1) == content(key, 1)
    assert cache.metadata.lookup("gs://test", "b/x") is None
    cache.usage()
    for index in range(2, 6):
        put_after_noticing(cache, key, index)
    with contextlib.suppress(CacheError):  # or only now, as this reads every row
        audit(cache)
    cache.usage()  # or now, as this opens it again
    put_after_noticing(cache, key, 6)
    assert cache.usage()[0] == 7
    assert [whole(cache, key, index) for index in range(7)] == [content(key, index) for index in range(7)]
    assert audit(cache).ok
    assert sum("is damaged" in record.message for record in caplog.records) == len(caplog.records) <= 2


def test_a_leftover_log_of_a_lost_index_is_not_played_into_the_new_one(cache, open_cache):
    put(cache, key_of(), *range(8))
    lost = [file_of(cache, key_of(), index) for index in range(8)]
    # The write-ahead log stays, and has rows for all of them.
    for path in [Path(cache.root, "index.db"), *lost]:
        path.unlink()
    other = open_cache()
    put(other, key_of(), 8)
    assert other.usage()[0] == 1
    assert audit(other).ok


def test_too_many_open_files_empty_the_pool(cache, monkeypatch):
    key = key_of()
    put(cache, key, *range(4))
    for index in range(3):
        whole(cache, key, index)

    def scarce(path, flags):
        if cache.open_blocks:
            raise OSError(errno.EMFILE, "Too many open files")
        return os.open(path, flags)

    replace_call(monkeypatch, "os.open", scarce)
    assert whole(cache, key, 3) == content(key, 3)
    assert len(cache.open_blocks) == 1


def test_nowait_is_a_hit_a_miss_or_a_blocking_error(cache, monkeypatch):
    key = key_of()
    put(cache, key, 0)
    assert whole(cache, key, 9, nowait=True) is None
    try:
        assert whole(cache, key, 0, nowait=True) == content(key, 0)
    except BlockingIOError:
        pytest.skip("this file system cannot read from the page cache alone")
    monkeypatch.setattr(disk, "_NOWAIT", None)
    with pytest.raises(BlockingIOError):
        whole(cache, key, 0, nowait=True)
    assert whole(cache, key, 0) == content(key, 0)


def test_a_failed_commit_leaves_no_reservation(cache, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(database, "SAVE_TOTALS", "not SQL")
        with pytest.raises(CacheError, match="syntax"):
            put(cache, key_of(), 0)
    assert cache.space.writing == set()
    put(cache, key_of(), 0)
    assert whole(cache, key_of(), 0) == content(key_of(), 0)


def test_a_failed_write_makes_no_index_in_a_cache_that_is_being_deleted(cache, monkeypatch):
    put(cache, key_of(), 0)

    def deleted(*args):
        Path(cache._own.index_path).unlink()
        full()

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_file", deleted)
        with pytest.raises(CacheError):
            put(cache, key_of(), 1)
    assert not os.path.exists(cache._own.index_path)
    put(cache, key_of(), 1)
    assert audit(cache).ok


def test_putting_again_writes_nothing(cache):
    key = key_of()
    put(cache, key, 0)
    inode = file_of(cache, key, 0).stat().st_ino
    put(cache, key, 0, 0)
    assert file_of(cache, key, 0).stat().st_ino == inode
    assert cache.usage()[0] == 1
