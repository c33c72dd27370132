"""The metadata of objects and listings in the cache: the newest answer counts."""

import datetime
import random
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cachedfs.cache import metadata_store
from cachedfs.cache.block_store import BlockStore
from cachedfs.cache.index.metadata_records import MetadataRecord, decode_info, encode_info
from cachedfs.common.types import BlockKey, CacheBounds, ObjectInfo, ObjectKey
from tests.cache.audit import audit
from tests.cache.helpers import AMPLE, content, key_of, overhead_of, put

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


def test_metadata_is_stored_with_blocks_also_if_some_are_cached(cache):
    key = key_of("b/x")
    put(cache, key, 0)
    blocks = [(key.block(index), content(key, index)) for index in range(2)]
    cache.put(blocks, AMPLE, records=[MetadataRecord(ORIGIN, "b/x", info_of("b/x"), NOW, 5)])
    assert cache.metadata.lookup(ORIGIN, "b/x").info == info_of("b/x")
    assert cache.has(key, 0)
    assert cache.has(key, 1)
    assert audit(cache).ok


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


def test_a_listing_of_any_age_is_cut_into_few_parts_of_a_page_or_more(cache, monkeypatch):
    monkeypatch.setattr(metadata_store, "PART", 2)
    monkeypatch.setattr(metadata_store, "MOST_PARTS", 3)
    assert cache.metadata.cuts(ORIGIN, "b") == []
    for n, expected in ((1, []), (2, []), (3, [2]), (5, [2, 4]), (6, [2, 4]), (7, [3, 6]), (9, [3, 6])):
        listed(cache, "b", *(f"b/{number}" for number in reversed(range(n))), age=1e5)
        assert cache.metadata.cuts(ORIGIN, "b") == [f"b/{number}" for number in expected]


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
times = st.datetimes(timezones=st.none() | st.just(datetime.UTC))
values = st.recursive(
    scalars | times, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


@settings(max_examples=10)
@example("b/x", None, None, {"metadata": {"$datetime": "tomorrow"}})  # looks like our own encoding
@given(
    st.text(),
    st.none() | st.integers(0),
    st.none() | st.text(),
    st.dictionaries(st.text(), values, max_size=4),
)
def test_infos_survive_as_they_are(path, size, fingerprint, details):
    info = ObjectInfo(path, "file", size, fingerprint, "id", details)
    found = decode_info(path, encode_info(info))
    assert found == info
    assert found.details == details


def test_a_fact_comes_back_as_it_was_also_elsewhere_and_with_odd_names(cache, open_cache):
    assert cache.metadata.lookup(ORIGIN, "b/x") is None
    for path in ("b/x", "", "b/\udcff\0", "b/" + "x" * 5000):
        learn(cache, path, info_of(path))
        assert open_cache().metadata.lookup(ORIGIN, path) == MetadataRecord(
            ORIGIN, path, info_of(path), NOW, 5
        )
    assert cache.metadata.lookup("gs://elsewhere", "b/x") is None


def test_the_fact_checked_last_wins_whatever_is_stored_last(cache):
    learn(cache, "b/x", info_of("b/x", "new"), age=1)
    learn(cache, "b/x", info_of("b/x", "old"), age=5)
    assert cache.metadata.lookup(ORIGIN, "b/x").info.fingerprint == "new"
    learn(cache, "b/x", None, age=0)
    assert cache.metadata.lookup(ORIGIN, "b/x").info is None


def test_a_listed_child_is_known_and_the_newer_answer_wins(cache):
    listed(cache, "b", "b/x", "b/y", age=5)
    assert cache.metadata.lookup(ORIGIN, "b/x") == MetadataRecord(ORIGIN, "b/x", info_of("b/x"), NOW - 5, 5)
    learn(cache, "b/x", info_of("b/x", "newer"), age=1)
    assert cache.metadata.lookup(ORIGIN, "b/x").info.fingerprint == "newer"
    listed(cache, "b", "b/x", version="newest")
    assert cache.metadata.lookup(ORIGIN, "b/x").info.fingerprint == "newest"
    assert cache.metadata.lookup(ORIGIN, "b/y") is None


def test_a_listing_is_what_was_listed_whatever_was_learnt_of_its_children_since(cache):
    listed(cache, "b", "b/x", "b/y", age=5)
    learn(cache, "b/x", None)
    learn(cache, "b/y", info_of("b/y", "newer"))
    learn(cache, "b/z", info_of("b/z"))
    listing = cache.metadata.listing(ORIGIN, "b")
    assert listing.infos == [info_of("b/x"), info_of("b/y")]
    assert (listing.checked_at, listing.counter) == (NOW - 5, 9)


def test_a_listing_is_replaced_whole(cache):
    listed(cache, "b", *(f"b/{n:04}" for n in range(3000)))
    listed(cache, "b", "b/1")
    assert cache.metadata.listing(ORIGIN, "b").infos == [info_of("b/1")]
    for n in range(9):
        learn(cache, f"c/{n}", None)
    with cache._own.index.reading() as rows:
        assert rows.load_totals().entries == 1 + 9
    assert audit(cache).ok


def test_what_has_blocks_stays_known_for_as_long_as_they_do(cache):
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


def test_there_is_a_limit_to_what_is_known(cache, monkeypatch):
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
