"""Writes to Drive: uploads, copies, moves, removals, and requests that are lost."""

import asyncio
import collections
import errno
import hashlib
import io
import json
from contextlib import nullcontext

import pytest

from cachedfs.errors import (
    AccessDenied,
    CachedFSError,
    IsAFolder,
    NotDownloadable,
    ObjectNotFound,
    OriginUnavailable,
)
from cachedfs.origins.drive import api, mutations, quota
from cachedfs.origins.drive.quota import DriveLimits, QuotaMeter, RateLimit
from cachedfs.origins.retry import RetryPolicy
from cachedfs.origins.upload import UploadContent
from cachedfs.sim import Fault
from tests.origins.contract import read

NO_ITEMS = '{"kind": "drive#fileList", "items": []}'
MB = 1 << 20
BIG = bytes(range(256)) * (10 * MB // 256)
UPLOAD = "cachedfs.origins.drive.item_upload"
SMALL = 256 << 10  # the smallest piece that Google takes
THREE = BIG[:700_000]  # three pieces of that size


@pytest.fixture
async def writer(origin):
    return origin.writer


@pytest.fixture
def small_pieces(monkeypatch):
    """Send more than 1,000 bytes in pieces of 256 KiB."""
    monkeypatch.setattr("cachedfs.origins.google_upload.PIECE", SMALL)
    monkeypatch.setattr(f"{UPLOAD}.ItemUpload.most_at_once", 1000)


async def write(writer, path, data, **options):
    await writer.write(path, UploadContent(io.BytesIO(data)), **options)


def changes(server):
    """Return method and kind of the requests that change something."""
    return [(r.method, r.kind) for r in server.requests if r.method != "GET"]


def pieces(server):
    return [r.headers["content-range"] for r in server.requests if "content-range" in r.headers]


def md5(data):
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


# Sending bytes
@pytest.mark.parametrize(
    ("size", "stops"),
    [(0, []), (5 * MB, []), (9 * MB, [9 * MB]), (9 * MB + 1, [8 * MB, 9 * MB + 1])],
)
async def test_up_to_5_mb_is_one_request_and_more_is_sent_in_pieces(
    writer, server, folder, root, size, stops
):
    await write(writer, f"{root}/a.txt", BIG[:size])
    (found,) = server.find(f"{folder}/a.txt")
    assert (found["size"], found["md5Checksum"]) == (str(size), md5(BIG[:size]))
    assert found["mimeType"] == "text/plain"
    assert len(changes(server)) == 1 + len(stops)
    assert pieces(server) == [
        f"bytes {start}-{stop - 1}/{size}" for start, stop in zip([0, *stops], stops, strict=False)
    ]


async def test_an_upload_with_slow_progress_is_never_given_up(writer, server, folder, root, monkeypatch):
    monkeypatch.setattr(f"{UPLOAD}.ItemUpload.most_at_once", 1000)
    n_lost, kept = 2 * RetryPolicy().tries, SMALL
    server.accept_only(kept, times=n_lost)
    for number in range(n_lost):  # each piece, and not the status request after it
        server.fail(Fault(kind="upload", nth=2 + 2 * number, lose=True))
    await write(writer, f"{root}/a", BIG[: 16 * kept])
    assert server.get(f"{folder}/a") == BIG[: 16 * kept]
    assert sum(not span.startswith("bytes */") for span in pieces(server)) == n_lost + 1


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("kept", "says", "n_pieces"), [(0, "6 tries", 11), (len(THREE), "all bytes", 6)], ids=["nothing", "all"]
)
async def test_an_upload_that_makes_no_file_is_origin_unavailable(writer, server, root, kept, says, n_pieces):
    headers = {"Range": f"bytes=0-{kept - 1}"} if kept else {}
    server.fail(Fault(kind="upload", nth=2, status=308, body="", headers=headers, times=None))
    with pytest.raises(OriginUnavailable, match=rf"drive://{root}/a.*{says}"):
        await write(writer, f"{root}/a", THREE)
    assert len(pieces(server)) == n_pieces


@pytest.mark.usefixtures("small_pieces")
async def test_a_session_lost_after_it_created_the_file_is_a_success(writer, server, folder, root):
    server.fail(Fault(kind="upload", nth=4, close_after=0))  # the last piece
    server.fail(Fault(kind="upload", nth=5, status=404))
    await write(writer, f"{root}/a", THREE, replaces=None)
    (found,) = server.find(f"{folder}/a")
    assert found["md5Checksum"] == md5(THREE)


ANOTHER = '{"kind": "drive#file", "id": "other", "name": "x", "mimeType": "text/plain", "size": "3"}'


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        *(("create", ""), ("copy", "{}"), ("upload", "<html>"), ("update", '{"kind": "drive#fileList"}')),
        *((kind, ANOTHER) for kind in ("create", "copy", "upload", "update")),
    ],
)
async def test_a_change_succeeds_only_if_drive_returns_the_item(writer, server, folder, root, kind, body):
    server.put(f"{folder}/a", b"1")
    act = {
        "create": lambda: writer.make_folder(f"{root}/new", exist_ok=False),
        "copy": lambda: writer.copy(f"{root}/a", f"{root}/new"),
        "upload": lambda: write(writer, f"{root}/new", b"1"),
        "update": lambda: writer.move(f"{root}/a", f"{root}/new"),
    }[kind]
    server.fail(Fault(kind=kind, status=200, body=body))  # nothing was done
    await act()
    assert len(server.find(f"{folder}/new")) == 1
    server.trash(server.find(f"{folder}/new")[0]["id"])
    server.put(f"{folder}/a", b"1")
    server.fail(Fault(kind=kind, status=200, body=body, times=None))
    with pytest.raises(OriginUnavailable, match=f"drive://{root}"):
        await act()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("data", [THREE[:10], THREE], ids=["one request", "in pieces"])
async def test_an_upload_that_is_answered_by_another_file_is_sent_again(writer, server, folder, root, data):
    wrong = {"kind": "drive#file", "id": "x", "name": "a", "mimeType": "x/y", "md5Checksum": md5(data)}
    server.fail(Fault(kind="upload", nth=4 if data == THREE else 1, status=200, body=json.dumps(wrong)))
    await write(writer, f"{root}/a", data)
    assert server.get(f"{folder}/a") == data


@pytest.fixture
def corrupted_upload(monkeypatch):
    """Corrupt uploads: the expected checksum is this one, of other bytes."""
    monkeypatch.setattr(UploadContent, "md5", lambda self: md5(b"meant"))
    return md5(b"meant")


async def test_a_new_file_with_wrong_bytes_is_removed(writer, server, folder, root, corrupted_upload):
    with pytest.raises(
        CachedFSError, match=rf"{root}/a: .*{md5(b'sent')} instead of {corrupted_upload}.*removed"
    ):
        await write(writer, f"{root}/a", b"sent")
    assert [item["trashed"] for item in server.find(f"{folder}/a")] == [True]


async def test_a_file_overwritten_with_wrong_bytes_is_restored(
    writer, server, folder, root, corrupted_upload
):
    id = server.put(f"{folder}/a", b"before")
    with pytest.raises(CachedFSError, match=rf"{root}/a: Drive holds other bytes.*is what it was before"):
        await write(writer, f"{root}/a", b"sent")
    assert (server.find(f"{folder}/a")[0]["id"], server.get(f"{folder}/a")) == (id, b"before")


async def test_wrong_bytes_that_cannot_be_undone_are_reported(writer, server, folder, root, corrupted_upload):
    server.put(f"{folder}/a", b"before")
    server.fail(Fault(kind="delete", status=403, reason="insufficientFilePermissions"))
    with pytest.raises(CachedFSError, match=rf"{root}/a: .*newest version now.*'Manage versions'"):
        await write(writer, f"{root}/a", b"sent")
    assert server.get(f"{folder}/a") == b"sent"


async def test_a_new_file_that_another_writer_may_have_changed_is_not_removed(
    writer, server, folder, root, corrupted_upload
):
    # It arrives, and another machine may write before the next lookup.
    server.fail(Fault(kind="upload", close_after=0))
    with pytest.raises(CachedFSError, match=rf"{root}/a: .*from another writer, and are left"):
        await write(writer, f"{root}/a", b"sent")
    assert server.get(f"{folder}/a") == b"sent"


# Each request is lost once: before it arrives, or its answer
LOST = {
    # The action; the expected files, None for absent ones; the number of requests.
    "a new file": (lambda w, at: write(w, f"{at}-new", b"new"), {"new": b"new"}, 5),
    "a big one": (lambda w, at: write(w, f"{at}-new", THREE), {"new": THREE}, 8),
    "over one": (lambda w, at: write(w, f"{at}-a", b"new"), {"a": b"new"}, 4),
    "in a new folder": (lambda w, at: write(w, f"{at}-sub/new", b"new"), {"sub/new": b"new"}, 10),
    "a copy over one": (lambda w, at: w.copy(f"{at}-a", f"{at}-b"), {"a": b"a", "b": b"a"}, 8),
    "moved over one": (lambda w, at: w.move(f"{at}-a", f"{at}-b"), {"a": None, "b": b"a"}, 7),
    "removed": (lambda w, at: w.remove(f"{at}-a"), {"a": None}, 4),
}


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("what", LOST)
async def test_each_request_may_be_lost_once(make, server, folder, root, what, is_done):
    act, after, n_requests = LOST[what]
    for nth in range(n_requests + 1):  # 0: none is lost
        ids = {name: server.put(f"{folder}/{nth}-{name}", name.encode()) for name in ("a", "b")}
        origin = make()
        server.reset()
        if nth:
            server.fail(Fault(nth=nth, lose=is_done, close_before=not is_done))
        await act(origin.writer, f"{root}/{nth}")
        n_more = _costs(server.requests[nth - 1], is_done) if nth else 0
        assert len(server.requests) == n_requests + n_more, (nth, [r.kind for r in server.requests])
        for name, data in after.items():
            live = [item for item in server.find(f"{folder}/{nth}-{name}") if not item["trashed"]]
            assert [item["md5Checksum"] for item in live] == ([] if data is None else [md5(data)])
            if name == "a":
                assert [item["id"] for item in live] in ([], [ids["a"]])
        assert len(server.find(f"{folder}/{nth}-sub")) == ("sub/new" in after)


def _costs(lost, is_done):
    """Return the number of additional requests: the same one again, and for some a lookup before or after it."""
    makes = lost.kind in ("create", "copy") or (lost.method, lost.query.get("uploadType")) == (
        "POST",
        "multipart",
    )
    is_piece = "content-range" in lost.headers
    return 2 if (is_done and makes) or (is_piece and not is_done) else 1


# Rate of new items
async def test_many_new_items_wait_for_their_turn_with_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(quota, "CREATES", (RateLimit(1, 0.001),))
    limits = DriveLimits(QuotaMeter())

    async def one():
        async with limits.creating():
            pass

    await asyncio.gather(*(one() for _ in range(50)))
    (warning,) = caplog.messages
    assert "2 to 3 new files a second" in warning


# Targets of writes
@pytest.mark.usefixtures("small_pieces")
async def test_an_overwrite_keeps_the_id_and_creates_one_revision(writer, server, folder, root, origin):
    id = server.put(f"{folder}/a", b"1")
    for data in (b"2", THREE):
        await write(writer, f"{root}/a", data)
        (found,) = server.find(f"{folder}/a")
        assert (found["id"], found["md5Checksum"]) == (id, md5(data))
    account = origin.account
    request = account.request(("files", id, "revisions"), "", "")
    revisions = await account.call(request, kind="drive#revisionList")
    assert len(revisions["revisions"]) == 3


async def test_of_duplicates_the_newest_is_overwritten(writer, server, folder, root):
    first = server.put(f"{folder}/a", b"1")
    second = server.put(f"{folder}/a", b"2", new=True)
    await write(writer, f"{root}/a", b"3")
    assert server.item(first)["md5Checksum"] == md5(b"1")
    assert server.item(second)["md5Checksum"] == md5(b"3")


async def test_a_write_through_a_shortcut_goes_to_its_target(writer, server, folder, root):
    target = server.put(f"{folder}/sub/a", b"1")
    server.shortcut(f"{folder}/link", target)
    await write(writer, f"{root}/link", b"2")
    assert server.get(f"{folder}/sub/a") == b"2"
    server.shortcut(f"{folder}/dir", server.folder(f"{folder}/sub"))
    await write(writer, f"{root}/dir/b", b"3")
    assert server.get(f"{folder}/sub/b") == b"3"
    with pytest.raises(IsAFolder):
        await write(writer, f"{root}/dir", b"4")
    server.shortcut(f"{folder}/gone", "nothing")
    for change in (write(writer, f"{root}/gone", b"5"), writer.copy(f"{root}/gone", f"{root}/x")):
        with pytest.raises(ObjectNotFound):
            await change
    server.shortcut(f"{folder}/to a document", server.document(f"{folder}/doc", ""))
    with pytest.raises(NotDownloadable):
        await write(writer, f"{root}/to a document", b"6")


IMPOSSIBLE = [
    # The method and its arguments, what the error is, and what it says.
    ("write", ["{at}/sub"], IsAFolder, "this leads to a folder"),
    ("write", ["My Drive"], IsAFolder, "where a Drive starts"),
    ("write", ["id:{sub}"], IsAFolder, "this leads to a folder"),
    ("write", ["{at}/doc"], NotDownloadable, "a document of Google's own"),
    ("write", ["id:{a}/x"], FileExistsError, "exists already"),
    ("make_folder", ["id:{a}"], FileExistsError, "exists already"),
    ("remove", ["shared:Team"], IsAFolder, "where a Drive starts"),
    ("remove", ["{at}/sub"], IsAFolder, "recursive"),
    ("copy", ["{at}/a", "{at}/sub"], IsAFolder, "this leads to a folder"),
    ("copy", ["{at}/a", "id:{b}"], CachedFSError, "its path"),
    ("copy", ["{at}/b", "{at}/b"], None, ""),
    ("move", ["{at}/a", "My Drive"], CachedFSError, "its path"),
    ("move", ["shared:Team", "id:2/x"], CachedFSError, "needs the name"),
    ("move", ["{at}/a", "{at}/sub"], FileExistsError, "exists already"),
    ("move", ["{at}/none", "{at}/c"], ObjectNotFound, "no item of this name"),
    ("move", ["{at}/sub", "{at}/sub/x"], ValueError, "into itself"),
    ("move", ["{at}/sub", "{at}/sub/new/x"], ValueError, "into itself"),
]


@pytest.mark.parametrize(("method", "paths", "error", "says"), IMPOSSIBLE, ids=str)
async def test_an_impossible_change_sends_nothing_and_says_why(
    writer, server, folder, root, method, paths, error, says
):
    ids = {name: server.put(f"{folder}/{name}", b"1") for name in "ab"}
    ids["sub"] = server.folder(f"{folder}/sub")
    server.edit(server.document(f"{folder}/doc", "text"), size="5")
    paths = [path.format(at=root, **ids) for path in paths]
    options = {"exist_ok": True} if method == "make_folder" else {}
    act = write(writer, *paths, b"") if method == "write" else getattr(writer, method)(*paths, **options)
    with pytest.raises(error, match=f"^drive://.*{says}") if error else nullcontext():
        await act
    assert changes(server) == []


async def test_many_files_in_a_new_folder_create_one_folder(writer, server, folder, root):
    await asyncio.gather(*(write(writer, f"{root}/new/er/{i}", b"%d" % i) for i in range(20)))
    assert len(server.find(f"{folder}/new")) == len(server.find(f"{folder}/new/er")) == 1
    assert [server.get(f"{folder}/new/er/{i}") for i in range(20)] == [b"%d" % i for i in range(20)]
    assert server.count("create") == 2
    # Each looks up the path; those that wait for the folder do not look it up again.
    assert server.count("get") <= 25


async def test_a_new_folder_that_queries_do_not_find_yet_is_not_created_again(writer, server, folder, root):
    await writer.make_folder(f"{root}/new", exist_ok=True)
    above = server.find(folder)[0]["id"]
    server.fail(Fault(kind="list", key=above, status=200, body=NO_ITEMS, times=None))
    await write(writer, f"{root}/new/a", b"")
    await writer.make_folder(f"{root}/new", exist_ok=True)
    assert len(server.find(f"{folder}/new")) == 1


async def test_a_file_in_a_briefly_invisible_folder_is_not_created_again(writer, server, folder, root):
    server.put(f"{folder}/sub/a", b"1")
    above = server.find(folder)[0]["id"]
    server.fail(Fault(kind="list", key=above, status=200, body=NO_ITEMS))
    await write(writer, f"{root}/sub/a", b"2")
    assert server.get(f"{folder}/sub/a") == b"2"
    assert len(server.find(f"{folder}/sub/a")) == len(server.find(f"{folder}/sub")) == 1


@pytest.mark.parametrize("how", ["there", "removed", "renamed"])
async def test_a_new_file_that_queries_do_not_find_yet_is_not_created_again(
    writer, server, folder, root, how, origin
):
    await write(writer, f"{root}/a", b"1")
    (made,) = server.find(f"{folder}/a")
    if how == "removed":
        server.trash(made["id"])
    elif how == "renamed":
        server.edit(made["id"], name="b")
    above = server.find(folder)[0]["id"]
    server.fail(Fault(kind="list", key=above, status=200, body=NO_ITEMS, times=None))
    if how == "there":
        assert (await origin.lookup(f"{root}/a")).id == made["id"]
    await write(writer, f"{root}/a", b"2")
    live = [item for item in server.find(f"{folder}/a") if not item["trashed"]]
    assert [(item["md5Checksum"], item["id"] == made["id"]) for item in live] == [(md5(b"2"), how == "there")]


async def test_concurrent_writes_of_one_path_create_one_file(writer, server, folder, root):
    await asyncio.gather(*(write(writer, f"{root}/a", b"%d" % i) for i in range(5)))
    assert len(server.find(f"{folder}/a")) == 1
    assert len(writer._locks) == 0


# Folders that were moved or removed
@pytest.mark.parametrize("how", ["trash", "remove"])
async def test_nothing_is_written_into_a_removed_folder(writer, server, folder, root, how):
    await write(writer, f"{root}/sub/deep/first", b"")  # caches the parent folders
    getattr(server, how)(server.folder(f"{folder}/sub"))
    await write(writer, f"{root}/sub/deep/a", b"data")
    (found,) = server.find(f"{folder}/sub/deep/a")
    assert found["trashed"] is False
    assert server.get(f"{folder}/sub/deep/a") == b"data"


@pytest.mark.parametrize(
    ("renamed", "moved"), [("sub", "elsewhere/deep"), ("sub/deep", "sub/elsewhere")], ids=["above", "itself"]
)
async def test_no_change_follows_a_folder_that_was_renamed(writer, server, folder, root, renamed, moved):
    await write(writer, f"{root}/sub/deep/first", b"old")  # caches the parent folders
    server.edit(server.folder(f"{folder}/{renamed}"), name="elsewhere")
    server.put(f"{folder}/sub/deep/first", b"new")  # another folder has this name now
    await write(writer, f"{root}/sub/deep/a", b"data")
    await writer.copy(f"{root}/sub/deep/a", f"{root}/sub/deep/b")
    await writer.remove(f"{root}/sub/deep/first")
    assert server.get(f"{folder}/{moved}/first") == b"old"
    assert server.find(f"{folder}/{moved}/a") == server.find(f"{folder}/{moved}/b") == []
    assert server.get(f"{folder}/sub/deep/a") == server.get(f"{folder}/sub/deep/b") == b"data"
    assert [item["trashed"] for item in server.find(f"{folder}/sub/deep/first")] == [True]


async def test_one_check_of_a_folder_counts_for_all_files_written_into_it_soon_after(
    writer, server, folder, root, monkeypatch
):
    await write(writer, f"{root}/sub/first", b"")
    server.reset()
    await asyncio.gather(*(write(writer, f"{root}/sub/{name}", b"") for name in "abcd"))
    await write(writer, f"{root}/sub/e", b"")
    counts = collections.Counter(request.kind for request in server.requests)
    assert counts == {"get": 2, "list": 5, "upload": 5}
    monkeypatch.setattr(mutations, "CHECKED_S", 0.0)  # as after 5 s
    server.edit(server.folder(f"{folder}/sub"), name="elsewhere")
    await write(writer, f"{root}/sub/f", b"data")
    assert server.get(f"{folder}/sub/f") == b"data"


async def test_a_failed_check_of_a_folder_fails_no_later_write(writer, server, folder, root):
    await write(writer, f"{root}/sub/first", b"")
    server.fail(Fault(kind="get", status=400, times=1))
    with pytest.raises(CachedFSError):
        await write(writer, f"{root}/sub/a", b"")
    await write(writer, f"{root}/sub/b", b"data")
    assert server.get(f"{folder}/sub/b") == b"data"


# Removing
@pytest.mark.parametrize("trash_only", [True, False])
async def test_of_several_items_of_a_name_the_one_that_is_read_is_removed(
    make, server, folder, root, caplog, trash_only
):
    days = {}
    for day in (3, 1, 2):
        id = server.put(f"{folder}/a", b"%d" % day, new=True)
        server.edit(id, modifiedTime=f"2024-01-0{day}T00:00:00.000Z")
        days[id] = day
    origin = make(trash_only=trash_only)
    for newest in (3, 2, 1):
        assert (await read(origin, f"{root}/a"))[0] == b"%d" % newest
        caplog.clear()
        await origin.call("rm", f"{root}/a")
        left = [item["id"] for item in server.find(f"{folder}/a") if not item["trashed"]]
        assert sorted(days[id] for id in left) == list(range(1, newest))
        said = [record.getMessage() for record in caplog.records if "stay there" in record.getMessage()]
        assert [text.split(": ")[1].split()[0] for text in said] == [str(len(left))] * bool(left)
    with pytest.raises(ObjectNotFound):
        await origin.call("rm", f"{root}/a")


async def test_without_trash_items_are_deleted(make, server, folder, root):
    server.put(f"{folder}/a", b"")
    origin = make(trash_only=False)
    await origin.call("rm", f"{root}/a")
    assert server.find(f"{folder}/a") == []


async def test_an_item_that_another_client_removed_first_counts_as_removed(make, server, folder, root):
    for options, kind in (({"trash_only": False}, "delete"), ({}, "update")):
        server.put(f"{folder}/a", b"1", new=True)
        server.fail(Fault(kind=kind, status=404))
        server.reset()
        await make(**options).call("rm", f"{root}/a")
        assert server.count(kind) == 1
        for item in server.find(f"{folder}/a"):
            server.remove(item["id"])


async def test_a_shortcut_is_removed_and_not_its_target(writer, server, folder, root):
    server.put(f"{folder}/sub/a", b"1")
    server.shortcut(f"{folder}/link", server.folder(f"{folder}/sub"))
    await writer.remove(f"{root}/link")
    assert server.get(f"{folder}/sub/a") == b"1"
    assert server.find(f"{folder}/link")[0]["trashed"] is True


async def test_rmdir_removes_an_empty_folder_and_nothing_else(writer, server, folder, root):
    server.put(f"{folder}/sub/a", b"")
    server.shortcut(f"{folder}/link", empty := server.folder(f"{folder}/empty"))
    with pytest.raises(OSError, match="not empty") as caught:
        await writer.remove_empty(f"{root}/sub")
    assert caught.value.errno == errno.ENOTEMPTY
    with pytest.raises(NotADirectoryError):
        await writer.remove_empty(f"{root}/sub/a")
    await writer.remove(f"{root}/sub/a")
    await writer.remove_empty(f"{root}/sub")
    await writer.remove_empty(f"{root}/link")  # and not the folder that it leads to
    assert [server.find(f"{folder}/{name}")[0]["trashed"] for name in ("sub", "link")] == [True, True]
    assert server.item(empty)["trashed"] is False
    with pytest.raises(ObjectNotFound):
        await writer.remove_empty(f"{root}/sub")


@pytest.mark.parametrize("older", ["folder", "file"])
async def test_rmdir_keeps_items_that_are_hidden_by_the_folders_name(writer, server, folder, root, older):
    hidden = server.put(f"{folder}/{'sub/kept' if older == 'folder' else 'sub'}", b"1")
    newest = server.add("sub", b"", parent=server.folder(folder), mimeType=api.FOLDER)
    await writer.remove_empty(f"{root}/sub")
    assert server.item(newest)["trashed"] is True
    assert server.item(hidden)["trashed"] is False
    with pytest.raises(OSError, match="not empty" if older == "folder" else "this is a file"):
        await writer.remove_empty(f"{root}/sub")


async def test_a_copy_replaces_the_visible_item_of_a_name_and_a_move_refuses_to_choose(
    writer, server, folder, root
):
    first, second = (server.put(f"{folder}/b", b"%d" % i, new=True) for i in range(2))
    server.put(f"{folder}/a", b"new")
    with pytest.raises(CachedFSError, match="2 items have this name"):
        await writer.move(f"{root}/a", f"{root}/b")
    await writer.copy(f"{root}/a", f"{root}/b")
    assert server.get(f"{folder}/b") == b"new"
    assert [server.item(id)["trashed"] for id in (first, second)] == [False, True]


async def test_a_file_is_written_moved_and_removed_by_its_id(writer, server, folder, root):
    id = server.put(f"{folder}/a.json", b"old", mimeType="application/json")
    await write(writer, f"id:{id}", b"new")
    (item,) = server.find(f"{folder}/a.json")
    assert (server.get(f"{folder}/a.json"), item["id"], item["mimeType"]) == (b"new", id, "application/json")
    with pytest.raises(CachedFSError, match=f"drive://id:{id}: .*its path"):
        await writer.move(f"{root}/a.json", f"id:{id}")
    for path in (f"{root}/b", f"{root}/sub/c"):
        await writer.move(f"id:{id}", path)
        assert (await writer._tree.lookup(path)).id == id
    assert len(server.item(id)["parents"]) == 1
    await writer.remove(f"id:{id}")
    assert server.item(id)["trashed"] is True
    with pytest.raises(ObjectNotFound):
        await write(writer, "id:none", b"")


async def test_an_item_in_the_trash_is_not_changed_by_its_id(make, server, folder):
    server.trash(id := server.put(f"{folder}/a", b"old"))
    origin = make(trash_only=False)
    writer = origin.writer
    for change in (write(writer, f"id:{id}", b"new"), writer.remove(f"id:{id}")):
        with pytest.raises(ObjectNotFound, match=f"drive://id:{id}: .*it is in the trash"):
            await change
    assert changes(server) == []


@pytest.mark.parametrize("fault", [{"lose": True}, {"status": 503}], ids=["lost", "503"])
async def test_a_document_that_may_have_been_copied_is_reported_and_not_copied_again(
    writer, server, folder, root, fault
):
    server.document(f"{folder}/doc", "text")
    server.put(f"{folder}/copy", b"before")
    server.fail(Fault(kind="copy", **fault))
    with pytest.raises(
        OriginUnavailable, match=f"drive://{root}/copy: copying to it .*may be there"
    ) as caught:
        await writer.copy(f"{root}/doc", f"{root}/copy")
    assert "1 try" in str(caught.value)
    assert server.count("copy") == 1
    live = [item for item in server.find(f"{folder}/copy") if not item["trashed"]]
    assert len(live) == (2 if "lose" in fault else 1)


# Moving
async def test_a_move_keeps_the_id_and_replaces_a_file(writer, server, folder, root, origin):
    id, sub = server.put(f"{folder}/a", b"1"), server.folder(f"{folder}/sub")
    for name in ("sub/in", "replaced"):
        server.put(f"{folder}/{name}", b"2")
    await origin.lookup(f"{root}/sub/in")
    await writer.move(f"{root}/a", f"{root}/new/b")
    await writer.move(f"{root}/sub", f"{root}/new/dir")
    assert server.find(f"{folder}/new/dir")[0]["id"] == sub
    assert server.get(f"{folder}/new/dir/in") == b"2"
    for gone in ("a", "sub", "sub/in"):
        with pytest.raises(ObjectNotFound):
            await origin.lookup(f"{root}/{gone}")
    await writer.move(f"{root}/new/b", f"{root}/new/B")  # a name in another case
    await writer.move(f"{root}/new/B", f"{root}/replaced")
    live = [item["id"] for item in server.find(f"{folder}/replaced") if not item["trashed"]]
    assert live == [id]


@pytest.mark.parametrize("is_undone", [True, False])
@pytest.mark.parametrize("what", ["copy", "move"])
async def test_a_copy_or_move_that_cannot_replace_its_target_is_undone_or_reported(
    writer, server, folder, root, what, is_undone
):
    """A user who may write in a folder may not always remove items of others from it."""
    server.put(f"{folder}/a", b"1")
    there = server.put(f"{folder}/sub/b", b"2")
    # A move: moved, removed, moved back; a copy: removed, and removed itself.
    nth = 2 if what == "move" else 1
    times, says = (1, "Nothing was") if is_undone else (None, "It is there")
    server.fail(Fault(kind="update", nth=nth, times=times, status=403, reason="insufficientFilePermissions"))
    with pytest.raises(AccessDenied, match=f"drive://{root}/sub/b: .*{says}"):
        await getattr(writer, what)(f"{root}/a", f"{root}/sub/b")
    server.heal()
    live = [item["id"] for item in server.find(f"{folder}/sub/b") if not item["trashed"]]
    assert (len(live), there in live) == (1 if is_undone else 2, True)
    assert bool(server.find(f"{folder}/a")) == (is_undone or what == "copy")


@pytest.mark.parametrize("what", ["copy", "move"])
async def test_changes_that_need_the_same_new_folder_do_not_deadlock(writer, server, folder, root, what):
    server.put(f"{folder}/a", b"1")
    change = getattr(writer, what)
    both = (change(f"{root}/a", f"{root}/new/er/b"), change(f"{root}/a", f"{root}/new/er"))
    said = await asyncio.wait_for(asyncio.gather(*both, return_exceptions=True), 60)
    assert [each is None for each in said].count(True) == 1
    assert [server.find(f"{folder}/{name}") == [] for name in ("a", "new/er")] == [what == "move", False]
    assert len(writer._locks) == 0


# Folders
async def test_make_folder_options(writer, server, folder, root):
    await writer.make_folder(f"{root}/a/b/c", exist_ok=True)
    made = await writer.make_folder(f"{root}/a/b/c", exist_ok=True)
    assert made.id == server.folder(f"{folder}/a/b/c")
    with pytest.raises(FileExistsError):
        await writer.make_folder(f"{root}/a/b/c", exist_ok=False)
    server.put(f"{folder}/file", b"")
    with pytest.raises(FileExistsError):
        await writer.make_folder(f"{root}/file", exist_ok=True)
    with pytest.raises(FileNotFoundError, match=f"drive://{root}/none"):
        await writer.make_folder(f"{root}/none/x", exist_ok=False, parents=False)
    await writer.make_folder(f"{root}/a/x", exist_ok=False, parents=False)
    assert (await writer.make_folder("My Drive", exist_ok=True)).kind == "directory"
    with pytest.raises(FileExistsError):
        await writer.make_folder("My Drive", exist_ok=False)
    assert server.find(f"{folder}/none") == []


async def test_a_wide_slash_in_a_path_becomes_a_slash_in_the_title(writer, server, root, origin):
    await write(writer, f"{root}/a／b", b"1")
    await writer.make_folder(f"{root}/c／d", exist_ok=False)
    await writer.move(f"{root}/c／d", f"{root}/e／f")
    for name in ("a／b", "e／f"):
        info = await origin.lookup(f"{root}/{name}")
        assert server.item(info.id or "")["name"] == name.replace("／", "/")
    await write(writer, f"{root}/a／b", b"22")
    assert (await origin.lookup(f"{root}/a／b")).size == 2
    assert server.count("create") == 1


async def test_an_overwrite_does_not_wait_for_a_turn(make, server, folder, root, monkeypatch):
    monkeypatch.setattr(quota, "CREATES", (RateLimit(1, 1e6),))
    id, origin = server.put(f"{folder}/a", b"old"), make()
    async with origin.account.limits.creating():  # the only one for days
        await write(origin.writer, f"{root}/a", b"new")
    assert (server.find(f"{folder}/a")[0]["id"], server.get(f"{folder}/a")) == (id, b"new")


async def test_a_copy_of_a_document_refused_for_its_rate_is_retried(writer, server, folder, root):
    server.document(f"{folder}/doc", "text")
    server.fail(Fault(kind="copy", status=403, reason="userRateLimitExceeded", times=2))
    await writer.copy(f"{root}/doc", f"{root}/copy")
    assert len(server.find(f"{folder}/copy")) == 1
    assert server.count("copy") == 3
