"""Request pacing at Drive, and requests that get no answer."""

import asyncio
import types

import pytest

from cachedfs.common.types import Range
from cachedfs.origins.drive import quota
from cachedfs.origins.drive.quota import DriveLimits, QuotaMeter, RateLimit
from cachedfs.origins.http_request import HTTPRequest
from cachedfs.origins.retry import RetryPolicy
from cachedfs.sim import Fault
from tests.origins.contract import read

pytestmark = pytest.mark.usefixtures("default_rate_limits")
STALLED = RetryPolicy(base_s=0.001, cap_s=0.001, media_s=0.1, metadata_s=0.1)


# Rates
async def test_requests_wait_for_a_full_minute_and_callers_before_speculation(
    make, server, folder, root, monkeypatch
):
    """A lookup costs 100 of 1,000 units a minute."""
    monkeypatch.setattr(quota, "REQUESTS", (RateLimit(1000, 61.0, quota.UNITS),))
    server.put(f"{folder}/a", b"a")
    origin = make()
    now, slept = 0.0, list[float]()

    async def sleep(pause_s):
        nonlocal now
        now += pause_s
        slept.append(pause_s)

    monkeypatch.setattr(quota, "asyncio", types.SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    origin.account.limits = DriveLimits(QuotaMeter(), clock=lambda: now)
    above = await origin.lookup(root)
    while origin.spare_s() == 0:
        await origin.lookup(f"{root}/a", above)
    assert server.count("list") == 6  # the next download would exceed three quarters of the minute
    while not slept:
        await origin.lookup(f"{root}/a", above)
    assert server.count("list") == 11  # the eleventh waited
    assert now == 61.0


async def test_refused_creations_slow_down_only_creations(make, server, root, monkeypatch):
    monkeypatch.setattr(quota, "CREATES", (RateLimit(1, 1 / 300), RateLimit(1, 1 / 200)))
    origin = make()
    server.fail(Fault(kind="upload", status=403, reason="userRateLimitExceeded", times=5))
    await origin.call("pipe_file", f"{root}/a", b"a")
    assert origin.account.limits.creates.refused > 0.1
    assert origin.account.limits.requests.refused == 0
    info = await origin.lookup(f"{root}/a")
    server.fail(Fault(kind="media", status=429))
    await read(origin, f"{root}/a", None, info)
    assert origin.account.limits.requests.refused > 0


async def test_a_canceled_wait_for_a_turn_delays_no_other(monkeypatch):
    now, get = 0.0, HTTPRequest(url="", subject="", kind="get")
    monkeypatch.setattr(quota, "REQUESTS", (RateLimit(1, 60.0),))
    rates = DriveLimits(QuotaMeter(), clock=lambda: now)
    await rates.wait(get)
    waiting = [asyncio.ensure_future(rates.wait(get)) for _ in range(3)]
    await asyncio.sleep(0)
    assert rates.spare_s() > 0
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    now = 60.0
    assert await asyncio.wait_for(rates.wait(get), 60)


# Late answers
async def test_a_read_without_an_answer_is_sent_again(make, server, folder, root):
    server.put(f"{folder}/a", data := bytes(range(256)) * 100)
    origin, n_requests = make(STALLED), 0
    file = await origin.lookup(f"{root}/a")
    server.reset()
    server.fail(Fault(kind="media", stall_s=3600))

    def count():
        nonlocal n_requests
        n_requests += 1

    origin.on_request = count
    for want in (Range(3, 500), None):
        found = (await asyncio.wait_for(read(origin, file.path, want, file), 60))[0]
        assert found == data[slice(3, 500) if want else slice(None)]
    assert n_requests == server.count("media") == 3
    assert {r.headers["range"] for r in server.requests} == {"bytes=3-499", "bytes=0-25599"}


async def test_changes_are_never_sent_again_because_they_are_late(make, server, root):
    origin = make(STALLED)
    await origin.lookup(root)
    server.fail(Fault(kind="upload", stall_s=0.5))
    await origin.call("pipe_file", f"{root}/new", b"x")
    assert server.count("upload") == 1
