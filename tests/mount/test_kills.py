"""Mounts that are killed and replaced while other processes write and read: `make stress`."""

import pytest

from tests.mount import kills
from tests.support import HAS_FUSE, tally


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.skipif(not HAS_FUSE, reason="needs FUSE: apt-get install fuse3")
def test_mounts_that_are_killed_tear_no_read_and_lose_no_write():
    counts, wrong = kills.run(20.0, seed=0)
    for what, n in counts.items():
        tally(f"mounts that were killed: {what}", n)
    assert wrong == []
    assert all(counts[what] > 0 for what in ("kills", "reads whole", "writes accepted"))
