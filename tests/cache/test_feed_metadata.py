"""Change feeds in the cache: what they watch, and the metadata that a change removes."""

import pytest

from cachedfs.cache.index.metadata_records import FeedSnapshot, MetadataRecord
from cachedfs.common.types import Change, Changes, ObjectInfo

ORIGIN, NOW = "drive|test|auth", 1_000_000.0
FOLDER = ObjectInfo("My Drive/d", "directory", id="D")
WAY = (("My Drive/d", "D"), ("My Drive", "root"))


def file_of(name, id, version="1"):
    return ObjectInfo(f"My Drive/d/{name}", size=3, fingerprint=version, id=id, details={"id": id})


@pytest.fixture
def cache(open_cache, monkeypatch):
    monkeypatch.setattr("time.time", lambda: NOW)
    cache = open_cache()
    cache.metadata.begin_feed(ORIGIN, "My Drive", "t1", NOW - 500)
    return cache


def feed_of(cache):
    return cache.metadata.feed(ORIGIN, "My Drive")


def listed(cache, *infos, watch=None, age=400):
    counters = {info.path: cache.metadata.counter(ORIGIN, info.path) for info in infos}
    folder_counters = {FOLDER.path: cache.metadata.listing_counter(ORIGIN, FOLDER.path)}
    if watch is None:
        watch = FeedSnapshot(feed_of(cache).id, feed_of(cache).number, WAY)
    listings = {FOLDER.path: infos}
    cache.metadata.keep_listings(
        ORIGIN,
        listings,
        checked_at=NOW - age,
        counters=counters,
        folder_counters=folder_counters,
        watch=watch,
    )


def polled(cache, *changes, token="t2", at=NOW, since=None):
    cache.metadata.follow_feed(ORIGIN, since or feed_of(cache), Changes(token, changes), checked_at=at)


def counts(cache, info):
    """Return whether what is stored of a path is valid, and until when the feed told nothing of it."""
    record = cache.metadata.lookup(ORIGIN, info.path)
    if record is None or record.counter != cache.metadata.counter(ORIGIN, info.path):
        return None
    return record.confirmation and record.confirmation.at


def listing_counts(cache):
    listing = cache.metadata.listing(ORIGIN, FOLDER.path)
    return listing is not None and listing.counter == cache.metadata.listing_counter(ORIGIN, FOLDER.path)


ONE, TWO = file_of("one", "1"), file_of("two", "2")


def in_folder(info, name=None, folder="D"):
    plain = ObjectInfo("", size=info.size, fingerprint=info.fingerprint, id=info.id, details=info.details)
    return Change(info.id, ((folder, name or info.path.rpartition("/")[2]),), plain)


@pytest.mark.parametrize(
    ("change", "old"),
    [
        (in_folder(file_of("one", "1", "2")), {"one"}),  # other content
        (in_folder(ONE, "uno"), {"one"}),  # another name
        (in_folder(ONE, folder="E"), {"one"}),  # another folder
        (Change("1"), {"one"}),  # gone
        (Change("1", (("D", "one"),)), {"one"}),  # in the trash
        (in_folder(file_of("two", "3")), {"two"}),  # another one of a name
        (in_folder(file_of("three", "3")), set()),  # a new one
        (in_folder(ONE), None),  # a comment
        (in_folder(file_of("x", "9"), folder="E"), None),  # elsewhere
        (Change("9"), None),  # nobody knows it
        (Change("D"), {"one", "two"}),  # the folder itself: all in it may have been out of sight
        (Change("root"), {"one", "two"}),
        (Change("root", (), ObjectInfo("", "directory", id="root")), None),  # always in sight
    ],
)
def test_a_change_invalidates_what_it_names_and_nothing_else(cache, open_cache, change, old):
    listed(cache, ONE, TWO)
    cache.metadata.keep_records(
        [MetadataRecord(ORIGIN, FOLDER.path, FOLDER, NOW, cache.metadata.counter(ORIGIN, FOLDER.path))]
    )
    polled(cache, change)
    for each in (cache, open_cache()):
        forgotten = {info.path.rpartition("/")[2] for info in (ONE, TWO) if counts(each, info) is None}
        assert forgotten == (old or set())
        assert listing_counts(each) == (old is None)
        record = each.metadata.lookup(ORIGIN, FOLDER.path)
        # Above what changed, nothing did.
        assert (record.counter == each.metadata.counter(ORIGIN, FOLDER.path)) == (change != Change("root"))


def test_a_reported_change_that_is_known_already_invalidates_nothing(cache):
    listed(cache, ONE, TWO)
    cache.metadata.changed(ORIGIN, [ONE.path])
    new, watch = file_of("one", "1", "2"), FeedSnapshot(feed_of(cache).id, 0, WAY)
    cache.metadata.keep_records(
        [MetadataRecord(ORIGIN, new.path, new, NOW - 300, cache.metadata.counter(ORIGIN, new.path), watch)]
    )
    polled(cache, in_folder(new))
    assert counts(cache, new) == NOW


def test_an_answer_that_a_poll_overtook_is_not_watched(cache):
    """It was asked for before the poll, and is stored after it: the poll could not find it."""
    before = FeedSnapshot(feed_of(cache).id, feed_of(cache).number, WAY)
    polled(cache, in_folder(ONE))
    listed(cache, ONE, watch=before)
    cache.metadata.keep_records(
        [MetadataRecord(ORIGIN, TWO.path, TWO, NOW - 400, cache.metadata.counter(ORIGIN, TWO.path), before)]
    )
    polled(cache, token="t3", at=NOW + 100)
    assert cache.metadata.lookup(ORIGIN, ONE.path).confirmation is None
    assert cache.metadata.lookup(ORIGIN, TWO.path).confirmation is None
    listed(cache, ONE)
    polled(cache, token="t4", at=NOW + 200)
    assert counts(cache, ONE) == NOW + 200


def test_a_poll_that_dies_before_its_end_is_as_one_that_was_not_made(cache, monkeypatch):
    listed(cache, ONE, TWO)
    change = in_folder(file_of("one", "1", "2"))
    with monkeypatch.context() as patch:
        patch.setattr(cache.metadata, "overtaken", interrupted)
        with pytest.raises(KeyboardInterrupt):
            polled(cache, change)
    assert (feed_of(cache).token, counts(cache, ONE)) == ("t1", NOW - 500)
    polled(cache, change)
    assert (feed_of(cache).token, counts(cache, ONE), counts(cache, TWO)) == ("t2", None, NOW)


def interrupted(*_):
    raise KeyboardInterrupt


def test_of_two_polls_from_one_token_the_changes_of_both_count(cache):
    listed(cache, ONE, TWO)
    both = feed_of(cache)
    polled(
        cache,
        in_folder(file_of("one", "1", "2")),
        in_folder(file_of("two", "2", "2")),
        since=both,
        token="t3",
    )
    polled(cache, in_folder(file_of("one", "1", "2")), since=both, token="t2", at=NOW - 1)
    assert (feed_of(cache).token, counts(cache, ONE), counts(cache, TWO)) == ("t3", None, None)
    listed(cache, file_of("one", "1", "2"))
    polled(cache, token="t4")
    assert counts(cache, ONE) == NOW


def test_a_feed_that_begins_anew_knows_nothing_of_what_the_old_one_watched(cache):
    listed(cache, ONE)
    old = feed_of(cache)
    cache.metadata.remove_feed(old)
    assert feed_of(cache) is None
    cache.metadata.begin_feed(ORIGIN, "My Drive", "t9", NOW)
    cache.metadata.begin_feed(ORIGIN, "My Drive", "t10", NOW)  # another process: the first counts
    polled(cache, since=old)
    assert (feed_of(cache).token, counts(cache, ONE)) == ("t9", None)
    assert cache.metadata.lookup(ORIGIN, ONE.path) is not None
