"""Caches in memory: SQLite waits for the disk whenever an index is closed."""

import pytest

from cachedfs.cache import directory
from cachedfs.cache.block_store import BlockStore


@pytest.fixture(autouse=True)
def no_wait_for_deletions(monkeypatch):
    """Delete parts of a cache without the wait of the next write for the end of the deletion."""
    monkeypatch.setattr(directory, "DELETION_S", 0.0)
    monkeypatch.setattr(directory, "QUIET_S", 0.0)


@pytest.fixture
def tmp_path(folder):
    return folder


@pytest.fixture
def open_cache(tmp_path):
    """Open caches, on one directory unless told otherwise; all are closed in the end."""
    opened = []

    def open_one(directory=None, *, explicit=True):
        cache = BlockStore(str(directory or tmp_path / "c"), explicit=explicit)
        opened.append(cache)
        return cache

    yield open_one
    for cache in opened:
        cache.close()


@pytest.fixture
def cache(open_cache):
    return open_cache()
