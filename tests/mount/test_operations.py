"""The calls of the kernel on a mounted folder, made directly: attributes, reading, versions, writing, names."""

import errno
import os
import stat
import tempfile
import threading
from contextlib import suppress
from functools import partial

import fsspec
import pytest

from cachedfs.mount import unsent_files
from cachedfs.mount.fuse_protocol import ROOT
from cachedfs.mount.inodes import InodeTable
from cachedfs.mount.operations import MountOperations
from cachedfs.mount.unsent_files import keep, kept
from cachedfs.origins.retry import RetryPolicy
from cachedfs.sim import Fault
from tests.support import MiB, noise

OURS = os.getpid()  # a thread of this process


class Mounted:
    """A mounted folder, used by path as the kernel uses it: it looks each name up, and again after ESTALE from `open`."""

    def __init__(self, fs, root, **options):
        self.fs, self.root = fs, root
        self.operations = MountOperations(fs, root, is_writable=True, **options)

    def inode(self, path):
        """Return the number of the inode of a path. The kernel looks up each name of it."""
        number = ROOT
        for name in filter(None, path.split("/")):
            number = self.operations.lookup(number, name).attributes.number
        return number

    def parent(self, path):
        above, _, name = path.rpartition("/")
        return self.inode(above), name

    def getattr(self, path):
        return self.operations.getattr(self.inode(path))

    def size(self, path):
        return self.getattr(path).size

    def opened(self, path, flags=os.O_RDONLY):
        try:
            return self.operations.files.open(self.inode(path), flags, OURS)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        return self.operations.files.open(self.inode(path), flags, OURS)

    def open(self, path, flags=os.O_RDONLY):
        return self.opened(path, flags).handle

    def create(self, path, flags=os.O_WRONLY | os.O_TRUNC):
        with suppress(FileNotFoundError):
            self.inode(path)
        return self.operations.create(*self.parent(path), flags | os.O_CREAT, OURS)[1].handle

    def read(self, handle, size=10 * MiB, offset=0):
        return self.operations.files.read(handle, size, offset)

    def write(self, handle, data, offset=0):
        return self.operations.files.write(handle, data, offset)

    def flush(self, handle, thread=OURS):
        self.operations.files.flush(handle, thread)

    def close(self, handle):
        try:
            self.flush(handle)
        finally:
            self.operations.files.release(handle)

    def content(self, path):
        handle = self.open(path)
        data = self.read(handle)
        self.close(handle)
        return data

    def save(self, path, data):
        handle = self.create(path)
        assert self.write(handle, data) == len(data)
        self.close(handle)

    def truncate(self, path, size):
        return self.operations.setattr(self.inode(path), size=size, mtime_ns=None)

    def entries(self, path="", *, is_plus=False):
        handle = self.operations.opendir(self.inode(path))
        found = [*self.operations.readdir(handle, 0, is_plus=is_plus)]
        self.operations.releasedir(handle)
        return {os.fsdecode(entry.name): entry for entry in found}

    def names(self, path=""):
        return sorted(self.entries(path).keys() - {".", ".."})

    def mkdir(self, path):
        self.operations.mkdir(*self.parent(path))

    def unlink(self, path):
        self.operations.unlink(*self.parent(path))

    def rmdir(self, path):
        self.operations.rmdir(*self.parent(path))

    def rename(self, old, new, flags=0):
        self.operations.rename(*self.parent(old), *self.parent(new), flags)

    def stored(self, key):
        self.fs.invalidate_cache()
        return self.fs.cat_file(f"{self.root}/{key}")

    def at_origin(self):
        self.fs.invalidate_cache()
        return self.fs.find(self.root)


@pytest.fixture(autouse=True)
def state_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def mounted(cloud, fs):
    return Mounted(fs, cloud.bucket)


@pytest.fixture
def at_drive(drive):
    return Mounted(fsspec.filesystem("cachedfs", target_protocol="drive"), drive.path())


def code_of(act, *args):
    with pytest.raises(OSError) as raised:
        act(*args)
    return raised.value.errno


# Metadata.


def test_attributes_and_names_are_those_of_the_objects(cloud, fs):
    cloud.put("d/a.bin", b"12345")
    cloud.put("d/sub/b", b"")
    mounted = Mounted(fs, cloud.path("d"), uid=7, gid=8)
    kinds = {name: entry.mode for name, entry in mounted.entries().items()}
    assert kinds == {".": stat.S_IFDIR, "..": stat.S_IFDIR, "a.bin": stat.S_IFREG, "sub": stat.S_IFDIR}
    found = mounted.getattr("/a.bin")
    assert (found.mode, found.size, found.uid, found.gid) == (stat.S_IFREG | 0o644, 5, 7, 8)
    assert found.mtime_ns == pytest.approx(fs.modified(cloud.path("d/a.bin")).timestamp() * 1e9, abs=1000)
    assert mounted.getattr("/sub").mode == mounted.getattr("/").mode == stat.S_IFDIR | 0o755
    mounted.operations = MountOperations(fs, cloud.bucket, is_writable=False)
    assert mounted.getattr("/d/a.bin").mode == stat.S_IFREG | 0o444


def test_names_that_a_file_system_refuses_are_encoded_or_left_out_with_a_warning(cloud, mounted, caplog):
    cloud.put("x/../a", b"up")
    cloud.put(f"{'long' * 70}", b"")
    assert mounted.names("/x") == ["%2E%2E"]
    assert mounted.content("/x/%2E%2E/a") == b"up"
    assert mounted.names() == ["x"]
    assert "longlong: the name is too long for a file system" in caplog.text


def test_a_listing_is_one_request_and_says_all_about_its_files(cloud, mounted):
    for number in range(20):
        cloud.put(f"d/{number}", b"12")
    cloud.put("d/sub/x", b"")
    mounted.inode("/d")
    cloud.asked()
    found = mounted.entries("/d", is_plus=True)
    assert mounted.entries("/d", is_plus=True) == found
    assert (found["."].entry, found[".."].entry) == (None, None)  # the kernel knows them
    told = {name: entry.entry.attributes for name, entry in found.items() if entry.entry is not None}
    assert [about.size for about in told.values()] == [2] * 20 + [0]
    assert stat.S_ISDIR(told["sub"].mode)
    assert mounted.getattr("/d/3") == told["3"]
    handle = mounted.operations.opendir(mounted.inode("/d"))
    rest = [os.fsdecode(entry.name) for entry in mounted.operations.readdir(handle, 3, is_plus=False)]
    assert rest == [*found][3:]
    assert cloud.asked() == ["list"]


@pytest.mark.parametrize(("max_age", "kept_s"), [(60, 1.0103), (0.3, 0.3)])
def test_the_kernel_keeps_listed_names_until_a_program_has_read_all(cloud, max_age, kept_s):
    for number in range(101):
        cloud.put(f"d/{number}", b"")
    mounted = Mounted(fsspec.filesystem("cachedfs", target_protocol="gs", max_age=max_age), cloud.bucket)
    assert mounted.entries("/d", is_plus=True)["7"].entry.kept_s == pytest.approx(kept_s)


def test_what_a_listing_said_ends_with_max_age_and_with_any_change(cloud, mounted, clock):
    cloud.put("d/a", b"1")
    assert (mounted.names("/d"), mounted.size("/d/a")) == (["a"], 1)
    cloud.put("d/a", b"12")
    cloud.put("d/b", b"")
    assert (mounted.names("/d"), mounted.size("/d/a")) == (["a"], 1)
    clock(61)
    assert (mounted.size("/d/a"), mounted.names("/d")) == (2, ["a", "b"])
    fsspec.filesystem("cachedfs", target_protocol="gs").pipe(cloud.path("d/a"), b"123")
    assert mounted.size("/d/a") == 3
    never = Mounted(fsspec.filesystem("cachedfs", target_protocol="gs", max_age=0), cloud.bucket)
    assert never.names("/d") == ["a", "b"]
    cloud.put("d/a", b"1234")
    assert never.size("/d/a") == 4


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_a_file_that_changed_since_it_was_looked_up_is_looked_up_again_by_open(cloud, mounted, flags):
    cloud.put("d/a", b"1")
    cloud.put("d/gone", b"1")
    old, gone = mounted.inode("/d/a"), mounted.inode("/d/gone")
    cloud.put("d/a", b"12")
    cloud.delete("d/gone")
    for number in (old, gone):
        assert code_of(mounted.operations.files.open, number, flags, OURS) == errno.ESTALE
    assert (mounted.size("/d/a"), code_of(mounted.getattr, "/d/gone")) == (2, errno.ENOENT)
    assert mounted.operations.getattr(old).size == 1
    assert mounted.content("/d/a") == b"12"


def test_the_lookup_after_a_stale_open_brings_the_first_bytes_as_the_file_may_be_replaced_again(
    cloud, mounted
):
    cloud.put("a", b"1")
    old = mounted.inode("/a")
    cloud.put("a", b"22")
    assert code_of(mounted.operations.files.open, old, os.O_RDONLY, OURS) == errno.ESTALE
    new = mounted.inode("/a")
    cloud.put("a", b"333")
    opened = mounted.operations.files.open(new, os.O_RDONLY, OURS)
    assert (mounted.operations.getattr(new).size, mounted.read(opened.handle)) == (2, b"22")


@pytest.mark.parametrize(("status", "code"), [(403, errno.EACCES), (503, errno.EIO)])
def test_an_error_is_its_errno_and_a_log_line_that_says_why(cloud, fs, caplog, monkeypatch, status, code):
    monkeypatch.setattr("cachedfs.origins.fsspec_origin.RetryPolicy", partial(RetryPolicy, tries=1))
    mounted = Mounted(fs, cloud.bucket)
    cloud.put("a", b"1")
    cloud.server.fail(Fault(status=status, times=None))
    assert code_of(mounted.getattr, "/a") == code
    assert f"lookup of {cloud.path('a')}: " in caplog.text
    assert str(status) in caplog.text


def test_an_error_that_programs_expect_is_not_logged(cloud, mounted, caplog):
    for name in "ab":
        cloud.put(name, b"1")
    reading = mounted.open("/a")
    assert code_of(mounted.getattr, "/no") == code_of(mounted.open, "/no") == errno.ENOENT
    assert code_of(mounted.getattr, "/\udcff") == errno.EILSEQ  # a name that is not UTF-8
    for act in (mounted.create, mounted.mkdir, mounted.inode):
        assert code_of(act, f"/{'n' * 256}") == errno.ENAMETOOLONG
    for exchange_or_whiteout in (2, 4):
        assert code_of(mounted.rename, "/a", "/b", exchange_or_whiteout) == errno.EINVAL
    assert not caplog.records
    assert code_of(mounted.write, reading, b"2") == errno.EBADF


def test_the_space_is_that_of_the_account_which_is_asked_once_a_minute(drive, at_drive, mounted, clock):
    no_limit = (1 << 52, 1 << 52)
    quotas = [
        ('{"limit": "1000", "usage": "400"}', (1000, 600)), ('{"limit": "1000", "usage": "4000"}', (1000, 0)),
        ('{"usage": "400"}', no_limit), (None, no_limit),
    ]  # fmt: skip
    for quota, space in quotas:
        body = f'{{"kind": "drive#about", "storageQuota": {quota}}}'
        answer = {"status": 200, "body": body} if quota else {"status": 403}
        drive.server.fail(Fault(kind="about", **answer))
        drive.asked()
        assert [at_drive.operations.statfs() for _ in range(2)] == [space] * 2
        assert drive.asked() == ["about"]
        clock(61)
    offline = fsspec.filesystem("cachedfs", target_protocol="drive", offline=True)
    for each in (mounted, Mounted(offline, "My Drive"), Mounted(offline, "shared:a")):
        assert each.operations.statfs() == no_limit
    assert drive.asked() == []


def test_a_google_document_is_its_export_with_its_size(drive, drive_server, at_drive, caplog):
    drive_server.document(f"{drive.name}/report", "the text")
    assert at_drive.size("/report") == 0
    assert "export" in caplog.text
    assert (
        code_of(at_drive.open, "/report") == code_of(at_drive.open, "/report", os.O_WRONLY) == errno.ENOTSUP
    )
    options = fsspec.config.conf["drive"] | {"export": {"document": "txt"}}
    exporting = Mounted(fsspec.filesystem("cachedfs", target_protocol="drive", drive=options), drive.path())
    assert exporting.names() == ["report"]
    drive_server.reset()
    assert exporting.size("/report") == len(exporting.content("/report")) > 0
    assert exporting.opened("/report").is_direct
    assert sum("export" in request.path for request in drive_server.requests) == 1
    drive_server.shortcut(f"{drive.name}/link", "nothing")
    at_drive.fs.invalidate_cache()
    assert (at_drive.names(), at_drive.size("/link")) == (["link", "report"], 0)
    assert code_of(at_drive.open, "/link") == errno.ENOENT


def test_items_of_one_name_are_shown_with_their_ids_and_changed_each_for_itself(
    drive, drive_server, at_drive
):
    newest = "2099-01-01T00:00:00Z"
    one, two, three = (drive_server.put(f"{drive.name}/p.jpg", b"%d" % i, new=True) for i in (1, 2, 3))
    drive_server.put(f"{drive.name}/f/in", b"inner")
    folder = drive_server.folder(f"{drive.name}/f")
    drive_server.edit(folder, name="p.jpg")
    drive_server.edit(three, modifiedTime=newest)
    shown = {id: f"p (id {id}).jpg" for id in (one, two, three)}
    kinds = {name: entry.mode for name, entry in at_drive.entries().items()}
    assert at_drive.names() == sorted(["p.jpg", shown[one], shown[two], f"p.jpg (id {folder})"])
    assert kinds[shown[one]] == stat.S_IFREG
    assert kinds[f"p.jpg (id {folder})"] == stat.S_IFDIR
    assert [at_drive.content(f"/{name}") for name in ("p.jpg", *shown.values())] == [b"3", b"1", b"2", b"3"]
    assert at_drive.names(f"/p.jpg (id {folder})") == ["in"]
    assert at_drive.content(f"/p.jpg (id {folder})/in") == b"inner"
    at_drive.save("/a (id 1).b", b"a name of its own")  # as another item's would be
    at_drive.save(f"/q (id {one}).jpg", b"and this")
    assert (
        at_drive.content("/a (id 1).b") + at_drive.content(f"/q (id {one}).jpg")
        == b"a name of its ownand this"
    )
    at_drive.save(f"/{shown[three]}", b"33")
    assert at_drive.content("/p.jpg") == b"33"
    at_drive.rename(f"/{shown[one]}", "/one")
    at_drive.unlink("/p.jpg")
    at_drive.unlink(f"/{shown[two]}")
    at_drive.rename(f"/p.jpg (id {folder})", "/d")
    assert at_drive.names() == ["a (id 1).b", "d", "one", f"q (id {one}).jpg"]
    assert at_drive.content("/one") + at_drive.content("/d/in") == b"1inner"
    assert [drive_server.item(id)["trashed"] for id in (one, two, three)] == [False, True, True]


# Reading.


def test_each_version_has_an_inode_of_its_own_whose_pages_the_kernel_keeps(cloud, mounted):
    cloud.put("a", b"one")
    number = mounted.inode("/a")
    kept = mounted.opened("/a")
    assert (kept.keeps_pages, kept.is_direct) == (True, False)
    cloud.put("a", b"two!")
    mounted.fs.invalidate_cache()
    beside = mounted.opened("/a")  # while the first version is open
    assert (beside.keeps_pages, beside.is_direct) == (True, False)
    assert mounted.inode("/a") != number
    assert (mounted.size("/a"), mounted.operations.getattr(number).size) == (4, 3)
    assert [mounted.read(opened.handle) for opened in (beside, kept)] == [b"two!", b"one"]


def test_an_inode_is_dropped_when_it_is_closed_and_the_kernel_forgets_it(cloud, mounted):
    cloud.put("a", b"one")
    handle, number = mounted.open("/a"), mounted.inode("/a")
    mounted.operations.forget(number, 2)
    assert mounted.operations.getattr(number).size == 3
    mounted.close(handle)
    with pytest.raises(OSError):
        mounted.operations.getattr(number)
    assert mounted.content("/a") == b"one"


# Writing.


def test_a_new_file_is_visible_here_at_once_and_at_the_origin_once_closed(cloud, mounted):
    mounted.mkdir("/d")
    handle = mounted.create("/d/new")
    mounted.write(handle, b"world", 6)
    mounted.write(handle, b"hello ")
    assert mounted.size("/d/new") == 11
    assert mounted.names("/d") == ["new"]
    assert mounted.content("/d/new") == b"hello world"
    assert mounted.at_origin() == []
    mounted.close(handle)
    assert fsspec.open(cloud.url("d/new")).open().read() == b"hello world"
    assert mounted.size("/d/new") == 11


@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_WRONLY | os.O_APPEND])
def test_changes_in_the_middle_and_at_the_end_replace_the_object(cloud, mounted, flags):
    cloud.put("a", b"0123456789")
    handle = mounted.open("/a", flags)
    mounted.write(handle, b"xy", 3)
    mounted.write(handle, b"!", 10)
    mounted.operations.files.fsync(handle)
    assert mounted.fs.cat_file(cloud.path("a")) == b"012xy56789!"
    mounted.close(handle)
    assert mounted.content("/a") == b"012xy56789!"


def test_truncating_works_on_open_and_on_closed_files(cloud, mounted):
    cloud.put("a", b"0123456789")
    mounted.truncate("/a", 4)
    assert mounted.fs.cat_file(cloud.path("a")) == b"0123"
    handle = mounted.open("/a", os.O_WRONLY | os.O_TRUNC)
    assert mounted.size("/a") == 0
    mounted.write(handle, b"new")
    mounted.truncate("/a", 2)
    mounted.close(handle)
    assert mounted.content("/a") == b"ne"


def test_a_close_that_does_not_complete_the_file_sends_nothing(cloud, mounted):
    """A shell closes a copy of the descriptor before anything is written, and a child process when it ends."""
    cloud.put("a", b"before")
    handle = mounted.open("/a", os.O_WRONLY | os.O_TRUNC)
    mounted.flush(handle)
    mounted.write(handle, b"one")
    mounted.flush(handle, thread=1 << 30)
    assert mounted.fs.cat_file(cloud.path("a")) == b"before"
    mounted.flush(handle)
    assert mounted.fs.cat_file(cloud.path("a")) == b"one"
    cloud.server.reset()
    mounted.operations.files.release(handle)
    assert not cloud.server.requests


def test_what_no_close_has_sent_is_sent_when_the_last_handle_goes(mounted):
    mounted.close(mounted.create("/empty"))
    assert mounted.at_origin() == [f"{mounted.root}/empty"]


def test_a_file_that_is_open_when_the_mount_ends_is_kept_in_a_private_file(mounted, caplog):
    handle = mounted.create("/a")
    mounted.write(handle, b"1")
    mounted.operations.written.report_unsent()
    (path,) = kept()
    assert f"{mounted.root}/a was not sent: what was written is kept in {path}" in caplog.text
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"1", 0o600)
    mounted.close(handle)


def full(*_):
    raise OSError(errno.ENOSPC, "no space")


def kept_as(tmp_path, data, name="b/a"):
    (tmp_path / "file").write_bytes(data)
    with (tmp_path / "file").open("rb") as file:
        return keep(file, name)


def test_kept_files_make_way_for_newer_ones_and_none_is_kept_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(unsent_files, "_MOST", 10)
    said = [kept_as(tmp_path, data) for data in (b"12345", b"1234", b"123456", b"too large now")]
    assert "is lost, as it is too large" in said[-1]
    assert [path.read_bytes() for path in kept()] == [b"1234", b"123456"]
    monkeypatch.setattr(unsent_files.shutil, "copyfileobj", full)
    assert "is lost, as it cannot be kept" in kept_as(tmp_path, b"1")
    assert [path.read_bytes() for path in kept()] == [b"123456"]


def test_files_of_one_path_and_with_long_or_strange_names_are_kept_also_without_a_home(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(unsent_files, "_state_folder", lambda: "~/no home")
    for name in ("b/a", "b/a", "b/" + "ö" * 200, "b/\0"):
        assert "is kept in" in kept_as(tmp_path, b"1", name)
    assert [each.read_bytes() for each in kept()] == [b"1"] * 4
    assert {each.parent for each in kept()} == {tmp_path / f"cachedfs-{os.geteuid()}/unsent"}


def test_bytes_written_after_a_part_of_a_file_was_read_are_kept(tmp_path):
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"12")
        file.seek(0)
        file.read(1)  # Python's buffer has the rest
        os.pwrite(file.fileno(), b"3", 1)
        keep(file, "b/a")
    assert kept()[0].read_bytes() == b"13"


def test_a_file_deleted_while_it_is_sent_is_gone(mounted, monkeypatch):
    is_sending, may_go_on, send = threading.Event(), threading.Event(), mounted.fs._send

    def slow(*args, **options):
        is_sending.set()
        may_go_on.wait(60)
        return send(*args, **options)

    monkeypatch.setattr(mounted.fs, "_send", slow)
    closing = threading.Thread(target=mounted.close, args=(mounted.create("/a"),))
    deleting = threading.Thread(target=mounted.unlink, args=("/a",))
    closing.start()
    assert is_sending.wait(60)
    deleting.start()
    may_go_on.set()
    closing.join()
    deleting.join()
    assert mounted.at_origin() == []


def test_a_failed_upload_is_the_error_of_close_and_leaves_the_object(cloud, mounted, caplog):
    cloud.put("a", b"before")
    handle = mounted.open("/a", os.O_WRONLY | os.O_TRUNC)
    mounted.write(handle, b"after")
    cloud.server.fail(Fault(status=403, times=None))
    assert code_of(mounted.flush, handle) == errno.EACCES
    cloud.server.heal()
    mounted.operations.files.release(handle)
    assert f"{mounted.root}/a was not sent: what was written is kept in {kept()[0]}" in caplog.text
    assert kept()[0].read_bytes() == b"after"
    assert mounted.content("/a") == b"before"


def test_after_a_failed_write_a_file_is_never_sent(cloud, mounted, monkeypatch, caplog):
    cloud.put("a", b"before")
    handle = mounted.open("/a", os.O_WRONLY | os.O_TRUNC)
    mounted.write(handle, b"good")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert code_of(mounted.write, handle, b"more", 4) == errno.ENOSPC
    mounted.write(handle, b"again", 4)
    assert code_of(mounted.operations.files.fsync, handle) == code_of(mounted.close, handle) == errno.EIO
    assert "/a was not sent: what was written to it is lost" in caplog.text
    assert mounted.content("/a") == b"before"


# Writing beside other machines. The second mount has a cache of its own.


@pytest.fixture
def elsewhere(cloud, tmp_path):
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", cache_dir=str(tmp_path / "elsewhere"))
    return Mounted(fs, cloud.bucket)


def append(mounted, path, data):
    try:
        handle = mounted.open(path, os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:
        handle = mounted.create(path, os.O_WRONLY | os.O_APPEND)
    mounted.write(handle, data, mounted.size(path))
    mounted.close(handle)


def test_what_machines_append_in_turn_is_all_there(cloud, mounted, elsewhere):
    assert code_of(mounted.inode, "/log") == errno.ENOENT
    cloud.put("log", b"theirs\n")
    # Linux looks it up again.
    assert code_of(mounted.create, "/log", os.O_WRONLY | os.O_APPEND) == errno.ESTALE
    for number in range(3):
        append(mounted, "/log", b"a%d\n" % number)
        append(elsewhere, "/log", b"b%d\n" % number)
    mounted.at_origin()
    assert mounted.content("/log") == b"theirs\na0\nb0\na1\nb1\na2\nb2\n"


def test_of_two_machines_that_make_a_file_with_o_excl_one_does(cloud, mounted, elsewhere):
    flags = os.O_WRONLY | os.O_EXCL
    handles = [each.create("/lock", flags) for each in (mounted, elsewhere)]
    mounted.close(handles[0])
    assert mounted.stored("lock") == b""
    assert code_of(elsewhere.flush, handles[1]) in (errno.EEXIST, errno.ESTALE)
    elsewhere.operations.files.release(handles[1])
    cloud.put("old", b"old")
    assert code_of(mounted.create, "/old", flags) == errno.EEXIST
    mounted.save("/a", b"a")
    assert code_of(mounted.inode, "/other") == errno.ENOENT
    cloud.put("other", b"b")
    must_not_replace = 1
    assert code_of(mounted.rename, "/a", "/other", must_not_replace) == errno.EEXIST
    assert mounted.stored("other") == b"b"


def test_what_another_machine_wrote_meanwhile_is_not_replaced_by_a_change(cloud, mounted, caplog):
    cloud.put("a", b"first")
    handle = mounted.open("/a", os.O_RDWR)
    mounted.write(handle, b"F")
    cloud.put("a", b"second")
    assert code_of(mounted.operations.files.fsync, handle) == code_of(mounted.flush, handle) == errno.ESTALE
    mounted.operations.files.release(handle)
    assert mounted.stored("a") == b"second"
    assert kept()[0].read_bytes() == b"First"
    assert f"kept in {kept()[0]}" in caplog.text
    assert mounted.content("/a") == b"second"


def test_an_emptied_file_replaces_whatever_is_there_without_a_request_more(cloud, mounted):
    cloud.put("a", b"first")
    assert mounted.size("/a") == 5
    cloud.server.reset()
    handle = mounted.open("/a", os.O_WRONLY | os.O_TRUNC)
    mounted.write(handle, b"ours")
    cloud.put("a", b"second")
    mounted.close(handle)
    assert len(cloud.server.requests) == 1
    assert mounted.content("/a") == b"ours"


def test_a_reader_keeps_its_version_while_the_file_is_written_here(cloud, mounted):
    cloud.put("a", b"before")
    reading, number = mounted.open("/a"), mounted.inode("/a")
    writing = mounted.open("/a", os.O_WRONLY | os.O_TRUNC)
    mounted.write(writing, b"1")
    assert (mounted.operations.getattr(number).size, mounted.size("/a")) == (6, 1)
    assert mounted.read(reading) == b"before"
    mounted.close(writing)
    mounted.close(reading)
    assert mounted.content("/a") == b"1"


def test_a_writer_beside_readers_gets_an_inode_that_waits_for_it(cloud, mounted):
    cloud.put("a", b"before")
    old = mounted.inode("/a")
    readers = [mounted.open("/a")]
    assert code_of(mounted.operations.files.open, old, os.O_WRONLY, OURS) == errno.ESTALE
    new = mounted.inode("/a")
    readers.append(mounted.open("/a"))  # of the new inode, which stays the writer's
    assert mounted.inode("/a") == new != old
    handle = mounted.operations.files.open(new, os.O_WRONLY, OURS).handle
    mounted.write(handle, b"B")
    assert [mounted.read(reader) for reader in readers] == [b"before", b"Before"]
    for each in (handle, *readers):
        mounted.close(each)
    assert mounted.stored("a") == b"Before"


def test_a_writer_that_does_not_come_changes_nothing(cloud, mounted):
    cloud.put("a", b"before")
    old, reader = mounted.inode("/a"), mounted.open("/a")
    cloud.server.reset()
    assert code_of(mounted.operations.files.open, old, os.O_WRONLY | os.O_TRUNC, OURS) == errno.ESTALE
    operations = mounted.operations
    operations.written.end_reservation(operations._inodes[mounted.inode("/a")])  # as its timer does
    assert not [request for request in cloud.server.requests if request.kind == "upload"]
    assert mounted.content("/a") == mounted.read(reader) == b"before"
    mounted.close(reader)


def test_an_open_file_is_truncated_and_not_another_that_took_its_name(mounted):
    handle, number = mounted.create("/a"), mounted.inode("/a")
    mounted.write(handle, b"old")
    mounted.unlink("/a")
    newer = mounted.create("/a")
    mounted.write(newer, b"new")
    assert mounted.operations.setattr(number, size=1, mtime_ns=None).size == 1
    assert mounted.read(handle) == b"o"
    for each in (handle, newer):
        mounted.close(each)
    assert mounted.stored("a") == b"new"


@pytest.mark.parametrize("how", ["unlink", "rename"])
def test_a_file_open_for_writing_outlives_its_name(cloud, mounted, how):
    cloud.put("a", b"bytes")
    cloud.put("b", b"other")
    handle = mounted.open("/a", os.O_RDWR)
    mounted.unlink("/a") if how == "unlink" else mounted.rename("/b", "/a")
    mounted.write(handle, b"B")
    assert mounted.read(handle) == b"Bytes"
    mounted.close(handle)
    assert mounted.at_origin() == [cloud.path({"unlink": "b", "rename": "a"}[how])]


def test_a_reader_that_opened_a_file_while_it_was_written_does_not_hold_its_version(cloud, mounted):
    writing = mounted.create("/a")
    mounted.write(writing, b"ours")
    reading = mounted.open("/a")
    mounted.close(writing)
    assert mounted.stored("a") == b"ours"
    cloud.put("a", b"theirs")
    mounted.fs.invalidate_cache()
    assert mounted.content("/a") == b"theirs"
    assert mounted.read(reading) == b"ours"
    mounted.close(reading)


def test_a_file_that_two_programs_make_at_once_is_emptied_by_the_second(mounted):
    first = mounted.create("/a")
    mounted.write(first, b"longer")
    second = mounted.create("/a")  # the kernel did not know of the first
    assert mounted.size("/a") == 0
    mounted.write(second, b"new")
    for each in (first, second):
        mounted.close(each)
    assert mounted.stored("a") == b"new"


def test_a_file_made_while_its_name_is_being_removed_is_another_one(mounted, monkeypatch):
    handle, remove, made = mounted.create("/a"), InodeTable.remove, []
    making = threading.Thread(target=lambda: made.append(mounted.create("/a")))

    def remove_late(inodes, path):
        if not making.ident:
            making.start()
            making.join(0.2)  # it waits until the old name is gone
        remove(inodes, path)

    monkeypatch.setattr(InodeTable, "remove", remove_late)
    mounted.unlink("/a")
    making.join()
    mounted.write(made[0], b"new")
    for each in (made[0], handle):
        mounted.close(each)
    assert mounted.stored("a") == b"new"


def test_a_refused_unlink_leaves_the_file_to_its_writer(cloud, mounted):
    cloud.put("a", b"old")
    handle = mounted.open("/a", os.O_WRONLY | os.O_APPEND)
    mounted.write(handle, b"A", 3)
    cloud.server.fail(Fault(status=403, times=None))
    assert code_of(mounted.unlink, "/a") == errno.EACCES
    cloud.server.heal()
    mounted.close(handle)
    assert mounted.stored("a") == b"oldA"


def test_after_a_failed_write_other_programs_replace_the_file(cloud, mounted):
    cloud.put("a", b"before")
    handle = mounted.open("/a", os.O_RDWR)
    cloud.server.fail(Fault(status=403, times=None))
    assert code_of(mounted.write, handle, b"x", 1) == errno.EACCES
    cloud.server.heal()
    assert mounted.content("/a") == b"before"
    mounted.save("/a", b"after")
    assert code_of(mounted.close, handle) == errno.EIO
    assert mounted.stored("a") == b"after"


def test_a_process_of_another_container_sends_what_it_wrote(mounted):
    opened = mounted.operations.create(ROOT, "a", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0)[1]
    mounted.write(opened.handle, b"1")
    mounted.flush(opened.handle, thread=0)
    assert mounted.stored("a") == b"1"
    mounted.operations.files.release(opened.handle)


def test_a_folder_that_changed_since_it_was_opened_tells_no_old_sizes(cloud, mounted):
    cloud.put("a", b"1")
    handle = mounted.operations.opendir(ROOT)
    mounted.save("/a", b"12")
    found = {entry.name: entry.entry for entry in mounted.operations.readdir(handle, 0, is_plus=True)}
    assert found[b"a"] is None


def test_opening_to_write_downloads_nothing_before_it_is_read_or_changed(cloud, mounted):
    data = cloud.put("a", noise(3 * MiB))
    mounted.inode("/a")
    cloud.server.reset()
    for flags in (os.O_RDWR, os.O_WRONLY | os.O_APPEND):
        mounted.close(mounted.open("/a", flags))
    assert cloud.server.bytes_sent() < 10_000
    mounted.truncate("/a", 100)
    assert mounted.content("/a") == data[:100]


def test_the_time_of_a_file_stays_what_it_was_when_it_was_written(cloud, mounted, elsewhere):
    handle = mounted.create("/a")
    mounted.write(handle, b"1")
    mounted.operations.setattr(mounted.inode("/a"), size=None, mtime_ns=1_600_000_000_123_456_789)
    mounted.close(handle)
    assert [each.getattr("/a").mtime_ns for each in (mounted, elsewhere)] == [1_600_000_000_123_000_000] * 2


# Names.


@pytest.mark.parametrize("key", ["", "x" * 256, "/part-0"])
def test_a_folder_is_not_removed_while_it_has_what_the_mount_cannot_show(cloud, mounted, caplog, key):
    cloud.put(f"d/{key}", b"precious")
    assert mounted.names("/d") == []
    assert code_of(mounted.rmdir, "/d") == errno.ENOTEMPTY
    assert f"the mount cannot show {cloud.path(f'd/{key}')}" in caplog.text
    assert mounted.stored(f"d/{key}") == b"precious"


@pytest.mark.parametrize("place", ["mounted", "at_drive"])
def test_folders_are_made_kept_empty_and_removed(place, request):
    mounted = request.getfixturevalue(place)
    mounted.mkdir("/d")
    mounted.mkdir("/d/e")
    assert (mounted.names(), mounted.names("/d")) == (["d"], ["e"])
    assert stat.S_ISDIR(mounted.getattr("/d/e").mode)
    mounted.save("/d/e/f", b"1")
    assert code_of(mounted.rmdir, "/d/e") == errno.ENOTEMPTY
    mounted.unlink("/d/e/f")
    assert mounted.names("/d") == ["e"]
    mounted.rmdir("/d/e")
    mounted.rmdir("/d")
    assert mounted.names() == []
    assert code_of(mounted.getattr, "/d") == errno.ENOENT


def test_folders_of_others_are_removed_once_they_are_empty(cloud, mounted):
    cloud.put("a/b/c", b"1")
    cloud.put("placeholder/", b"")
    mounted.unlink("/a/b/c")
    for folder in ("/a/b", "/a", "/placeholder"):
        mounted.rmdir(folder)
    assert mounted.names() == []


def test_removing_a_folder_leaves_others_of_its_name(drive, drive_server, at_drive):
    drive_server.put(f"{drive.name}/d/in", b"1")
    drive_server.edit(drive_server.folder(f"{drive.name}/e"), name="d", modifiedTime="2099-01-01T00:00:00Z")
    at_drive.rmdir("/d")
    assert at_drive.content("/d/in") == b"1"


@pytest.mark.parametrize("place", ["mounted", "at_drive"])
def test_files_and_folders_are_renamed_also_over_others(place, request):
    mounted = request.getfixturevalue(place)
    mounted.save("/a", b"a")
    mounted.save("/b", b"b")
    mounted.rename("/a", "/b")
    assert (mounted.names(), mounted.content("/b")) == (["b"], b"a")
    mounted.mkdir("/d")
    mounted.rename("/b", "/d/b")
    mounted.mkdir("/e")
    mounted.rename("/d", "/e")
    assert (mounted.names(), mounted.names("/e"), mounted.content("/e/b")) == (["e"], ["b"], b"a")
    mounted.mkdir("/f")
    mounted.rename("/f", "/g")
    assert mounted.names() == ["e", "g"]
    assert code_of(mounted.rename, "/g", "/e") == errno.ENOTEMPTY


@pytest.mark.parametrize("is_large", [False, True])
def test_a_drive_file_that_a_rename_replaces_keeps_its_id_unless_it_is_large(
    drive, drive_server, at_drive, monkeypatch, is_large
):
    monkeypatch.setattr("cachedfs.mount.written_files._KEEPS_ID", 2 if is_large else 3)
    id = drive_server.put(f"{drive.name}/a", b"first")
    at_drive.save("/a.tmp", b"new")
    mtime_ns = at_drive.getattr("/a.tmp").mtime_ns
    at_drive.rename("/a.tmp", "/a")
    assert (at_drive.names(), at_drive.content("/a")) == (["a"], b"new")
    assert at_drive.getattr("/a").mtime_ns == mtime_ns
    assert drive_server.item(id)["trashed"] == is_large
    assert drive_server.item(id)["size"] == ("5" if is_large else "3")


def test_open_files_move_with_their_folder_and_a_replaced_one_is_never_sent(cloud, mounted):
    mounted.mkdir("/d")
    inside, replaced = mounted.create("/d/a"), mounted.create("/b")
    mounted.write(inside, b"1")
    mounted.write(replaced, b"old")
    mounted.rename("/d", "/e")
    mounted.write(inside, b"2", 1)
    mounted.close(inside)
    mounted.rename("/e/a", "/b")
    mounted.close(replaced)
    assert (mounted.names(), mounted.names("/e"), mounted.content("/b")) == (["b", "e"], [], b"12")


def test_a_file_that_is_closed_while_it_is_renamed_is_at_its_new_name(mounted, monkeypatch):
    handle, mv = mounted.create("/a"), mounted.fs.mv
    mounted.write(handle, b"1")
    monkeypatch.setattr(
        mounted.fs, "mv", lambda *args, **options: (mounted.close(handle), mv(*args, **options))
    )
    mounted.rename("/a", "/b")
    assert (mounted.names(), mounted.content("/b")) == (["b"], b"1")


def test_a_folder_that_may_be_seen_and_not_opened_is_refused_and_not_empty(drive, at_drive):
    drive.put("shut/a", b"a")
    drive.server.limit(drive.server.folder(f"{drive.name}/shut"))
    assert at_drive.names() == ["shut"]
    assert stat.S_ISDIR(at_drive.getattr("/shut").mode)
    assert code_of(at_drive.names, "/shut") == code_of(at_drive.getattr, "/shut/a") == errno.EACCES
    assert code_of(at_drive.create, "/shut/b") == code_of(at_drive.rmdir, "/shut") == errno.EACCES
