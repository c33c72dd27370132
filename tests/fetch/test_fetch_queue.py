"""Background requests: slots, turns, the bound on memory, and their priority below reads that a reader waits for."""

import asyncio
import contextlib

import pytest

from cachedfs.common.types import LinkStats, ObjectInfo, Range
from cachedfs.errors import OriginUnavailable
from cachedfs.fetch import fetch_queue
from cachedfs.fetch.fetch_queue import FetchQueue, SpeculativeRequest
from cachedfs.fetch.inflight import InflightRequest
from cachedfs.origins.request_slots import RequestSlots, speculative
from tests.fakes import FakeOrigin
from tests.support import MiB


class Desk:
    """An `Ahead`, and what was sent by it: names in their order, and their flights."""

    def __init__(self, concurrency: int = 2) -> None:
        self.ahead = FetchQueue()
        self.origin = FakeOrigin()
        self.origin.concurrency = concurrency
        self.sent: list[str] = []
        self.is_sent = asyncio.Event()
        self.inflight_requests: dict[str, InflightRequest] = {}

    def candidate(self, name: str, owner: object = "owner", size: int = MiB, **options) -> None:
        self.ahead.submit(
            SpeculativeRequest(
                owner, size, lambda: [self.run_request(name, size)], lambda: self.origin, **options
            )
        )

    def run_request(self, name: str, size: int) -> InflightRequest:
        inflight = self.inflight_requests[name] = InflightRequest(demand=size)
        inflight.begin(ObjectInfo(name, size=size), None, Range(0, size))
        self.sent.append(name)
        self.is_sent.set()
        return inflight

    async def asked(self) -> None:
        """Wait until every lookup has its answer, and what follows from it is done."""
        if asking := list(self.ahead._lookups):
            await asyncio.wait(asking)  # whose own callbacks come first

    def arrive(self, name: str, *, is_stored: bool = True) -> None:
        """The bytes of `name` came, and the request is over."""
        inflight = self.inflight_requests[name]
        inflight.feed(bytes(inflight.stop))
        inflight.n_received += 1
        inflight.finish()
        if is_stored:
            inflight.stored(True)
        self.ahead.pump()


@pytest.fixture
async def desk() -> Desk:
    return Desk()


async def test_as_many_are_sent_as_the_origin_has_slots_and_the_next_when_one_has_ended(desk):
    for name in "abcd":
        desk.candidate(name)
    assert desk.sent == ["a", "b"]
    desk.arrive("b")
    assert desk.sent == ["a", "b", "c"]


async def test_what_somebody_waits_for_by_now_takes_no_slot_of_what_nobody_does(desk):
    desk.candidate("a")
    desk.candidate("b")
    desk.candidate("c")
    reader = asyncio.ensure_future(desk.inflight_requests["b"].wait_until(MiB))
    await asyncio.sleep(0)
    desk.ahead.pump()
    assert desk.sent == ["a", "b", "c"]
    desk.arrive("b")
    await reader


async def test_a_question_that_somebody_waits_for_by_now_takes_no_slot_of_what_nobody_does(desk):
    answer, is_wanted = asyncio.get_running_loop().create_future(), False
    for _ in range(2):
        candidate = SpeculativeRequest(
            "owner", MiB, lambda: asyncio.shield(answer), lambda: desk.origin, is_wanted=lambda: is_wanted
        )
        desk.ahead.submit(candidate)
    desk.candidate("c")
    assert desk.sent == []
    is_wanted = True
    desk.ahead.pump()
    assert desk.sent == ["c"]
    answer.set_result([])
    await asyncio.sleep(0)


async def test_each_origin_has_slots_of_its_own(desk):
    desk.candidate("a")
    desk.candidate("b")
    desk.candidate("c", owner="other")
    other = FakeOrigin()
    desk.ahead.submit(SpeculativeRequest("third", 1, lambda: [desk.run_request("d", 1)], lambda: other))
    assert desk.sent == ["a", "b", "d"]


async def test_owners_take_turns_and_what_one_wants_goes_in_its_order(desk):
    desk.candidate("x")
    desk.candidate("y")
    for owner in "abc":
        for number in range(3):
            desk.candidate(f"{owner}{number}", owner=owner)
    for number in range(9):
        desk.arrive(desk.sent[number])
    assert desk.sent[2:] == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]


async def test_what_is_inferred_goes_before_what_is_declared(desk):
    desk.candidate("d0", is_declared=True, owner="plan")
    desk.candidate("d1", is_declared=True, owner="plan")
    desk.candidate("d2", is_declared=True, owner="plan")
    desk.candidate("i0")
    desk.arrive("d0")
    assert desk.sent == ["d0", "d1", "i0"]


async def test_what_is_withdrawn_is_not_sent(desk):
    keep: list[InflightRequest] = []  # owners need not be hashable
    for name in "abc":
        desk.candidate(name, owner=keep)
    desk.candidate("d")
    desk.ahead.withdraw(keep)
    desk.arrive("a")
    desk.arrive("b")
    assert desk.sent == ["a", "b", "d"]
    assert not any(desk.ahead._queues)


async def test_what_somebody_fetched_meanwhile_is_forgotten(desk):
    here: set[str] = set()
    for name in "abcdef":
        desk.candidate(name, is_over=lambda name=name: name in here)
    here |= set("abcde")
    desk.arrive("a")
    assert desk.sent == ["a", "b", "f"]
    assert not any(desk.ahead._queues)


async def test_a_wish_that_finds_all_of_it_here_takes_nothing_of_what_the_next_needs(monkeypatch):
    monkeypatch.setattr(fetch_queue, "MEMORY", MiB)
    desk = Desk(concurrency=1)
    for _ in range(3):
        desk.ahead.submit(SpeculativeRequest("owner", MiB, list, lambda: desk.origin))
    desk.candidate("a")
    desk.candidate("b")
    assert desk.sent == ["a"]


async def test_memory_is_bounded_until_the_bytes_are_on_the_disk(monkeypatch):
    monkeypatch.setattr(fetch_queue, "MEMORY", 3 * MiB)
    desk = Desk(concurrency=16)
    for name in "abcde":
        desk.candidate(name)
    assert desk.sent == ["a", "b", "c"]
    desk.arrive("a", is_stored=False)
    assert desk.ahead.memory == 3 * MiB
    assert desk.sent == ["a", "b", "c"]
    desk.inflight_requests["a"].stored(True)
    desk.ahead.pump()
    assert desk.sent == ["a", "b", "c", "d"]
    desk.arrive("b", is_stored=False)
    del desk.inflight_requests["b"]  # given up by all who had it
    desk.ahead.pump()
    assert desk.sent == ["a", "b", "c", "d", "e"]


async def test_what_could_not_be_stored_gives_way_to_what_is_sent_for_oldest_first(monkeypatch):
    monkeypatch.setattr(fetch_queue, "MEMORY", 3 * MiB)
    desk = Desk(concurrency=16)
    for name in "abcde":
        desk.candidate(name)
    for name in "abc":
        desk.arrive(name, is_stored=False)
    assert desk.sent == ["a", "b", "c"]
    for name in "ab":
        desk.inflight_requests[name].stored(False)
    assert desk.ahead.memory == 3 * MiB  # its reader may still come
    desk.ahead.pump()
    assert desk.sent == ["a", "b", "c", "d", "e"]
    assert [desk.inflight_requests[name].memory for name in "abc"] == [0, 0, MiB]
    assert not desk.inflight_requests["a"].covers(0)  # who wants it looks elsewhere


async def test_a_request_that_broke_takes_the_memory_of_what_came(monkeypatch):
    monkeypatch.setattr(fetch_queue, "MEMORY", 3 * MiB)
    desk = Desk(concurrency=16)
    for name in "abcd":
        desk.candidate(name)
    desk.inflight_requests["a"].feed(bytes(1000))
    desk.inflight_requests["a"].finish(OriginUnavailable("reset"))
    assert desk.ahead.memory == 2 * MiB + 1000
    desk.ahead.pump()
    assert desk.sent == ["a", "b", "c", "d"]


async def test_what_is_larger_than_the_memory_is_sent_alone(monkeypatch):
    monkeypatch.setattr(fetch_queue, "MEMORY", 3 * MiB)
    desk = Desk(concurrency=16)
    desk.candidate("big", size=4 * MiB)
    desk.candidate("small")
    assert desk.sent == ["big"]
    desk.arrive("big")
    assert desk.sent == ["big", "small"]


async def test_nothing_is_sent_while_the_origin_has_no_requests_to_spare(desk):
    looks = iter([0.001, 0.001])
    desk.origin.spare_s = lambda: next(looks, 0.0)
    desk.candidate("a")
    assert desk.sent == []
    await desk.is_sent.wait()
    assert not list(looks)


async def test_what_has_to_be_looked_up_first_takes_its_slot_and_its_memory(desk):
    answer = asyncio.get_running_loop().create_future()
    for _ in range(2):
        desk.ahead.submit(
            SpeculativeRequest("owner", MiB, lambda: asyncio.shield(answer), lambda: desk.origin)
        )
    desk.candidate("c")
    assert desk.sent == []
    assert desk.ahead.memory == 2 * MiB
    with speculative():
        answer.set_result([desk.run_request("a", 3 * MiB)])
    await desk.asked()
    assert desk.ahead.memory == 4 * MiB
    assert desk.sent == ["a", "c"]


async def test_large_bodies_are_as_many_as_the_link_takes_and_small_ones_as_there_are_slots():
    desk = Desk(concurrency=16)
    for number in range(20):
        desk.candidate(f"large {number}", size=8 * MiB)
    assert len(desk.sent) == 6, "four and one more on the link, and what waits for its first byte meanwhile"
    other = Desk(concurrency=16)
    for number in range(20):
        other.candidate(f"small {number}", size=64 << 10)
    assert len(other.sent) == 16


async def test_more_bodies_are_sent_where_each_comes_as_fast_as_one(desk):
    desk = Desk(concurrency=16)
    for number in range(16):
        desk.candidate(f"large {number}", size=8 * MiB)
    for _ in range(40):
        desk.ahead.record_timing(desk.origin, wait_s=0.05, size=8 * MiB, took_s=0.14)
    desk.ahead.pump()
    assert len(desk.sent) > 6


@pytest.mark.parametrize("is_later", [False, True])
async def test_a_wish_that_fails_is_nobodys_error_and_holds_nothing(desk, is_later):
    def fail() -> list[InflightRequest]:
        raise OriginUnavailable("no")

    async def fail_later() -> list[InflightRequest]:
        return fail()

    desk.ahead.submit(SpeculativeRequest("owner", MiB, fail_later if is_later else fail, lambda: desk.origin))
    await desk.asked()
    assert desk.ahead.memory == 0
    desk.candidate("b")
    assert desk.sent == ["b"]


async def test_a_wish_that_breaks_does_not_take_the_others_with_it(desk):
    def broken():
        raise RuntimeError("a mistake of ours")

    desk.ahead.submit(SpeculativeRequest("other", MiB, broken, lambda: desk.origin))
    desk.candidate("a")
    assert desk.sent == ["a"]


async def test_a_request_that_somebody_waited_for_before_takes_nothing_of_ours(desk):
    inflight = desk.run_request("theirs", MiB)
    desk.ahead.submit(SpeculativeRequest("owner", MiB, lambda: [inflight], lambda: desk.origin))
    assert desk.ahead.memory == 0


async def test_who_waits_never_waits_for_a_slot_of_what_is_sent_ahead():
    slots = RequestSlots(1)
    async with contextlib.AsyncExitStack() as stack:
        with speculative():
            await stack.enter_async_context(slots.mine)
            await stack.enter_async_context(slots.mine)
            assert slots.mine.locked()
        assert not slots.mine.locked()


async def test_what_was_measured_of_the_link_is_told_and_nothing_that_is_assumed(desk):
    assert desk.ahead.link_stats(desk.origin) == LinkStats(n_at_once=4)
    desk.ahead.record_timing(desk.origin, wait_s=0.5, size=1000, took_s=0.001)
    assert desk.ahead.link_stats(desk.origin) == LinkStats(1, 0.5, None, 4)
    for took_s in (0.5, 1.5):
        desk.ahead.record_timing(desk.origin, wait_s=0.25, size=10 * MiB, took_s=took_s)
    assert desk.ahead.link_stats(desk.origin) == LinkStats(3, 1.0, 10 * MiB, 4)
    desk.candidate("a")
    desk.candidate("b")
    desk.ahead.record_timing(
        desk.origin, wait_s=1.0, size=20 * MiB, took_s=1.0
    )  # shared with two that wait half of their time
    assert desk.ahead.link_stats(desk.origin) == LinkStats(4, 2.0, 20 * MiB, 4)
