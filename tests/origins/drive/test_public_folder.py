"""Public folders of Google Drive without an account and without an API key, by their public page."""

import asyncio
import functools
import os
from collections import Counter

import fsspec
import pytest

from cachedfs.errors import (
    AccessDenied,
    CachedFSError,
    NotDownloadable,
    ObjectNotFound,
    OriginUnavailable,
)
from cachedfs.origins.drive import api
from cachedfs.origins.drive.public import page_of
from cachedfs.origins.retry import RetryPolicy
from cachedfs.sim import Fault
from tests.origins.contract import read
from tests.support import forget

pytestmark = pytest.mark.usefixtures("only_with_account")
DATA = os.urandom(3000)
ID = "1sTWaJ_j7PkjzaBWtNc3IzovK5hQf21FbOw9yLeeLPNQ"
APPS = "application/vnd.google-apps."


# The page
def entry(link, name, mime="text/plain", id="1AbCdEfGh"):
    """Return an entry of a page, in the markup of Google's pages in 2026."""
    return (
        f'<div class="flip-entry" id="entry-{id}" tabindex="0" role="link"><div class="flip-entry-info"><a href="{link}" '
        'target="_blank"><div class="flip-entry-visual"><div class="flip-entry-thumb"><img src="https://lh3.google.com/u/0/d/x" '
        'alt=""/></div></div><div class="flip-entry-list-icon"><img src="https://drive-thirdparty.googleusercontent.com/16/type/'
        f'{mime}" alt=""/></div><div class="flip-entry-title">{name}</div></a></div><div class="flip-entry-last-modified">'
        "<div>Oct 7, 2026</div></div></div>"
    )


def page(*entries):
    text = "".join(entries)
    title = "<title>A &amp; B</title>"
    return f'<html><head>{title}</head><body><div class="flip-entries">{text}</div></body></html>'.encode()


FILE = "https://drive.google.com/file/d/1File-id_0/view"
EDITOR = "https://docs.google.com"
ANY = "application/octet-stream"


@pytest.mark.parametrize(
    ("link", "mime", "found"),
    [
        (f"{FILE}?usp=drive_web&amp;resourcekey=0-a8Xq1ZkP", "text/csv", ("1File-id_0", "text/csv", "0-a8Xq1ZkP")),
        (FILE, api.SHORTCUT, ("1File-id_0", ANY, None)),
        ("https://drive.google.com/drive/folders/1Folder_0", "", ("1Folder_0", api.FOLDER, None)),
        (f"{EDITOR}/spreadsheets/d/1AbCdEfGh/edit", "", ("1AbCdEfGh", f"{APPS}spreadsheet", None)),
        (f"{EDITOR}/forms/d/e/1FAIpQL/viewform", "", ("1AbCdEfGh", f"{APPS}form", None)),
        ("https://colab.research.google.com/drive/1AbCdEfGh", "", ("1AbCdEfGh", ANY, None)),
    ],
)  # fmt: skip
def test_an_entry_of_a_page_is_an_item(link, mime, found):
    shown = page_of(200, page(entry(link, "Größe &lt;1&gt; &amp; a&#39;b/c", mime)), ID, "drive://x", 7.0)
    assert (shown.title, shown.at) == ("A & B", 7.0)
    [item] = shown.items
    assert item["name"] == "Größe <1> & a'b/c"
    assert (item["id"], item["mimeType"], item.get("resourceKey")) == found
    assert item.get(api.PAGE_READ_AT) == (7.0 if item["mimeType"] == api.FOLDER else None)


def test_an_empty_folder_has_a_page_too():
    assert page_of(200, page(), ID, "drive://x", 7.0).items == []
    link = f'<a href="https://drive.google.com/drive/folders/{ID}">itself</a>'
    assert page_of(200, page(link), ID, "drive://x", 7.0).items == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html><title>Sign in to the network</title><body>Welcome</body></html>",
        page(entry(FILE, "a")).replace(b"flip-entries", b"list"),
        page(entry(FILE, "a")).replace(b'"flip-entry"', b'"row"'),
        page(entry(FILE, "a")).replace(b"flip-entry-title", b"name"),
        page(entry(FILE, "a"), entry(FILE, "")),
        page(entry(FILE, "a").replace("href", "data-href")),
        page(entry("https://drive.google.com/new/form/1File-id_0", "a")),
        page(entry("https://elsewhere.example/1File-id_0", "a", id="x")),
    ],
)
def test_a_page_of_another_form_is_an_error_that_names_the_api_key(body):
    with pytest.raises(CachedFSError, match=r"drive://x: .*another form than is known.*api_key") as caught:
        page_of(200, body, ID, "drive://x", 7.0)
    assert not isinstance(caught.value, FileNotFoundError)


# Reading
@pytest.fixture
def tree(server, folder):
    """The id of a public folder with the files a, b and sub/c."""
    for name in ("a", "b", "sub/c"):
        server.put(f"{folder}/{name}", name.encode() * 1000)
    server.publish(id := server.folder(folder))
    server.reset()
    return id


@pytest.fixture
def cached(server, own_cache, nobody):
    """A function that makes a filesystem over the cache."""

    def make_filesystem(**options):
        drive = {"endpoint_url": server.endpoint_url, **options.pop("drive", {})}
        return fsspec.filesystem(
            "cachedfs", target_protocol="drive", drive=drive, skip_instance_cache=True, **options
        )

    return make_filesystem


def asked(server):
    """Return the requests since the last call, by kind."""
    found = Counter(request.kind for request in server.requests)
    server.reset()
    return dict(found)


def test_a_public_folder_is_listed_by_its_page(cached, server, tree):
    fs = cached()
    link = f"https://drive.google.com/drive/folders/{tree}?usp=sharing"
    assert sorted(fs.ls(link, detail=False)) == [f"id:{tree}/{name}" for name in ("a", "b", "sub")]
    assert asked(server) == {"media": 1, "page": 1}  # what is it? no file
    found = {info["name"].rpartition("/")[2]: info for info in fs.ls(f"id:{tree}")}
    assert {name: (info["type"], info["size"]) for name, info in found.items()} == {
        "a": ("file", None),
        "b": ("file", None),
        "sub": ("directory", 0),
    }
    assert asked(server) == {}
    assert fs.info(f"id:{tree}/a")["size"] == 1000  # its own answer states it
    assert fs.info(f"id:{tree}/sub")["type"] == "directory"
    assert asked(server) == {"media": 1}
    assert fs.find(f"id:{tree}") == [f"id:{tree}/{name}" for name in ("a", "b", "sub/c")]
    assert asked(server) == {"page": 1}
    assert [(path, sorted(files)) for path, _, files in fs.walk(f"id:{tree}")] == [
        (f"id:{tree}", ["a", "b"]),
        (f"id:{tree}/sub", ["c"]),
    ]
    assert fs.glob(f"id:{tree}/*/c") == [f"id:{tree}/sub/c"]
    assert asked(server) == {}
    assert fs.du(f"id:{tree}") == 1000 + 1000 + 5000
    assert asked(server) == {"media": 2}


def test_files_of_a_public_folder_are_read_and_cached(cached, server, tree, tmp_path):
    fs = cached()
    assert fs.cat_file(f"id:{tree}/sub/c") == b"sub/c" * 1000
    # What is the folder, its page, the page of the folder below, and the file: its version before, with and after the bytes.
    assert asked(server) == {"media": 4, "page": 2}
    fs.get(f"id:{tree}", str(tmp_path / "copy"), recursive=True)
    assert (tmp_path / "copy" / "a").read_bytes() == b"a" * 1000
    assert (tmp_path / "copy" / "sub" / "c").read_bytes() == b"sub/c" * 1000
    assert asked(server) == {"media": 6}
    forget()
    with fs.open(f"id:{tree}/a") as file:
        assert file.read() == b"a" * 1000
    assert asked(server) == {}


def test_a_page_is_as_new_as_the_folder(cached, clock, server, folder, tree):
    fs = cached(max_age=60)
    assert fs.cat_file(f"id:{tree}/a") == b"a" * 1000
    for path in fs.find(f"id:{tree}"):
        fs.info(path)
    asked(server)
    server.trash(server.find(f"{folder}/a")[0]["id"])
    server.put(f"{folder}/a", b"new")
    clock(61)
    assert fs.cat_file(f"id:{tree}/a") == b"new"
    assert asked(server) == {"page": 1, "media": 3}
    assert fs.cat_file(f"id:{tree}/sub/c") == b"sub/c" * 1000
    assert asked(server) == {"page": 1, "media": 3}
    fs = cached(max_age=0)
    assert fs.ls(f"id:{tree}", detail=False) == [f"id:{tree}/{name}" for name in ("a", "b", "sub")]
    server.put(f"{folder}/more", b"")
    assert f"id:{tree}/more" in fs.ls(f"id:{tree}", detail=False)
    assert asked(server) == {"page": 2}


def test_a_name_that_the_page_lacks_is_never_absent(cached, clock, server, tree, monkeypatch):
    at_once = functools.partial(RetryPolicy, base_s=0.0, media_s=3600.0, metadata_s=3600.0)
    monkeypatch.setattr("cachedfs.origins.drive.connection.RetryPolicy", at_once)
    server.page_limit(2)  # sub and a
    fs = cached()
    assert fs.ls(f"id:{tree}", detail=False) == [f"id:{tree}/a", f"id:{tree}/sub"]
    for path in (f"id:{tree}/b", f"id:{tree}/sub/missing", f"id:{tree}/missing/below"):
        for use in (fs.cat_file, fs.open, fs.info, fs.exists, fs.isfile, fs.ls):
            with pytest.raises(AccessDenied, match=r"does not show this name.*may leave out names.*api_key"):
                use(path)
    offline = cached(offline=True)
    with pytest.raises(OriginUnavailable):
        offline.cat_file(f"id:{tree}/b")
    clock(1e4)
    server.fail(Fault(close_before=True, times=None))
    with pytest.raises(OriginUnavailable):
        fs.cat_file(f"id:{tree}/b")
    server.heal()
    # With the key it is there, and what it lists completely is complete for all.
    key = cached(drive={"api_key": server.api_key()})
    assert key.cat_file(f"id:{tree}/b") == b"b" * 1000


@pytest.mark.parametrize("status", [302, 404])
def test_a_folder_or_file_that_cannot_be_seen_any_more_is_no_absence(cached, clock, server, tree, status):
    fs = cached()
    assert fs.cat_file(f"id:{tree}/a") == b"a" * 1000
    clock(61)
    page = {"Location": "https://accounts.google.com/ServiceLogin", "Content-Type": "text/html"}
    server.fail(Fault(kind="page", status=status, body="", headers=page, times=None))
    for name in ("a", "missing"):
        with pytest.raises(AccessDenied, match="api_key"):
            fs.cat_file(f"id:{tree}/{name}")
    server.heal()
    server.fail(Fault(kind="media", status=status, body="", headers=page, times=None))
    with pytest.raises(AccessDenied):
        fs.cat_file(f"id:{tree}/b")


def test_a_zarr_array_raises_for_a_chunk_that_the_page_lacks(cached, server, folder):
    zarr = pytest.importorskip("zarr")
    np = pytest.importorskip("numpy")
    store = zarr.storage.MemoryStore()
    array = zarr.create_array(store, shape=(2,), chunks=(2,), dtype="i4", fill_value=0)
    array[:] = np.arange(1, 3)
    for name, data in store._store_dict.items():
        server.put(f"{folder}/{name}", data.to_bytes())
    server.publish(id := server.folder(folder))
    fs = cached(asynchronous=True)
    opened = zarr.open_array(zarr.storage.FsspecStore(fs, path=f"id:{id}"), mode="r", zarr_format=3)
    assert opened[:].tolist() == [1, 2]
    server.remove(server.find(f"{folder}/c/0")[0]["id"])
    fs.invalidate_cache()
    with pytest.raises(AccessDenied, match="api_key"):
        opened[:]


async def test_names_shortcuts_and_documents_of_a_public_folder(make, server, folder):
    old = server.add("x", b"old", parent=(id := server.folder(folder)), modifiedTime="2020-01-01T00:00:00Z")
    newest = server.add("x", b"newest", parent=id, modifiedTime="2099-01-01T00:00:00Z")
    older = server.add("x", b"older", parent=id, modifiedTime="2019-01-01T00:00:00Z")
    server.add("a/<b>&amp;", DATA, parent=id)
    server.document(f"{folder}/doc", "text")
    server.publish(other := server.put("elsewhere", b"elsewhere"))
    server.shortcut(f"{folder}/short", other)
    server.edit(old, resourceKey="0-a8Xq1ZkP")
    server.publish(id)
    origin = make()
    assert (await read(origin, f"id:{id}/x"))[0] == b"newest"  # as with an account
    assert (await read(origin, f"id:{id}/a／<b>&amp;"))[0] == DATA
    assert (await read(origin, f"id:{id}/short"))[0] == b"elsewhere"
    with pytest.raises(NotDownloadable, match="document of Google's own"):
        await read(origin, f"id:{id}/doc")
    found = {info.path.rpartition("/")[2]: info async for info in origin.list(f"id:{id}")}
    assert found.keys() == {"x", "a／<b>&amp;", "doc", "short"}
    assert (found["x"].id, found["x"].details["same_name"].keys()) == (newest, {old, older})
    assert not origin.lists_all(f"id:{id}")


@pytest.mark.parametrize(
    ("page", "error"),
    [
        ({"status": 404}, ObjectNotFound),
        ({"status": 302}, AccessDenied),
        ({"status": 200, "body": "<title>New form</title>"}, CachedFSError),
        ({"close_before": True}, OriginUnavailable),
    ],
)
async def test_only_a_page_that_is_missing_too_makes_an_absence(make, server, tree, page, error):
    html = {"Content-Type": "text/html"}
    server.fail(Fault(kind="media", status=404, body="", headers=html, times=None))
    server.fail(Fault(kind="page", headers=html, times=None, **page))
    with pytest.raises(error) as caught:
        await make().lookup(f"id:{tree}")
    assert isinstance(caught.value, FileNotFoundError) == (error is ObjectNotFound)


async def test_a_passing_trouble_of_the_page_is_retried(make, server, tree):
    origin = make()
    await origin.lookup(f"id:{tree}")
    page = {"Content-Type": "text/html"}
    for path in (f"id:{tree}", f"id:{tree}/sub/c"):
        server.fail(Fault(kind="page", status=500, body="<title>Error 500</title>", headers=page))
        assert (await origin.lookup(path)).path == path


async def test_a_folder_needs_its_resource_key(make, server, folder, tree):
    server.edit(tree, resourceKey="0-a8Xq1ZkP")
    with pytest.raises(AccessDenied, match="not public"):
        await make().lookup(f"id:{tree}")
    assert (await read(make(), f"id:{tree},resourcekey=0-a8Xq1ZkP/a"))[0] == b"a" * 1000


async def test_many_readers_of_a_folder_share_its_page(make, server, tree):
    origin = make()
    parent = await origin.lookup(f"id:{tree}")
    sub = await origin.lookup(f"id:{tree}/sub", parent)
    asked(server)
    await asyncio.gather(*(origin.lookup(f"id:{tree}/sub/c", sub) for _ in range(20)))
    assert asked(server) == {"page": 1, "media": 20}


def test_a_file_that_is_gone_from_a_cached_folder_is_no_absence(cached, server, folder, tree):
    fs = cached(max_age="immutable")
    assert fs.info(f"id:{tree}/a")["size"] == 1000
    server.remove(server.find(f"{folder}/a")[0]["id"])
    with pytest.raises(AccessDenied, match="does not show this name"):
        fs.cat_file(f"id:{tree}/a")
