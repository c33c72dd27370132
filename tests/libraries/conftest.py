"""The names under which each library reads and writes, and what none of them may leave behind."""

import functools
import gc
import threading
import time
import weakref

import fsspec
import fsspec.config
import psutil
import pytest

from cachedfs.file import CachedFile
from cachedfs.written import WrittenFile
from tests.support import AGE_S, NAMES, Place, forget


@pytest.fixture
def files(monkeypatch):
    """Return all files that the test has opened and that somebody still holds."""
    made = weakref.WeakSet()

    def noting(init):
        @functools.wraps(init)
        def noted(self, *args, **options):
            init(self, *args, **options)
            made.add(self)

        return noted

    for each in (CachedFile, WrittenFile):
        monkeypatch.setattr(each, "__init__", noting(each.__init__))
    return made


@pytest.fixture(params=NAMES)
def place(request, own_cache, files, monkeypatch):
    """A place in a simulated cloud, under each name; processes that a library starts are configured as this one."""
    machine = request.getfixturevalue("drive" if "drive" in request.param else "cloud")
    before = running()  # of a Loader in another file, whose threads decode for all of the process
    for name, value in {**machine.configuration, "FSSPEC_CACHEDFS_MAX_AGE": str(AGE_S)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf["cachedfs"], "max_age", AGE_S)
    yield Place(machine, request.param)
    deadline = time.monotonic() + 60
    while True:  # threads, Arrow's too, end a moment later
        forget()
        left = [*filter(is_open, files), *leases(own_cache), *(running() - before)]
        if not left:
            break
        assert time.monotonic() < deadline, f"left behind: {left}"
        del left
        gc.collect()
        time.sleep(0.2)


def is_open(file):
    return not file.closed


def leases(cache_dir):
    """Return the whole objects lent as files that are still open."""
    paths = [each.path for each in psutil.Process().open_files()]
    return [path for path in paths if path.startswith(str(cache_dir)) and "/leases/" in path]


def running():
    """Return our threads."""
    return {each for each in threading.enumerate() if each.name.startswith("cachedfs")}
