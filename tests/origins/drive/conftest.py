"""Fixtures: a simulated Drive, an empty folder for each test, and origins that read it."""

import asyncio
import itertools

import pytest

from cachedfs.origins.drive.filesystem import DriveFileSystem
from cachedfs.origins.drive.origin import DriveOrigin
from cachedfs.origins.retry import RetryPolicy
from cachedfs.sim import DriveServer
from tests.origins.drive.certificates import private_key
from tests.sim.discovery import problems_of_request

# A busy machine may seem to hang, and must not cause a second request.
PATIENT = RetryPolicy(base_s=0.001, cap_s=0.001, media_s=3600.0, metadata_s=3600.0)
_numbers = itertools.count()


@pytest.fixture(scope="session")
def pem():
    """The private key of a service account."""
    return private_key()[1]


@pytest.fixture(scope="module")
def shared_server():
    with DriveServer("off") as server:
        yield server


@pytest.fixture
def server(shared_server):
    shared_server.reset()
    yield shared_server
    asked = shared_server.requests
    shared_server.heal()
    shared_server.short_pages(None)
    shared_server.require_no_token()
    # Every request since the last reset must be in Google's description of the API.
    assert [problem for request in asked for problem in problems_of_request(request)] == []


@pytest.fixture
def only_with_account(server):
    """A Drive that answers no anonymous requests, as Google's does, but at its public addresses."""
    server.require_token("of an account")
    yield
    server.reset()  # the public addresses are in no description of the API
    server.page_limit(None)


@pytest.fixture
def folder(server):
    """The name of an empty folder in My Drive."""
    name = f"folder-{next(_numbers)}"
    server.folder(name)
    return name


@pytest.fixture
def root(folder):
    """The path of that folder for an origin."""
    return f"My Drive/{folder}"


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """A machine where nobody has signed in."""
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG", "HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, "" if name.startswith("GOOGLE") else str(tmp_path / "home"))
    monkeypatch.setattr("google.auth.compute_engine._metadata.is_on_gce", lambda request: False)


@pytest.fixture
async def make(server):
    """A function that creates origins; they are closed at the end."""
    made = []

    def make_origin(policy=PATIENT, concurrency=16, meter=None, **options):
        origin = DriveOrigin(
            {"token": "anon", "endpoint_url": server.endpoint_url, **options},
            identity="drive",
            loop=asyncio.get_running_loop(),
            on_request=lambda: None,
            concurrency=concurrency,
            policy=policy,
            filesystem_over=DriveFileSystem.over,
            meter=meter,
        )
        made.append(origin)
        return origin

    yield make_origin
    for origin in made:
        await origin.aclose()


@pytest.fixture
async def origin(make):
    return make()
