"""The audit of a cache: it finds damage, repairs it, and finds nothing afterwards."""

import os
import time
from pathlib import Path

import pytest

from cachedfs.common.types import CacheBounds
from tests.cache.helpers import content, file_of, flip, key_of, put, whole


@pytest.fixture
def filled(cache):
    put(cache, key_of(), *range(6))
    assert cache.check().ok
    return cache


def repaired(cache):
    """Repair, and return what was found; the next audit must find nothing."""
    report = cache.check(repair=True)
    assert report.repaired
    assert cache.check().ok
    return report


def test_a_sound_cache_is_counted(filled):
    report = filled.check()
    assert (report.blocks, report.bytes) == filled.usage()


def test_a_missing_file_loses_its_row(filled):
    file_of(filled, key_of(), 2).unlink()
    assert [Path(each).name for each in repaired(filled).missing] == [key_of().name(2)]
    assert filled.usage()[0] == 5


def test_a_file_that_nobody_counts_is_counted(filled):
    with filled._own.index.writing() as rows:
        rows.remove_block(rows.block(key_of(), 3))
    assert filled.usage()[0] == 5
    assert len(repaired(filled).orphans) == 1
    assert filled.usage()[0] == 6
    assert whole(filled, key_of(), 3) == content(key_of(), 3)


def test_a_file_that_is_no_block_is_removed(filled):
    stray = file_of(filled, key_of(), 0).with_name("stray")
    stray.write_text("what is this")
    assert repaired(filled).corrupt == (str(stray),)
    assert not stray.exists()


def test_a_block_under_another_name_is_removed(filled):
    path = file_of(filled, key_of(), 0)
    os.link(path, path.with_name(key_of("b/other").name(0)))
    assert len(repaired(filled).corrupt) == 1


def test_a_damaged_block_goes_with_its_row(filled):
    flip(file_of(filled, key_of(), 1), 1000)
    assert len(repaired(filled).corrupt) == 1
    assert filled.usage()[0] == 5
    assert whole(filled, key_of(), 1) is None


def test_a_wrong_size_is_set_right(filled):
    before = filled.usage()
    with filled._own.index.writing() as rows:
        rows.resize_block(rows.block(key_of(), 3), 7)
    assert len(repaired(filled).wrong_size) == 1
    assert filled.usage() == before


def test_wrong_sums_are_set_right(filled):
    before = filled.usage()
    with filled._own.index.writing() as rows:
        rows.totals.bytes = 5
        rows.totals.blocks = 99
    assert set(repaired(filled).wrong_sums) == {"bytes", "blocks"}
    assert filled.usage() == before


def test_leftover_temporary_files_are_removed(filled):
    left = Path(filled.root, "tmp", "left")
    left.write_text("x")
    assert filled.check().ok
    os.utime(left, (0, time.time() - 4000))
    assert repaired(filled).leftovers == (str(left),)
    assert not left.exists()


def test_who_writes_removes_temporary_files_of_an_hour_and_counts_younger_ones(filled):
    left = Path(filled.root, "tmp", "left")
    left.write_bytes(bytes(1 << 20))
    bounds = CacheBounds(size=64 << 20, keep_free=0)
    with_it = filled.allowance(bounds)
    os.utime(left, (0, time.time() - 4000))
    assert filled.allowance(bounds) == with_it + (1 << 20)
    assert not left.exists()


def test_an_audit_without_repair_changes_nothing(filled):
    path = file_of(filled, key_of(), 1)
    flip(path, 10)
    assert not filled.check().ok
    assert path.exists()
    assert filled.usage()[0] == 6


def test_rebuilding_counts_the_files_and_keeps_the_pins(filled):
    filled.pin("gs://test", "b/x")
    before = filled.usage()
    filled.rebuild()
    assert filled.usage() == before
    assert filled.pins() == [("gs://test", "b/x")]
    assert filled.check().ok
