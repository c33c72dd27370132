"""Endpoints over an origin in memory, and over the simulated clouds."""

import fsspec
import pytest

from tests.server.served import Served


@pytest.fixture
def serving():
    """Return a function that serves URLs by the names of buckets, with options of the filesystem."""
    running = []

    def serve(urls, *, keys=..., domains=("localhost",), origins=(), **options):
        buckets = {name: fsspec.url_to_fs(url, **options) for name, url in urls.items()}
        given = {} if keys is ... else {"keys": keys}
        running.append(Served(buckets, domains=domains, origins=origins, **given))
        return running[-1]

    yield serve
    for each in running:
        each.close()


@pytest.fixture
def served(origin, serving):
    """The bucket `data` over an origin in memory."""
    return serving({"data": "cachedfs::gs://b/top"})
