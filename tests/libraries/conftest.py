"""Library tests: where each test reads and writes, and checks that no file or thread stays open."""

import collections
import functools
import gc
import itertools
import pathlib
import threading
import weakref

import fsspec
import fsspec.config
import psutil
import pytest

from cachedfs.core import objects
from cachedfs.filesystem.file import CachedFile
from cachedfs.filesystem.write_file import WrittenFile
from tests.support import AGE_S, NAMES, Place, forget, until

HERE = pathlib.Path(__file__).parent
LOCAL = ("cachedfs::memory://", "cachedfs::file://")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items):
    """Run each test with one of the clouds in turn, and once with memory and local files; `make works` runs all combinations."""
    cells = {}
    for item in items:
        if item.path.parent == HERE and hasattr(item, "callspec"):
            params = item.callspec.params
            place = params.get("place", params.get("base", ""))
            others = str([value for value in params.values() if value != place])
            cells.setdefault((item.path, item.originalname), {}).setdefault(others, {})[place] = item
    lookup_slots = collections.defaultdict(itertools.count)
    for (path, _), cell in cells.items():
        for number, by_place in enumerate(cell.values()):
            clouds = [place for place in by_place if place not in LOCAL]
            chosen = {clouds[next(lookup_slots[path]) % len(clouds)], *(LOCAL if number == 0 else [])}
            for place, item in by_place.items():
                if place not in chosen:
                    item.add_marker(pytest.mark.works)


@pytest.fixture
def files(monkeypatch):
    """Return all files that the test opened and that are still referenced."""
    made = weakref.WeakSet()

    def recording(init):
        @functools.wraps(init)
        def noted(self, *args, **options):
            init(self, *args, **options)
            made.add(self)

        return noted

    for each in (CachedFile, WrittenFile):
        monkeypatch.setattr(each, "__init__", recording(each.__init__))
    return made


@pytest.fixture(params=[*NAMES, "cachedfs::s3://"])
def place(request, own_cache, files, monkeypatch):
    """A place in a simulated cloud, under each URL form; child processes of libraries have the same configuration."""
    machine = request.getfixturevalue(
        next((name for name in ("drive", "s3") if name in request.param), "cloud")
    )
    before = running()  # from a Loader in another file, whose threads decode for the whole process
    for name, value in {**machine.configuration, "FSSPEC_CACHEDFS_MAX_AGE": str(AGE_S)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf["cachedfs"], "max_age", AGE_S)
    monkeypatch.setattr(objects, "ABSENCE_S", AGE_S)  # a busy machine may take longer than ten seconds
    yield Place(machine, request.param)

    def is_clean():
        forget()
        if left := [*filter(is_open, files), *leases(own_cache), *(running() - before)]:
            del left
            gc.collect()
            return False
        return True

    until(is_clean)  # threads, also those of Arrow, end a moment later


def is_open(file):
    return not file.closed


def leases(cache_dir):
    """Return the local copies of whole objects that are still in use."""
    paths = [each.path for each in psutil.Process().open_files()]
    return [path for path in paths if path.startswith(str(cache_dir)) and "/local-copies/" in path]


def running():
    """Return our threads."""
    return {each for each in threading.enumerate() if each.name.startswith("cachedfs")}
