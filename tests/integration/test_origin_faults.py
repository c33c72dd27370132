"""Faults of the origin during reads, listings and writes: right bytes or the right error, and nothing wrong is cached."""

import asyncio
import concurrent.futures
import importlib.util
import random
import threading
import types
from collections import Counter
from functools import partial

import fsspec
import gcsfs.retry
import pytest

from cachedfs.cache.index import database
from cachedfs.errors import AccessDenied, CachedFSError, ObjectChanged, OriginUnavailable, OriginUnreachable
from cachedfs.origins.retry import RetryPolicy
from cachedfs.sim import Fault
from tests.support import KiB, forget, noise, stack_dump, tally, until_quiet

BLOCK, SIZE = 64 * KiB, 300_000
OLD, NEW = noise(SIZE), noise(70_000, seed=2)
OPTIONS = {"block_size": BLOCK, "request_size": 2 * BLOCK, "read_ahead": 4 * BLOCK}
TRIES = 6
HANGS_S = 120.0

# Faults that are gone at the next try. `Content-Range` is only in the answers to reads.
PASSING = {
    "reset before the body": {"close_before": True, "reset": True},
    "closed before the body": {"close_before": True},
    "reset in the body": {"close_after": 40, "reset": True},
    "closed in the body": {"close_after": 40},
    "short body": {"short_by": 30},
    "long body": {"long_by": 100},
    "bytes behind the body": {"spill": 100},
    "wrong total": {"total": 777_777},
    "wrong range": {"headers": {"Content-Range": "bytes 1-99999/*"}},
    "all for a range": {"ignores_range": True},
    **{f"{status}": {"status": status, "html": status % 2 == 0} for status in (408, 429, 500, 502, 503, 504)},
    "retry after 0 s": {"status": 503, "headers": {"Retry-After": "0"}},
    "stalled before the body": {"stall_s": 60.0},
    "stalled in the body": {"stall_s": 60.0, "stall_after": 40},
    "trickle": {"trickle_s": 0.001},
    "rate limit": {"status": 403, "reason": "userRateLimitExceeded"},
    "redirected to itself": {"redirect": "", "status": 307},
    "a page": {"status": 200, "html": True},
}
LASTING = {
    **dict.fromkeys(("closed before the body", "short body", "503", "rate limit", "a page"), OriginUnavailable),
    "redirected to itself": OriginUnavailable,
    "retry after an hour": OriginUnavailable,
    "401": AccessDenied,
    "no right": AccessDenied,
    "404": (FileNotFoundError, CachedFSError),
    "refused": OriginUnreachable,
}  # fmt: skip
NOT_OF_S3 = ("rate limit", "408")  # S3 uses other codes, and s3fs does not repeat these
FAULTS = PASSING | {
    "retry after an hour": {"status": 429, "headers": {"Retry-After": "3600"}},
    "401": {"status": 401},
    "no right": {"status": 403, "reason": "insufficientFilePermissions"},
    "404": {"status": 404},
}


def read(fs, path):
    return fs.cat_file(path)


def read_a_part(fs, path):
    with fs.open(path) as file:
        file.seek(200_000)
        return file.read(60_000)


def find(fs, path):
    return fs.find(fs._parent(path))


def write(fs, path):
    fs.pipe_file(path, NEW)


# What is called, its right result, and the kind of the requests that are hit.
MOMENTS = {
    read: (lambda path: OLD, "media"),
    read_a_part: (lambda path: OLD[200_000:260_000], "media"),
    find: (lambda path: [path], "list"),
    write: (lambda path: None, "upload"),
}


@pytest.fixture
def policy(monkeypatch):
    """The retry policy of new origins, which does not wait."""
    given = {"base_s": 0.001, "cap_s": 0.001, "stall_s": 10.0, "media_s": 60.0, "metadata_s": 60.0}
    for room in ("cachedfs.origins.fsspec_origin", "cachedfs.origins.drive.connection"):
        monkeypatch.setattr(f"{room}.RetryPolicy", lambda: RetryPolicy(**given))
    monkeypatch.setattr(gcsfs.retry, "random", types.SimpleNamespace(random=lambda: -100.0))
    if importlib.util.find_spec("s3fs"):
        monkeypatch.setattr("s3fs.core.asyncio", Hasty())
        monkeypatch.setattr("botocore.retryhandler.delay_exponential", lambda *_, **__: 0.001)
    return given


class Hasty:
    """asyncio without waiting, for a module that waits between retries."""

    def __getattr__(self, name):
        return getattr(asyncio, name)

    async def sleep(self, wait_s):
        pass


@pytest.fixture
def machine(request):
    return request.getfixturevalue(request.param)


def filesystem(machine, **options):
    return fsspec.filesystem("cachedfs", target_protocol=machine.protocol, **OPTIONS, **options)


def outcome(act):
    """Return what a call returns or raises, or "hangs"."""
    future = concurrent.futures.Future()

    def run():
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


def is_right(got, moment, path, name, machine, *, is_lasting):
    if moment is write:
        # gcsfs writes to GCS: it tries less, and knows fewer errors.
        return got is None or (isinstance(got, CachedFSError) and f"{machine.protocol}://" in str(got))
    if not is_lasting:
        # With another size, a file of Drive is another version.
        is_changed = machine.protocol == "drive" and name == "wrong total" and isinstance(got, ObjectChanged)
        return is_changed or got == MOMENTS[moment][0](path)
    if machine.protocol == "s3" and name == "404" and got == []:
        return True  # s3fs finds nothing in a missing bucket
    if isinstance(got, ObjectChanged):
        return name == "404"  # of a version that was known
    return isinstance(got, LASTING[name]) and (path in str(got) or moment is find)


# Reads of GCS and of Drive have one loop; S3 is read by s3fs, and writes are each their own.
CASES = [
    *(("cloud", moment) for moment in MOMENTS),
    ("drive", read_a_part),
    ("drive", write),
    ("s3", read_a_part),
]


@pytest.mark.parametrize(
    ("machine", "moment"),
    CASES,
    indirect=["machine"],
    ids=[f"{name}-{moment.__name__}" for name, moment in CASES],
)
def test_faults_lead_to_right_bytes_or_the_right_error_and_nothing_wrong_is_cached(
    machine, moment, policy, clock
):
    patient = filesystem(machine)
    patient._objects.origin("")  # with the limits of now
    policy["stall_s"] = 0.3
    hasty = filesystem(machine, concurrency=14)
    hasty._objects.origin("")
    wrong, n = [], 0
    for name, times in [*((name, 1) for name in PASSING), *((name, None) for name in LASTING)]:
        if name in ("wrong total", "wrong range", "all for a range") and MOMENTS[moment][1] != "media":
            continue
        # Gcsfs and s3fs have their own limits.
        if "stalled" in name and (moment is write or machine.protocol == "s3"):
            continue
        if name in NOT_OF_S3 and machine.protocol == "s3":
            continue
        fs = hasty if "stalled" in name else patient
        path = machine.path(f"{name} {times}/big".replace(" ", "-"))
        machine.put(path.split(f"{machine.name}/")[1], OLD)
        patient.info(path)  # so that the fault does not hit the way to it
        if moment is find:
            patient.invalidate_cache(path)
            patient.info(patient._parent(path))
        until_quiet(patient._objects.engine)
        machine.server.reset()
        kind = MOMENTS[moment][1]
        if name == "refused":
            machine.server.refuse()
        else:
            machine.server.fail(Fault(kind=kind, times=times, **FAULTS[name]))
        got = outcome(partial(moment, fs, path))
        has_our_tries = machine.protocol != "s3" and moment is not write
        if name != "refused" and machine.server.count(kind) > 4 * TRIES and has_our_tries:
            wrong.append(f"{name}, {times}: {machine.server.count(kind)} requests")
        machine.server.heal()
        if not is_right(got, moment, path, name, machine, is_lasting=times is None):
            wrong.append(f"{name}, {times}: {got!r:.150}")
        until_quiet(patient._objects.engine)
        fs._objects.engine._unreachable.clear()
        clock(11)  # an absence has expired
        held = stored(machine, path)
        if moment is write and got is None and held != NEW:
            wrong.append(f"{name}, {times}: the write is lost")
        if (now := outcome(partial(read, fs, path))) != held:
            wrong.append(f"{name}, {times}: leaves {now!r:.150}")
        n += 1
    tally("faults at a moment of a call to a service", n)
    assert not wrong, "\n".join(wrong)


def stored(machine, path):
    """Return the bytes that the service holds, without cachedfs."""
    key = path.split(f"{machine.name}/")[1]
    if machine.protocol == "s3":
        return machine.server.get(machine.name, key)
    if machine.protocol == "drive":
        return bytes(machine.server.get(f"{machine.name}/{key}"))
    return bytes(machine.server._runner._service.store.get(machine.name, key).content())


@pytest.mark.parametrize(
    ("machine", "n_reads", "seed"),
    [
        ("cloud", 100, 0),
        *(
            pytest.param(name, 2000, seed, marks=[pytest.mark.stress, pytest.mark.timeout(900)])
            for name in ("cloud", "drive", "s3")
            for seed in range(20)
        ),
    ],
    indirect=["machine"],
)
def test_no_read_is_wrong_when_one_request_in_ten_fails(machine, n_reads, seed, policy, monkeypatch):
    """Eight threads read ranges of objects that are evicted again and again."""
    monkeypatch.setattr(database, "_WRITER_WAIT_S", 60.0)  # on a busy machine, `evict` would not get its turn
    rng = random.Random(seed)
    data = {f"{n}": machine.put(f"{n}", noise(SIZE, seed=seed + n)) for n in range(8)}
    fs = filesystem(machine)
    machine.server.reset()
    left_out = {"wrong total", *(NOT_OF_S3 if machine.protocol == "s3" else ())}
    faults = [fault for name, fault in PASSING.items() if "stalled" not in name and name not in left_out]
    for nth in range(1, 20_000):
        if rng.randrange(10) == 0:
            machine.server.fail(Fault(kind="media", nth=nth, **rng.choice(faults)))
    wanted = [(str(rng.randrange(8)), *sorted(rng.sample(range(SIZE), 2))) for _ in range(n_reads)]

    def read_range(which):
        name, start, stop = which
        fs.evict(machine.path(name))
        got = outcome(partial(fs.cat_file, machine.path(name), start, stop))
        return "right" if got == data[name][start:stop] else type(got).__name__

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        outcomes = Counter(threads.map(read_range, wanted))
    assert machine.server.count("media") >= 100  # ten of them failed
    machine.server.heal()
    until_quiet(fs._objects.engine)
    forget()
    assert {name: filesystem(machine).cat_file(machine.path(name)) for name in data} == data
    assert set(outcomes) <= {"right", "OriginUnavailable"}
    assert outcomes["right"] >= 0.95 * n_reads
