"""Metadata entries in memory, in front of the shared store."""

import time

import pytest

from cachedfs.cache.block_cache import BlockCache
from cachedfs.common.types import ObjectInfo
from cachedfs.core.metadata_cache import MetadataCache

ORIGIN = "gs||"


@pytest.mark.parametrize(("age", "exists"), [(12.0, True), (8.0, False)])
def test_the_newer_of_an_entry_and_a_listing_without_the_path_counts(tmp_path, age, exists):
    now = time.time()
    store = BlockCache([str(tmp_path)], explicit=True).metadata
    known = MetadataCache(store, ORIGIN, lambda record: store.keep_records([record]))
    info = ObjectInfo("b/x", "file", 1, "1")
    known.store("b/x", info, checked_at=now - 10, mark=known.mark("b/x"))
    marks = {"b": store.listing_mark(ORIGIN, "b")}
    store.keep_listings(ORIGIN, {"b": []}, checked_at=now - age, marks={}, folder_marks=marks)
    entry = MetadataCache(store, ORIGIN, lambda record: None).get("b/x")
    assert entry is not None
    assert (entry.info == info) is exists


def test_the_oldest_entries_leave_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("cachedfs.core.metadata_cache.MOST", 2)
    store = BlockCache([str(tmp_path)], explicit=True).metadata
    cache = MetadataCache(store, ORIGIN, lambda record: None)
    for path in ("b/1", "b/2", "b/1", "b/3"):
        cache.store(path, ObjectInfo(path, "file", 1, "1"), checked_at=time.time(), mark=cache.mark(path))
    assert [cache.in_memory(path) is None for path in ("b/1", "b/2", "b/3")] == [True, False, False]
