"""What storing costs: SQL statements, and looks at the disk."""

import collections
import math
import os

import pytest

from cachedfs.cache import directory
from cachedfs.cache.index import database
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
    put(cache, KNOWN, 1)
    monkeypatch.setattr(cache._own, "look_at", math.inf)  # what is done once a second was just done
    statements.clear()
    return cache, statements


@pytest.mark.parametrize(
    ("key", "first", "n"), [(key_of(), 0, 1), (KNOWN, 2, 6)], ids=["a new object", "more of one"]
)
def test_storing_n_blocks_costs_n_inserts_and_four_other_statements(warm, key, first, n):
    cache, statements = warm
    put(cache, key, *range(first, first + n))
    assert len(statements) == n + 4
    assert sum(each.startswith("INSERT INTO blocks") for each in statements) == n
    assert (statements[0], statements[-1]) == ("BEGIN IMMEDIATE", "COMMIT")


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
