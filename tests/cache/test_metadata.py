"""The metadata of objects and listings in the cache: the newest answer counts."""

import datetime
import random
from pathlib import Path

import pytest

from cachedfs.cache import metadata_store
from cachedfs.cache.block_store import BlockStore
from cachedfs.cache.index.metadata_records import MetadataRecord
from cachedfs.common.types import BlockKey, CacheBounds, ObjectInfo, ObjectKey
from tests.cache.audit import audit
from tests.cache.helpers import AMPLE, content, key_of, overhead_of

ORIGIN, NOW = "gs://test", 1_700_000_000.0


@pytest.fixture(autouse=True)
def _now(monkeypatch):
    monkeypatch.setattr("time.time", lambda: NOW)
    # Each write removes old metadata, as one in a minute does.
    monkeypatch.setattr(metadata_store, "_SWEEP_N", 1)


def info_of(path, version="1"):
    return ObjectInfo(path, size=3, fingerprint=version)


def learn(cache, path, info, age=0.0, counter=5):
    cache.metadata.keep_records([MetadataRecord(ORIGIN, path, info, NOW - age, counter)])


def test_metadata_that_cannot_be_stored_is_no_obstacle_to_blocks(cache):
    key, info = key_of("b/x"), ObjectInfo("b/x", size=3, fingerprint="1", details={"x": object()})
    cache.put([(key.block(0), content(key, 0))], AMPLE, records=[MetadataRecord(ORIGIN, "b/x", info, NOW, 5)])
    assert cache.has(key, 0)
    assert cache.metadata.lookup(ORIGIN, "b/x") is None
    assert cache.cannot_store is None
    assert audit(cache).ok


def listed(cache, folder, *paths, age=0.0, counter=9, version="1"):
    infos = [info_of(path, version) for path in paths]
    counters = dict.fromkeys(paths, 5)
    cache.metadata.keep_listings(
        ORIGIN, {folder: infos}, checked_at=NOW - age, counters=counters, folder_counters={folder: counter}
    )


DETAILS = {
    "no": None, "list": [True, 1, 1.5, {"at": datetime.datetime.fromisoformat("0001-01-01T00:00:05.000007")}], "ü\ud800": {},
    "utc": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), "metadata": {"$datetime": "tomorrow"},
}  # fmt: skip


@pytest.mark.parametrize("path", ["b/x", "", "b/\udcff\0", "b/" + "x" * 5000])
def test_metadata_comes_back_as_it_was_also_in_other_processes_and_of_odd_names(cache, open_cache, path):
    assert cache.metadata.lookup(ORIGIN, path) is None
    infos = [
        ObjectInfo(path),
        ObjectInfo(path, "file", 0, "v1", "id", DETAILS),
        ObjectInfo(path, "directory"),
    ]
    for info in infos:
        learn(cache, path, info)
        found = open_cache().metadata.lookup(ORIGIN, path)
        assert found == MetadataRecord(ORIGIN, path, info, NOW, 5)
        assert found.info.details == info.details
    assert cache.metadata.lookup("gs://elsewhere", path) is None


def test_the_answer_requested_last_wins_also_over_a_listing_and_whatever_is_stored_last(cache):
    def version(path="b/x"):
        record = cache.metadata.lookup(ORIGIN, path)
        return record and record.info and record.info.fingerprint

    listed(cache, "b", "b/x", "b/y", age=9)
    assert cache.metadata.lookup(ORIGIN, "b/x") == MetadataRecord(ORIGIN, "b/x", info_of("b/x"), NOW - 9, 5)
    learn(cache, "b/x", info_of("b/x", "newer"), age=6)
    learn(cache, "b/x", info_of("b/x", "older"), age=7)
    assert version() == "newer"
    learn(cache, "b/x", None, age=5)
    assert version() is None
    listing = cache.metadata.listing(ORIGIN, "b")  # as it was then
    assert listing.infos == [info_of("b/x"), info_of("b/y")]
    assert (listing.checked_at, listing.counter) == (NOW - 9, 9)
    listed(cache, "b", "b/x", version="newest")
    assert version() == "newest"
    assert cache.metadata.lookup(ORIGIN, "b/y") is None


def test_metadata_of_cached_blocks_stays_as_long_as_they_do(cache):
    key = ObjectKey(ORIGIN, "b/f/read", "1", 1 << 20)
    cache.put([(BlockKey(key, 0), b"bytes")], CacheBounds(1 << 24, 0))
    for path in ("b/f/read", "b/f/not-read", "b/other/x"):
        learn(cache, path, info_of(path), age=8 * 86400)
    listed(cache, "b/f", "b/f/read", "b/f/listed", age=8 * 86400)
    listed(cache, "b/other", "b/other/listed", age=8 * 86400)
    for _ in range(3):
        learn(cache, "b/new", info_of("b/new"))
    assert cache.metadata.lookup(ORIGIN, "b/f/read") is not None
    assert cache.metadata.listing(ORIGIN, "b/f") is not None
    assert cache.metadata.lookup(ORIGIN, "b/f/not-read") is None
    assert cache.metadata.lookup(ORIGIN, "b/other/x") is None
    assert cache.metadata.listing(ORIGIN, "b/other") is None
    assert audit(cache).ok


def test_metadata_entries_are_limited_in_number_and_the_oldest_go(cache, monkeypatch):
    monkeypatch.setattr(metadata_store, "_MOST_ENTRIES", 100)
    for n in range(200):
        learn(cache, f"b/{n}", None, age=200 - n)
    with cache._own.index.reading() as rows:
        assert rows.load_totals().entries <= 100
    assert cache.metadata.lookup(ORIGIN, "b/0") is None
    assert cache.metadata.lookup(ORIGIN, "b/199") is not None
    assert audit(cache).ok


def test_marks_refuse_a_fact_that_a_write_overtook(cache):
    counter = cache.metadata.counter(ORIGIN, "b/x")
    cache.metadata.changed(ORIGIN, ["b/x"])  # while the origin was answering
    learn(cache, "b/x", info_of("b/x"), counter=counter)
    assert cache.metadata.lookup(ORIGIN, "b/x").counter != cache.metadata.counter(ORIGIN, "b/x")


def test_the_index_is_counted_in_the_bound(cache):
    listed(cache, "b", *(f"b/{n:05}" for n in range(6000)))
    grown = sum(path.stat().st_size for path in Path(cache.root).glob("index.db*"))
    assert overhead_of(cache, CacheBounds(1 << 30, 0)) >= grown > 150_000


KNOWN = [f"b/{name}" for name in range(12)]
ABSENT = [f"b/no-{name}" for name in range(4)]
LISTED = [f"l/{name}" for name in range(12)]


def answers(cache):
    """Return all that the index says of the paths above."""
    facts = {path: cache.metadata.lookup(ORIGIN, path) for path in KNOWN + ABSENT + LISTED}
    return facts, cache.metadata.listing(ORIGIN, "l")


def test_a_flipped_bit_in_the_index_makes_no_wrong_fact(cache, tmp_path):
    """A wrong size would cut an object off; a wrong time would keep a stale one for ever."""
    for path in KNOWN:
        learn(cache, path, info_of(path, f"version of {path}"), counter=7)
    for path in ABSENT:
        learn(cache, path, None, counter=7)
    listed(cache, "l", *LISTED)
    facts, listing = answers(cache)
    assert None not in facts.values()
    cache.close()
    file = Path(cache.root, "index.db")
    whole = file.read_bytes()
    pages = [
        at
        for at in range(0, len(whole), 4096)
        if any(path.encode() in whole[at : at + 4096] for path in KNOWN + LISTED)
    ]
    places = [place for at in pages for place in range(at, at + 4096) if whole[place]]
    rng = random.Random(5)
    for place in rng.sample(places, len(places) // 25):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        reader = BlockStore(str(tmp_path / "c"), explicit=True)
        found, found_listing = answers(reader)
        reader.close()
        for path, record in found.items():
            assert record in (None, facts[path]), (place, path)
        for info in found_listing.infos if found_listing else ():
            assert info in listing.infos, place
