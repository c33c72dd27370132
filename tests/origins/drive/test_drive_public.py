"""Public files and folders of Google Drive without an account: with an API key, and at the public download address."""

import asyncio
import os

import fsspec
import pytest

from cachedfs.common.types import Range
from cachedfs.errors import (
    AccessDenied,
    NotDownloadable,
    ObjectChanged,
    ObjectNotFound,
    QuotaExceeded,
    SignInRefused,
)
from cachedfs.origins.drive import accounts, connection
from cachedfs.sim import Fault
from tests.origins.contract import read

pytestmark = pytest.mark.usefixtures("only_with_account")
DATA = os.urandom(3000)


def published(server, path, data=DATA):
    id = server.put(path, data)
    server.publish(id)
    return id


def save_sign_in(server):
    program = server.client_json()["installed"]
    accounts.save(
        "me", {"type": "authorized_user", "refresh_token": "r", "account": "me@example.com", **program}
    )


# With an API key
async def test_an_api_key_reads_public_files_and_folders(make, server, folder):
    server.put(f"{folder}/sub/a", DATA)
    server.publish(id := server.folder(folder))
    origin = make(token=None, api_key=server.api_key())
    server.reset()
    assert (await read(origin, f"id:{id}/sub/a"))[0] == DATA
    found = {info.path: info.size async for info in origin.list(f"id:{id}", deep=True)}
    assert found == {f"id:{id}/sub": None, f"id:{id}/sub/a": len(DATA)}
    # It is in no log of a proxy.
    assert not [request for request in server.requests if "key" in request.query]


async def test_an_api_key_reads_nothing_else_and_says_what_helps(make, server, folder, root):
    private = server.put(f"{folder}/a", DATA)
    origin = make(token=None, api_key=server.api_key())
    for path, top in ((f"id:{private}", f"id:{private}"), (f"{root}/a", "My Drive")):
        with pytest.raises(ObjectNotFound, match=f"drive://{top}.*an API key"):
            await origin.lookup(path)
    with pytest.raises(SignInRefused, match="sign in"):
        await origin.call("pipe_file", f"id:{published(server, f'{folder}/b')}", b"new")
    with pytest.raises(SignInRefused, match=r"does not accept the API key.*check the key"):
        await make(token=None, api_key="AIza-wrong").lookup(f"id:{private}")


# Without
@pytest.mark.parametrize("options", [{"token": "anon"}, {"token": None}])
async def test_a_public_file_is_read_without_an_account(make, server, folder, nobody, options):
    server.scan_limit(100)  # of which Google would want a confirmation
    id = published(server, f"{folder}/größe.bin")
    server.edit(id, resourceKey="0-key")
    origin, path = make(**options), f"id:{id},resourcekey=0-key"
    info = await origin.lookup(path)
    assert (info.size, info.details["title"]) == (len(DATA), "größe.bin")
    assert info.fingerprint is not None
    data, _, start, stop = await read(origin, path, None, info)
    assert (data, start, stop) == (DATA, 0, len(DATA))
    server.put(f"{folder}/größe.bin", DATA + b"more")
    server.edit(id, modifiedTime="2099-01-01T00:00:00Z")
    assert (await origin.lookup(path)).fingerprint != info.fingerprint
    empty = published(server, f"{folder}/empty", b"")
    assert (await read(origin, f"id:{empty}"))[0] == b""
    server.scan_limit(100 << 20)


def test_a_file_that_is_replaced_within_its_second_is_seen_at_the_next_lookup(
    server, folder, own_cache, nobody
):
    id, recent = published(server, f"{folder}/a", b"old"), "2099-01-01T00:00:00Z"
    server.edit(id, modifiedTime=recent)
    drive = {"endpoint_url": server.endpoint_url}
    fs = fsspec.filesystem("cachedfs", target_protocol="drive", drive=drive, max_age=0)
    assert fs.cat_file(f"id:{id}") == b"old"
    server.put(f"{folder}/a", b"new")
    server.edit(id, modifiedTime=recent)
    assert fs.cat_file(f"id:{id}") == b"new"


async def test_a_recent_file_is_read_in_several_requests(make, server, folder, nobody):
    id = published(server, f"{folder}/a")
    server.edit(id, modifiedTime="2099-01-01T00:00:00Z")
    origin = make()
    info = await origin.lookup(f"id:{id}")
    for want in (Range(0, 10), Range(10, 3000)):
        assert (await read(origin, f"id:{id}", want, info))[0] == DATA[want.start : want.stop]
    server.edit(id, modifiedTime="2098-01-01T00:00:00Z")
    with pytest.raises(ObjectChanged):
        await read(origin, f"id:{id}", Range(0, 10), info)


async def test_a_file_that_is_not_public_says_what_helps(make, server, folder, root, nobody):
    private, public = server.put(f"{folder}/a", DATA), published(server, f"{folder}/b")
    document = server.document(f"{folder}/doc", "text")
    origin = make()
    for path, kind, words in (
        (f"id:{private}", AccessDenied, "not public.*Anyone with the link.*sign in.*API key"),
        ("id:1nothing", ObjectNotFound, "no such file, or it is not public"),
        (f"id:{server.folder(folder)}", AccessDenied, "not public"),
        (f"{root}/b", AccessDenied, "no anonymous requests.*sign in, or give an API key"),
    ):
        with pytest.raises(kind, match=words):
            await read(origin, path)
    server.publish(server.folder(folder))
    with pytest.raises(NotDownloadable, match=r"no documents.*sign in"):
        await read(origin, f"id:{document}")
    server.edit(public, capabilities={"canDownload": False})
    with pytest.raises(AccessDenied, match="does not give this file"):
        await read(origin, f"id:{public}")


async def test_a_page_in_place_of_the_bytes_is_never_data(make, server, folder):
    id = published(server, f"{folder}/a")
    origin = make()
    info = await origin.lookup(f"id:{id}")
    used_up = "<html><title>Google Drive - Quota exceeded</title>Too many users have viewed</html>"
    page = {"Content-Type": "text/html; charset=utf-8"}
    server.fail(Fault(kind="media", status=200, body=used_up, headers=page, times=None))
    for pinned in (info, None):
        with pytest.raises(QuotaExceeded, match=r"too many users.*24 hours"):
            await read(origin, f"id:{id}", None, pinned)
    server.heal()
    assert (await read(origin, f"id:{id}", None, info))[0] == DATA


async def test_who_signs_in_later_uses_the_same_origin(make, server, folder, root, nobody, monkeypatch):
    monkeypatch.setattr(connection, "_SEARCH_AGAIN_S", 0.0)
    origin = make(token=None)
    id = server.put(f"{folder}/a", DATA)
    for path in (f"{root}/a", f"id:{id}"):
        with pytest.raises(AccessDenied, match=r"sign in|login drive"):
            await origin.lookup(path)
    save_sign_in(server)
    assert (await read(origin, f"id:{id}"))[0] == DATA
    assert (await read(origin, f"{root}/a"))[0] == DATA


async def test_a_public_folder_is_listed_by_the_api_after_a_sign_in(
    make, server, folder, nobody, monkeypatch
):
    monkeypatch.setattr(connection, "_SEARCH_AGAIN_S", 0.0)
    origin, path = make(token=None), f"id:{server.folder(folder)}"
    server.put(f"{folder}/a", DATA)
    server.publish(server.folder(folder))
    assert [info.path async for info in origin.list(path)] == [f"{path}/a"]
    assert not origin.lists_all(path)
    save_sign_in(server)
    found = await asyncio.gather(*(origin.lookup(f"{path}/{name}") for name in "xyz"), return_exceptions=True)
    assert [type(error) for error in found] == [ObjectNotFound] * 3
    assert [info.path async for info in origin.list(path)] == [f"{path}/a"]
    assert origin.lists_all(path)


def test_what_is_read_after_a_sign_in_is_cached_for_that_account(server, folder, root, own_cache, nobody):
    def make():
        drive = {"endpoint_url": server.endpoint_url}
        return fsspec.filesystem("cachedfs", drive=drive, target_protocol="drive", skip_instance_cache=True)

    server.put(f"{folder}/private", DATA)
    fs = make()
    with pytest.raises(AccessDenied, match="cachedfs login drive"):
        fs.cat_file(f"{root}/private")
    save_sign_in(server)
    fs._objects._look_at = fs._objects._identify_at = 0.0  # a second later
    assert fs.cat_file(f"{root}/private") == DATA
    accounts.remove("me")
    with pytest.raises(AccessDenied, match="cachedfs login drive"):
        make().cat_file(f"{root}/private")


async def test_an_api_key_is_sent_to_google_alone(make, server, folder):
    id = published(server, f"{folder}/a")
    origin = make(token=None, api_key=server.api_key())
    info = await origin.lookup(f"id:{id}")
    server.reset()
    server.fail(Fault(kind="media", redirect="/portal/page"))
    assert (await read(origin, f"id:{id}", None, info))[0] == DATA
    assert [request.kind for request in server.requests] == ["media", "media"]


async def test_a_passing_trouble_of_the_public_address_is_retried(make, server, folder, nobody):
    id = published(server, f"{folder}/a")
    origin = make(token=None)
    page = {"Content-Type": "text/html"}
    for pinned in (None, await origin.lookup(f"id:{id}")):
        server.fail(Fault(kind="media", status=500, body="<title>Error 500</title>", headers=page))
        assert (await read(origin, f"id:{id}", None, pinned))[0] == DATA


async def test_a_public_file_that_goes_while_it_is_read_is_no_absence(make, server, folder, nobody):
    id = published(server, f"{folder}/a")
    origin = make()
    info = await origin.lookup(f"id:{id}")
    server.remove(id)
    for want in (None, Range(0, 10)):
        with pytest.raises(ObjectChanged, match="was removed while it was read"):
            await read(origin, f"id:{id}", want, info)
    with pytest.raises(ObjectNotFound):
        await read(origin, f"id:{id}")
