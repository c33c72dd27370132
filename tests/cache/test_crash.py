"""Killed processes: the cache stays sound wherever a process dies."""

import collections
import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from cachedfs.cache.block_store import BlockStore
from cachedfs.common.types import CacheBounds
from cachedfs.errors import CacheError
from tests.cache.audit import audit
from tests.cache.helpers import AMPLE, content, disk_usage, overhead_of, whole
from tests.cache.kills import N_OLD, NEW, OLD, OPERATIONS, Step, put_after_noticing
from tests.support import tally

HOUR_S = 3600
# The calls that leave something to other processes: to die before or after any other is to die at one of these.
CHANGES = {
    "allocate", "create", "make_folder", "os.link", "os.makedirs", "os.rename", "shutil.rmtree", "unlink",
    "write_all", "write_file", "SQL COMMIT",
}  # fmt: skip


class Start:
    """The state that an operation starts from, kept as a directory that is copied for every kill."""

    def __init__(self, folder, operation):
        self.operation, self.folder = operation, folder
        self.template = folder / "template"
        cache, prepare = BlockStore(str(self.template), explicit=True), OPERATIONS[operation].prepare
        # The mapped file of the counters is counted, and made when it is first used.
        cache.metadata.counter("", "")
        self.bounds = (prepare(cache) if prepare else None) or AMPLE
        cache.close()
        self.flaws, self.look = OPERATIONS[operation].flaws, OPERATIONS[operation].look

    @contextlib.contextmanager
    def copied(self):
        directory = self.folder / "copy"
        shutil.copytree(self.template, directory)
        yield str(directory)
        shutil.rmtree(directory)

    def steps(self, fork_server):
        """Return all steps to die at: before and after each call."""
        with self.copied() as directory:
            arguments = self.operation, directory, self.bounds.size
            calls = fork_server.run("tests.cache.kills:record", *arguments).result
        return [
            Step(self.operation, call, nth, when)
            for call, n in collections.Counter(calls).items()
            for nth in range(1, n + 1)
            for when in ("before", "after")
        ]


@contextlib.contextmanager
def opened(directory):
    cache = BlockStore(directory, explicit=True)
    try:
        yield cache
    finally:
        cache.close()


def put_in_order(cache, bounds):
    """Have the index counted, if it was lost, as it is before every put; a damaged one is noticed at the first use."""
    with contextlib.suppress(CacheError):
        cache.allowance(bounds)
    cache.allowance(bounds)


def uncounted(cache):
    """Return by how many bytes the files are more than what the cache counts."""
    usage = disk_usage(cache)
    with cache._own.index.reading() as rows:
        n_bytes = rows.load_totals().bytes
    room = cache.space
    return usage - n_bytes - (overhead_of(cache, AMPLE) - room.growth)


def assert_reads_are_right(cache, *, n=N_OLD):
    for key in (OLD, NEW):
        for index in range(n):
            data = whole(cache, key, index)
            assert data is None or data == content(key, index)
            tally("blocks read after a kill", data is not None)


def assert_sound(directory, start):
    """Assert what must be true after a kill: reads are right, nothing is uncounted, and work goes on at once."""
    bounds = start.bounds
    with opened(directory) as cache:
        if start.look is not None:
            start.look(cache)
        if "corrupt" not in start.flaws:
            assert_reads_are_right(cache)
        put_in_order(cache, bounds)
        if "orphans" not in start.flaws:
            assert uncounted(cache) <= 0
        report = audit(cache)
        for found in ("orphans", "wrong_size", "corrupt", "wrong_sums"):
            assert found in start.flaws or getattr(report, found) == (), found
        assert_reads_are_right(cache)  # a damaged block goes
        put_after_noticing(cache, bounds)
        assert [whole(cache, NEW, index) for index in (0, 1)] == [content(NEW, 0), content(NEW, 1)]
        assert uncounted(cache) <= 0
        assert disk_usage(cache) <= bounds.size
        assert audit(cache)._replace(missing=(), leftovers=()).ok
        assert_reads_are_right(cache)
    assert_no_temporary_file_outlives_an_hour(directory)


def assert_no_temporary_file_outlives_an_hour(directory):
    for path in Path(directory).glob("*/tmp/*"):
        os.utime(path, (0, time.time() - HOUR_S - 1))
    with opened(directory) as cache:
        cache.allowance(AMPLE)
        assert list(Path(directory).glob("*/tmp/*")) == []


def killed_at_all(steps, start, fork_server):
    """Kill one child at each of the steps, and look over what it left; return the kills by named step."""
    kills = collections.Counter()
    for step in steps:
        with start.copied() as directory:
            arguments = (step.operation, directory, start.bounds.size, *step[1:])
            ended = fork_server.run("tests.cache.kills:die", *arguments)
            try:
                assert_sound(directory, start)
            except BaseException as error:
                error.add_note(f"killed at {step}")
                raise
        kills[step.call, step.when] += ended.signal == signal.SIGKILL
    tally("kills at a named step", kills.total())
    return kills


def assert_every_step_was_hit(operation, steps, kills):
    for call, when in sorted({(step.call, step.when) for step in steps}):
        sys.stdout.write(f"{operation:24} {when:6} {call:20} {kills[call, when]:4}\n")
        assert kills[call, when] > 0


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_process_may_be_killed_at_every_kind_of_step(operation, fork_server, folder):
    """After the first call of each kind, and before the transaction's end."""
    start = Start(folder, operation)
    steps = [
        step
        for step in start.steps(fork_server)
        if step.call in CHANGES and step.nth == 1 and (step.when == "after" or step.call == "SQL COMMIT")
    ]
    kills = killed_at_all(steps, start, fork_server)
    assert_every_step_was_hit(operation, steps, kills)


@pytest.mark.parametrize("call", ["write_file", "os.rename", "SQL COMMIT"])
def test_processes_that_are_killed_beside_others_leave_a_sound_cache(folder, fork_server, call):
    """Two of four processes that read and write one cache die at one kind of call, early and late."""
    bounds = CacheBounds(size=8 << 20, keep_free=0)
    deaths = [(call, 3, "before"), (call, 9, "after"), None, None]
    crowd = [
        fork_server.start(
            "tests.cache.kills:churn", str(folder), me, bounds.size, 12, 1 << 30 if death else 40, death
        )
        for me, death in enumerate(deaths)
    ]
    signals = [fork_server.wait(process).signal for process in crowd]
    assert signals == [signal.SIGKILL, signal.SIGKILL, 0, 0]
    assert_crowd_left_a_sound_cache(folder, bounds)


def assert_crowd_left_a_sound_cache(folder, bounds):
    with opened(str(folder)) as cache:
        assert disk_usage(cache) <= bounds.size
        put_in_order(cache, bounds)
        assert uncounted(cache) <= 0
        report = audit(cache)
        assert (report.orphans, report.wrong_size, report.corrupt, report.wrong_sums) == ((), (), (), ())
        assert report.blocks > 2


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_process_may_be_killed_at_every_single_call(operation, fork_server, folder):
    start = Start(folder, operation)
    steps = start.steps(fork_server)
    kills = killed_at_all(steps, start, fork_server)
    # It took minutes: what is done only while somebody wrote lately may not be done any more.
    done = {(step.call, step.when) for step in start.steps(fork_server)}
    assert_every_step_was_hit(operation, [step for step in steps if step[1::2] in done], kills)
