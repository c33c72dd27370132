"""Caches in memory: SQLite waits for the disk whenever an index is closed."""

import contextlib
import os
import pathlib
import tempfile

import pytest

from cachedfs.cache import BlockCache

MEMORY = pathlib.Path("/dev/shm")


@pytest.fixture
def tmp_path(tmp_path):
    """A folder in memory, where the system has one."""
    with contextlib.ExitStack() as stack:
        if os.access(MEMORY, os.W_OK):
            tmp_path = pathlib.Path(
                stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY, prefix="cachedfs-"))
            )
        yield tmp_path


@pytest.fixture
def open_cache(tmp_path):
    """Open caches, on one directory unless told otherwise; all are closed in the end."""
    opened = []

    def open_one(*directories, explicit=True):
        cache = BlockCache([str(each) for each in directories or (tmp_path / "c",)], explicit=explicit)
        opened.append(cache)
        return cache

    yield open_one
    for cache in opened:
        cache.close()


@pytest.fixture
def cache(open_cache):
    return open_cache()
