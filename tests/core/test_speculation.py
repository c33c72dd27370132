"""The fetch queue: slots, turns of the owners, the bound on memory, and priority below reads that a caller waits for."""

import asyncio
import contextlib

import pytest

from cachedfs.common.types import ObjectInfo, Range
from cachedfs.core import speculation
from cachedfs.core.download import Download
from cachedfs.core.speculation import SpeculativeQueue, SpeculativeRequest
from cachedfs.core.statistics import LinkStats
from cachedfs.errors import OriginUnavailable
from cachedfs.origins.request_slots import RequestSlots, speculative
from tests.fakes import FakeOrigin
from tests.support import MiB


class SentRequests:
    """A fetch queue, the names that it sent, in order, and their in-flight requests."""

    def __init__(self, concurrency=2):
        self.ahead = SpeculativeQueue()
        self.origin = FakeOrigin()
        self.origin.concurrency = concurrency
        self.sent: list[str] = []
        self.is_sent = asyncio.Event()
        self.by_block: dict[str, Download] = {}

    def candidate(self, name, owner="owner", size=MiB, **options):
        self.ahead.submit(
            SpeculativeRequest(
                owner, size, lambda: [self.run_request(name, size)], lambda: self.origin, **options
            )
        )

    def run_request(self, name, size):
        download = self.by_block[name] = Download(demand=size)
        download.begin(ObjectInfo(name, size=size), None, Range(0, size))
        self.sent.append(name)
        self.is_sent.set()
        return download

    async def lookups_done(self):
        """Wait until every lookup has its answer and the requests that follow are sent."""
        if asking := list(self.ahead._lookups):
            await asyncio.wait(asking)  # their callbacks run first

    def receive(self, name, *, is_stored=True):
        """Receive all bytes of `name` and end its request."""
        download = self.by_block[name]
        download.feed(bytes(download.stop))
        download.n_received += 1
        download.finish()
        if is_stored:
            download.stored(True)
        self.ahead.pump()


@pytest.fixture
async def queue():
    return SentRequests()


async def test_a_request_that_a_reader_waits_for_frees_its_speculative_slot(queue):
    for name in "abc":
        queue.candidate(name)
    reader = asyncio.ensure_future(queue.by_block["b"].wait_until(MiB))
    await asyncio.sleep(0)
    queue.ahead.pump()
    assert queue.sent == ["a", "b", "c"]
    queue.receive("b")
    await reader


async def test_owners_take_turns_and_each_keeps_its_order(queue):
    queue.candidate("x")
    queue.candidate("y")
    for owner in "abc":
        for number in range(3):
            queue.candidate(f"{owner}{number}", owner=owner)
    for number in range(9):
        queue.receive(queue.sent[number])
    assert queue.sent[2:] == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]


async def test_inferred_requests_go_before_declared_ones(queue):
    for number in range(3):
        queue.candidate(f"d{number}", is_declared=True, owner="plan")
    queue.candidate("i0")
    queue.receive("d0")
    assert queue.sent == ["d0", "d1", "i0"]


async def test_canceled_and_wanted_requests_are_not_sent(queue):
    keep: list[Download] = []  # owners need not be hashable
    for name in "abc":
        queue.candidate(name, owner=keep)
    queue.candidate("its reader came first", is_wanted=lambda: True)
    queue.candidate("d")
    queue.ahead.cancel(keep)
    queue.receive("a")
    queue.receive("b")
    assert queue.sent == ["a", "b", "d"]
    assert (queue.ahead.queued, queue.ahead._lookups) == ({}, {})


async def test_memory_is_counted_until_the_bytes_are_on_disk(monkeypatch):
    monkeypatch.setattr(speculation, "MEMORY", 3 * MiB)
    queue = SentRequests(concurrency=16)
    for name in "abcde":
        queue.candidate(name)
    assert queue.sent == ["a", "b", "c"]
    queue.receive("a", is_stored=False)
    assert queue.ahead.memory == 3 * MiB
    assert queue.sent == ["a", "b", "c"]
    queue.by_block["a"].stored(True)
    queue.ahead.pump()
    assert queue.sent == ["a", "b", "c", "d"]
    queue.receive("b", is_stored=False)
    del queue.by_block["b"]  # given up by all its readers
    queue.ahead.pump()
    assert queue.sent == ["a", "b", "c", "d", "e"]


async def test_blocks_that_could_not_be_stored_are_dropped_oldest_first(monkeypatch):
    monkeypatch.setattr(speculation, "MEMORY", 3 * MiB)
    queue = SentRequests(concurrency=16)
    for name in "abcde":
        queue.candidate(name)
    for name in "abc":
        queue.receive(name, is_stored=False)
    assert queue.sent == ["a", "b", "c"]
    for name in "ab":
        queue.by_block[name].stored(False)
    assert queue.ahead.memory == 3 * MiB  # a reader may still need them
    queue.ahead.pump()
    assert queue.sent == ["a", "b", "c", "d", "e"]
    assert [queue.by_block[name].memory for name in "abc"] == [0, 0, MiB]
    assert not queue.by_block["a"].covers(0)  # its reader fetches it again


async def test_nothing_is_sent_while_the_origin_has_no_requests_to_spare(queue):
    looks = iter([0.001, 0.001])
    queue.origin.spare_s = lambda: next(looks, 0.0)
    queue.candidate("a")
    assert queue.sent == []
    await queue.is_sent.wait()
    assert not list(looks)


async def test_a_lookup_uses_a_slot_and_memory_before_its_request_is_sent(queue):
    answer = asyncio.get_running_loop().create_future()
    for _ in range(2):
        queue.ahead.submit(
            SpeculativeRequest("owner", MiB, lambda: asyncio.shield(answer), lambda: queue.origin)
        )
    queue.candidate("c")
    assert queue.sent == []
    assert queue.ahead.memory == 2 * MiB
    with speculative():
        answer.set_result([queue.run_request("a", 3 * MiB)])
    await queue.lookups_done()
    assert queue.ahead.memory == 4 * MiB
    assert queue.sent == ["a", "c"]


async def test_large_bodies_are_limited_by_the_link_and_small_ones_by_slots():
    large, small = SentRequests(concurrency=16), SentRequests(concurrency=16)
    for number in range(20):
        large.candidate(f"large {number}", size=8 * MiB)
        small.candidate(f"small {number}", size=64 << 10)
    assert len(small.sent) == 16
    assert len(large.sent) == 6, "four and one more on the link, and what waits for its first byte meanwhile"
    for _ in range(40):  # the link has room for more
        large.ahead.record_timing(large.origin, wait_s=0.05, size=8 * MiB, took_s=0.14)
    large.ahead.pump()
    assert len(large.sent) > 6


@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize("error", [OriginUnavailable("no"), RuntimeError("a mistake of ours")])
async def test_a_failing_request_is_no_error_and_frees_its_slot(queue, is_later, error):
    def fail():
        raise error

    async def fail_later():
        return fail()

    queue.ahead.submit(
        SpeculativeRequest("owner", MiB, fail_later if is_later else fail, lambda: queue.origin)
    )
    await queue.lookups_done()
    assert queue.ahead.memory == 0
    queue.candidate("b")
    assert queue.sent == ["b"]


async def test_a_reader_never_waits_for_a_speculative_slot():
    slots = RequestSlots(1)
    async with contextlib.AsyncExitStack() as stack:
        with speculative():
            await stack.enter_async_context(slots.slot())
            await stack.enter_async_context(slots.slot())
        await asyncio.wait_for(stack.enter_async_context(slots.slot()), 60)


async def test_link_stats_contain_only_measured_values(queue):
    assert queue.ahead.link_stats(queue.origin) == LinkStats(n_at_once=4)
    queue.ahead.record_timing(queue.origin, wait_s=0.5, size=1000, took_s=0.001)
    assert queue.ahead.link_stats(queue.origin) == LinkStats(1, 0.5, None, 4)
    for took_s in (0.5, 1.5):
        queue.ahead.record_timing(queue.origin, wait_s=0.25, size=10 * MiB, took_s=took_s)
    assert queue.ahead.link_stats(queue.origin) == LinkStats(3, 1.0, 10 * MiB, 4)
    queue.candidate("a")
    queue.candidate("b")
    # Shared with two that wait half of their time.
    queue.ahead.record_timing(queue.origin, wait_s=1.0, size=20 * MiB, took_s=1.0)
    assert queue.ahead.link_stats(queue.origin) == LinkStats(4, 2.0, 20 * MiB, 4)
