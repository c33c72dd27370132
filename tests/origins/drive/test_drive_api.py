"""Errors of Drive: which exception each becomes, and which requests are retried."""

import json
import socket
from dataclasses import replace

import pytest

from cachedfs.common.types import ObjectInfo, Range
from cachedfs.errors import (
    AccessDenied,
    OriginUnavailable,
    OriginUnreachable,
)
from cachedfs.origins.drive import api
from cachedfs.origins.drive.options import DriveOptions
from cachedfs.origins.retry import RetryableError, RetryPolicy
from cachedfs.sim import Fault
from tests.origins.contract import DATA, read

TOKEN = "ya29.very-secret"
# From a network or a proxy, or truncated; the last one is another resource of Drive.
NO_LISTS = ["{}", '{"kind": "drive#fileList", "it', '{"kind": "drive#file"}']

FILE = {"kind": "drive#file", "id": "1", "name": "x", "mimeType": "text/plain", "size": "3"}


@pytest.fixture
def path(server, folder, root):
    server.put(f"{folder}/a.bin", DATA)
    return f"{root}/a.bin"


async def ask(origin, kind, path, pinned=None):
    """Send one request over the transport of this kind: aiohttp for media, else threads."""
    if kind == "media":
        return (await read(origin, path, Range(0, 100), pinned))[0]
    return await origin.lookup(path, ObjectInfo("x", "directory", id=pinned.details["above"]))


@pytest.fixture(params=["media", "list"])
def kind(request):
    return str(request.param)


@pytest.fixture
async def pinned(make, server, path, root):
    """The file, with the id of its folder; the lookup is not counted."""
    origin = make()
    info = await origin.lookup(path)
    info.details["above"] = (await origin.lookup(root)).id
    server.reset()
    return info


async def test_a_refusal_becomes_its_error_and_is_not_retried(make, server, path, pinned, kind):
    server.fail(Fault(kind=kind, status=403, reason="insufficientFilePermissions", times=None))
    with pytest.raises(AccessDenied, match=rf"drive://{path}: access denied to the account") as caught:
        await ask(
            make(token=TOKEN),
            kind,
            path,
            replace(pinned, details={**pinned.details, "canReadRevisions": False}),
        )
    assert TOKEN not in str(caught.value)
    assert server.count(kind) == 1


# Answers that are not those of the service
async def test_a_redirect_loop_fails_at_once(make, server, path, pinned):
    origin = make(token=TOKEN)
    server.reset()
    server.fail(Fault(kind="media", redirect="", times=None))
    with pytest.raises(OriginUnavailable, match=rf"drive://{path}: .* after 1 try .*redirects in a loop"):
        await ask(origin, "media", path, pinned)
    assert server.count("media") <= 6


NOT_DRIVES = [
    ("list", {"status": 200, "html": True}),
    *(("list", {"status": 200, "body": body}) for body in NO_LISTS),
    *((kind, {"status": 404, "html": True}) for kind in ("list", "media")),
    ("media", {"status": 404, "body": '{"error": "Not Found"}'}),
]


@pytest.mark.parametrize(("kind", "fault"), NOT_DRIVES, ids=str)
async def test_an_answer_that_is_not_from_drive_is_retried_and_never_used(
    make, server, path, pinned, kind, fault
):
    server.fail(Fault(kind=kind, **fault))
    answer = await ask(make(), kind, path, pinned)
    assert answer == DATA[:100] or answer.size == len(DATA)
    assert server.count(kind) == 2
    server.fail(Fault(kind=kind, times=None, **fault))
    with pytest.raises(OriginUnavailable, match=rf"drive://{path}: .* failed after 6 tries"):
        await ask(make(), kind, path, pinned)


async def test_an_absence_reported_by_another_host_is_not_believed(make, server, path, pinned):
    missing = "/drive/v3/files/missing"  # answers as Drive does
    server.fail(Fault(kind="list", redirect=missing, status=302))
    assert (await ask(make(), "list", path, pinned)).size == len(DATA)
    server.fail(Fault(kind="list", redirect=missing, status=302, times=None))
    with pytest.raises(OriginUnavailable, match="redirect"):
        await ask(make(), "list", path, pinned)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("drive#file", {}),
        ("drive#fileList", {"files": [{"name": "a"}]}),
        ("drive#fileList", {"files": {"id": "a"}}),
        *(("drive#fileList", {"files": [{**FILE, name: None}]}) for name in ("id", "name", "mimeType")),
        ("drive#fileList", {"files": [{**FILE, "size": "-5"}]}),
    ],
)
def test_a_resource_without_the_required_fields_is_unusable(kind, body):
    with pytest.raises(RetryableError, match=f"no complete {kind}"):
        api.resource_of(200, json.dumps({"kind": kind, **body}).encode(), kind)


def test_only_a_delete_may_be_answered_without_content():
    assert api.resource_of(204, b"", None) == {}
    for status, kind in ((200, None), (204, "drive#file")):
        with pytest.raises(RetryableError, match="answer"):
            api.resource_of(status, b"", kind)


async def test_a_service_that_refuses_connections_is_unreachable(make, pinned, kind):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        origin = make(policy=RetryPolicy(base_s=0.001, cap_s=0.001, connect_s=0.2), endpoint_url=url)
        with pytest.raises(OriginUnreachable, match=r"drive://.*endpoint"):
            await ask(origin, kind, "My Drive/x", pinned)


async def test_refused_tokens_are_access_denied(make, server, path, pinned, kind):
    server.require_token("another")
    for origin in (make(token=TOKEN), make()):
        with pytest.raises(AccessDenied, match=rf"drive://{path}") as caught:
            await ask(origin, kind, path, pinned)
        assert TOKEN not in str(caught.value)


async def test_an_origin_reconnects_after_aclose(make, path):
    origin = make()
    assert (await read(origin, path))[0] == DATA
    await origin.aclose()
    assert (await read(origin, path))[0] == DATA
    await origin.aclose()
    await origin.aclose()


# Without requests
@pytest.mark.parametrize(
    ("given", "near"),
    [("tokn", "token"), ("trash", "trash_only")],
)
def test_an_unknown_option_is_an_error_with_the_nearest_name(given, near):
    with pytest.raises(ValueError, match=rf"{given}.*did you mean {near}\?"):
        DriveOptions.of({given: 1})


@pytest.mark.parametrize(("text", "value"), [("False", False), ("0", False), ("true", True), (" On ", True)])
def test_a_switch_may_be_a_word_of_the_environment(text, value):
    assert DriveOptions.of({"acknowledge_abuse": text}).acknowledge_abuse is value
    assert DriveOptions.of({"trash_only": text}).trash_only is value
    with pytest.raises(ValueError, match="trash_only='perhaps'"):
        DriveOptions.of({"trash_only": "perhaps"})


def test_options_set_to_none_are_ignored():
    options = DriveOptions.of({"token": None, "endpoint_url": None, "trash_only": None})
    assert options == DriveOptions()
    assert DriveOptions.of({"endpoint_url": "http://h/"}).endpoint_url == "http://h"


def test_a_fingerprint_depends_on_the_content_and_not_on_the_version():
    item = {"id": "i", "name": "t", "mimeType": "x/y", "size": "3", "md5Checksum": "m", "version": "1"}
    info = api.item_info(item, "My Drive/t")
    assert (info.fingerprint, info.size) == ("i-m-3", 3)
    assert api.item_info({**item, "version": "2"}, "My Drive/t").fingerprint == info.fingerprint
    del item["md5Checksum"]
    assert api.item_info(item, "My Drive/t").fingerprint is None
    assert api.item_info({**item, "headRevisionId": "r"}, "My Drive/t").fingerprint == "i-r-3"
