"""Statistics that all processes of a machine share."""

import struct
from pathlib import Path

import pytest

from cachedfs.cache.counters import Counted
from tests.cache.helpers import finish, start


def add(cache, n=1):
    """Count `n` hits, and return the hits of all processes."""
    cache.counts.add([n, 0, 0, 0, 0, 0, 0])
    return cache.counts.total().hits


def test_all_processes_count_in_one_record(cache):
    code = """
from cachedfs.cache import counters
counters._TRIES = 10**6  # a process that the system puts aside is waited for
total = counters.SharedCounters.total
counters.SharedCounters.total = lambda self: (total(self), os.sched_yield())[0]  # to the others
cache = BlockStore(sys.argv[1], explicit=True)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(100):
    cache.counts.add([1, 0, 0, 0, 0, 0, 0])
"""
    add(cache, 7)
    children = [start(code, Path(cache.root).parent) for _ in range(2)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    for child in children:
        finish(child)
    assert cache.counts.total().hits == 207


def test_a_process_that_is_slow_or_dies_in_the_middle_holds_nobody_up(cache):
    code = """
from cachedfs.cache import counters
counters.SharedCounters.total = lambda self: (print("in", flush=True), sys.stdin.read())
BlockStore(sys.argv[1], explicit=True).counts.add([1, 0, 0, 0, 0, 0, 0])
"""
    add(cache, 3)
    with start(code, Path(cache.root).parent) as child:
        assert child.stdout.readline() == "in\n"
        assert add(cache) == 4
        child.kill()
        child.communicate()
    assert add(cache) == 5


@pytest.mark.parametrize("damage", [b"\xff" * 8, struct.pack("=d", -1.0), struct.pack("=d", 1e300)])
def test_numbers_that_are_no_counts_are_counted_anew(cache, open_cache, damage):
    add(cache, 3)
    path = Path(cache.root, "change-counters")
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("=d", 3.0))
    data[at : at + 8] = damage
    path.write_bytes(data)
    assert open_cache().counts.total() == Counted()
    assert add(open_cache()) == 1
