"""Entries in memory, in front of the shared store."""

import time

import pytest

from cachedfs.common.types import ObjectInfo
from cachedfs.config import Config
from cachedfs.core.objects import Objects

INFO = ObjectInfo("b/x", "file", 1, "1")


@pytest.fixture
def make_objects(tmp_path):
    def make(**options):
        config = Config.resolve({"cache_dir": str(tmp_path / "cache"), **options})
        return Objects("gs", {"token": "anon"}, config, lambda path: f"gs://{path}")

    return make


def learn(objects, path, asked_at):
    info = ObjectInfo(path, "file", 1, "1")
    return objects.learn(path, info, asked_at=asked_at, counter=objects.counter(path))


@pytest.mark.parametrize(("age", "exists"), [(12.0, True), (8.0, False)])
def test_the_newer_of_an_entry_and_a_listing_without_the_path_counts(make_objects, age, exists):
    now, objects = time.time(), make_objects()
    learn(objects, "b/x", now - 10)
    assert objects.engine.drain(60)
    store, identity = objects.store, objects.identity
    counters = {"b": store.listing_counter(identity, "b")}
    store.keep_listings(identity, {"b": []}, checked_at=now - age, counters={}, folder_counters=counters)
    objects.entries.clear()  # as in another process
    entry = objects.known("b/x")
    assert entry is not None
    assert (entry.info == INFO) is exists


def test_the_oldest_entries_leave_memory(make_objects, monkeypatch):
    monkeypatch.setattr("cachedfs.core.objects.MOST", 2)
    objects = make_objects()
    for path in ("b/1", "b/2", "b/1", "b/3"):
        learn(objects, path, time.time())
    objects._look_at = 0.0  # a second later
    assert objects.fresh("b/3") is not None
    assert list(objects.entries) == ["b/2", "b/3"]


def test_filesystems_of_one_origin_share_entries_and_compare_them_with_their_own_max_age(make_objects):
    patient, hasty = make_objects(), make_objects(max_age=5)
    entry = learn(patient, "b/x", time.time() - 8)
    assert patient.fresh("b/x") is hasty.known("b/x") is entry
    assert hasty.fresh("b/x") is None


def test_a_version_that_another_filesystem_replaces_at_that_moment_is_not_returned(make_objects):
    one, other = make_objects(), make_objects(block_size="64KiB")
    theirs = other.version(learn(other, "b/x", time.time()))

    class Replaced:
        info = INFO
        version = property(lambda self: theirs, lambda self, version: None)

    assert one.version(Replaced()).block_size == one.config.block_size != theirs.block_size


def test_a_late_answer_does_not_replace_that_of_a_later_request(make_objects):
    objects, now = make_objects(), time.time()
    newer = learn(objects, "b/x", now)
    late = learn(objects, "b/x", now - 1)
    assert late.asked_at == now - 1
    assert objects.known("b/x") is newer
    objects.store.changed(objects.identity, ["b/x"])
    assert objects.known("b/x") is None
    changed = learn(objects, "b/x", now - 1)
    assert objects.known("b/x") is changed


def test_what_a_listing_said_is_known_without_a_query_until_it_changes(make_objects, monkeypatch):
    objects, now = make_objects(), time.time()
    newer = learn(objects, "b/x", now)
    learn(objects, "b/old", now - 2)
    monkeypatch.setattr(objects.store, "find", lambda identity, path: pytest.fail(path))
    infos = [ObjectInfo(path, "file", 2, "2") for path in ("b/x", "b/old", "b/y")]
    counters = {info.path: objects.counter(info.path) for info in infos}
    objects.keep_listed(infos, counters, asked_at=now - 1)
    assert objects.fresh("b/x") is newer
    assert [objects.fresh(path).info for path in ("b/old", "b/y")] == infos[1:]
    monkeypatch.undo()
    objects.store.changed(objects.identity, ["b/y"])
    assert objects.fresh("b/y") is None
