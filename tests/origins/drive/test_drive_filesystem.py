"""The filesystem `drive://` without a cache: the test suites of fsspec, and what they do not cover."""

import errno
import gc
import io
import itertools
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
from contextlib import suppress

import fsspec
import fsspec.tests.abstract as suites
import pytest
from fsspec.asyn import sync
from fsspec.callbacks import Callback

from cachedfs.errors import AccessDenied, IsAFolder, ObjectChanged, QuotaExceeded, SignInRefused
from cachedfs.origins import google_upload, spooled_file
from cachedfs.origins.drive.filesystem import DriveFileSystem
from cachedfs.origins.upload import UploadContent
from cachedfs.sim import Fault

DATA = bytes(range(256)) * 40
_numbers = itertools.count()


@pytest.fixture
def options(server):
    return {"token": "anon", "endpoint_url": server.endpoint_url}


@pytest.fixture
def fs(options):
    yield fsspec.filesystem("drive", **options)
    DriveFileSystem.clear_instance_cache()


# Test suites of fsspec
class Fixtures(suites.AbstractFixtures):
    @pytest.fixture(scope="class")
    @classmethod
    def fs(cls, shared_server):
        return fsspec.filesystem("drive", token="anon", endpoint_url=shared_server.endpoint_url)

    @pytest.fixture
    def fs_path(self):
        return f"My Drive/conformance-{next(_numbers)}"

    @pytest.fixture
    def fs_join(self):
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def supports_empty_directories(self):
        return True


class TestSuites(
    suites.AbstractCopyTests,
    suites.AbstractGetTests,
    suites.AbstractPutTests,
    suites.AbstractPipeTests,
    suites.AbstractOpenTests,
    Fixtures,
):
    # Two suites have a test of this name.
    test_put_as_list = suites.AbstractPutTests.test_copy_with_source_and_destination_as_list
    # The base class expands patterns: tests/integration/test_conformance.py has them all.
    test_copy_glob_edge_cases = test_get_glob_edge_cases = test_put_glob_edge_cases = None


# Reading
def test_opening_what_cannot_be_opened_fails_at_once(fs, server, folder, root):
    server.folder(f"{folder}/sub")
    for path, mode, error, says in (
        (f"{root}/sub", "rb", IsAFolder, f"drive://{root}/sub"),
        (f"{root}/none", "rb", FileNotFoundError, f"drive://{root}/none"),
        ("nowhere/a", "wb", ValueError, "'My Drive'"),
        (f"{root}/a", "r+b", ValueError, "mode"),
    ):
        with pytest.raises(error, match=says):
            fs.open(path, mode)


# Listing
@pytest.fixture
def tree(server, folder):
    for name in ("a.txt", "b.bin", "sub/c.txt", "sub/deep/d.txt"):
        server.put(f"{folder}/{name}", b"12345")
    server.folder(f"{folder}/empty")
    server.document(f"{folder}/doc", "no size")


def test_find_walk_and_du(fs, tree, root):
    def below(*names):
        return sorted(f"{root}/{name}" for name in names)

    assert fs.find(root) == below("a.txt", "b.bin", "doc", "sub/c.txt", "sub/deep/d.txt")
    assert fs.find(root, maxdepth=1) == below("a.txt", "b.bin", "doc")
    assert fs.find(f"{root}/a.txt") == below("a.txt")
    assert fs.find(f"{root}/a.txt", maxdepth=1, detail=True)[f"{root}/a.txt"]["size"] == 5
    assert fs.find(root, prefix="s", maxdepth=2, withdirs=True) == below("sub", "sub/c.txt", "sub/deep")
    assert fs.find(root, prefix="a", withdirs=True) == fs.find(root, prefix="a", maxdepth=1) == below("a.txt")
    assert fs.find(f"{root}/none") == []
    everything = fs.find(root, withdirs=True, detail=True)
    assert set(everything) == {root, *fs.find(root), *below("sub", "sub/deep", "empty")}
    assert "" not in fs.find("", withdirs=True)
    assert fs.du(root) == 20
    assert fs.du(root, total=False)[f"{root}/doc"] == 0
    assert [here for here, _, _ in fs.walk(root, topdown=False)][-1] == root
    with pytest.raises(ValueError, match="maxdepth"):
        list(fs.walk(root, maxdepth=0))
    assert list(fs.walk(f"{root}/none")) == [(f"{root}/none", [], [])]


REFUSALS = [
    (401, "authError", AccessDenied),
    (403, "dailyLimitExceeded", QuotaExceeded),
]


@pytest.mark.parametrize(("status", "reason", "error"), REFUSALS)
def test_every_lookup_without_access_raises_the_access_error(fs, server, root, status, reason, error):
    server.fail(Fault(status=status, reason=reason, times=None))
    for act in (
        *(lambda ask=ask: ask(f"{root}/a") for ask in (fs.exists, fs.lexists, fs.isfile, fs.isdir, fs.info)),
        *(lambda ask=ask: ask(root) for ask in (fs.ls, fs.find, fs.du)),
        lambda: fs.find(root, maxdepth=2),
        lambda: fs.glob(f"{root}/*"),
        lambda: list(fs.walk(root)),
        lambda: list(fs.walk(root, on_error="raise")),
        *(lambda ask=ask: sync(fs.loop, ask, root) for ask in (fs._exists, fs._isfile, fs._isdir)),
    ):
        with pytest.raises(error, match="drive://My Drive"):
            act()
    recorded = []
    assert list(fs.walk(root, on_error=recorded.append)) == [(root, [], [])]
    assert [type(each) for each in recorded] == [SignInRefused if status == 401 else error]


def test_what_drive_says_of_a_file(fs, tree, root):
    info = fs.info(f"drive://{root}/a.txt")
    assert (info["name"], info["type"], info["size"]) == (f"{root}/a.txt", "file", 5)
    assert fs.modified(f"{root}/a.txt") == info["modified"]
    assert fs.created(f"{root}/a.txt") == info["created"]
    assert fs.ukey(f"{root}/a.txt") == fs.checksum(f"{root}/a.txt")
    assert [item["name"] for item in fs.ls(f"{root}/a.txt")] == [f"{root}/a.txt"]
    with pytest.raises(FileNotFoundError, match=f"drive://{root}/none"):
        fs.ls(f"{root}/none")


# Writing
def test_files_are_written_appended_to_and_created(fs, server, folder, root):
    with fs.open(f"{root}/new/a", "wb") as file:
        assert (file.write(b"one"), file.tell()) == (3, 3)
        assert server.count("upload") == 0
    with fs.open(f"{root}/new/a", "ab") as file:
        file.write(b" two")
        with pytest.raises(io.UnsupportedOperation, match="at the end"):
            file.seek(0)
    assert server.get(f"{folder}/new/a") == b"one two"
    with pytest.raises(FileExistsError):
        fs.open(f"{root}/new/a", "xb")
    with fs.open(f"{root}/new/b", "xb") as file:
        file.write(b"now!")
        assert (file.seek(1), file.write(b"ew"), file.truncate()) == (1, 2, 3)
        assert (file.seek(0), file.read()) == (0, b"new")
    with fs.open(f"{root}/new/text", "w", encoding="utf-8") as file:
        file.write("ä\n")
    with fs.open(f"{root}/new/c", "ab"):
        pass
    assert [server.get(f"{folder}/new/{name}") for name in ("b", "text", "c")] == [
        b"new",
        "ä\n".encode(),
        b"",
    ]
    fs.touch(f"{root}/new/b")
    assert server.get(f"{folder}/new/b") == b""
    assert len(server.find(f"{folder}/new/a")) == 1


def test_an_append_to_an_unreadable_file_does_not_empty_it(fs, server, folder, root):
    server.put(f"{folder}/a", DATA)
    server.fail(Fault(kind="media", status=403, reason="insufficientFilePermissions", times=None))
    with pytest.raises(AccessDenied):
        fs.open(f"{root}/a", "ab")
    gc.collect()
    assert server.get(f"{folder}/a") == DATA


def test_an_append_to_a_file_that_changed_is_an_error_and_loses_no_bytes(fs, server, folder, root):
    server.put(f"{folder}/a", b"one")
    first, second = (fs.open(f"{root}/a", "ab") for _ in range(2))
    first.write(b" two")
    second.write(b" three")
    first.close()
    with pytest.raises(ObjectChanged, match=rf"drive://{root}/a: .*appended to"):
        second.close()
    assert server.get(f"{folder}/a") == b"one two"
    with fs.open(f"{root}/new", "ab") as file:
        file.write(b"one")
        server.put(f"{folder}/new", b"theirs")
        with pytest.raises(ObjectChanged):
            file.close()
    with fs.open(f"{root}/newer", "xb") as file:
        server.put(f"{folder}/newer", b"theirs")
        with pytest.raises(FileExistsError):
            file.close()
    assert server.get(f"{folder}/new") == server.get(f"{folder}/newer") == b"theirs"


class FullDisk(io.BytesIO):
    def write(self, data, /):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_that_cannot_be_buffered_is_not_sent_in_part(fs, server, folder, root):
    file = fs.open(f"{root}/a", "wb")
    file.write(b"first")
    file._spool.close()
    file._spool = FullDisk()
    for act in (lambda: file.write(b"more"), lambda: file.write(b"more"), file.close):
        with pytest.raises(OSError, match=rf"{root}/a: .*No space left.*TMPDIR") as caught:
            act()
        assert caught.value.errno == errno.ENOSPC
    assert file.closed
    assert server.find(f"{folder}/a") == []


def test_a_file_being_written_is_not_in_memory(fs, server, folder, root, tmp_path, monkeypatch):
    """When it is written, appended to or copied, one piece is in memory, whatever the size."""
    part, sizes, read = b"x" * (256 << 10), [], UploadContent.piece
    monkeypatch.setattr(spooled_file, "_IN_MEMORY", len(part))
    monkeypatch.setattr(google_upload, "PIECE", len(part))

    def piece(content, start, stop):
        sizes.append(stop - start)
        return read(content, start, stop)

    monkeypatch.setattr(UploadContent, "piece", piece)
    for mode, n_parts in (("wb", 24), ("ab", 1)):
        with fs.open(f"{root}/a", mode) as file:
            for _ in range(n_parts):
                file.write(part)
            assert file._spool._rolled  # into a file on the disk
    fs.get_file(f"{root}/a", tmp_path / "a")
    fs.put_file(tmp_path / "a", f"{root}/b")
    assert {*sizes} == {len(part)}
    for name in "ab":
        assert int(server.find(f"{folder}/{name}")[0]["size"]) == 25 * len(part)


def test_a_failed_write_is_an_error_of_close(fs, server, folder, root):
    server.fail(Fault(kind="upload", status=403, reason="storageQuotaExceeded"))
    file = fs.open(f"{root}/a", "wb")
    file.write(b"x")
    with pytest.raises(OSError, match=r"storage of this account is full"):
        file.close()
    assert file.closed
    assert server.find(f"{folder}/a") == []


def test_a_failing_writer_or_transaction_sends_nothing(fs, server, folder, root):
    with suppress(ZeroDivisionError), fs.open(f"{root}/a", "wb") as file:
        file.write(b"x")
        raise ZeroDivisionError
    with suppress(ZeroDivisionError), fs.transaction:
        with fs.open(f"{root}/b", "wb") as file:
            file.write(b"x")
        raise ZeroDivisionError
    assert server.find(f"{folder}/a") == server.find(f"{folder}/b") == []
    with fs.transaction:
        with fs.open(f"{root}/a", "wb") as file:
            file.write(b"a")
        assert server.find(f"{folder}/a") == []
    assert server.get(f"{folder}/a") == b"a"


def test_removing_trees_and_globs(fs, server, tree, folder, root):
    with pytest.raises(IsAFolder):
        fs.rm(f"{root}/sub")
    fs.rm(f"{root}/**/c.txt")
    assert not fs.exists(f"{root}/sub/c.txt")
    server.reset()
    fs.rm([f"{root}/sub", f"{root}/sub/deep", f"{root}/sub/deep/d.txt"], recursive=True)
    assert server.count("update") == 1
    with pytest.raises(FileNotFoundError):
        fs.rm(f"{root}/none")
    server.put(f"{folder}/x/y/z", b"")
    fs.rm(f"{root}/**", recursive=True)
    assert fs.find(root, withdirs=True) == []


def test_mv_and_cp(fs, server, tree, folder, root):
    id = fs.info(f"{root}/a.txt")["id"]
    fs.mv(f"{root}/a.txt", f"{root}/moved.txt")
    fs.mv(f"{root}/moved.txt", f"{root}/sub/")
    fs.mv(f"{root}/sub", f"{root}/there")
    fs.mv(f"{root}/there/moved.txt", f"{root}/there/moved.txt")
    assert fs.info(f"{root}/there/moved.txt")["id"] == id
    assert not fs.exists(f"{root}/sub")
    fs.cp(f"{root}/there", f"{root}/copy", recursive=True)
    assert fs.find(f"{root}/copy") == [f"{root}/copy/{n}" for n in ("c.txt", "deep/d.txt", "moved.txt")]
    fs.mv(f"{root}/copy/*.txt", f"{root}/globbed/")
    assert fs.ls(f"{root}/globbed", detail=False) == [f"{root}/globbed/c.txt", f"{root}/globbed/moved.txt"]


# Upload and download
def test_a_failed_download_leaves_no_partial_file(fs, server, folder, root, tmp_path):
    server.put(f"{folder}/a", DATA)
    (tmp_path / "a").write_bytes(b"before")
    for fault in ({"close_after": 100}, {"status": 403, "reason": "domainPolicy"}):
        server.fail(Fault(kind="media", **fault))
        server.fail(Fault(kind="media", nth=2, times=None, status=403, reason="domainPolicy"))
        with pytest.raises(AccessDenied):
            fs.get_file(f"{root}/a", tmp_path / "a")
        server.heal()
        assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["a"]
        assert (tmp_path / "a").read_bytes() == b"before"
    fs.get_file(f"{root}/a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == DATA


# Instances
def test_an_instance_is_pickled_as_its_arguments(fs, server, folder, root):
    server.put(f"{folder}/a", DATA)
    assert fs.cat_file(f"{root}/a") == DATA
    again = pickle.loads(pickle.dumps(fs))
    assert again is fs
    assert fsspec.AbstractFileSystem.from_json(fs.to_json()) is fs
    assert json.loads(fs.to_json())["protocol"] == "drive"
    other = DriveFileSystem(**fs.storage_options, trash_only=False, skip_instance_cache=True)
    copy = pickle.loads(pickle.dumps(other))
    assert (copy.storage_options["trash_only"], copy.cat_file(f"{root}/a")) == (False, DATA)
    with fs.open(f"{root}/a") as file:
        file.seek(5)
        with pickle.loads(pickle.dumps(file)) as other_file:
            assert (other_file.tell(), other_file.read()) == (5, DATA[5:])


def test_live_credentials_cannot_be_pickled(options):
    fs = DriveFileSystem(**{**options, "token": None}, credentials=object(), skip_instance_cache=True)
    for travel in (pickle.dumps, DriveFileSystem.to_json, DriveFileSystem.to_dict):
        with pytest.raises(TypeError, match=r"credentials=: a live object.*client_json_file_path"):
            travel(fs)


async def test_an_asynchronous_instance_runs_on_the_callers_loop(options, server, folder, root):
    server.put(f"{folder}/a", DATA)
    fs = fsspec.filesystem("drive", asynchronous=True, skip_instance_cache=True, **options)
    assert await fs._cat_file(f"{root}/a") == DATA
    await fs._pipe_file(f"{root}/b", b"b")
    assert await fs._find(root) == [f"{root}/a", f"{root}/b"]
    assert [here async for here, _, _ in fs._walk(root)] == [root]
    assert await fs._du(root) == len(DATA) + 1
    await fs._mv_file(f"{root}/b", f"{root}/c")
    await fs._rm(f"{root}/c")
    assert server.get(f"{folder}/a") == DATA
    await fs.origin.aclose()


def in_a_child(fs, path, answers):
    try:
        fs.cat_file(path)
        answers.put("read")
    except RuntimeError as error:
        answers.put(str(error))
    again = DriveFileSystem(**fs.storage_options)
    answers.put(again.cat_file(path))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_instance_from_before_a_fork_is_refused_in_the_child(fs, server, folder, root):
    server.put(f"{folder}/a", DATA)
    assert fs.cat_file(f"{root}/a") == DATA
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=in_a_child, args=(fs, f"{root}/a", answers))
    process.start()
    assert "fork" in answers.get(timeout=600)
    assert answers.get(timeout=600) == DATA
    process.join(600)
    assert process.exitcode == 0
    assert fs.cat_file(f"{root}/a") == DATA


SCRIPT = """
    import gc, sys
    import fsspec
    url, path = sys.argv[1:]
    options = {"token": "anon", "endpoint_url": url, "skip_instance_cache": True}
    for how in ("dropped", "kept"):
        fs = fsspec.filesystem("drive", **options)
        with fs.open(path) as file:
            file.read(10)
        fs.pipe_file(path + ".new", b"x")
        if how == "dropped":
            del fs, file
            gc.collect()
    print("done")
"""


def test_connections_and_threads_are_closed(server, folder, root):
    server.put(f"{folder}/a", DATA)
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(SCRIPT), server.endpoint_url, f"{root}/a"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
    ours = [line for line in ended.stderr.splitlines() if "Warning" in line and "site-packages" not in line]
    assert ours == []
    assert "Unclosed" not in ended.stderr
    assert "never awaited" not in ended.stderr


def test_a_transfer_reports_every_piece(fs, root, tmp_path, monkeypatch):
    monkeypatch.setattr("cachedfs.origins.google_upload.PIECE", 256 << 10)
    monkeypatch.setattr("cachedfs.origins.drive.item_upload.ItemUpload.most_at_once", 1000)
    (tmp_path / "a").write_bytes(bytes(700_000))
    recorded = []

    class Recording(Callback):
        def call(self, hook_name=None, **kwargs):
            recorded.append(self.value)

    sent, received = Recording(), Callback()
    fs.put_file(tmp_path / "a", f"{root}/a", callback=sent)
    assert sorted({*recorded}) == [0, 262_144, 524_288, 700_000]
    fs.get_file(f"{root}/a", buffer := io.BytesIO(), callback=received)
    assert buffer.getvalue() == bytes(700_000)
    assert {(each.size, each.value) for each in (sent, received)} == {(700_000, 700_000)}


async def test_a_dropped_asynchronous_instance_closes_its_connections(options, server, folder, root):
    server.put(f"{folder}/a", DATA)
    fs = DriveFileSystem(asynchronous=True, skip_instance_cache=True, **options)
    assert await fs._cat_file(f"{root}/a") == DATA
    session = (await fs.origin.account.clients()).session
    del fs
    gc.collect()
    assert session.closed
