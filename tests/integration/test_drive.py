"""Google Drive through the cache: requests, freshness, writes, and every kind of item."""

import asyncio
import concurrent.futures
import functools
import subprocess
import sys
import textwrap
import threading

import fsspec
import pandas as pd
import pytest
import zarr

from cachedfs.errors import (
    AccessDenied,
    CachedFSError,
    IsAFolder,
    NotDownloadable,
    ObjectChanged,
    ObjectNotFound,
)
from cachedfs.sim import Fault
from tests.support import MiB, files_below, forget, noise, until


@pytest.fixture
def fs(drive):
    return fsspec.filesystem("cdrive")


# Cost in requests.
def test_an_unknown_file_costs_its_folders_and_its_data_then_nothing(drive):
    data = drive.put("deep/er/a.bin", noise(40_000))
    # The test's folder, two folders and the file by one request; then the bytes.
    for expected in (["list", "media"], []):
        with fsspec.open(drive.url("deep/er/a.bin")) as file:
            assert file.read() == data
        assert drive.asked() == expected
    forget()
    with fsspec.open(drive.url("deep/er/a.bin")) as file:
        assert file.read() == data
    assert drive.asked() == []


def test_64_listed_files_in_one_call_cost_64_requests_then_none(drive, fs):
    data = {drive.path(f"{i}.txt"): drive.put(f"{i}.txt", noise(5000, seed=i)) for i in range(64)}
    assert fs.find(drive.path()) == sorted(data)
    drive.asked()
    assert fs.cat(list(data)) == data
    assert drive.asked() == ["media"] * 64
    forget()
    again = fsspec.filesystem("cdrive")
    assert again.cat(again.find(drive.path())) == data
    assert drive.asked() == []


def test_find_costs_one_listing_per_folder_then_none(drive, fs):
    for i in range(6):
        drive.put(f"{i % 3}/{i}.txt", b"x")
    drive.server.folder(f"{drive.name}/empty")
    # The token of the change feed; the path to the folder; the folder and the four in it.
    for expected in (["change", "get", *["list"] * 6], []):
        assert len(fs.find(drive.path())) == 6
        assert len(fs.find(drive.path(), withdirs=True)) == 11
        assert drive.asked() == expected
    assert fs.ls(drive.path("empty")) == []
    assert drive.asked() == []


def test_the_third_name_of_a_folder_lists_it(drive, fs):
    data = {drive.path(name): drive.put(name, noise(100)) for name in ("ant", "bee", "cat", "dog")}
    for path, expected in zip(data, (["list", "media"], ["list", "media"]), strict=False):
        assert fs.cat_file(path) == data[path]
        assert drive.asked() == expected
    for path, expected in zip([*data][2:], (["list", "media"], ["media"]), strict=False):
        assert fs.cat_file(path) == data[path]
        assert drive.asked() == expected
    drive.put("new", b"")  # the listing was nobody's wish: what is new is found as before
    assert [fs.exists(drive.path(name)) for name in ("new", "none")] == [True, False]
    assert drive.asked() == ["list", "list"]


def test_of_a_path_by_one_request_only_what_is_sure_is_used(drive, fs, short_pages):
    here = drive.server.folder(f"{drive.name}/a")
    data = drive.put("a/b/c/x.txt", b"this one")
    for other in ("b/c/x.txt", "c/x.txt", "a/x.txt", "x.txt"):  # the same names in other folders
        drive.put(other, other.encode())
    drive.put("a/a/x.txt", b"a twice")
    drive.server.add("twice", b"old", parent=here)
    drive.server.add("twice", b"new", parent=here)
    (folder,) = drive.server.find(f"{drive.name}/c")
    drive.server.shortcut(f"{drive.name}/a/to c", folder["id"])
    drive.asked()
    for path, expected in (
        ("a/b/c/x.txt", data),
        ("a/a/x.txt", b"a twice"),
        ("a/twice", b"new"),
        ("a/to c/x.txt", b"c/x.txt"),
    ):
        fs.invalidate_cache()
        assert fs.cat_file(drive.path(path)) == expected
    drive.asked()
    fs.invalidate_cache()
    with pytest.raises(FileNotFoundError):
        fs.cat_file(drive.path("a/b/none/x.txt"))


@pytest.fixture
def short_pages(drive):
    """Listings of three names a page; every other page is empty."""
    drive.server.short_pages(3)
    yield
    drive.server.short_pages(None)


def test_of_a_large_folder_no_more_pages_are_listed_than_names_were_asked(drive, fs, short_pages):
    data = {drive.path(name): drive.put(name, noise(100)) for name in "ABCDEFGHI"}
    n_pages = 0
    for n, path in enumerate(data, 1):
        assert fs.cat_file(path) == data[path]
        log = [request.query["q"] for request in drive.server.requests if request.kind == "list"]
        drive.server.reset()
        n_pages += sum("name =" not in query for query in log)
        assert n_pages <= n
    until(lambda: not any(names.epoch for names in fs._objects.engine.folder_names.values()))
    assert n_pages == 6


def test_an_array_with_nested_keys_costs_two_lookups_a_chunk_and_a_warning(drive, caplog):
    array = zarr.create_array(zarr.storage.MemoryStore(), shape=(50, 1, 1), chunks=(1, 1, 1), dtype="i4")
    array[:, 0, 0] = range(1, 51)
    for key, value in array.store_path.store._store_dict.items():
        drive.put(f"a.zarr/{key}", value.to_bytes())
    drive.asked()
    # Without read-ahead, which may list the folder too: that depends on how many reads wait.
    array = zarr.open_array(drive.url("a.zarr"), mode="r", storage_options={"read_ahead": 0})
    assert array[:].ravel().tolist() == [*range(1, 51)]
    asked = drive.asked()
    assert asked.count("media") == 51
    # The folders, the array, the folder of the chunks, and two for each chunk.
    assert asked.count("list") == 2 + 1 + 2 * 50
    assert len(asked) == 51 + 103
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(
        f"{drive.url('a.zarr', 'drive://')}: each chunk of this Zarr array is in folders"
    )


def test_with_max_age_0_one_call_lists_a_folder_of_many_files_once(drive):
    data = {drive.path(f"a/{i:02}"): drive.put(f"a/{i:02}", noise(100, seed=i)) for i in range(20)}
    fs = fsspec.filesystem("cdrive", max_age=0)
    assert fs.cat(list(data)) == data
    assert sorted(drive.asked()) == ["list"] * 5 + ["media"] * 20  # two folders, two names, and the listing
    drive.put("a/05", b"another")
    drive.server.add("06", b"uploaded beside it", parent=drive.server.folder(f"{drive.name}/a"))
    data |= {drive.path("a/05"): b"another", drive.path("a/06"): b"uploaded beside it"}
    for n_changed in (2, 0):
        assert fs.cat(list(data)) == data
        # A small folder is listed at once.
        assert sorted(drive.asked()) == ["list"] * 3 + ["media"] * n_changed


def test_the_folders_of_an_expired_path_are_looked_up_in_parallel(drive):
    drive.put("a/b/c.txt", b"x")
    fs = fsspec.filesystem("cdrive", max_age=0)
    fs.cat_file(drive.path("a/b/c.txt"))
    drive.asked()
    drive.server.fail(Fault(times=4, stall_s=3600))

    async def read():
        task = asyncio.create_task(fs._cat_file(drive.path("a/b/c.txt")))
        await asyncio.to_thread(until, lambda: drive.server.count() == 4)  # before any of them is answered
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(read())
    assert drive.asked() == ["list", "list", "list", "list"]  # My Drive itself stays known


# Changes.
@pytest.mark.parametrize("has_no_revisions", [False, True])
def test_an_open_file_never_mixes_two_versions(drive, has_no_revisions):
    old, new = noise(4 * MiB, seed=1), noise(4 * MiB, seed=2)
    drive.put("a.bin", old)
    if has_no_revisions:
        (item,) = drive.server.find(f"{drive.name}/a.bin")
        drive.server.edit(item["id"], capabilities={"canDownload": True, "canReadRevisions": False})
    fs = fsspec.filesystem("cdrive", read_ahead=0, request_size=MiB)
    with fs.open(drive.path("a.bin")) as file:
        assert file.read(MiB) == old[:MiB]
        drive.put("a.bin", new)
        file.seek(3 * MiB)
        if has_no_revisions:
            with pytest.raises(ObjectChanged, match=r"a\.bin"):
                file.read(MiB)
        else:  # the revision is still there
            assert file.read(MiB) == old[3 * MiB :]
    fs.invalidate_cache()
    assert fs.cat_file(drive.path("a.bin")) == new


# Two writers of one path.

WRITE = """
    import fsspec, sys
    fs = fsspec.filesystem("cdrive")
    fs.ls("My Drive")
    for line in sys.stdin:
        path, text = line.strip().rsplit(" ", 1)
        try:
            fs.pipe_file(path, text.encode(), mode="create" if text == "new" else "overwrite")
            print("written", flush=True)
        except FileExistsError:
            print("exists", flush=True)
"""


def exclusively(fs, path):
    try:
        fs.pipe_file(path, b"new", mode="create")
    except FileExistsError:
        return "exists"
    return "written"


def at_once(*acts):
    """Call all functions in threads, and return their results."""
    with concurrent.futures.ThreadPoolExecutor(len(acts)) as pool:
        return [future.result() for future in [pool.submit(act) for act in acts]]


def test_two_processes_that_write_one_new_path_create_one_file(drive, fs):
    path = drive.path("new/er/a.txt")
    with drive.talking(WRITE) as other:
        for kind in ("create", "upload"):  # so that both could look and find nothing
            drive.server.fail(Fault(kind=kind, times=4, stall_s=0.2))
        at_once(lambda: other(f"{path} theirs"), lambda: fs.pipe_file(path, b"ours"))
        for name in ("new", "new/er", "new/er/a.txt"):
            assert len(drive.server.find(f"{drive.name}/{name}")) == 1
        assert drive.server.get(f"{drive.name}/new/er/a.txt") in (b"theirs", b"ours")
        path = drive.path("new/er/b.txt")
        drive.server.fail(Fault(kind="upload", times=2, stall_s=0.2))
        said = at_once(lambda: other(f"{path} new"), lambda: exclusively(fs, path))
        assert sorted(said) == ["exists", "written"]
        assert len(drive.server.find(f"{drive.name}/new/er/b.txt")) == 1


def test_a_killed_writer_leaves_no_partial_file_and_does_not_block_the_path(drive, fs, tmp_path):
    path, spools = drive.path("new/a.bin"), tmp_path / "spools"
    spools.mkdir()
    drive.server.fail(Fault(kind="upload", nth=3, stall_s=3600))  # the second piece
    code = f"""
        import fsspec
        with fsspec.filesystem("cdrive").open({path!r}, "wb") as file:
            for _ in range(20):
                file.write(bytes(1 << 20))
    """
    environment = {**drive._environment(), "TMPDIR": str(spools)}
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=environment) as process:
        until(lambda: drive.server.count("upload") == 3)
        process.kill()
    drive.server.heal()  # the killed request may not have met this fault; ours must not
    assert list(spools.iterdir()) == []
    assert drive.server.find(f"{drive.name}/new/a.bin") == []
    fs.pipe_file(path, b"ours")
    assert fs.cat_file(path) == b"ours"


def test_of_two_files_written_by_two_machines_the_newest_is_used(drive, tmp_path, caplog):
    """Drive accepts both files, and the machines share nothing else; see semantics.md."""
    path = drive.path("a.txt")
    one, two = (fsspec.filesystem("cdrive", cache_dir=str(tmp_path / name), max_age=0) for name in "ab")
    one.pipe_file(path, b"first")
    (folder,) = drive.server.find(drive.name)
    two.pipe_file(drive.path("b.txt"), b"")  # caches the parent folder
    drive.server.fail(Fault(kind="list", key=folder["id"], status=200, body='{"kind": "drive#fileList"}'))
    two.pipe_file(path, b"second")  # looked before the first write
    assert len(drive.server.find(f"{drive.name}/a.txt")) == 2
    assert [fs.cat_file(path) for fs in (one, two)] == [b"second"] * 2
    assert "2 items have this name" in caplog.text
    one.pipe_file(path, b"third")
    assert [fs.cat_file(path) for fs in (one, two)] == [b"third"] * 2
    assert len(drive.server.find(f"{drive.name}/a.txt")) == 2


def apply(change, held):
    """Apply a change, such as "mv a b", to a dict from names to bytes; return the error its caller gets."""
    what, source, *target = change.split()
    if source not in held:
        return ObjectNotFound
    data = held[source] if what == "cp" else held.pop(source)
    held.update(dict.fromkeys(target, data))
    return None


def serial_outcomes(changes, orders):
    """Return the possible outcomes of changes made in any order: the error of each caller, and the content."""
    outcomes = []
    for order in orders:
        held = {"a": b"A", "b": b"B"}
        said = {i: apply(changes[i], held) for i in order}
        outcomes.append(([said[0], said[1]], held))
    return outcomes


@pytest.mark.parametrize(
    ("protocol", "changes"),
    [
        ("drive", ("mv a b", "mv b a")),
        ("cdrive", ("mv a b", "mv a c")),
        ("drive", ("mv a b", "rm a")),
        ("cdrive", ("mv a b", "cp b a")),
    ],
    ids=str,
)
def test_concurrent_changes_of_the_same_names_end_as_in_some_order(drive, protocol, changes):
    fs = fsspec.filesystem(protocol)
    acts = {"mv": fs.mv, "cp": fs.cp_file, "rm": fs.rm_file}
    for n in range(4):
        root, gate = drive.path(f"{n}"), threading.Barrier(2)
        fs.pipe({f"{root}/a": b"A", f"{root}/b": b"B"})

        def act(change, root=root, gate=gate):
            what, *names = change.split()
            gate.wait()
            return outcome(lambda names: acts[what](*names), [f"{root}/{name}" for name in names])

        both = [functools.partial(act, change) for change in changes]
        said = at_once(*both[:: -1 if n % 2 else 1])[:: -1 if n % 2 else 1]
        fs.invalidate_cache()
        left = {path.rpartition("/")[2]: fs.cat_file(path) for path in fs.find(root)}
        assert (said, left) in serial_outcomes(changes, [(0, 1), (1, 0)])


def test_a_document_is_exported_at_each_open_and_never_cached(drive, tmp_path):
    sheet = "application/vnd.google-apps.spreadsheet"
    drive.server.document(f"{drive.name}/table", "n,x\n1,2\n", mime=sheet)
    url, options = drive.url("table"), {"drive": {"export": {"spreadsheet": "csv"}}}
    assert pd.read_csv(url, storage_options=options)["x"].tolist() == [2]
    fs = fsspec.filesystem("cachedfs", target_protocol="drive", **options)
    path = drive.path("table")
    drive.asked()
    with fs.open(path) as file:
        (item,) = drive.server.find(f"{drive.name}/table")
        drive.server.remove(item["id"])
        drive.server.document(f"{drive.name}/table", "n,x\n1,3\n", mime=sheet)
        # One export, even if the document changes.
        assert (file.size, file.readlines()) == (8, [b"n,x\n", b"1,2\n"])
    assert drive.asked() == ["export"]
    assert [fs.cat_file(path), fs.cat_file(path, 4, 7), fs.cat_file(path, -2)] == [
        b"n,x\n1,3\n",
        b"1,3",
        b"3\n",
    ]
    fs.get(path, str(tmp_path / "table.csv"))
    assert (tmp_path / "table.csv").read_bytes() == b"n,x\n1,3\n"
    assert drive.asked().count("export") >= 4
    assert (fs.info(path)["size"], fs.stats().blocks) == (None, 0)
    with pytest.raises(NotDownloadable):  # cached metadata has no export types
        fsspec.filesystem("cdrive").cat_file(path)


SHEET = "application/vnd.google-apps.spreadsheet"


def of_every_kind(drive):
    """Create an item of every kind; return the expected result of reading each path: bytes, or an error."""
    server, here = drive.server, drive.name

    def put(name, data, **more):
        return server.put(f"{here}/{name}", data, **more)

    plain = put("plain", b"plain")
    put("empty", b"")
    put("twice", b"older")
    put("twice", b"newer", new=True)
    two = put("one/x", b"two places")
    server.edit(two, parents=[server.folder(f"{here}/one"), server.folder(f"{here}/two")])
    keyed = put("keyed", b"keyed")
    server.shortcut(f"{here}/to keyed", server.edit(keyed, resourceKey="0-k") or keyed)
    server.shortcut(f"{here}/to plain", plain)
    server.shortcut(f"{here}/to one", server.folder(f"{here}/one"))
    server.shortcut(f"{here}/one/back", server.folder(here))
    server.shortcut(f"{here}/dangling", "nothing")
    server.add("either/or", b"slash", parent=server.folder(here))
    server.document(f"{here}/sheet", "1,2", mime=SHEET)
    server.document(f"{here}/letter", "words")
    put("locked", b"x", capabilities={"canDownload": False})
    put("virus", b"x", abusive=True)
    team = server.share_drive(f"Team {here}")
    server.put("sub/t", b"team", parent=team)
    theirs = server.shared_with_me(f"theirs of {here}", b"theirs")
    server.put("in", b"in theirs", parent=server.shared_with_me(f"folder of {here}"))
    mine = {
        "plain": b"plain", "empty": b"", "twice": b"newer", "one/x": b"two places", "two/x": b"two places",
        "to plain": b"plain", "to one/x": b"two places", "one/back/plain": b"plain", "to keyed": b"keyed", "either／or": b"slash",
        "sheet": b"1,2", "letter": NotDownloadable, "locked": AccessDenied, "virus": AccessDenied, "dangling": ObjectNotFound,
        "keyed": b"keyed", "one": IsAFolder, "none": ObjectNotFound,
    }  # fmt: skip
    return {drive.path(name): expected for name, expected in mine.items()} | {
        f"id:{plain}": b"plain", f"id:{keyed}": ObjectNotFound, f"id:{keyed},resourcekey=0-k": b"keyed", f"id:{two}": b"two places",
        f"shared:Team {here}/sub/t": b"team", f"id:{team}/sub/t": b"team",
        f"Shared with me/theirs of {here}": b"theirs", f"Shared with me/folder of {here}/in": b"in theirs", f"id:{theirs}": b"theirs",
    }  # fmt: skip


def outcome(read, path):
    try:
        return read(path)
    except OSError as error:
        return type(error)


@pytest.mark.parametrize("protocol", ["drive", "cdrive"])
def test_every_kind_of_item_is_read_or_its_error_says_why(drive, protocol):
    expected = of_every_kind(drive)
    options = {"export": {"spreadsheet": "csv"}}
    flat = {**fsspec.config.conf["drive"], **options}
    fs = (
        fsspec.filesystem("drive", **flat)
        if protocol == "drive"
        else fsspec.filesystem("cdrive", drive=options)
    )

    def opened(path):
        with fs.open(path) as file:
            return file.read()

    for read in (fs.cat_file, opened, fs.cat_file):
        assert {path: outcome(read, path) for path in expected} == expected
    listed = fs.find(drive.path())
    names = ("two/x", "to one/x", "either／or", "sheet", "dangling")
    assert {drive.path(name) for name in names} <= set(listed)
    assert not [path for path in listed if "back/" in path]  # a cycle is listed and not entered
    assert {path: outcome(fs.cat_file, path) for path in expected} == expected  # again, after the listing


def test_a_recursive_copy_copies_the_rest_and_names_what_it_left(drive, fs, tmp_path):
    drive.put("tree/a", b"a")
    drive.put("tree/sub/b", b"b")
    drive.put("tree/locked", b"x")
    drive.server.edit(
        drive.server.find(f"{drive.name}/tree/locked")[0]["id"], capabilities={"canDownload": False}
    )
    drive.server.edit(drive.server.put(f"{drive.name}/tree/sizeless", b"x"), size=None)
    drive.server.document(f"{drive.name}/tree/doc", "words")
    drive.server.shortcut(f"{drive.name}/tree/dangling", "nothing")
    with pytest.raises(CachedFSError, match="4 objects could not be copied") as caught:
        fs.get(drive.path("tree"), str(tmp_path / "tree"), recursive=True)
    for name, why in (
        ("doc", "document of Google's own"),
        ("dangling", "a shortcut to a file that is gone"),
        ("locked", "switched off downloading"),
        ("sizeless", "does not say how large"),
    ):
        assert any(
            drive.path(f"tree/{name}") in line and why in line for line in str(caught.value).split("\n")
        )
    assert files_below(tmp_path / "tree") == {"a": b"a", "sub/b": b"b"}
    fs.evict()
    with pytest.raises(CachedFSError, match=r"4 of 6 objects.*no known size"):
        fs.prefetch(drive.path("tree")).wait()
    assert fs.cached_extent(drive.path("tree/sub/b")) == [(0, 1)]


def test_a_file_without_a_version_is_not_cached_with_one_warning(drive, fs, caplog):
    data = drive.put("a.bin", noise(1000))
    (item,) = drive.server.find(f"{drive.name}/a.bin")
    drive.server.edit(item["id"], md5Checksum=None, headRevisionId=None)
    for _ in range(2):
        assert fs.cat_file(drive.path("a.bin")) == data
        assert "media" in drive.asked()
    said = [record.getMessage() for record in caplog.records if "neither a checksum" in record.getMessage()]
    assert len(said) == 1
    assert drive.path("a.bin") in said[0]


def test_nothing_is_older_than_max_age_when_folders_are_swapped(drive, clock):
    drive.put("a/b/x.txt", b"one")
    drive.put("c/b/x.txt", b"two")
    fs = fsspec.filesystem("cdrive")
    fs.info(drive.path("a/b"))
    clock(50)
    assert fs.cat_file(drive.path("a/b/x.txt")) == b"one"
    (a,), (c,) = (drive.server.find(f"{drive.name}/{name}") for name in "ac")
    drive.server.edit(a["id"], name="d")
    drive.server.edit(c["id"], name="a")
    clock(11)  # the folder entry is 61 s old, the file entry 11
    assert fs.cat_file(drive.path("a/b/x.txt")) == b"two"


def test_a_shortcut_to_a_parent_folder_does_not_recurse_forever(drive, fs):
    drive.put("a/b/x.txt", b"x")
    (item,) = drive.server.find(f"{drive.name}/a")
    drive.server.shortcut(f"{drive.name}/a/b/loop", item["id"])
    for _ in range(2):
        assert [here.removeprefix(drive.path()) for here, _, _ in fs.walk(drive.path())] == ["", "/a", "/a/b"]
        assert fs.ls(drive.path("a/b/loop"), detail=False) == [drive.path("a/b/loop/b")]
        assert fs.find(drive.path(), maxdepth=9) == fs.find(drive.path()) == [drive.path("a/b/x.txt")]


# Folders that the account may see and not open.
def test_an_array_in_a_limited_folder_is_an_error_and_never_zeros(drive):
    server = drive.server
    array = zarr.create_array(drive.url("shut/a"), shape=(4,), chunks=(2,), dtype="i4")
    array[:] = [1, 2, 3, 4]
    server.limit(server.folder(f"{drive.name}/shut"))
    forget()
    for path in (drive.url("shut/a"), drive.url("shut"), f"drive://{drive.path('shut/a')}"):
        for open_it in (zarr.open_array, zarr.open_group):
            with pytest.raises(AccessDenied, match=r"you may see the folder drive://.*/shut, not open it"):
                open_it(path, mode="r")


def revisions_hidden(drive, key):
    """Hide the old revisions of a file, so that only a second lookup proves a version."""
    (item,) = drive.server.find(f"{drive.name}/{key}")
    drive.server.edit(item["id"], capabilities={"canDownload": True, "canReadRevisions": False})


@pytest.mark.parametrize("evidence", ["revision", "time"])
def test_a_file_replaced_and_restored_is_never_a_mixture(drive, evidence):
    first, second = noise(4 * MiB, seed=1), noise(4 * MiB, seed=2)
    drive.put("a.bin", first)
    revisions_hidden(drive, "a.bin")
    (item,) = drive.server.find(f"{drive.name}/a.bin")
    if evidence == "time":
        drive.server.edit(item["id"], headRevisionId=None)
    fs = fsspec.filesystem("cdrive", read_ahead=0, request_size=MiB)
    with fs.open(drive.path("a.bin")) as file:
        assert file.read(MiB) == first[:MiB]
        drive.put("a.bin", second)
        drive.put("a.bin", first)
        if evidence == "time":
            drive.server.edit(item["id"], headRevisionId=None)
        file.seek(3 * MiB)
        with pytest.raises(ObjectChanged):
            file.read(MiB)
    fs.invalidate_cache()
    assert fs.cat_file(drive.path("a.bin")) == first
