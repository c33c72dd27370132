"""Kills of processes that read and write through the whole stack: later reads are right, the cache is sound."""

import os
import random
import signal
import time
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from cachedfs.cache.block_cache import BlockCache
from tests.cache.helpers import disk_usage
from tests.cache.kills import watch
from tests.support import KiB, MiB, forget, noise, tally

N_FILES, SIZE, BOUND = 6, 3 * MiB // 2 + 5, 6 * MiB
CALLS = [  # of the cache, and whether the process dies before it or after it
    ("create", "after"), ("write_all", "before"), ("os.rename", "before"), ("os.rename", "after"), ("unlink", "before"),
    ("SQL BEGIN", "after"), ("SQL INSERT", "before"), ("SQL COMMIT", "after"), ("open_to_read", "after"),
]  # fmt: skip


def filesystem(folder, **options):
    return fsspec.filesystem(
        "cachedfs",
        target_protocol="file",
        cache_dir=str(folder / "c"),
        cache_size=BOUND,
        keep_free=0,
        block_size=256 * KiB,
        **options,
    )


def file_at(folder, n):
    return folder / "origin" / str(n)


# In the children.


def read_on(folder, seed):
    """Read for ever, in every way; what is read is what lies there, as nobody writes meanwhile."""
    fs, chance = filesystem(Path(folder), max_age=0), random.Random(seed)
    while True:
        path = file_at(Path(folder), chance.randrange(N_FILES))
        data, start = path.read_bytes(), chance.randrange(SIZE)
        assert fs.cat_file(str(path), start, start + 300 * KiB) == data[start : start + 300 * KiB]
        with fs.open(str(path)) as file:
            assert file.read(MiB) == data[:MiB]
        assert fs.cat_file(str(path)) == data
        assert len(fs.ls(str(path.parent))) == N_FILES


def read_until(folder, seed, call, nth, when):
    """Read, and die at a call of the cache's room."""
    seen = []

    def hit(name, at):
        seen.append(name) if (name, at) == (call, when) else None
        if len(seen) == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    watch(hit)
    read_on(folder, seed)


def write_on(folder, seed):
    fs, chance = filesystem(Path(folder)), random.Random(seed)
    while True:
        n = chance.randrange(N_FILES)
        fs.pipe_file(str(file_at(Path(folder), n)), noise(SIZE, chance.randrange(1000)))
        assert len(fs.cat_file(str(file_at(Path(folder), n)))) == SIZE


def write_and_die(folder, n, when):
    """Die when the origin is about to be told, or has just been told, and nobody else has heard of it."""
    write = LocalFileSystem.pipe_file

    def dying(self, *args, **options):
        if when == "after":
            write(self, *args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    LocalFileSystem.pipe_file = dying
    filesystem(Path(folder)).pipe_file(str(file_at(Path(folder), n)), noise(SIZE, 99))


# What is true after each kill.


@pytest.fixture
def stocked(folder):
    (folder / "origin").mkdir()
    for n in range(N_FILES):
        file_at(folder, n).write_bytes(noise(SIZE, n))
    yield folder
    forget()  # before the folder goes


def assert_all_is_right(folder, fs):
    for n in range(N_FILES):
        assert fs.cat_file(str(file_at(folder, n))) == file_at(folder, n).read_bytes()
        tally("objects read after a kill")


def assert_cache_is_sound(folder):
    cache = BlockCache([str(folder / "c")], explicit=True)
    report = cache.check()
    assert (report.orphans, report.wrong_size, report.corrupt, report.wrong_sums) == ((), (), (), ())
    assert disk_usage(cache) <= BOUND
    cache.close()


def kill_after(fork_server, pid, chance, longest_s):
    time.sleep(chance.uniform(0.005, longest_s))  # the moment is the matter of the test
    os.kill(pid, signal.SIGKILL)
    assert fork_server.wait(pid).signal == signal.SIGKILL
    tally("kills of the whole stack")


def test_a_reader_killed_at_a_call_of_the_cache_leaves_it_right(stocked, fork_server):
    for n, (call, when) in enumerate(CALLS):
        file_at(stocked, n % N_FILES).write_bytes(noise(SIZE, 100 + n))
        ended = fork_server.run("tests.integration.test_crash:read_until", str(stocked), n, call, 3, when)
        assert ended.signal == signal.SIGKILL
        tally("kills of the whole stack")
        assert_all_is_right(stocked, filesystem(stocked, max_age=0))
        assert_cache_is_sound(stocked)
        forget()


def killed_readers_leave_it_right(folder, fork_server, *, n, seed):
    chance = random.Random(seed)
    for step in range(n):
        file_at(folder, step % N_FILES).write_bytes(noise(SIZE, 200 + step))
        pid = fork_server.start("tests.integration.test_crash:read_on", str(folder), step)
        kill_after(fork_server, pid, chance, 0.2)
        assert_all_is_right(folder, filesystem(folder, max_age=0))
        assert_cache_is_sound(folder)
        forget()


def killed_writers_leave_no_old_bytes(folder, fork_server, *, n, seed):
    """We knew every object, for a minute: but who writes says so before it writes."""
    fs, chance = filesystem(folder), random.Random(seed)
    for step in range(n):
        assert_all_is_right(folder, fs)
        pid = fork_server.start("tests.integration.test_crash:write_on", str(folder), step)
        kill_after(fork_server, pid, chance, 0.1)
        assert_all_is_right(folder, fs)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_writer_killed_beside_its_write_leaves_nobody_with_old_bytes(stocked, fork_server, when):
    fs = filesystem(stocked)
    assert_all_is_right(stocked, fs)
    ended = fork_server.run("tests.integration.test_crash:write_and_die", str(stocked), 2, when)
    assert ended.signal == signal.SIGKILL
    assert (file_at(stocked, 2).read_bytes() == noise(SIZE, 99)) == (when == "after")
    assert_all_is_right(stocked, fs)


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_hundreds_of_readers_and_writers_are_killed(stocked, fork_server):
    killed_readers_leave_it_right(stocked, fork_server, n=300, seed=2)
    killed_writers_leave_no_old_bytes(stocked, fork_server, n=300, seed=2)
