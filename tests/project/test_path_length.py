"""How many functions of cachedfs one read passes through, over all threads, storing included.

These are upper bounds: a change that makes a path longer has to make it shorter elsewhere. Comprehensions are not counted.
"""

import asyncio
import contextlib
import gc
import pathlib
import string
import sys
import threading
import time

import fsspec
import pytest

import cachedfs
from tests.support import MiB, noise, until

ROOT = str(pathlib.Path(cachedfs.__file__).parent)
SIM = str(pathlib.Path(ROOT, "sim"))
MOST = {"hit": 9, "hit of an open file": 4, "miss of a known version": 59, "miss of an unknown object": 86}


class Counter:
    """Counts the functions of cachedfs that run in threads which are started while it is active."""

    def __init__(self):
        self._codes, self._is_on = set(), False

    @contextlib.contextmanager
    def active(self):
        gc.collect()
        gc.disable()  # destructors of other tests
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield self
        finally:
            gc.enable()
            sys.setprofile(None)
            threading.setprofile(None)

    def _profile(self, frame, event, arg):
        code = frame.f_code
        is_ours = code.co_filename.startswith(ROOT) and not code.co_filename.startswith(SIM)
        if self._is_on and event == "call" and is_ours and not code.co_name.startswith("<"):
            self._codes.add(code)

    def of(self, act, end):
        """Return the functions that run in `act`, and in other threads until `end` returns."""
        self._codes, self._is_on = set(), True
        act()
        sys.setprofile(None)
        end()
        sys.setprofile(self._profile)
        self._is_on = False
        return self._codes


class StoppedTime:
    """The module `time`, with a monotonic clock that stands still: what is done once a second is not counted.

    The wall clock is ahead, so that no folder counts as changed a moment ago.
    """

    def __init__(self):
        self._now = time.monotonic()

    def monotonic(self):
        return self._now

    def time(self):
        return time.time() + 10

    def __getattr__(self, name):
        return getattr(time, name)


@pytest.fixture
def counted(cloud, monkeypatch):
    """The functions of each kind of read; `read_ahead=0`, so that no other object is read."""
    body, counter = noise(MiB), Counter()
    for number in range(8):
        cloud.put(f"k{number}", body)
    cloud.put("big", noise(24 * MiB))
    path = cloud.path
    with counter.active():
        fs = fsspec.filesystem("cachedfs", target_protocol="gs", read_ahead=0)
        engine = fs._objects.engine

        def drain():
            until(lambda: not engine.active_requests)
            assert engine.drain(60)
            engine.run(asyncio.sleep(0))  # after what the writer thread has scheduled

        for number in range(3):
            fs.cat_file(path(f"k{number}"))
        fs.cat_file(path("big"), 0, 10)
        drain()
        for digit in string.hexdigits[:16]:
            pathlib.Path(engine.cache.root, "blocks", digit).mkdir(mode=0o700, exist_ok=True)
        stopped = StoppedTime()
        for name, module in list(sys.modules.items()):
            if (
                name.startswith(("cachedfs.cache.", "cachedfs.core."))
                and getattr(module, "time", None) is time
            ):
                monkeypatch.setattr(module, "time", stopped)
        fs.cat_file(path("k3"))  # this write verifies the new folders
        drain()
        fs.cat_file(path("k0"), 10, 20)
        found = {"hit": counter.of(lambda: fs.cat_file(path("k0"), 10, 20), int)}
        with fs.open(path("k1")) as file:
            file.read(10), file.seek(5000), file.read(10)
            found["hit of an open file"] = counter.of(lambda: (file.seek(9000), file.read(10)), int)
        found["miss of an unknown object"] = counter.of(lambda: fs.cat_file(path("k5")), drain)
        far = 20 * MiB
        found["miss of a known version"] = counter.of(lambda: fs.cat_file(path("big"), far, far + 10), drain)
    return found


def test_a_read_passes_through_few_functions(counted):
    assert {name: len(codes) for name, codes in counted.items() if len(codes) > MOST[name]} == {}
