"""What storing costs: SQL statements, and looks at the disk."""

import collections
import math
import os
import time

import pytest

from cachedfs.cache import directory
from cachedfs.cache.index import database
from cachedfs.cache.index.metadata_records import MetadataRecord
from cachedfs.common.types import ObjectInfo
from tests.cache.helpers import AMPLE, key_of, put

KNOWN = key_of("b/known")


@pytest.fixture
def warm(open_cache, monkeypatch):
    """A cache in use: opened a while ago, with a folder for each digit, and with its folders checked this second."""
    monkeypatch.setattr(directory, "RECENT_S", -1.0)
    statements, connect = [], database.connect

    def connected(*args):
        connection = connect(*args)
        connection.set_trace_callback(statements.append)
        return connection

    monkeypatch.setattr(database, "connect", connected)
    cache = open_cache()
    cache.put([(key_of(f"b/{n}").block(0), bytes(10)) for n in range(100)], AMPLE)
    put(cache, KNOWN, 0)
    cache.metadata.keep_records([record(cache, "b/known", new_at=1e9)])
    put(cache, KNOWN, 1)
    monkeypatch.setattr(cache._own, "look_at", math.inf)  # what is done once a second was just done
    statements.clear()
    return cache, statements


def record(cache, path, new_at=None):
    info = ObjectInfo(path, size=5, fingerprint="v1", details={"etag": "x", "contentType": "text/plain"})
    counter = cache.metadata.counter("gs://test", path)
    return MetadataRecord("gs://test", path, info, time.time(), counter, new_at=new_at)


@pytest.mark.parametrize(
    ("key", "first", "n", "n_statements"),
    [(key_of(), 0, 1, 5), (key_of(), 0, 6, 10), (KNOWN, 2, 1, 5), (KNOWN, 2, 6, 10)],
)
def test_storing_n_blocks_costs_n_inserts_and_four_other_statements(warm, key, first, n, n_statements):
    cache, statements = warm
    put(cache, key, *range(first, first + n))
    assert len(statements) == n_statements
    assert sum(each.startswith("INSERT INTO blocks") for each in statements) == n
    assert (statements[0], statements[-1]) == ("BEGIN IMMEDIATE", "COMMIT")


@pytest.mark.parametrize(
    ("path", "is_new", "most"), [("b/new", False, 5), ("b/new", True, 6), ("b/known", False, 5)]
)
def test_storing_a_metadata_record_costs_at_most_six_statements(warm, path, is_new, most):
    cache, statements = warm
    cache.metadata.keep_records([record(cache, path, time.time() if is_new else None)])
    assert len(statements) <= most
    assert cache.metadata.lookup("gs://test", path).info.size == 5


def test_storing_a_block_looks_at_the_disk_three_times(warm, monkeypatch):
    cache, _ = warm
    looks = collections.Counter()

    def counting(name, function):
        def counted(*args, **options):
            looks[name] += 1
            return function(*args, **options)

        return counted

    with monkeypatch.context() as patch:
        for name in ("stat", "lstat", "fstat", "statvfs"):
            patch.setattr(os, name, counting(name, getattr(os, name)))
        put(cache, key_of(), 0)
    assert looks == {"lstat": 3}
