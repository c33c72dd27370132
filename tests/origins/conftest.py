"""Origins for tests; they are closed at the end."""

import asyncio

import pytest

from cachedfs.origins.registry import open_origin
from tests.origins.contract import CONCURRENCY


@pytest.fixture
async def opened():
    """Return a function that opens the origin of a protocol."""
    made = []

    def open_one(protocol, policy=None, slots=CONCURRENCY, **options):
        loop = asyncio.get_running_loop()
        origin = open_origin(protocol, options, loop=loop, on_request=lambda: None, concurrency=slots)
        if policy is not None:
            origin.policy = policy
        made.append(origin)
        return origin

    yield open_one
    for origin in made:
        await origin.aclose()
