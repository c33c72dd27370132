"""Answers of Drive that lack what it always sends, as of a proxy: an error that names the file, and nothing wrong."""

import json

import pytest

from cachedfs.errors import OriginUnavailable
from cachedfs.origins.retry import RetryPolicy
from cachedfs.sim import Fault
from tests.origins.contract import names

HASTY = RetryPolicy(tries=2, base_s=0.0)
FILE = {"kind": "drive#file", "id": "1", "name": "x", "mimeType": "text/plain", "size": "3"}


@pytest.mark.parametrize(
    "page",
    [
        {},
        {"kind": "drive#fileList", "nextPageToken": "x"},  # names itself as the next one
        *({"kind": "drive#fileList", "files": [{**FILE, name: None}]} for name in ("id", "name", "mimeType")),
        {"kind": "drive#fileList", "files": [{**FILE, "size": "-5"}]},
    ],
)  # fmt: skip
async def test_a_listing_that_drive_never_sends_is_an_error(make, server, root, page):
    origin = make(policy=HASTY)
    folder = await origin.lookup(root)
    server.fail(Fault(kind="list", status=200, body=json.dumps(page), times=None))
    with pytest.raises(OriginUnavailable, match=f"drive://{root}"):
        await names(origin.list(root, folder))


@pytest.mark.parametrize(
    ("method", "kind"), [("pipe_file", "upload"), ("cp_file", "copy"), ("mv_file", "update")]
)
async def test_a_change_that_is_answered_with_another_file_is_an_error(
    make, server, folder, root, method, kind
):
    server.put(f"{folder}/k", b"old")
    args = {"pipe_file": (f"{root}/new", b"new")}.get(method, (f"{root}/k", f"{root}/new"))
    for answer in ({}, {**FILE, "id": "other"}):
        origin = make(policy=HASTY)
        server.fail(Fault(kind=kind, status=200, body=json.dumps(answer), times=None))
        with pytest.raises(OSError, match=f"drive://{root}"):
            await origin.call(method, *args)
        server.heal()
        assert bytes(server.get(f"{folder}/k")) == b"old"
