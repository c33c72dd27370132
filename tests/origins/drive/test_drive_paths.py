"""Paths of Drive: names, duplicates, shortcuts, shared drives, listings, and the number of requests."""

import asyncio
import json
import logging
import unicodedata

import pytest

from cachedfs.common.types import ObjectInfo, Range
from cachedfs.errors import (
    AccessDenied,
    CachedFSError,
    ObjectNotFound,
    OriginUnavailable,
    QuotaExceeded,
    SignInRefused,
)
from cachedfs.origins.drive import api
from cachedfs.sim import Fault
from tests.origins.contract import DATA, names, read


def kinds(server):
    return [request.kind for request in server.requests]


async def listed(origin, folder, **options):
    found = [info async for info in origin.list(folder, **options)]
    assert len({info.path for info in found}) == len(found)
    return {info.path: info for info in found}


# Beginnings of paths
FOUR = "'My Drive'.*'shared:NAME'.*'Shared with me'.*'id:ID'"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("data/a", f"{FOUR}.*as in drive://My Drive/data/a$"),
        ("my drive/a", f"{FOUR}.*as in drive://My Drive/a$"),
        ("1sTWaJ_j7PkjzaBWtNc3IzovK5hQf21FbO/a", r"as in drive://id:1sTWaJ_j7PkjzaBWtNc3IzovK5hQf21FbO/a$"),
        ("shared:", FOUR),
        ("id:/a", FOUR),
        ("id:1//x", "a name is empty"),
        ("My Drive/\udcff", "a name is not UTF-8"),
    ],
)
async def test_an_impossible_path_is_a_value_error_that_says_what_is_possible(origin, server, path, says):
    for ask in (origin.lookup(path), read(origin, path), names(origin.list(path))):
        with pytest.raises(ValueError, match=f"(?s)drive://.*{says}"):
            await ask
    assert server.count() == 0


async def test_the_top_lists_the_beginnings_of_paths(origin, server):
    server.share_drive("Team/One")
    assert (await origin.lookup("")).kind == "directory"
    found = await listed(origin, "")
    assert {"My Drive", "Shared with me", "shared:Team／One"} <= set(found)
    assert {info.kind for info in found.values()} == {"directory"}
    for path in found:
        assert (await origin.lookup(path)).id == found[path].id


# Cost in requests
async def test_a_listing_is_one_request_per_thousand_items(make, server, folder, root):
    origin = make()
    server.fill(server.folder(folder), 2001)
    here = await origin.lookup(root)
    server.reset()
    assert len(await listed(origin, root, parent=here)) == 2001
    assert kinds(server) == ["list"] * 3
    for request in server.requests:
        assert request.query["fields"] == api.LIST_FIELDS
        assert request.query["pageSize"] == "1000"
        assert request.query["q"] == f"'{here.id}' in parents and trashed = false"


async def test_a_deep_listing_is_one_request_per_folder_with_siblings_in_parallel(
    origin, server, folder, root
):
    for i in range(30):
        server.put(f"{folder}/sub{i}/a.bin", b"x")
    here = await origin.lookup(root)
    server.reset()
    server.fail(Fault(kind="list", stall_s=0.05, times=None))
    assert len(await listed(origin, root, parent=here, deep=True)) == 60
    assert kinds(server) == ["list"] * 31
    assert not any(" or " in request.query["q"] for request in server.requests)
    assert 1 < server.peak_concurrency <= 8


# Names
NAMES = [
    "''",
    " 'a' ",
    "'a",
    "\\'",
    "größe-日本-🎉",
    "a' or title = 'b",
    "a+b&c=d 100%",
    "..",
]


@pytest.mark.parametrize("name", NAMES)
async def test_awkward_names_are_found(origin, server, folder, root, name):
    server.add(name, DATA, parent=server.folder(folder))
    server.add("other", b"", parent=server.folder(folder))
    path = f"{root}/{name}"
    assert (await origin.lookup(path)).path == path
    assert path in await listed(origin, root)
    assert (await read(origin, path))[0] == DATA
    server.reset()
    await origin.call("pipe_file", path, b"new")
    assert "list" in kinds(server)
    assert [item["size"] for item in server.find(f"{folder}/{name}")] == ["3"]  # no second file was made


@pytest.mark.parametrize("order", [("NFC", "NFD"), ("NFD", "NFC")])
async def test_names_in_different_unicode_forms_are_different(origin, server, folder, root, order, caplog):
    here, asked = (unicodedata.normalize(form, "größe-가") for form in order)
    server.put(f"{folder}/{here}", b"here")
    for _ in range(2):
        with pytest.raises(ObjectNotFound):
            await origin.lookup(f"{root}/{asked}")
    (record,) = caplog.records
    assert "looks the same" in record.getMessage()
    assert ascii(here) in record.getMessage()
    assert server.count("list") == 3  # the folder and the two names: the warning costs no request
    server.put(f"{folder}/{asked}", b"asked")
    assert (await read(origin, f"{root}/{asked}"))[0] == b"asked"
    assert (await read(origin, f"{root}/{here}"))[0] == b"here"
    assert set(await listed(origin, root)) == {f"{root}/{here}", f"{root}/{asked}"}


async def test_names_are_case_sensitive(origin, server, folder, root):
    for name in ("Readme", "readme"):
        server.put(f"{folder}/{name}", name.encode())
        assert (await read(origin, f"{root}/{name}"))[0] == name.encode()
    with pytest.raises(ObjectNotFound):
        await origin.lookup(f"{root}/README")
    assert len(await listed(origin, root)) == 2


async def test_a_slash_in_a_title_is_shown_as_a_wide_slash(origin, server, folder, root):
    above = server.folder(folder)
    paths = {}
    for title in ("a/b", "c／d", "e/f／g／h/i", "1/2/3／4／5／6/7"):
        server.add(title, title.encode(), parent=above)
        paths[f"{root}/{title.replace('/', '／')}"] = title.encode()
    assert set(await listed(origin, root)) == set(paths)
    for path, data in paths.items():
        assert (await read(origin, path))[0] == data
    with pytest.raises(ObjectNotFound):
        await origin.lookup(f"{root}/1／2／3／4／5／6／8")


async def test_of_duplicate_names_the_newest_is_used_with_one_warning(origin, server, folder, root, caplog):
    caplog.set_level(logging.WARNING, "cachedfs.origins")
    first = server.put(f"{folder}/a", b"1")
    second = server.put(f"{folder}/a", b"2", new=True)
    assert (await read(origin, f"{root}/a"))[0] == b"2"
    assert len(await listed(origin, root)) == 1
    server.put(f"{folder}/other", b"")
    server.edit(first, modifiedTime="2099-01-01T00:00:00Z")
    assert (await read(origin, f"{root}/a"))[0] == b"1"
    server.edit(second, modifiedTime="2099-01-01T00:00:00Z")
    assert (await origin.lookup(f"{root}/a")).id == min(first, second)
    assert (await listed(origin, root))[f"{root}/a"].id == min(first, second)
    (record,) = caplog.records
    assert record.name == "cachedfs.origins"
    assert f"drive://{root}/a: 2 items" in record.getMessage()
    for info in (await origin.lookup(f"{root}/a"), (await listed(origin, root))[f"{root}/a"]):
        assert info.details["same_name"] == {max(first, second): "file"}
    assert "same_name" not in (await origin.lookup(f"{root}/other")).details
    assert (await read(origin, f"id:{first}"))[0] == b"1"


HIDERS = {
    "document": lambda server, path: server.document(path, "text"),
    "shortcut that leads nowhere": lambda server, path: server.shortcut(path, "nothing"),
    "shortcut to a document": lambda server, path: server.shortcut(path, server.document("elsewhere", "")),
}


def newest(server, id):
    server.edit(id, modifiedTime="2099-01-01T00:00:00Z")


@pytest.mark.parametrize(
    ("hidden", "hider"), [*(("file", hider) for hider in HIDERS), ("shortcut to a folder", "document")]
)
async def test_a_document_or_dangling_shortcut_does_not_hide_items_of_its_name(
    origin, server, folder, root, hidden, hider
):
    at = "elsewhere" if "shortcut" in hidden else f"{folder}/x"
    id = server.folder(at) if "folder" in hidden else server.put(at, DATA)
    if "shortcut" in hidden:
        server.shortcut(f"{folder}/x", id)
    newest(server, HIDERS[hider](server, f"{folder}/x"))
    assert (await origin.lookup(f"{root}/x")).id == id
    assert (await listed(origin, root))[f"{root}/x"].id == id


@pytest.mark.parametrize("hider", ["shortcut that leads nowhere", "file"])
async def test_nothing_hides_a_parent_folder(origin, server, folder, root, hider):
    server.put(f"{folder}/x/y/in", DATA)
    for path in (f"{folder}/x", f"{folder}/x/y"):
        if hider in HIDERS:
            newest(server, HIDERS[hider](server, path))
        else:
            above = server.folder(path.rpartition("/")[0])
            id = server.add(path.rpartition("/")[2], b"", parent=above)
            newest(server, id)
    assert (await read(origin, f"{root}/x/y/in"))[0] == DATA
    a_file = ObjectInfo(f"{root}/x/y", "file", 0, id="of the file")
    assert (await origin.lookup(f"{root}/x/y/in", a_file)).size == len(DATA)
    await origin.call("pipe_file", f"{root}/x/y/new", b"new")
    await origin.call("pipe_file", f"{root}/x/z/new", b"new")
    await origin.call("makedirs", f"{root}/x/y", exist_ok=True)
    assert server.get(f"{folder}/x/y/new") == server.get(f"{folder}/x/z/new") == b"new"
    folders = [item for item in server.find(f"{folder}/x") if item["mimeType"] == api.FOLDER]
    assert len(folders) == 1


async def test_trashed_items_are_invisible(origin, server, folder, root):
    server.trash(server.put(f"{folder}/a", b""))
    server.put(f"{folder}/sub/b", b"")
    server.trash(server.folder(f"{folder}/sub"))
    assert await listed(origin, root) == {}
    for name in ("a", "sub", "sub/b"):
        with pytest.raises(ObjectNotFound):
            await origin.lookup(f"{root}/{name}")


@pytest.mark.parametrize("how", ["never", "trashed", "denied"])
async def test_a_dangling_shortcut_is_a_file_that_cannot_be_read(origin, server, folder, root, how):
    target = server.put(f"{folder}/sub/a.bin", DATA)
    server.shortcut(f"{folder}/link", "nothing" if how == "never" else target)
    if how == "denied":
        server.fail(Fault(key=target, status=403, reason="domainPolicy", times=None))
    elif how != "never":
        server.trash(target)
    info = (await listed(origin, root))[f"{root}/link"]
    assert (info.kind, info.size, info.details["dangling"]) == ("file", None, True)
    for pinned in (None, info):
        with pytest.raises(ObjectNotFound, match=rf"drive://{root}/link.*gone"):
            await read(origin, f"{root}/link", None, pinned)


async def test_a_refused_sign_in_does_not_make_a_shortcut_dangling(origin, server, folder, root):
    target = server.put(f"{folder}/sub/a.bin", DATA)
    server.shortcut(f"{folder}/link", target)
    server.fail(Fault(key=target, status=401, times=None))
    for asked in (listed(origin, root), origin.lookup(f"{root}/link")):
        with pytest.raises(SignInRefused, match=f"drive://{root}/link.*not accepted.*sign in"):
            await asked
    server.heal()
    assert "dangling" not in (await listed(origin, root))[f"{root}/link"].details


@pytest.mark.parametrize("trash_only", [True, False])
async def test_an_item_removed_from_one_of_two_folders_stays_in_the_other(
    make, server, folder, root, trash_only
):
    """An item could be in two folders until 2020."""
    id, origin = server.put(f"{folder}/a/x", DATA), make(trash_only=trash_only)
    server.edit(id, parents=[server.folder(f"{folder}/a"), server.folder(f"{folder}/b")])
    await origin.call("rm_file", f"{root}/a/x")
    assert await listed(origin, f"{root}/a") == {}
    assert (await read(origin, f"{root}/b/x"))[0] == DATA
    await origin.call("rm_file", f"{root}/b/x")  # from its last folder
    with pytest.raises(ObjectNotFound):
        await origin.lookup(f"id:{id}")
    assert server.count("delete") == (0 if trash_only else 1)


async def test_a_resource_key_is_in_the_path_of_an_id_or_in_a_shortcut(origin, server, folder, root):
    file, sub = server.put(f"{folder}/a.bin", DATA), server.folder(f"{folder}/sub")
    server.put(f"{folder}/sub/in.bin", b"in")
    server.edit(file, resourceKey="0-k1", capabilities={"canReadRevisions": False})
    server.edit(sub, resourceKey="0-k2")
    server.shortcut(f"{folder}/file", file)
    server.shortcut(f"{folder}/dir", sub)
    with pytest.raises(ObjectNotFound, match=r"drive://id:ID,resourcekey=KEY"):
        await origin.lookup(f"id:{file}")
    with pytest.raises(ObjectNotFound):
        await origin.lookup(f"id:{file},resourcekey=0-other")
    for path in (f"id:{file},resourcekey=0-k1", f"{root}/file"):
        assert (await read(origin, path))[0] == DATA
        assert (await read(origin, path, Range(5, 9)))[0] == DATA[5:9]
    for path in (f"id:{sub},resourcekey=0-k2", f"{root}/dir"):
        assert set(await listed(origin, path)) == {f"{path}/in.bin"}
    assert (await read(origin, f"id:{sub},resourcekey=0-k2/in.bin"))[0] == b"in"
    await origin.call("cp_file", f"{root}/file", f"{root}/copy")
    assert server.get(f"{folder}/copy") == DATA


# Shared drives, and items of others
async def test_items_of_a_shared_drive_are_requested_from_that_drive(origin, server):
    drive = server.share_drive("Team A")
    server.put("sub/a.bin", DATA, parent=drive)
    assert (await read(origin, "shared:Team A/sub/a.bin"))[0] == DATA
    assert set(await listed(origin, "shared:Team A", deep=True)) == {
        "shared:Team A/sub",
        "shared:Team A/sub/a.bin",
    }
    for request in server.requests:
        if request.kind == "list":
            assert (request.query["corpora"], request.query["driveId"]) == ("drive", drive)
        if request.kind in ("list", "get", "media"):
            assert request.query["supportsAllDrives"] == "true"
    await origin.call("pipe_file", "shared:Team A/new/b", b"b")
    assert server.get("new/b", parent=drive) == b"b"
    with pytest.raises(ObjectNotFound, match="Team A"):
        await origin.lookup("shared:Team B/x")


@pytest.mark.parametrize("path", ["Shared with me/dataset", "shared:Ours/link"])
async def test_a_shared_folder_is_read_and_written_without_membership_of_its_drive(origin, server, path):
    dataset = server.folder("dataset", parent=server.share_drive("Theirs", member=False))
    server.put("sub/a.bin", DATA, parent=dataset)
    server.share(dataset)
    if path == "shared:Ours/link":
        server.edit(dataset, name="another")
        server.shortcut("link", dataset, parent=server.share_drive("Ours"))
    assert (await read(origin, f"{path}/sub/a.bin"))[0] == DATA
    assert set(await listed(origin, path)) == {f"{path}/sub"}
    assert set(await listed(origin, path, deep=True)) == {f"{path}/sub", f"{path}/sub/a.bin"}
    for data in (b"1", b"2"):
        await origin.call("pipe_file", f"{path}/new/b.txt", data)
    assert len(server.find("new/b.txt", parent=dataset)) == 1
    assert server.get("new/b.txt", parent=dataset) == b"2"
    refused = [request for request in server.requests if request.status == 404 and request.kind == "list"]
    assert len(refused) <= path.startswith("shared:")  # an invisible drive is tried once


async def test_a_folder_that_cannot_be_listed_is_never_left_out(origin, server, folder, root):
    sub = server.folder(f"{folder}/sub")
    server.put(f"{folder}/sub/a.bin", DATA)
    server.fail(Fault(kind="list", key=sub, status=404, times=None))
    for asked in (listed(origin, root, deep=True), origin.lookup(f"{root}/sub/a.bin")):
        with pytest.raises(CachedFSError, match=r"Drive shows the folder '.*sub', and does not") as caught:
            await asked
        assert not isinstance(caught.value, ObjectNotFound)


async def test_shared_drives_of_one_name_are_addressed_by_id(origin, server):
    one, two = server.share_drive("Twin"), server.share_drive("Twin")
    with pytest.raises(ValueError, match=rf"2 shared drives.*drive://id:{one}.*drive://id:{two}"):
        await origin.lookup("shared:Twin/x")
    server.put("a", b"1", parent=two)
    assert (await read(origin, f"id:{two}/a"))[0] == b"1"


async def test_items_shared_by_others_are_read_only(origin, server):
    server.shared_with_me("theirs.bin", DATA)
    server.put("in.bin", b"in", parent=server.shared_with_me("their folder"))
    assert (await read(origin, "Shared with me/theirs.bin"))[0] == DATA
    assert (await read(origin, "Shared with me/their folder/in.bin"))[0] == b"in"
    assert {"Shared with me/theirs.bin", "Shared with me/their folder"} <= set(
        await listed(origin, "Shared with me")
    )
    n_before = server.count()
    write, take = "write to a folder in it", r"drive.google.com, or remove or move it as drive://id:ID"
    for to_do, method, *args in (
        (write, "pipe_file", "Shared with me/new.bin", b""),
        (write, "pipe_file", "Shared with me/theirs.bin", b""),
        (write, "mkdir", "Shared with me/new"),
        (take, "rm_file", "Shared with me/theirs.bin"),
        (take, "rmdir", "Shared with me/their folder"),
        (take, "mv", "Shared with me/theirs.bin", "My Drive/mine.bin"),
        (write, "cp_file", "Shared with me/theirs.bin", "Shared with me/copy.bin"),
    ):
        with pytest.raises(
            OSError, match=f"drive://Shared with me/[^:]*: 'Shared with me' is a view.*{to_do}"
        ):
            await origin.call(method, *args)
    assert {r.method for r in server.requests[n_before:]} == {"GET"}
    await origin.call("cp_file", "Shared with me/theirs.bin", "My Drive/copied.bin")
    assert server.get("copied.bin") == DATA


# Items without bytes
@pytest.mark.parametrize("want", [None, Range(0, 5)])
async def test_an_abusive_file_is_read_only_with_acknowledge_abuse(make, server, folder, root, want):
    server.edit(server.put(f"{folder}/a", DATA), abusive=True)
    with pytest.raises(AccessDenied, match=r"malware.*acknowledge_abuse"):
        await read(make(), f"{root}/a", want)
    origin = make(acknowledge_abuse=True)
    assert (await read(origin, f"{root}/a", want))[0] == DATA[: 5 if want else None]
    server.edit(server.find(f"{folder}/a")[0]["id"], abusive=False)  # Google's verdict may change
    assert (await read(origin, f"{root}/a", want))[0] == DATA[: 5 if want else None]
    # Google refuses the acknowledgement for other files.
    server.put(f"{folder}/good", DATA)
    assert (await read(origin, f"{root}/good", want))[0] == DATA[: 5 if want else None]


# Pages
async def test_short_and_empty_pages_are_not_the_end(origin, server, folder, root):
    server.fill(server.folder(folder), 10)
    here = await origin.lookup(root)
    server.short_pages(3)
    server.reset()
    assert len(await listed(origin, root, parent=here)) == 10
    assert server.count("list") == 8
    assert (await origin.lookup(f"{root}/f000003", here)).size == 16


async def test_a_rejected_page_token_restarts_the_listing_once(make, server, folder, root):
    origin = make()
    server.fill(server.folder(folder), 7)
    server.short_pages(3)
    here = await origin.lookup(root)
    server.reset()
    server.fail(Fault(kind="list", nth=3, status=400, reason="invalid"))
    assert len(await listed(origin, root, parent=here)) == 7
    n_lists = server.count("list")
    assert n_lists == 9
    server.heal()
    server.fail(Fault(kind="list", nth=2, status=400, reason="invalid"))
    server.fail(Fault(kind="list", nth=4, status=400, reason="invalid"))
    with pytest.raises(ValueError, match=f"drive://{root}"):
        await listed(origin, root, parent=here)
    assert server.count("list") == n_lists + 4


async def test_an_incomplete_search_is_never_used(origin, server, folder, root):
    server.put(f"{folder}/a", b"")
    here = await origin.lookup(root)
    partial = json.dumps({"kind": "drive#fileList", "items": [], "incompleteSearch": True})
    server.reset()
    server.fail(Fault(kind="list", status=200, body=partial, times=2))
    assert len(await listed(origin, root, parent=here)) == 1
    assert server.count() == 3
    server.fail(Fault(kind="list", status=200, body=partial, times=None))
    with pytest.raises(OriginUnavailable, match="only a part"):
        await listed(origin, root, parent=here)
    assert server.count() == 9


async def test_a_listing_that_does_not_end_is_an_error(origin, server, root):
    here = await origin.lookup(root)
    page = {"kind": "drive#fileList", "nextPageToken": "x"}  # names itself as the next one
    server.fail(Fault(kind="list", status=200, body=json.dumps(page), times=None))
    with pytest.raises(OriginUnavailable, match=f"drive://{root}: listing it does not end"):
        await listed(origin, root, parent=here)


# Concurrent changes
async def test_a_folder_that_was_replaced_is_looked_up_again(origin, server, folder, root):
    server.put(f"{folder}/sub/a", b"old")
    assert (await read(origin, f"{root}/sub/a"))[0] == b"old"
    server.remove(server.folder(f"{folder}/sub"))
    server.put(f"{folder}/sub/a", b"new")
    assert (await read(origin, f"{root}/sub/a"))[0] == b"new"


async def test_a_subfolder_removed_during_a_deep_listing_is_left_out(origin, server, folder, root):
    server.put(f"{folder}/gone/a", b"")
    server.put(f"{folder}/stays/b", b"")
    here, gone = await origin.lookup(root), server.folder(f"{folder}/gone")
    before = [server.item(gone), server.item(server.folder(f"{folder}/stays"))]
    server.fail(Fault(kind="list", key=here.id, status=200, body=json.dumps({"items": before})))
    server.fail(Fault(kind="list", key=gone, status=404))
    server.trash(gone)
    assert f"{root}/stays/b" in await listed(origin, root, deep=True)
    server.remove(str(here.id))
    with pytest.raises(ObjectNotFound):
        await listed(origin, root, parent=here, deep=True)


async def test_a_failing_listing_leaves_no_task(origin, server, folder, root):
    target = server.put(f"{folder}/a", b"")
    for i in range(10):
        server.put(f"{folder}/sub{i}/x", b"")
        server.shortcut(f"{folder}/link{i}", target)
    here = await origin.lookup(root)
    for kind in ("get", "list"):
        server.fail(Fault(kind=kind, nth=4, status=403, reason="dailyLimitExceeded"))
        before = asyncio.all_tasks()
        with pytest.raises(QuotaExceeded):
            await listed(origin, root, parent=here, deep=True)
        assert asyncio.all_tasks() == before
        server.heal()
    server.reset()
    found = origin.list(root, here, deep=True)
    for _ in range(21):
        await anext(found)
    await found.aclose()
    assert asyncio.all_tasks() == before
    assert server.count("list") < 11


async def test_a_shared_drive_listed_on_two_pages_is_one_drive(origin, server):
    drive = {"id": server.share_drive("moving"), "name": "moving"}
    for body in ({"items": [drive], "nextPageToken": "2"}, {"items": [drive]}):
        server.fail(Fault(kind="drives", status=200, body=json.dumps(body)))
    assert (await origin.lookup("shared:moving")).id == drive["id"]
    assert server.count("drives") == 2
