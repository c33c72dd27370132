"""Faults of the origin during reads, listings and writes: right bytes or the right error, and nothing wrong is cached.

One table gives the expected outcome of each fault at each moment of each service. The suite runs `COVERING`: every fault in
every group of moments. The stress test runs the whole product, except for `IMPOSSIBLE`.
"""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import email.utils
import functools
import itertools
import random
import threading
import types
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import fsspec
import gcsfs.retry
import pytest

from cachedfs.cache.block_cache import BlockCache
from cachedfs.errors import (
    AccessDenied,
    CachedFSError,
    CacheError,
    ObjectChanged,
    ObjectNotFound,
    OriginUnavailable,
    OriginUnreachable,
)
from cachedfs.fetch import runtimes
from cachedfs.origins.drive import quota
from cachedfs.origins.rate_limit import RateLimit
from cachedfs.origins.retry import RetryPolicy
from cachedfs.sim import Fault
from tests.support import Cloud, KiB, Machine, forget, noise, stack_dump, tally, until

BLOCK = 64 * KiB
SIZE, SMALL = 300_000, 100_000  # the object that takes three requests, and the one that takes one
BIG, SMALL_ONE, NEW = noise(SIZE), noise(SMALL, seed=1), noise(70_000, seed=2)
OPTIONS = {"block_size": BLOCK, "request_size": 2 * BLOCK, "read_ahead": 4 * BLOCK}
TRIES = 6
ONCE, FOR_EVER = 1, None
STALL_S = {ONCE: 0.2, FOR_EVER: 0.04}  # the time limit for a temporary stall, and for a lasting one
HANGS_S = 120.0  # a call that takes longer hangs
BYTES = None  # the outcome: the bytes of the object
EITHER = (BYTES, OriginUnavailable)
FAR = 1 << 40  # beyond the end of every body


# Moments


@dataclasses.dataclass(frozen=True)
class Moment:
    """An operation: how it is prepared, what is called, and what it costs without faults."""

    group: str  # media, json or write
    act: Callable[[Any], Any]
    right: Callable[[Any], Any]
    requests: int = 1  # of the kind that is affected by the fault
    size: int = 0  # bytes that must be received
    prepare: Callable[[Any], Any] = lambda at: None
    nth: int = 1  # which of those requests is affected


def read_in_sequence(at: Any) -> bytes:
    with at.fs.open(at.path("big")) as file:
        return b"".join(iter(lambda: file.read(10_000), b""))


def open_handle(at: Any) -> None:
    at.handle = at.fs.open(at.path("big"))
    assert at.handle.read(10) == at.big[:10]


def read_handle(at: Any) -> bytes:
    at.handle.seek(200_000)
    return bytes(at.handle.read(60_000))


def write_file(at: Any) -> None:
    with at.fs.open(at.path("big"), "wb") as file:
        file.write(NEW)


MERGED = [(0, 1000), (65_000, 66_000), (140_000, 262_144)]
MOMENTS = {
    "hit": Moment(
        "media",
        lambda at: (at.fs.cat_file(at.path("big")), at.fs.cat_file(at.path("big"), 5, 70_000)),
        lambda at: (at.big, at.big[5:70_000]),
        requests=0,
        prepare=lambda at: at.fs.cat_file(at.path("big")),
    ),
    "whole": Moment("media", lambda at: at.fs.cat_file(at.path("small")), lambda at: at.small, 1, SMALL),
    "range": Moment(
        "media",
        lambda at: at.fs.cat_file(at.path("big"), 70_000, 130_000),
        lambda at: at.big[70_000:130_000],
        1,
        BLOCK,
    ),
    "merged": Moment(
        "media",
        lambda at: at.fs.cat_ranges([at.path("big")] * 3, *map(list, zip(*MERGED, strict=True))),
        lambda at: [at.big[start:stop] for start, stop in MERGED],
        4,  # in order, so the last block is read ahead
        SIZE,
        prepare=lambda at: at.fs.info(at.path("big")),
    ),
    "suffix": Moment(
        "media",
        lambda at: at.fs.cat_file(at.path("big"), -1000, None),
        lambda at: at.big[-1000:],
        1,
        BLOCK - 1 + 1000,  # the size of the object is unknown, and so the start of its last block
    ),
    "ahead": Moment("media", read_in_sequence, lambda at: at.big, 3, SIZE, nth=2),
    "handle": Moment("media", read_handle, lambda at: at.big[200_000:260_000], 1, BLOCK, prepare=open_handle),
    "ls": Moment(
        "json",
        lambda at: sorted(at.fs.ls(at.path(), detail=False)),
        lambda at: [at.path("big"), at.path("small")],
    ),
    "find": Moment(
        "json",
        lambda at: at.fs.find(at.path()),
        lambda at: [at.path("big"), at.path("small")],
    ),
    "info": Moment("json", lambda at: at.fs.info(at.path("big"))["size"], lambda at: SIZE),
    "pipe": Moment(
        "write",
        lambda at: at.fs.pipe_file(at.path("big"), NEW),
        lambda at: None,
    ),
    "write": Moment("write", write_file, lambda at: None),
}
COSTS = {  # in requests and bytes, where a service differs
    ("drive", "suffix"): (1, SIZE - 4 * BLOCK),
    ("gs", "write"): (2, 0),  # a session and its end
}
KINDS = {  # of the requests that are affected
    "gs": {"media": "media", "ls": "list", "find": "list", "info": "metadata", "write": "upload"},
    "drive": {"media": "media", "ls": "list", "find": "list", "info": "list", "write": "upload"},
}


# Faults


@dataclasses.dataclass(frozen=True)
class Row:
    """A fault, and its outcome in each group of moments: BYTES, the class of the error, or one of several.

    `fault` depends on the group; "refuse" means that no connection is accepted.
    """

    fault: Callable[[str], dict[str, Any]] | str
    times: int | None = ONCE
    media: Any = BYTES
    json: Any = BYTES
    write: Any = BYTES
    sends_again: bool = False  # received bytes must be discarded
    at_most: int | None = None  # requests for each request without a fault


def always(**fault: Any) -> Callable[[str], dict[str, Any]]:
    return lambda group: fault


def inside(group: str) -> int:
    """Return an offset in the middle of the body."""
    return 20_000 if group == "media" else 40


def passing(fault: Callable[[str], dict[str, Any]], **more: Any) -> dict[str, Row]:
    """Return the rows of a fault that is retried: once, and for ever."""
    stays = {"media": OriginUnavailable, "json": OriginUnavailable, "write": OriginUnavailable}
    return {"": Row(fault, **more), " for ever": Row(fault, FOR_EVER, **{**more, **stays})}


def harmless(fault: Callable[[str], dict[str, Any]], **more: Any) -> dict[str, Row]:
    """Return the rows of a fault that does not change the bytes."""
    return {"": Row(fault, **more), " for ever": Row(fault, FOR_EVER, **more)}


def refusal(kind: Any, **fault: Any) -> dict[str, Row]:
    """Return the rows of an answer that is not retried, once and for ever."""
    given = {"media": kind, "json": kind, "write": kind}
    return {"": Row(always(**fault), **given), " for ever": Row(always(**fault), FOR_EVER, **given)}


LATER = email.utils.format_datetime(
    datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=2), usegmt=True
)
NOTHING_FAILS = "nothing"
GIVEN_UP = {"media": OriginUnavailable, "json": OriginUnavailable, "write": BYTES, "at_most": 1}
FAMILIES: dict[str, dict[str, Row]] = {
    NOTHING_FAILS: {"": Row(always(), at_most=1)},
    "refused": {
        " for ever": Row("refuse", FOR_EVER, OriginUnreachable, OriginUnreachable, OriginUnreachable)
    },
    "reset before the body": passing(always(close_before=True, reset=True)),
    "closed before the body": passing(always(close_before=True)),
    "reset in the body": {"": Row(lambda group: {"close_after": inside(group), "reset": True})},
    "closed in the body": {"": Row(lambda group: {"close_after": inside(group)})},
    "closed soon": {" for ever": passing(always(close_after=10))[" for ever"]},
    "reset after the body": harmless(always(close_after=FAR, reset=True)),
    "closed after the body": harmless(always(close_after=FAR)),
    "short body": passing(always(short_by=30), sends_again=True),
    "long body": {
        "": Row(always(long_by=100), sends_again=True),
        " for ever": Row(
            always(long_by=100), FOR_EVER, BYTES, OriginUnavailable, OriginUnavailable, sends_again=True
        ),
    },
    # The network decides whether they are received with the body, which is then invalid, or after it.
    "bytes behind the body": {
        "": Row(always(spill=100), sends_again=True),
        " for ever": Row(always(spill=100), FOR_EVER, EITHER, EITHER, EITHER, sends_again=True),
    },
    "wrong range": passing(always(headers={"Content-Range": "bytes 1-99999/*"}), sends_again=True),
    "wrong total": passing(always(total=777_777), sends_again=True),
    "all for a range": harmless(always(ignores_range=True), sends_again=True),
    "spoilt byte": passing(always(flip=5), sends_again=True),
    **{
        f"{status} as {name}": {"": Row(always(status=status, html=name == "html"))}
        for status, name in zip((408, 429, 500, 502, 503, 504), ("json", "html") * 3, strict=True)
    },
    "503": {" for ever": passing(always(status=503))[" for ever"]},
    "429": {" for ever": passing(always(status=429))[" for ever"]},
    "retry after 0 s": passing(always(status=503, headers={"Retry-After": "0"})),
    "retry after an hour": {"": Row(always(status=429, headers={"Retry-After": "3600"}), **GIVEN_UP)},
    "retry after a date": {"": Row(always(status=503, headers={"Retry-After": LATER}), **GIVEN_UP)},
    "stalled before the body": passing(always(stall_s=2.0)),
    "stalled in the body": {"": Row(lambda group: {"stall_s": 2.0, "stall_after": inside(group)})},
    "stalled soon": {" for ever": passing(always(stall_s=2.0, stall_after=10))[" for ever"]},
    "trickle": {"": Row(always(trickle_s=0.001))},
    "401": refusal(AccessDenied, status=401),
    "403 of a right": refusal(AccessDenied, status=403, reason="insufficientFilePermissions"),
    "403 of a rate": passing(always(status=403, reason="userRateLimitExceeded")),
    "404": {
        "": Row(always(status=404), ONCE, ObjectNotFound, ObjectNotFound, ObjectNotFound),
        " for ever": Row(always(status=404), FOR_EVER, ObjectNotFound, ObjectNotFound, ObjectNotFound),
    },
    # Redirects are followed; Drive API requests are retried instead, as they are never redirected.
    "302": passing(always(redirect=""), write=CachedFSError, at_most=2 * TRIES),
    "307": passing(always(redirect="", status=307), at_most=2 * TRIES),
    "302 to a page": passing(always(redirect="/portal/page"), write=CachedFSError, at_most=4 * TRIES),
    "page instead": passing(always(status=200, html=True), at_most=2 * TRIES),
}
FAULTS = {name + when: row for name, family in FAMILIES.items() for when, row in family.items()}
SERVICES = ("gs", "drive", "drive without revisions")
CLOUDS = ("gs", "drive")
# Services and moments with other outcomes.
EXCEPTIONS: dict[tuple[str, str, str], Any] = {
    # The wanted bytes may be complete before the block around them fails.
    **{(cloud, moment, "short body for ever"): EITHER for cloud in CLOUDS for moment in ("range", "handle")},
    # The headers state the length of a range.
    **{
        (cloud, moment, "long body for ever"): OriginUnavailable
        for cloud in CLOUDS
        for moment, operation in MOMENTS.items()
        if operation.group == "media"
    },
    # For a known version, a 404 means a change; one-shot reads then look the object up again.
    **{
        ("gs", moment, f"404{when}"): ObjectChanged
        for moment in ("ahead", "handle")
        for when in ("", " for ever")
    },
    ("gs", "merged", "404"): BYTES,
    **{("drive", moment, "404"): BYTES for moment in ("whole", "range", "merged", "suffix")},
    **{("drive", moment, "404"): (BYTES, ObjectChanged) for moment in ("ahead", "handle")},
    **{
        ("drive", moment, "404 for ever"): ObjectChanged
        for moment in ("whole", "range", "merged", "suffix", "ahead", "handle")
    },
    # A folder that Drive shows but does not list is not removed: nothing may be left out.
    **{
        ("drive", moment, f"404{when}"): CachedFSError
        for moment in ("ls", "find", "info")
        for when in ("", " for ever")
    },
    # Drive reads a revision; if that is refused, the file is read without naming it.
    **{
        ("drive", moment, fault): (BYTES, AccessDenied)
        for moment in ("range", "merged", "suffix", "handle")
        for fault in ("401", "403 of a right")
    },
    **{
        ("drive", moment, fault): outcome
        for moment in ("whole", "range", "merged", "suffix", "ahead", "handle")
        for fault, outcome in (
            ("wrong total", (BYTES, ObjectChanged)),
            ("wrong total for ever", ObjectChanged),
        )
    },
    # gcsfs makes the writes to Google Cloud Storage; it distinguishes fewer errors and retries less.
    **{
        ("gs", moment, fault): (BYTES, OriginUnavailable)
        for moment in ("pipe", "write")
        for fault in (
            "short body",
            "long body",
            "stalled before the body",
            "stalled in the body",
            "302 to a page",
            "page instead",
            "302 to a page for ever",
        )
    },
    **{
        ("gs", moment, f"403 of a rate{when}"): AccessDenied
        for moment in ("pipe", "write")
        for when in ("", " for ever")
    },
    **{
        ("drive", moment, f"retry after {how}"): OriginUnavailable
        for moment in ("pipe", "write")
        for how in ("an hour", "a date")
    },
    **{("drive", moment, "404"): (BYTES, ObjectNotFound) for moment in ("pipe", "write")},
    # A redirected write is not followed, or followed as a GET.
    **{
        (cloud, moment, fault): outcome
        for cloud in CLOUDS
        for moment in ("pipe", "write")
        for fault, outcome in (("302", (BYTES, CachedFSError)), ("302 for ever", CachedFSError))
    },
    **{
        ("drive", moment, f"{fault}{when}"): outcome
        for moment in ("pipe", "write")
        for fault in ("307", "302 to a page")
        for when, outcome in (("", (BYTES, CachedFSError)), (" for ever", CachedFSError))
    },
}
NOT_A_RANGE = "only an answer to a read of a range can be of another range"
NO_CHECKSUM = "nothing says what the bytes should be: no checksum covers a part, nor an answer in JSON"
AS_DRIVE = "only the proof of a version differs from that of other files of Drive"
IMPOSSIBLE = {
    **{
        (service, moment, fault): NOT_A_RANGE
        for service in SERVICES
        for moment, operation in MOMENTS.items()
        if operation.group != "media"
        for fault in FAULTS
        if fault.startswith(("wrong ", "all for"))
    },
    **{
        (service, moment, fault): NO_CHECKSUM
        for service in SERVICES
        for moment in MOMENTS
        if moment not in ("hit", "whole")
        for fault in FAULTS
        if fault.startswith("spoilt")
    },
    **{
        ("drive without revisions", moment, fault): AS_DRIVE
        for moment, operation in MOMENTS.items()
        if operation.group != "media" or moment in ("hit", "whole")
        for fault in FAULTS
    },
}
CELLS = [
    (service, moment, fault)
    for service in SERVICES
    for moment in MOMENTS
    for fault in FAULTS
    if (service, moment, fault) not in IMPOSSIBLE
]


def covering() -> list[tuple[str, str, str]]:
    """Return cells with every fault for reads of each service, listings of one and writes of the other; moments take turns."""
    chosen = [(service, "hit", "refused for ever") for service in CLOUDS]
    for n, fault in enumerate(FAULTS):
        one, other = CLOUDS if (n + n // 2) % 2 else CLOUDS[::-1]
        clouds = {"media": SERVICES, "json": [one], "write": [other]}
        for group, services in clouds.items():
            moments = [
                name for name, operation in MOMENTS.items() if operation.group == group and name != "hit"
            ]
            in_turn = moments[n % len(moments) :] + moments[: n % len(moments)]
            for service in services:
                possible = [(service, moment, fault) for moment in in_turn]
                chosen += [cell for cell in possible if cell not in IMPOSSIBLE][:1]
    return chosen


COVERING = covering()


# Checks of every cell


@pytest.fixture(autouse=True)
def held_locks(monkeypatch):
    """Record which fetch locks and lookup locks are held."""
    held: set[int] = set()
    take, drop = BlockCache.take_lock, BlockCache.release_lock

    def recording_take(self, hash64):
        if is_taken := take(self, hash64):
            held.add(hash64)
        return is_taken

    def recording_release(self, hash64):
        drop(self, hash64)
        held.discard(hash64)

    monkeypatch.setattr(BlockCache, "take_lock", recording_take)
    monkeypatch.setattr(BlockCache, "release_lock", recording_release)
    return held


@pytest.fixture
def policy(monkeypatch):
    """The retry policy of new origins; gcsfs retries without waiting."""
    # A request ends soon after its reader pauses.
    monkeypatch.setattr("cachedfs.fetch.fetcher.PATIENCE_S", 0.02)
    given = {"base_s": 0.001, "cap_s": 0.001, "stall_s": 10.0, "connect_s": 10.0}
    # A busy machine must not cause more requests.
    given |= {"media_s": 60.0, "metadata_s": 60.0}
    for room in ("cachedfs.origins.gcs.origin", "cachedfs.origins.drive.client"):
        monkeypatch.setattr(f"{room}.RetryPolicy", lambda: RetryPolicy(**given))
    # Pacing after refusals is tested elsewhere and would take time here.
    monkeypatch.setattr(quota, "REQUESTS", (RateLimit(1e6),))
    # The six tries of gcsfs would wait 31 s in all.
    monkeypatch.setattr(gcsfs.retry, "random", types.SimpleNamespace(random=lambda: -100.0))
    return given


def outcome(act: Callable[[], Any]) -> Any:
    """Return what a call returns or raises, or "hangs"."""
    future: concurrent.futures.Future = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(act())
        except Exception as error:
            future.set_result(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return future.result(HANGS_S)
    except concurrent.futures.TimeoutError:
        print(stack_dump())  # noqa: T201 - shown with the failure
        return "hangs"


def await_quiet(held_locks: set[int]) -> None:
    """Wait until no request, lookup or lock is left; fail if that takes too long."""
    (runtime,) = runtimes._runtimes.values()

    # On the loop, where no request is between the queue and the list of active ones.
    async def is_quiet() -> bool:
        # Readahead waits while an origin has no requests to spare, as after many refusals.
        ahead = any(runtime.fetch_queue._queues) or runtime.fetch_queue._lookups
        return not (
            ahead
            or runtime.active_requests
            or runtime.inflight_requests
            or runtime.lookups._running
            or held_locks
        )

    until(lambda: runtime.drain(120) and runtime.run(is_quiet()))


class Cell:
    """One fault at one moment, with two objects of its own."""

    def __init__(self, machine: Machine, service: str, moment: str, fault: str, fs: Any) -> None:
        self.machine, self.server, self.fs = machine, machine.server, fs
        self.moment, self.operation, self.row, self.fault = moment, MOMENTS[moment], FAULTS[fault], fault
        self.name = "small" if moment == "whole" else "big"
        self.folder = fault.replace(" ", "-")
        self.big, self.small = BIG, SMALL_ONE
        machine.put(f"{self.folder}/big", BIG)
        machine.put(f"{self.folder}/small", SMALL_ONE)
        if service == "drive without revisions":
            for name in ("big", "small"):
                (item,) = self.server.find(f"{machine.name}/{self.folder}/{name}")
                self.server.edit(item["id"], capabilities={"canDownload": True, "canReadRevisions": False})
        kinds = KINDS[machine.protocol]
        self.requests, self.size = COSTS.get(
            (machine.protocol, moment), (self.operation.requests, self.operation.size)
        )
        self.kind = None if moment == "hit" else kinds.get(moment) or kinds[self.operation.group]
        self.expected = EXCEPTIONS.get(
            (machine.protocol, moment, fault), getattr(self.row, self.operation.group)
        )

    def path(self, name: str = "") -> str:
        return str(self.machine.path(f"{self.folder}/{name}")).rstrip("/")

    def run(self, held_locks: set[int]) -> str:
        """Return what is wrong, or an empty string."""
        if self.machine.protocol == "drive":
            self.fs.info(self.path())
        self.operation.prepare(self)
        await_quiet(held_locks)
        self.server.reset()
        self._inject()
        with pytest.MonkeyPatch.context() as patch:
            # A slow reader on a busy machine must not lose its request.
            patch.setattr("cachedfs.fetch.fetcher.PATIENCE_S", HANGS_S)
            got = outcome(lambda: self.operation.act(self))
        if self.moment == "handle":
            self.handle.close()
        self.server.heal()
        await_quiet(held_locks)
        n, sent = self.server.count(self.kind), self.server.bytes_sent()
        if self.operation.group == "write" and got is None and self.stored_bytes() != NEW:
            return "lost the write"
        return self._judged(got) or self._counted(n, sent)

    def _inject(self) -> None:
        if self.row.fault == "refuse":
            self.server.refuse()
            return
        assert callable(self.row.fault)
        fault = self.row.fault(self.operation.group)
        if fault.get("redirect"):  # the fault at its target comes first: it is media to GCS
            key = "page" if self.machine.protocol == "gs" else ""
            self.server.fail(Fault(key=key, status=200, html=True, times=None))
        self.server.fail(Fault(kind=self.kind, times=self.row.times, nth=self.operation.nth, **fault))

    def _judged(self, got: Any) -> str:
        outcomes = self.expected if isinstance(self.expected, tuple) else (self.expected,)
        if self.moment == "ahead" and self.row.times == ONCE:
            outcomes = (*outcomes, BYTES)  # a reader that did not wait yet sends its own request
        if self.moment == "hit":
            outcomes = (BYTES,)
        wrong = [self._differs(got, expected) for expected in outcomes]
        return "" if "" in wrong else wrong[0]

    def _differs(self, got: Any, expected: Any) -> str:
        if expected is BYTES:
            right = self.operation.right(self)
            return "" if got == right else f"gave {got!r:.150}"
        # The first request of a write may be for the top of its path.
        place = f"{self.machine.protocol}://" if self.operation.group == "write" else self.path()
        is_named = place in str(got)
        if isinstance(got, list) and self.moment == "merged":
            got = next((each for each in got if isinstance(each, Exception)), got)
        return "" if isinstance(got, expected) and is_named else f"gave {got!r:.150}"

    def _counted(self, n: int, sent: int) -> str:
        tries = self.row.at_most or (2 if self.row.times == ONCE else TRIES)
        if self.fault.startswith("stalled"):
            tries = max(tries, 3)  # on a busy machine, the next request may seem to stall too
        if self.operation.group == "write":
            # gcsfs ignores Retry-After, and follows ten redirects at each try
            tries = 10 * TRIES if self.fault.startswith("30") else max(tries, 2)
        if self.moment == "ahead":
            tries = max(tries, 3)  # a reader of two blocks that failed ahead requests each of them
            if self.row.times == FOR_EVER and isinstance(self.expected, tuple):
                tries *= 2  # some succeed, and the reader requests again what failed ahead
        # On a busy machine any of several requests may seem to stall.
        n_struck = 1 if self.row.times == ONCE and not self.fault.startswith("stalled") else self.requests
        if n > self.requests + (tries - 1) * n_struck or (self.fault == NOTHING_FAILS and n != self.requests):
            return f"took {n} requests"
        most = self.size + KiB * n + (SIZE * n if self.row.sends_again else 0)
        if self.size and (sent > most or (self.fault == NOTHING_FAILS and sent != self.size)):
            return f"took {sent} bytes for {self.size}"
        return ""

    def stored_bytes(self) -> bytes:
        """Return the bytes that the cloud stores, without cachedfs."""
        if isinstance(self.machine, Cloud):
            store = self.server._runner._service.store
            return bytes(store.get(self.machine.name, f"{self.folder}/{self.name}").content())
        return bytes(self.server.get(f"{self.machine.name}/{self.folder}/{self.name}"))

    def reads_wrong(self, fs: Any) -> str:
        """Return what a read returns wrongly now that nothing fails."""
        got = outcome(partial(fs.cat_file, self.path(self.name)))
        return "" if got == self.stored_bytes() else f"leaves {got!r:.150}"


def check(chosen: list[tuple[str, str, str]], request, policy, held_locks, clock) -> None:
    """Run cells of one service and one moment, and fail with everything that is wrong."""
    service, moment, _ = chosen[0]
    machine = request.getfixturevalue("cloud" if service == "gs" else "drive")
    make = functools.partial(fsspec.filesystem, "cachedfs", target_protocol=machine.protocol, **OPTIONS)
    patient = make()
    patient._source.origin("")
    hasty = {}
    for n, (times, stall_s) in enumerate(STALL_S.items(), 14):
        policy["stall_s"] = stall_s
        limited = service == "gs" and MOMENTS[moment].group == "write"
        hasty[times] = make(concurrency=n, target_options={"requests_timeout": stall_s} if limited else {})
        hasty[times]._source.origin("")
    cells, wrong = [], {}
    for each in chosen:
        fs = hasty[FAULTS[each[2]].times] if "stalled" in each[2] else patient
        cells.append(Cell(machine, *each, fs))
        if cells[-1].operation.group == "write":
            patient.cat_file(cells[-1].path("big"))  # these cached bytes must not be returned after the write
        wrong[each] = cells[-1].run(held_locks)
    clock(11)  # cached absences have expired
    for cell in cells:
        wrong[service, moment, cell.fault] = wrong[service, moment, cell.fault] or cell.reads_wrong(patient)
    forget()
    anew = make()
    for cell in cells:
        wrong[service, moment, cell.fault] = wrong[service, moment, cell.fault] or cell.reads_wrong(anew)
    tally("faults at a moment of a call to a service", len(cells))
    if found := "\n".join(f"{cell[2]}: {what}" for cell, what in wrong.items() if what):
        pytest.fail(found, pytrace=False)


def by_moment(cells: list[tuple[str, str, str]]) -> Any:
    """Parametrize with the cells of each service and moment."""
    groups: dict[str, list[tuple[str, str, str]]] = {}
    for cell in cells:
        groups.setdefault(f"{cell[0]}-{cell[1]}", []).append(cell)
    return pytest.mark.parametrize("cells", groups.values(), ids=groups.keys())


@by_moment(COVERING)
def test_faults_lead_to_right_bytes_or_the_right_error_and_nothing_wrong_is_cached(
    cells, request, policy, held_locks, clock
):
    check(cells, request, policy, held_locks, clock)


@pytest.mark.stress
@by_moment(CELLS)
def test_every_fault_at_every_moment(cells, request, policy, held_locks, clock):
    check(cells, request, policy, held_locks, clock)


def test_the_table_has_an_outcome_for_every_cell():
    product = set(itertools.product(SERVICES, MOMENTS, FAULTS))
    assert set(CELLS) == product - set(IMPOSSIBLE)
    assert set(IMPOSSIBLE) | set(EXCEPTIONS) <= product
    assert {cell[2] for cell in COVERING} == set(FAULTS)
    assert {cell[:2] for cell in COVERING} == {cell[:2] for cell in CELLS}


@pytest.mark.parametrize("service", ["gs", "drive"])
def test_all_readers_of_a_failed_request_get_its_error_and_the_next_read_retries(
    service, request, policy, held_locks
):
    machine = request.getfixturevalue("cloud" if service == "gs" else "drive")
    data = machine.put("big", BIG)
    fs = fsspec.filesystem("cachedfs", target_protocol=machine.protocol, **OPTIONS)
    path = machine.path("big")
    fs.info(path)
    for times, expected in ((FOR_EVER, OriginUnavailable), (TRIES - 1, bytes)):
        machine.server.fail(Fault(kind="media", times=times, status=503, stall_s=0.1))
        machine.server.reset()
        with concurrent.futures.ThreadPoolExecutor(20) as threads:
            waiting = [threads.submit(outcome, partial(fs.cat_file, path, n, 60_000 + n)) for n in range(20)]
            got = [each.result() for each in waiting]
        assert {type(each) for each in got} == {expected}
        # They share one block and its six tries; a later reader starts again.
        assert machine.server.count("media") <= 2 * TRIES
        await_quiet(held_locks)
        machine.server.heal()
        if expected is bytes:
            assert got == [data[n : 60_000 + n] for n in range(20)]
    assert fs.cat_file(path) == data


# Random faults


def faults_by_chance(share: int, rng: random.Random) -> list[Fault]:
    """Return one fault in `share` of the next requests, of every temporary kind."""
    kinds: dict[str, list[Row]] = {}
    for name, row in FAULTS.items():
        if (
            row.times == ONCE
            and row.media is BYTES
            and not name.startswith(("nothing", "spoilt", "stalled", "302 to"))
        ):
            kinds.setdefault("status" if " as " in name else name, []).append(row)
    struck = [n for n in range(1, 20_000) if rng.randrange(share) == 0]
    return [
        Fault(kind="media", nth=n, **rng.choice(kinds[rng.choice([*kinds])]).fault("media")) for n in struck
    ]


def read_by_chance(machine: Machine, n_reads: int, seed: int, held_locks: set[int]) -> Counter:
    """Read ranges in eight threads while one request in ten fails; count the right reads and the errors."""
    rng = random.Random(seed)
    data = {f"{n}": machine.put(f"{n}", noise(SIZE, seed=seed + n)) for n in range(8)}
    fs = fsspec.filesystem("cachedfs", target_protocol=machine.protocol, **OPTIONS)
    machine.server.reset()
    for fault in faults_by_chance(10, rng):
        machine.server.fail(fault)
    wanted = [(str(rng.randrange(8)), *sorted(rng.sample(range(SIZE), 2))) for _ in range(n_reads)]

    def read(which: tuple[str, int, int]) -> str:
        name, start, stop = which
        with contextlib.suppress(CacheError):  # the index is busy
            fs.evict(machine.path(name))  # so that requests are needed
        got = outcome(partial(fs.cat_file, machine.path(name), start, stop))
        return "right" if got == data[name][start:stop] else type(got).__name__

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        outcomes = Counter(threads.map(read, wanted))
    assert machine.server.count("media") >= 100  # ten of them failed
    machine.server.heal()
    await_quiet(held_locks)
    forget()
    anew = fsspec.filesystem("cachedfs", target_protocol=machine.protocol, **OPTIONS)
    for name, right in data.items():
        assert anew.cat_file(machine.path(name)) == right
    return outcomes


@pytest.mark.parametrize("service", ["gs", "drive"])
def test_no_read_is_wrong_when_one_request_in_ten_fails(service, request, policy, held_locks):
    machine = request.getfixturevalue("cloud" if service == "gs" else "drive")
    outcomes = read_by_chance(machine, 100, 0, held_locks)
    assert set(outcomes) <= {"right", "OriginUnavailable"}
    assert outcomes["right"] >= 95  # six failures in a row have a chance of one in a million


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("service", ["gs", "drive"])
def test_no_read_is_wrong_when_one_request_in_ten_fails_for_long(
    service, seed, request, policy, held_locks, capsys
):
    machine = request.getfixturevalue("cloud" if service == "gs" else "drive")
    outcomes = read_by_chance(machine, 2000, seed, held_locks)
    with capsys.disabled():
        print(f"\n{service}, seed {seed}: {dict(outcomes)}")  # noqa: T201 - what was counted is the result
    assert set(outcomes) <= {"right", "OriginUnavailable"}
