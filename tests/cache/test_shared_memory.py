"""State that processes share without a database: change counters, use records, fetch locks."""

import errno
import math
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from cachedfs.cache import access_stats, change_counters, disk, locks
from cachedfs.cache.access_stats import AccessStats, age
from cachedfs.cache.change_counters import ChangeCounters, slots_of
from cachedfs.common.clock import Clock
from cachedfs.common.logging import WarnOnce
from tests.cache.faults import replace_call
from tests.cache.helpers import AMPLE, content, finish, key_of, put, start, whole

ORIGIN = "gs://test"


def look_now(cache):
    """Do what is done once a second."""
    cache._own.look_at = 0.0
    cache._own.look()


@pytest.mark.parametrize(
    ("path", "tree", "changed", "others"),
    [
        (
            "b/k/x",
            False,
            ["b/k/x", "b/k", "b/k/", "b", "b/", ""],
            ["b/k/y", "b/z", "b/z/", "c", "b/k/x/below"],
        ),
        ("b/t", True, ["b/t", "b/t/x", "b/t/deep/", "b/t/deep/er/y"], ["b/tt", "b/u/", "b/u/x", "c/t/x"]),
        ("", True, ["", "b", "c/t/x"], []),
    ],
)
def test_a_change_moves_the_counters_above_a_path_or_below_a_tree_and_no_other(
    cache, path, tree, changed, others
):
    """A name with "/" at its end is a listing."""

    def counters():
        return {name: cache.metadata.counter(ORIGIN, name) for name in changed + others}

    def elsewhere():
        return cache.metadata.epoch("gs://elsewhere"), cache.metadata.counter("gs://elsewhere", path)

    before, beside, epoch = counters(), elsewhere(), cache.metadata.epoch(ORIGIN)
    cache.metadata.changed(ORIGIN, [path], tree=tree)
    assert [name for name, now in counters().items() if now != before[name]] == changed
    assert elsewhere() == beside
    assert cache.metadata.epoch(ORIGIN) != epoch


def test_the_time_of_a_change_is_by_the_clock_of_metadata(monkeypatch):
    ahead = Clock()
    ahead.now()
    ahead.advance(ahead.offset + 3600)  # the wall clock was an hour fast before
    monkeypatch.setattr(change_counters, "clock", ahead)
    counters, before = ChangeCounters("/nowhere", WarnOnce()), ahead.now()
    assert counters.changed_at("i", "x") == 0
    counters.changed("i", ["x"])
    assert int(before) <= counters.changed_at("i", "x") <= ahead.now()


def test_two_writers_at_once_cannot_cancel_each_other():
    """A writer never reads a slot: whichever of two wins, the counter is neither the old one nor a repeated one."""
    first, second = ChangeCounters("/nowhere", WarnOnce()), ChangeCounters("/nowhere", WarnOnce())
    seen = set()
    for _ in range(100):
        seen.add(first.counter("i", "p"))
        second.changed("i", ["p"])
        first.changed("i", ["p"])
        assert first.counter("i", "p") == second.counter("i", "p")
    assert len(seen) == 100


def test_a_write_right_after_the_marks_were_lost_is_seen_with_the_old_ones_and_the_new(cache, open_cache):
    with_old = open_cache()
    before = with_old.metadata.counter(ORIGIN, "b/x")
    assert cache.metadata.counter(ORIGIN, "b/x") == before
    Path(cache.root, "change-counters").unlink()
    with_new = open_cache()
    new = with_new.metadata.counter(ORIGIN, "b/x")
    cache.metadata.changed(ORIGIN, ["b/x"])
    assert with_old.metadata.counter(ORIGIN, "b/x") != before
    assert with_new.metadata.counter(ORIGIN, "b/x") != new
    assert cache.metadata.counter(ORIGIN, "b/x") == with_new.metadata.counter(ORIGIN, "b/x")


# Access records
def test_counts_stop_at_their_limit_and_the_clock_goes_round():
    accesses, (one, other) = AccessStats(), (SimpleNamespace(number=n << 48 | n << 2) for n in (7, 8))
    accesses.open(0, clock=(1 << 32) - 2)
    for each in (one, other, one):
        accesses.touch(each, 0)
    assert accesses.now == 1
    assert age((1 << 32) - 1, accesses.now) == 2
    assert accesses.of(one.number).uses == 1, "a round is one of the times when counts are halved"
    for each in (other, one) * 300:
        accesses.touch(each, 0)
    assert accesses.of(one.number).uses == 255


# Fetch locks

LOCKER = (
    "cache = BlockStore(sys.argv[1], explicit=True)\n"
    "print(bool(cache.locks.take(7)), flush=True)\nsys.stdin.readline()\n"
    "print(bool(cache.locks.take(7)), flush=True)\nsys.stdin.readline()\n"
)


def test_a_run_of_locks_is_taken_as_far_as_it_is_free(cache, monkeypatch):
    calls, lockf = [], locks.fcntl.lockf
    monkeypatch.setattr(locks.fcntl, "lockf", lambda *given: calls.append(given[1:]) or lockf(*given))
    assert cache.locks.take(20, 5) == 5
    assert len(calls) == 1
    assert cache.locks.take(18, 5) == 2
    other = start(LOCKER, Path(cache.root).parent)
    assert other.stdout.readline() == "True\n"  # number 7
    assert cache.locks.take(4, 5) == 3
    assert cache.locks.take(7, 2) == 0
    assert cache.locks.take(8, 1) == 1
    assert finish(other, "\n\n") == "False\n"
    for number in range(4, 25):
        cache.locks.release(number)
    assert cache.locks.held().keys() == set()


@pytest.mark.parametrize("who", ["another cache of the process", "other code"])
def test_locks_are_kept_whoever_closes_a_file(cache, open_cache, who):
    assert cache.locks.take(7)
    if who == "other code":
        os.close(locks._DESCRIPTORS[f"{cache.root}/locks"])
        look_now(cache)
        assert cache.locks.works_across_processes
    else:
        other = open_cache()
        assert other.locks.take(9)
        put(other, key_of(), 0)
        other.close()
    assert finish(start(LOCKER, Path(cache.root).parent), "\n\n") == "False\nFalse\n"


def test_shared_files_that_were_truncated_cost_no_read_and_are_made_anew(cache, monkeypatch):
    monkeypatch.setattr(access_stats, "FLUSH_S", 3600.0)
    key = key_of()
    put(cache, key, 0)
    assert whole(cache, key, 0) == content(key, 0)
    before = cache.metadata.counter(ORIGIN, "b/x")
    for name in ("change-counters", "access-records"):
        os.truncate(f"{cache.root}/{name}", 0)
    assert whole(cache, key, 0) == content(key, 0)
    assert cache.metadata.counter(ORIGIN, "b/x") != before
    look_now(cache)
    assert cache.reads_since(0, AMPLE)[1] == [key.hash64(0)], "the read that was not written yet"
    assert whole(cache, key, 0) == content(key, 0)
    assert cache.reads_since(0, AMPLE)[1] == [key.hash64(0)]
    assert cache.metadata.counters.paths == {f"{cache.root}/change-counters"}


def test_a_change_that_cannot_be_written_is_seen_by_all_at_once(
    cache, open_cache, monkeypatch, own_memory_folder
):
    """The counters on disk are then invalid, and those in memory are used too."""
    other, at_first = open_cache(), cache.metadata.counter(ORIGIN, "b/x")
    assert other.metadata.counter(ORIGIN, "b/x") == at_first
    real = {"os.pwrite": os.pwrite, "allocate": disk.allocate}

    def full_disk(call, fd, *args):
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(str(own_memory_folder)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real[call](fd, *args)

    with monkeypatch.context() as patch:
        for call in real:
            replace_call(patch, call, partial(full_disk, call))
        cache.metadata.changed(ORIGIN, ["b/x"])
        changed = other.metadata.counter(ORIGIN, "b/x")
        assert cache.metadata.counter(ORIGIN, "b/x") == changed != at_first
        counters = cache.metadata.counters
        assert counters.paths == other.metadata.counters.paths == {counters.in_memory}
        cache.metadata.changed(ORIGIN, ["b/x"])
        assert other.metadata.counter(ORIGIN, "b/x") != changed
    for each in (cache, other):  # there is space again, a minute later
        each._own._again_at = 0.0
        look_now(each)
    changed = other.metadata.counter(ORIGIN, "b/x")
    assert len(other.metadata.counters.paths) == 2
    cache.metadata.changed(ORIGIN, ["b/x"])
    assert other.metadata.counter(ORIGIN, "b/x") == cache.metadata.counter(ORIGIN, "b/x") != changed


def without_disk(open_cache, tmp_path, n=2):
    """Open caches on a directory that cannot be made."""
    (tmp_path / "file").write_bytes(b"")
    return [open_cache(tmp_path / "file" / "c", explicit=False) for _ in range(n)]


def test_a_process_that_only_reads_notices_that_change_counters_were_replaced(cache, open_cache, monkeypatch):
    monkeypatch.setattr("cachedfs.cache.directory.LOOK_S", 0.0)
    other, slots = open_cache(), slots_of("gs://test", "b/x")
    before = cache.metadata.counter_at(slots)
    os.unlink(f"{cache.root}/change-counters")
    other.metadata.changed("gs://test", ["b/x"])
    cache.metadata.look()
    assert cache.metadata.counter_at(slots) != before


def test_without_a_directory_processes_see_the_changes_of_each_other(open_cache, tmp_path, own_memory_folder):
    one, other = without_disk(open_cache, tmp_path)
    before = other.metadata.counter(ORIGIN, "b/x")
    assert one.metadata.counter(ORIGIN, "b/x") == before
    one.metadata.changed(ORIGIN, ["b/x"])
    assert other.metadata.counter(ORIGIN, "b/x") == one.metadata.counter(ORIGIN, "b/x") != before
    assert one.metadata.sees_other_processes
    path = Path(one.metadata.counters.in_memory)
    assert path.parent == own_memory_folder
    assert (path.stat().st_mode & 0o777, path.stat().st_blocks * 512 >= 2 << 20) == (0o600, True)


def test_a_change_by_a_process_that_cannot_write_the_directory_is_noticed(cache, open_cache):
    """Such as a container that has the directory read-only: within a second, and at once when anything is changed."""
    other = open_cache()
    before = other.metadata.counter(ORIGIN, "b/x")
    cache.metadata.counters.move_to(None)
    cache.metadata.changed(ORIGIN, ["b/x"])
    look_now(other)
    assert other.metadata.counter(ORIGIN, "b/x") != before
    seen = cache.metadata.counter(ORIGIN, "b/x")
    other.metadata.changed(ORIGIN, ["b/x"])
    assert cache.metadata.counter(ORIGIN, "b/x") != seen


@pytest.mark.parametrize("harm", [lambda path: path.symlink_to("/etc/passwd"), lambda path: path.mkdir()])
def test_what_another_user_may_have_put_in_the_memory_folder_is_not_used(
    open_cache, tmp_path, own_memory_folder, monkeypatch, harm
):
    (cache,) = without_disk(open_cache, tmp_path, 1)
    harm(Path(cache.metadata.counters.in_memory))
    monkeypatch.setattr(disk, "unlink", lambda path: not_permitted())
    assert not cache.metadata.sees_other_processes
    before = cache.metadata.counter(ORIGIN, "b/x")
    look_now(cache)
    assert cache.metadata.counter(ORIGIN, "b/x") == before, (
        "or immutable metadata would be asked for each second"
    )


def not_permitted():
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_a_program_that_closes_all_descriptors_gets_nothing_written_into_its_files(cache, tmp_path):
    key = key_of()
    put(cache, key, 0)
    counter = cache.metadata.counter(ORIGIN, "b/x")
    shared = [cache.metadata.counters.tables[0], cache.accesses.open()]
    mine, copies = os.open(tmp_path / "mine", os.O_RDWR | os.O_CREAT), []
    for table in shared:
        copies.append(os.dup(table.fd))
        os.dup2(mine, table.fd)  # closed, and the number used again
    cache.touch(key, 0)
    cache.accesses.flush()
    cache.metadata.changed(ORIGIN, ["b/x"])
    assert cache.metadata.counter(ORIGIN, "b/x") != counter
    assert os.fstat(mine).st_size == 0
    for fd in [mine, *copies, *(table.fd for table in shared)]:
        os.close(fd)


# Accesses that wait


def test_the_last_reads_of_all_processes_are_known_in_their_order(cache, open_cache):
    key, other = key_of(), open_cache()
    clock, _ = cache.reads_since(0, AMPLE)
    for index in range(4):
        (cache, other)[index % 2].touch(key, index)
        (cache, other)[index % 2].reads_since(0, AMPLE)
    clock, reads = cache.reads_since(clock, AMPLE)
    assert reads == [key.hash64(index) for index in range(4)]
    assert cache.reads_since(clock, AMPLE) == (clock, [])
    for index in range(1000):
        other.touch(key, index)
    assert other.reads_since(clock, AMPLE) == (
        clock + 1000,
        [key.hash64(index) for index in range(744, 1000)],
    )


def test_reads_of_another_process_are_seen_with_its_first_one_a_tenth_of_a_second_later(
    cache, open_cache, monkeypatch
):
    now, key, other = [100.0], key_of(), open_cache()
    monkeypatch.setattr(access_stats, "time", SimpleNamespace(monotonic=lambda: now[0]))
    clock, _ = cache.reads_since(0, AMPLE)
    for index, (at, seen) in enumerate([(100.0, 1), (100.05, 1), (100.11, 3)]):
        now[0] = at
        other.touch(key, index)
        assert len(cache.reads_since(clock, AMPLE)[1]) == seen


def test_an_interrupted_write_of_accesses_does_not_hold_up_later_ones(cache, open_cache, monkeypatch):
    key, written = key_of(), open_cache().accesses
    assert cache.locks.take(access_stats._FLUSH_LOCK)  # what a Ctrl-C leaves
    monkeypatch.setattr(access_stats, "FLUSH_S", 0.0)
    monkeypatch.setattr(access_stats, "LEFT_S", 0.0)
    for index in range(3):
        cache.touch(key, index)
    assert written.now == 3


def test_the_clock_never_goes_back_while_another_process_writes(cache, open_cache, monkeypatch):
    """Two that add to it at once would each count on from the same number."""
    key, other = key_of(), open_cache()
    written, held = other.accesses, other.locks
    assert held.take(access_stats._FLUSH_LOCK)
    monkeypatch.setattr(access_stats, "FLUSH_S", 0.0)
    monkeypatch.setattr(access_stats, "LEFT_S", math.inf)
    monkeypatch.setattr(access_stats, "_MOST_PENDING", 8)
    for index in range(7):
        cache.touch(key, index)
    assert written.now == 0
    cache.touch(key, 7)  # the other one was stopped in the middle
    assert written.now == 8
    held.release(access_stats._FLUSH_LOCK)
