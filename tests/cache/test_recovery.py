"""What a lost index or a dead process leaves is counted again, or removed."""

import os
import time
from pathlib import Path

import pytest

from cachedfs.common.types import CacheBounds
from tests.cache.audit import audit, recount
from tests.cache.helpers import content, file_of, key_of, put, whole


@pytest.fixture
def filled(cache):
    put(cache, key_of(), *range(6))
    report = audit(cache)
    assert (report.ok, (report.blocks, report.bytes)) == (True, cache.usage())
    return cache


def test_a_new_index_counts_the_files(filled):
    before = filled.usage()
    recount(filled)
    assert filled.usage() == before
    assert audit(filled).ok
    assert whole(filled, key_of(), 3) == content(key_of(), 3)


def test_a_file_that_is_no_block_is_removed_when_files_are_counted(filled):
    stray = file_of(filled, key_of(), 0).with_name("stray")
    stray.write_text("what is this")
    assert audit(filled).corrupt == (str(stray),)
    recount(filled)
    assert not stray.exists()
    assert audit(filled).ok


def test_a_block_under_another_name_is_removed_when_files_are_counted(filled):
    path = file_of(filled, key_of(), 0)
    other = path.with_name(key_of("b/other").name(0))
    os.link(path, other)
    recount(filled)
    assert not other.exists()
    assert audit(filled).ok


def test_who_writes_removes_temporary_files_of_an_hour_and_counts_younger_ones(filled):
    left = Path(filled.root, "tmp", "left")
    left.write_bytes(bytes(1 << 20))
    assert audit(filled).ok
    bounds = CacheBounds(size=64 << 20, keep_free=0)
    with_it = filled.allowance(bounds)
    os.utime(left, (0, time.time() - 4000))
    assert audit(filled).leftovers == (str(left),)
    assert filled.allowance(bounds) == with_it + (1 << 20)
    assert not left.exists()
