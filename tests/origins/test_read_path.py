"""One read from Google Cloud Storage: how many functions it runs, and how long they are."""

import asyncio
import collections
import os
import sys
from pathlib import Path

import pytest

import cachedfs
from cachedfs.common.types import Range
from cachedfs.origins.gcs.origin import GCSOrigin
from cachedfs.sim import GCSServer

MOST_FUNCTIONS, MOST_CALLS_A_PIECE = 11, 1
MOST_LINES, MOST_LINES_IN_ALL = 40, 210
ROOT = Path(cachedfs.__file__).parent
OURS = tuple(f"{ROOT / package}{os.sep}" for package in ("origins", "common"))
COROUTINES = 0x2A0  # flags of generators and coroutines: a resumed one is no new call


class Calls(collections.Counter):
    """Counts the calls of our functions while it is entered, without lambdas and comprehensions."""

    def __enter__(self):
        self._frames = {}
        sys.setprofile(self._count)
        return self

    def __exit__(self, *exc_info):
        sys.setprofile(None)
        self._frames.clear()

    def _count(self, frame, event, argument):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(OURS) or code.co_name.startswith("<"):
            return
        if code.co_flags & COROUTINES:
            if id(frame) in self._frames:
                return
            self._frames[id(frame)] = frame  # which keeps the number from being used again
        self[code] += 1


@pytest.fixture(scope="module")
def server():
    with GCSServer("off", process=True) as server:
        server.put("b", "warm", bytes(10))
        server.put("b", "k", os.urandom(1 << 20))
        server.put("b", "big", os.urandom(9 << 20))
        yield server


@pytest.fixture(params=["unknown", "pinned", "part"])
async def calls(server, request):
    options = {"token": "anon", "endpoint_url": server.endpoint_url}
    loop = asyncio.get_running_loop()
    origin = GCSOrigin(options, identity="", loop=loop, on_request=lambda: None)
    path, want = ("b/big", Range(8 << 20, 9 << 20)) if request.param == "part" else ("b/k", Range(0, 1 << 20))
    async with origin.read("b/warm", None, None) as reply:  # opens the connection
        assert [piece async for piece in reply.body] == [bytes(10)]
    pinned = None if request.param == "unknown" else await origin.lookup(path)
    size = n_pieces = 0
    with Calls() as found:
        async with origin.read(path, want, pinned) as reply:
            async for piece in reply.body:
                size, n_pieces = size + len(piece), n_pieces + 1
    await origin.aclose()
    assert size == 1 << 20
    return found, n_pieces


async def test_a_read_runs_few_functions(calls):
    found, n_pieces = calls
    assert len(found) <= MOST_FUNCTIONS, sorted(code.co_name for code in found)
    assert found.total() <= MOST_FUNCTIONS + MOST_CALLS_A_PIECE * n_pieces


async def test_the_functions_of_a_read_are_short(calls):
    lines = [max(line for *_, line in code.co_lines() if line) - code.co_firstlineno + 1 for code in calls[0]]
    assert max(lines) <= MOST_LINES
    assert sum(lines) <= MOST_LINES_IN_ALL
