"""The clock for the age of metadata."""

import time

import pytest

from cachedfs.common import clock as module
from cachedfs.common.clock import Clock, boot_number


@pytest.fixture
def machine(monkeypatch):
    """Return the clocks of the machine, to be set: seconds since the epoch and since boot."""
    now = {"wall": 1_000_000.0, "boot": 500.0}
    monkeypatch.setattr(time, "time", lambda: now["wall"])
    monkeypatch.setattr(time, "clock_gettime", lambda which: now["boot"])
    return now


@pytest.mark.parametrize(
    ("wall_s", "boot_s", "age_s"),
    [
        (61, 61, 61),
        (61 - 3600, 61, 61),  # set back by an hour
        (61 + 3600, 61, 3661),  # set forward
        (61, 1, 61),  # a virtual machine was paused
    ],
)
def test_the_age_is_the_larger_of_wall_clock_and_time_since_boot(machine, wall_s, boot_s, age_s):
    clock = Clock()
    began = clock.now()
    assert began == 1_000_000
    machine["wall"] += wall_s
    machine["boot"] += boot_s
    assert clock.now() - began == age_s


def test_a_process_that_starts_after_the_clock_was_set_back_learns_the_offset_of_others(machine):
    first, second = Clock(), Clock()
    began = first.now()
    machine["wall"] -= 3600
    machine["boot"] += 61
    second.advance(first.offset)
    assert second.now() - began == 61


def test_a_system_without_boot_numbers_has_none(monkeypatch):
    monkeypatch.setattr(module, "_BOOT_ID", "/missing")
    assert boot_number.__wrapped__() is None
