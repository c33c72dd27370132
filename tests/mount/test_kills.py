"""Mounts that are killed and replaced while other processes write and read: `make stress`."""

import pytest

from tests.benchmarks import mount_kills
from tests.benchmarks.mount_kills import Version
from tests.support import HAS_FUSE, tally

VERSION, NEXT = Version("open-m0-w0-0", 1), Version("open-m0-w0-0", 2)
LINES = [mount_kills.encoded(Version("log-m0-w0-0", number), "x" * number) for number in (1, 2, 3)]


def test_torn_reads_are_seen():
    text, other = (mount_kills.encoded(version, "x" * 100) for version in (VERSION, NEXT))
    assert mount_kills.versions_in(VERSION.name, text) == [1]
    for torn in (
        b"",
        text[:-1],
        text[:50],
        text[:50] + other[50:],
        text + bytes(10),
        text + other,
        text.replace(b"xx", b"xy", 1),
    ):
        assert mount_kills.versions_in(VERSION.name, torn) is None
    assert mount_kills.versions_in("open-m0-w0-1", text) is None  # of another file


def test_a_log_has_all_its_lines_in_order():
    name = "log-m0-w0-0"
    assert mount_kills.versions_in(name, b"".join(LINES)) == [1, 2, 3]
    assert mount_kills.versions_in(name, LINES[0] + LINES[2]) == [1, 3]  # the second was not accepted
    for torn in (LINES[1] + LINES[0], LINES[0] + LINES[1][:-5], LINES[0] + LINES[1][5:] + LINES[2]):
        assert mount_kills.versions_in(name, torn) is None


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.skipif(not HAS_FUSE, reason="needs FUSE: apt-get install fuse3")
def test_mounts_that_are_killed_tear_no_read_and_lose_no_write():
    counts = mount_kills.run(20.0, seed=0)
    for what, n in counts.items():
        tally(f"mounts that were killed: {what}", n)
    assert counts["kills"] > 0
    assert counts["reads whole"] > 0
    assert counts["writes accepted"] > 0
    assert mount_kills.is_good(counts), counts
