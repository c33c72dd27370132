"""The Drive origin over the simulated Drive: the contract of an origin, and request counts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from cachedfs.errors import OriginUnavailable
from cachedfs.origins.drive.origin import DriveOrigin
from cachedfs.origins.registry import open_origin
from cachedfs.sim import DriveServer, Fault
from tests.origins.contract import CONCURRENCY, OriginContract


@dataclass
class Folder:
    """One folder of the simulated Drive, changed without the origin."""

    server: DriveServer
    folder: str
    root: str

    def put(self, name, data):
        self.server.put(f"{self.folder}/{name}", data)

    def get(self, name):
        return self.server.get(f"{self.folder}/{name}")

    def delete(self, name):
        for item in self.server.find(f"{self.folder}/{name}"):
            self.server.remove(item["id"])


@pytest.fixture
def world(server, folder, root):
    return Folder(server, folder, root)


@pytest.fixture
async def origin(server):
    origin = open_origin(
        "drive",
        {"token": "anon", "endpoint_url": server.endpoint_url},
        loop=asyncio.get_running_loop(),
        on_request=lambda: None,
        concurrency=CONCURRENCY,
    )
    assert isinstance(origin, DriveOrigin)
    yield origin
    await origin.aclose()


async def test_a_failing_change_feed_is_asked_twice(make, server):
    """The feed only saves requests: a listing does not wait for it to recover."""
    server.reset()
    server.fail(Fault(kind="change", status=500, times=None))
    with pytest.raises(OriginUnavailable, match="2 tries"):
        await make().changes("My Drive", None)
    assert server.count("change") == 2


class TestContract(OriginContract):
    missing_folder_is_an_error = True
    keeps_versions = True
