"""Killed processes: the cache stays sound wherever a process dies."""

import collections
import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from cachedfs.cache.block_store import BlockStore
from cachedfs.common.types import CacheBounds
from cachedfs.errors import CacheError
from tests.cache.audit import audit
from tests.cache.days import KEY, N_OTHER, OTHER, SMALL
from tests.cache.helpers import AMPLE, content, disk_usage, key_of, overhead_of, put, whole
from tests.cache.kills import Step, is_forgotten_or_asked_again
from tests.support import tally

HOUR_S = 3600
NEW = key_of("b/new")
BOUNDS = SMALL._replace(size=SMALL.size + (3 << 20))  # with what a process leaves in temporary files
# The calls that leave something to other processes: to die before or after any other is to die at one of these.
CHANGES = {
    "allocate", "create", "make_folder", "os.link", "os.makedirs", "os.rename", "shutil.rmtree", "unlink",
    "write_all", "write_file", "SQL COMMIT",
}  # fmt: skip


@pytest.fixture
def steps(fork_server, folder):
    """All steps to die at: before and after each call."""
    calls = fork_server.run("tests.cache.kills:record", str(folder / "recorded")).result
    return [
        Step(call, nth, when)
        for call, n in collections.Counter(calls).items()
        for nth in range(1, n + 1)
        for when in ("before", "after")
    ]


def uncounted(cache, bounds):
    """Return by how many bytes the files are more than what the cache counts."""
    usage, n_bytes = disk_usage(cache), cache.usage()[1]
    return usage - n_bytes - (overhead_of(cache, bounds) - cache.space.growth)


def assert_counted(cache, bounds):
    """Assert that all files are counted; a lost index was, as before every put, and a damaged one is noticed at once."""
    with contextlib.suppress(CacheError):
        cache.allowance(bounds)
    cache.allowance(bounds)
    assert uncounted(cache, bounds) <= 0
    report = audit(cache)
    assert (report.orphans, report.wrong_size, report.corrupt, report.wrong_sums) == ((), (), (), ())
    return report


def assert_reads_are_right(cache):
    """Read all blocks, so that a damaged one goes."""
    for key, n in ((KEY, 3), (OTHER, N_OTHER), (NEW, 2)):
        for index in range(n):
            data = whole(cache, key, index)
            assert data is None or data == content(key, index)
            tally("blocks read after a kill", data is not None)


def assert_sound(directory):
    """Assert what must be true after a kill: reads are right, nothing is uncounted, and work goes on at once."""
    with contextlib.closing(BlockStore(str(directory), explicit=True)) as cache:
        assert is_forgotten_or_asked_again(cache)
        assert_reads_are_right(cache)
        assert_counted(cache, BOUNDS)
        put(cache, NEW, 0, 1, bounds=BOUNDS)
        assert [whole(cache, NEW, index) for index in (0, 1)] == [content(NEW, 0), content(NEW, 1)]
        assert uncounted(cache, BOUNDS) <= 0
        assert disk_usage(cache) <= BOUNDS.size
        assert audit(cache)._replace(missing=(), leftovers=()).ok
        assert_reads_are_right(cache)
    hexadecimal = 16 * "[0-9a-f]"
    assert list(Path(directory).glob(f"*/tmp/{hexadecimal}-{hexadecimal}")) == []  # of incomplete blocks
    for path in Path(directory).glob("*/tmp/*"):
        os.utime(path, (0, time.time() - HOUR_S - 1))
    with contextlib.closing(BlockStore(str(directory), explicit=True)) as cache:
        cache.allowance(AMPLE)  # no temporary file outlives an hour
        assert list(Path(directory).glob("*/tmp/*")) == []


def kill_at_all(steps, folder, fork_server):
    """Kill one child at each of the steps, and look over what it left; each kind of step must be reached."""
    kills, directory = collections.Counter(), folder / "killed"
    for step in steps:
        ended = fork_server.run("tests.cache.kills:die", str(directory), *step)
        try:
            assert_sound(directory)
        except BaseException as error:
            error.add_note(f"killed at {step}")
            raise
        kills[step.call, step.when] += ended.signal == signal.SIGKILL
        shutil.rmtree(directory)
    tally("kills at a named step", kills.total())
    assert {(step.call, step.when) for step in steps} == {key for key, n in kills.items() if n}


def test_a_process_may_be_killed_at_every_kind_of_step(steps, fork_server, folder):
    """After the first, the last and some other calls of each kind, and also before the end of transactions."""
    chosen = []
    for call, when in [("SQL COMMIT", "before"), *((call, "after") for call in sorted(CHANGES))]:
        same = [step for step in steps if (step.call, step.when) == (call, when)]
        chosen += [*same[:: max(1, len(same) // 4)], same[-1]]
    kill_at_all(chosen, folder, fork_server)


@pytest.mark.parametrize("call", ["write_file", "os.rename", "SQL COMMIT"])
def test_processes_that_are_killed_beside_others_leave_a_sound_cache_within_its_bound(
    folder, fork_server, call
):
    """Two of four processes that read and write one cache die at one kind of call, early and late."""
    bounds = CacheBounds(size=8 << 20, keep_free=0)
    deaths = [(call, 3, "before"), (call, 9, "after"), None, None]
    crowd = [
        fork_server.start(
            "tests.cache.kills:churn", str(folder), me, bounds.size, 12, 1 << 30 if death else 40, death
        )
        for me, death in enumerate(deaths)
    ]
    ended = [fork_server.wait(process) for process in crowd]
    assert [each.signal for each in ended] == [signal.SIGKILL, signal.SIGKILL, 0, 0]
    assert 4 << 20 < max(each.result for each in ended[2:]) <= bounds.size
    with contextlib.closing(BlockStore(str(folder), explicit=True)) as cache:
        assert disk_usage(cache) <= bounds.size
        assert assert_counted(cache, bounds).blocks > 2


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_a_process_may_be_killed_at_every_single_call(steps, folder, fork_server):
    kill_at_all(steps, folder, fork_server)
