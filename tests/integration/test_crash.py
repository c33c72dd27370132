"""Kills of processes that read and write through the whole stack: later reads are right and the cache is valid."""

import os
import random
import signal
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from cachedfs.cache.block_cache import BlockCache
from tests.cache.helpers import disk_usage
from tests.cache.kills import watch
from tests.support import KiB, MiB, forget, noise, tally

N_FILES, SIZE, BOUND = 6, 3 * MiB // 2 + 5, 6 * MiB
CALLS = [  # system calls of the cache, and whether the process dies before or after them
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


# Run in the child processes.
def read_on(folder, seed):
    """Read forever, in every way, and compare with the files, which do not change."""
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
    """Read, and die at a system call of the cache."""
    seen = []

    def hit(name, at):
        seen.append(name) if (name, at) == (call, when) else None
        if len(seen) == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    watch(hit)
    read_on(folder, seed)


def write_and_die(folder, n, when):
    """Die right before or right after the write reaches the origin, before any other process learns of it."""
    write = LocalFileSystem.pipe_file

    def dying(self, *args, **options):
        if when == "after":
            write(self, *args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    LocalFileSystem.pipe_file = dying
    filesystem(Path(folder)).pipe_file(str(file_at(Path(folder), n)), noise(SIZE, 99))


# Checked after each kill.
@pytest.fixture
def source_files(folder):
    (folder / "origin").mkdir()
    for n in range(N_FILES):
        file_at(folder, n).write_bytes(noise(SIZE, n))
    yield folder
    forget()  # before the folder is removed


def assert_reads_are_right(folder, fs):
    for n in range(N_FILES):
        assert fs.cat_file(str(file_at(folder, n))) == file_at(folder, n).read_bytes()
        tally("objects read after a kill")


def assert_cache_is_valid(folder):
    cache = BlockCache([str(folder / "c")], explicit=True)
    report = cache.check()
    assert (report.orphans, report.wrong_size, report.corrupt, report.wrong_sums) == ((), (), (), ())
    assert disk_usage(cache) <= BOUND
    cache.close()


def test_a_reader_killed_at_a_system_call_leaves_a_valid_cache(source_files, fork_server):
    for n, (call, when) in enumerate(CALLS):
        file_at(source_files, n % N_FILES).write_bytes(noise(SIZE, 100 + n))
        ended = fork_server.run(
            "tests.integration.test_crash:read_until", str(source_files), n, call, 3, when
        )
        assert ended.signal == signal.SIGKILL
        tally("kills of the whole stack")
        assert_reads_are_right(source_files, filesystem(source_files, max_age=0))
        assert_cache_is_valid(source_files)
        forget()


@pytest.mark.parametrize("when", ["before", "after"])
def test_after_a_killed_write_no_process_reads_old_bytes(source_files, fork_server, when):
    fs = filesystem(source_files)
    assert_reads_are_right(source_files, fs)
    ended = fork_server.run("tests.integration.test_crash:write_and_die", str(source_files), 2, when)
    assert ended.signal == signal.SIGKILL
    assert (file_at(source_files, 2).read_bytes() == noise(SIZE, 99)) == (when == "after")
    assert_reads_are_right(source_files, fs)
