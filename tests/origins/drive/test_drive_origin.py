"""The contract of an origin, and the change feed, at the simulated Drive; the contract also at the real one.

The last part needs an account, that of `FSSPEC_DRIVE_TOKEN` and similar variables or of google-auth, and a folder:
`CACHEDFS_LIVE_DRIVE="My Drive/scratch" pytest -m live`. It creates a folder and deletes it.
"""

import os
import uuid

import fsspec
import pytest

from cachedfs.errors import OriginUnavailable
from cachedfs.sim import Fault
from tests.origins.contract import OriginContract, World, folder_of
from tests.support import Drive

SCRATCH = os.environ.get("CACHEDFS_LIVE_DRIVE", "")


class TestContract(OriginContract):
    missing_folder_is_an_error = True
    keeps_versions = True

    @pytest.fixture
    def world(self, server, folder, root, own_cache):
        drive = Drive(server, folder, own_cache)
        return World(root, drive.put, drive.delete)

    @pytest.fixture
    async def origin(self, opened, server):
        return opened("drive", token="anon", endpoint_url=server.endpoint_url)


async def test_a_failing_change_feed_is_asked_twice(make, server):
    """The feed only saves requests: a listing does not wait for it to recover."""
    server.reset()
    server.fail(Fault(kind="change", status=500, times=None))
    with pytest.raises(OriginUnavailable, match="2 tries"):
        await make().changes("My Drive", None)
    assert server.count("change") == 2


@pytest.mark.live
@pytest.mark.skipif(not SCRATCH, reason="CACHEDFS_LIVE_DRIVE names no folder, as 'My Drive/scratch'")
class TestLive(OriginContract):
    missing_folder_is_an_error = True
    keeps_versions = True

    @pytest.fixture
    def world(self):
        fs = fsspec.filesystem("drive", skip_instance_cache=True, trash_only=False)
        root = f"{SCRATCH}/cachedfs-{uuid.uuid4().hex[:8]}"
        fs.makedirs(root)
        yield folder_of(fs, root)
        fs.rm(root, recursive=True)

    @pytest.fixture
    async def origin(self, opened):
        return opened("drive")
