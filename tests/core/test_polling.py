"""Waiting for other processes, in virtual time."""

import types

import pytest

from cachedfs.core import polling
from cachedfs.core.polling import poll


@pytest.fixture
def pauses(monkeypatch):
    """Let virtual time pass in pauses only, and return these."""
    pauses: list[float] = []

    async def sleep(pause_s):
        pauses.append(pause_s)

    monkeypatch.setattr(polling, "time", types.SimpleNamespace(monotonic=lambda: sum(pauses)))
    monkeypatch.setattr(polling, "asyncio", types.SimpleNamespace(sleep=sleep))
    return pauses


async def test_the_result_is_returned_at_once_or_after_growing_pauses(pauses):
    assert await poll(lambda: "here") == "here"
    assert pauses == []
    answers = iter([None] * 7 + ["there"])
    assert await poll(lambda: next(answers)) == "there"
    assert pauses == [0.002, 0.004, 0.008, 0.016, 0.032, 0.05, 0.05]


async def test_waiting_ends_with_the_time_allowed(pauses):
    assert not await poll(lambda: False, within_s=30)
    assert 30 <= sum(pauses) < 30.1
