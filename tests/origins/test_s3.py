"""The generic origin over S3: the contract, conditional reads, requests and errors."""

from functools import partial

import fsspec.config
import pytest

from cachedfs.common.types import Range
from cachedfs.errors import AccessDenied, CachedFSError, ObjectChanged, OriginUnavailable, OriginUnreachable
from cachedfs.sim import Fault
from tests.origins.contract import DATA, OriginContract, World, read


@pytest.fixture
def server(s3):
    return s3.server


@pytest.fixture
def world(s3):
    return World(s3.name, s3.put, s3.delete)


@pytest.fixture
def make(s3, opened):
    """Return a function that opens origins with these options."""
    return partial(opened, "s3", **s3.options["s3"])


@pytest.fixture
async def origin(make):
    return make()


class TestContract(OriginContract):
    missing_folder_is_an_error = True


def asked(server):
    """Return the requests since the last call: their kind, and the ETag that they require."""
    requests = [(request.kind, request.headers.get("if-match")) for request in server.requests]
    server.reset()
    return requests


async def test_a_read_is_a_lookup_and_one_request_for_the_bytes_of_its_etag(origin, server, world):
    world.put("k", DATA)
    path = f"{world.root}/k"
    _, info, _, _ = await read(origin, path, Range(5, 50))
    etag = info.details["ETag"]
    assert info.fingerprint == f"etag:{etag}-{len(DATA)}"
    assert asked(server) == [("metadata", None), ("media", etag)]
    assert (await read(origin, path, Range(5, 50), info))[0] == DATA[5:50]
    (listed,) = [each async for each in origin.list(world.root)]
    assert (await read(origin, path, None, listed))[0] == DATA
    assert asked(server) == [("media", etag), ("list", None), ("media", etag)]


async def test_bytes_of_another_etag_are_never_returned(origin, server, world):
    """A compatible service may ignore the condition."""
    world.put("k", DATA)
    pinned = await origin.lookup(f"{world.root}/k")
    server.fail(Fault(kind="media", times=None, headers={"ETag": '"another"'}))
    for want in (None, Range(0, 10)):
        with pytest.raises(ObjectChanged, match="another ETag"):
            await read(origin, pinned.path, want, pinned)


async def test_a_body_that_breaks_is_requested_again(origin, server, world):
    world.put("k", DATA)
    pinned = await origin.lookup(f"{world.root}/k")
    server.reset()
    server.fail(Fault(kind="media", close_after=40, times=2))
    assert (await read(origin, pinned.path, None, pinned))[0] == DATA
    assert server.count("media") == 3
    server.heal()
    server.fail(Fault(kind="media", close_after=40, times=None))
    with pytest.raises(OriginUnavailable, match=pinned.path):
        await read(origin, pinned.path, None, pinned)


def error(status, code):
    return {"status": status, "body": f"<Error><Code>{code}</Code><Message>no</Message></Error>"}


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (error(403, "AccessDenied"), AccessDenied),
        (error(404, "NoSuchKey"), ObjectChanged),
        (error(500, "InternalError"), OriginUnavailable),
        ({"status": 502, "html": True}, OriginUnavailable),
        ({"status": 200, "html": True}, CachedFSError),
        ({"close_before": True}, OriginUnavailable),
        (None, OriginUnreachable),
    ],
)
async def test_failures_are_cachedfs_errors(make, server, world, fault, kind, monkeypatch):
    # Without the retries of s3fs and botocore, which wait in between.
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    origin = make(config_kwargs={"retries": {"max_attempts": 0}})
    world.put("k", DATA)
    pinned = await origin.lookup(f"{world.root}/k")
    if fault is None:
        server.refuse()
    else:
        server.fail(Fault(times=None, kind="media", **fault))
    with pytest.raises(kind, match=pinned.path):
        await read(origin, pinned.path, None, pinned)


async def test_more_connections_than_those_of_botocore_are_used(make, monkeypatch):
    for given, expected in (
        ({}, {"max_pool_connections": 128}),
        ({"config_kwargs": {"max_pool_connections": 5}}, {"max_pool_connections": 5}),
        ({"config_kwargs": {"read_timeout": 9}}, {"max_pool_connections": 128, "read_timeout": 9}),
    ):
        assert (await make(**given).filesystem()).config_kwargs == expected
    monkeypatch.setitem(fsspec.config.conf["s3"], "config_kwargs", {"read_timeout": 7})
    assert (await make().filesystem()).config_kwargs["read_timeout"] == 7
