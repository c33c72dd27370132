"""Errors of Drive: which exception each becomes, and which requests are retried."""

import json

import pytest

from cachedfs.common.types import ObjectInfo, Range
from cachedfs.errors import AccessDenied, OriginUnavailable
from cachedfs.origins.drive import api
from cachedfs.origins.drive.options import DriveOptions
from cachedfs.origins.retry import RetryableError
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


async def ask(origin, kind, path, pinned):
    """Send one request: for bytes, or for the list of a folder."""
    if kind == "media":
        return (await read(origin, path, Range(0, 100), pinned))[0]
    return await origin.lookup(path, ObjectInfo("x", "directory", id=pinned.details["above"]))


@pytest.fixture
async def pinned(make, server, path, root):
    """The file, with the id of its folder; the lookup is not counted."""
    origin = make()
    info = await origin.lookup(path)
    info.details["above"] = (await origin.lookup(root)).id
    server.reset()
    return info


@pytest.mark.parametrize("kind", ["media", "list"])
async def test_a_refusal_becomes_its_error_and_is_not_retried(make, server, path, pinned, kind):
    server.fail(Fault(kind=kind, status=403, reason="insufficientFilePermissions", times=None))
    pinned.details["canReadRevisions"] = False
    with pytest.raises(AccessDenied, match=rf"drive://{path}: access denied to the account") as caught:
        await ask(make(token=TOKEN), kind, path, pinned)
    assert TOKEN not in str(caught.value)
    assert server.count(kind) == 1


# Answers that are not those of the service
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


def test_a_fingerprint_depends_on_the_content_and_not_on_the_version():
    item = {"id": "i", "name": "t", "mimeType": "x/y", "size": "3", "md5Checksum": "m", "version": "1"}
    info = api.item_info(item, "My Drive/t")
    assert (info.fingerprint, info.size) == ("i-m-3", 3)
    assert api.item_info({**item, "version": "2"}, "My Drive/t").fingerprint == info.fingerprint
    del item["md5Checksum"]
    assert api.item_info(item, "My Drive/t").fingerprint is None
    assert api.item_info({**item, "headRevisionId": "r"}, "My Drive/t").fingerprint == "i-r-3"


@pytest.fixture(params=["media", "list"])
def kind(request):
    return str(request.param)


def test_only_a_delete_may_be_answered_without_content():
    assert api.resource_of(204, b"", None) == {}
    for status, kind in ((200, None), (204, "drive#file")):
        with pytest.raises(RetryableError, match="answer"):
            api.resource_of(status, b"", kind)


def test_options_set_to_none_are_ignored():
    options = DriveOptions.of({"token": None, "endpoint_url": None, "trash_only": None})
    assert options == DriveOptions()
    assert DriveOptions.of({"endpoint_url": "http://h/"}).endpoint_url == "http://h"
