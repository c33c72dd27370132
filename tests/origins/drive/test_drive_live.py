"""The contract of an origin at the real Google Drive: `CACHEDFS_LIVE_DRIVE="My Drive/scratch" pytest -m live`.

The account is that of `FSSPEC_DRIVE_TOKEN` and similar variables, or of google-auth. The test creates a folder and
moves it to the trash.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from dataclasses import dataclass

import fsspec
import pytest

from cachedfs.origins.drive.filesystem import DriveFileSystem
from cachedfs.origins.drive.origin import DriveOrigin
from cachedfs.origins.registry import open_origin
from tests.origins.contract import CONCURRENCY, OriginContract

SCRATCH = os.environ.get("CACHEDFS_LIVE_DRIVE", "")

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not SCRATCH, reason="CACHEDFS_LIVE_DRIVE names no folder, as 'My Drive/scratch'"),
]


@dataclass
class RealFolder:
    """One folder of a real Drive, accessed by its own filesystem."""

    fs: DriveFileSystem
    root: str

    def put(self, name, data):
        self.fs.pipe_file(f"{self.root}/{name}", data)

    def get(self, name):
        return bytes(self.fs.cat_file(f"{self.root}/{name}"))

    def delete(self, name):
        self.fs.rm(f"{self.root}/{name}", recursive=True)


@pytest.fixture
def world():
    fs = fsspec.filesystem("drive", skip_instance_cache=True, trash_only=False)
    root = f"{SCRATCH}/cachedfs-{uuid.uuid4().hex[:8]}"
    fs.makedirs(root)
    yield RealFolder(fs, root)
    fs.rm(root, recursive=True)


@pytest.fixture
async def origin():
    origin = open_origin(
        "drive", {}, loop=asyncio.get_running_loop(), on_request=lambda: None, concurrency=CONCURRENCY
    )
    assert isinstance(origin, DriveOrigin)
    yield origin
    await origin.aclose()


class TestLive(OriginContract):
    missing_folder_is_an_error = True
    keeps_versions = True
