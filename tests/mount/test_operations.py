"""The calls of the kernel on a mounted folder, made directly: attributes, reading, versions, writing, names."""

import errno
import os
import stat
import threading
from types import SimpleNamespace

import fsspec
import pytest

from cachedfs.mount.operations import MountOperations
from cachedfs.sim import Fault
from tests.support import MiB, noise, until


class Mounted:
    """A mounted folder, used as the kernel does."""

    def __init__(self, fs, root, **options):
        self.fs, self.root = fs, root
        self.operations = MountOperations(fs, root, is_writable=True, **options)

    def __getattr__(self, name):
        return getattr(self.operations, name)

    def open(self, path, flags=os.O_RDONLY):
        fi = SimpleNamespace(flags=flags, fh=0, direct_io=0, keep_cache=0)
        self.operations.open(path, fi)
        return fi

    def create(self, path):
        fi = SimpleNamespace(flags=os.O_WRONLY | os.O_CREAT, fh=0, direct_io=0, keep_cache=0)
        self.operations.create(path, 0o644, fi)
        return fi

    def close(self, path, fi):
        try:
            self.operations.flush(path, fi)
        finally:
            self.operations.release(path, fi)

    def content(self, path):
        fi = self.open(path)
        data = self.operations.read(path, 10 * MiB, 0, fi)
        self.close(path, fi)
        return data

    def save(self, path, data):
        fi = self.create(path)
        assert self.operations.write(path, data, 0, fi) == len(data)
        self.close(path, fi)

    def names(self, path="/"):
        return sorted(name for name, _, _ in self.operations.readdir(path, 0) if name not in (".", ".."))

    def at_origin(self):
        self.fs.invalidate_cache()
        return self.fs.find(self.root)

    def size(self, path):
        return self.operations.getattr(path)["st_size"]


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
    kinds = {name: stat.S_IFMT(about["st_mode"]) for name, about, _ in mounted.readdir("/", 0)}
    assert kinds == {".": stat.S_IFDIR, "..": stat.S_IFDIR, "a.bin": stat.S_IFREG, "sub": stat.S_IFDIR}
    found = mounted.getattr("/a.bin")
    assert (found["st_mode"], found["st_size"], found["st_uid"], found["st_gid"]) == (
        stat.S_IFREG | 0o644,
        5,
        7,
        8,
    )
    assert found["st_mtime"] == pytest.approx(fs.modified(cloud.path("d/a.bin")).timestamp() * 1e9, abs=1000)
    assert mounted.getattr("/sub")["st_mode"] == mounted.getattr("/")["st_mode"] == stat.S_IFDIR | 0o755
    assert (
        MountOperations(fs, cloud.bucket, is_writable=False).getattr("/d/a.bin")["st_mode"]
        == stat.S_IFREG | 0o444
    )


def test_names_that_a_file_system_refuses_are_encoded_or_left_out_with_a_warning(cloud, mounted, caplog):
    cloud.put("x/../a", b"up")
    cloud.put(f"{'long' * 70}", b"")
    assert mounted.names("/x") == ["%2E%2E"]
    assert mounted.content("/x/%2E%2E/a") == b"up"
    assert mounted.names() == ["x"]
    assert "longlong: the name is too long for a file system" in caplog.text


def test_an_object_that_no_file_can_show_disturbs_no_file_and_is_not_removed_with_its_folder(cloud, mounted):
    cloud.put("d/", b"bytes")
    cloud.put("d/x", b"1")
    assert (mounted.names(), mounted.names("/d"), mounted.content("/d/x")) == (["d"], ["x"], b"1")
    mounted.operations.unlink("/d/x")
    assert mounted.names("/d") == []
    assert code_of(mounted.operations.rmdir, "/d") == errno.ENOTEMPTY
    assert mounted.fs.cat_file(cloud.path("d/")) == b"bytes"


def test_a_listing_is_one_request_and_says_all_about_its_files(cloud, mounted, monkeypatch):
    for number in range(20):
        cloud.put(f"d/{number}", b"12")
    cloud.put("d/sub/x", b"")
    modified = mounted.getattr("/d/3")["st_mtime"]
    cloud.server.reset()
    names = mounted.names("/d")
    monkeypatch.setattr(mounted.fs, "info", None)
    monkeypatch.setattr(mounted.fs, "_listing", None)
    assert [mounted.size(f"/d/{name}") for name in names] == [2] * 20 + [0]
    assert mounted.getattr("/d/3")["st_mtime"] == modified
    assert stat.S_ISDIR(mounted.getattr("/d/sub")["st_mode"])
    assert mounted.names("/d") == names
    assert len(cloud.server.requests) == 1


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
def test_a_file_that_changed_since_its_folder_was_listed_is_opened_with_its_new_size(cloud, mounted, flags):
    cloud.put("d/a", b"1")
    cloud.put("d/gone", b"1")
    assert mounted.names("/d") == ["a", "gone"]
    cloud.put("d/a", b"12")
    cloud.delete("d/gone")
    other = fsspec.filesystem("cachedfs", target_protocol="gs", max_age=0)
    assert (other.size(cloud.path("d/a")), other.exists(cloud.path("d/gone"))) == (2, False)
    assert [mounted.size(path) for path in ("/d/a", "/d/gone")] == [1, 1]
    assert code_of(mounted.open, "/d/a", flags) == code_of(mounted.open, "/d/gone", flags) == errno.ESTALE
    assert (mounted.size("/d/a"), code_of(mounted.getattr, "/d/gone")) == (2, errno.ENOENT)
    fi = mounted.open("/d/a", flags)
    assert mounted.read("/d/a", 9, 0, fi) == b"12"
    mounted.close("/d/a", fi)


def test_a_name_that_is_not_utf_8_is_an_error_of_its_own_without_a_log_line(mounted, caplog):
    assert code_of(mounted.getattr, "/\udcff") == errno.EILSEQ
    assert not caplog.records


def test_a_missing_file_is_enoent_without_a_log_line(mounted, caplog):
    assert code_of(mounted.getattr, "/no") == code_of(mounted.open, "/no") == errno.ENOENT
    assert not caplog.records


def test_an_error_is_its_errno_and_a_log_line_that_says_why(cloud, mounted, caplog):
    cloud.put("a", b"1")
    cloud.server.fail(Fault(status=403, times=None))
    assert code_of(mounted.getattr, "/a") == errno.EACCES
    assert "getattr of /a: " in caplog.text
    assert "403" in caplog.text


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
    assert exporting.open("/report").direct_io
    assert sum("export" in request.path for request in drive_server.requests) == 1


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
    kinds = {name: about["st_mode"] for name, about, _ in at_drive.readdir("/", 0)}
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


def test_a_shortcut_without_its_target_is_listed_and_empty(drive, drive_server, at_drive):
    drive_server.shortcut(f"{drive.name}/link", "nothing")
    assert (at_drive.names(), at_drive.size("/link")) == (["link"], 0)
    assert code_of(at_drive.open, "/link") == errno.ENOENT


# Reading.


def test_any_part_of_a_file_is_right_and_is_then_cached_for_urls(cloud, mounted):
    data = cloud.put("a", noise(3 * MiB))
    fi = mounted.open("/a")
    for start, size in [
        (0, 10),
        (MiB - 5, 10),
        (2 * MiB + 1, 131072),
        (5, MiB),
        (3 * MiB - 1, 100),
        (3 * MiB, 1),
    ]:
        assert mounted.read("/a", size, start, fi) == data[start : start + size]
    mounted.close("/a", fi)
    cloud.server.reset()
    assert fsspec.open(cloud.url("a")).open().read() == data
    assert not cloud.server.requests


def test_the_kernel_keeps_the_pages_of_a_version_and_never_mixes_two(cloud, mounted):
    cloud.put("a", b"one")
    first = mounted.open("/a")
    assert not first.keep_cache
    assert mounted.read("/a", 9, 0, first) == b"one"
    mounted.close("/a", first)
    kept = mounted.open("/a")
    assert kept.keep_cache
    cloud.put("a", b"two!")
    mounted.fs.invalidate_cache()
    beside = mounted.open("/a")  # while the first version is open
    assert beside.direct_io
    assert mounted.read("/a", 9, 0, beside) == b"two!"
    assert mounted.read("/a", 9, 0, kept) == b"one"
    mounted.close("/a", beside)
    mounted.close("/a", kept)
    after = mounted.open("/a")
    assert (after.keep_cache, after.direct_io) == (False, 0)
    mounted.close("/a", after)
    assert mounted.open("/a").keep_cache


# Writing.


def test_a_new_file_is_visible_here_at_once_and_at_the_origin_once_closed(cloud, mounted):
    mounted.mkdir("/d", 0o755)
    fi = mounted.create("/d/new")
    mounted.write("/d/new", b"world", 6, fi)
    mounted.write("/d/new", b"hello ", 0, fi)
    assert mounted.size("/d/new") == 11
    assert mounted.names("/d") == ["new"]
    assert mounted.content("/d/new") == b"hello world"
    assert mounted.at_origin() == []
    mounted.close("/d/new", fi)
    assert fsspec.open(cloud.url("d/new")).open().read() == b"hello world"
    assert mounted.size("/d/new") == 11


@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_WRONLY | os.O_APPEND])
def test_changes_in_the_middle_and_at_the_end_replace_the_object(cloud, mounted, flags):
    cloud.put("a", b"0123456789")
    fi = mounted.open("/a", flags)
    mounted.write("/a", b"xy", 3, fi)
    mounted.write("/a", b"!", 10, fi)
    mounted.fsync("/a", 0, fi)
    assert mounted.fs.cat_file(cloud.path("a")) == b"012xy56789!"
    mounted.close("/a", fi)
    assert mounted.content("/a") == b"012xy56789!"


def test_truncating_works_on_open_and_on_closed_files(cloud, mounted):
    cloud.put("a", b"0123456789")
    mounted.truncate("/a", 4)
    assert mounted.fs.cat_file(cloud.path("a")) == b"0123"
    fi = mounted.open("/a", os.O_WRONLY | os.O_TRUNC)
    assert mounted.size("/a") == 0
    mounted.write("/a", b"new", 0, fi)
    mounted.truncate("/a", 2)
    mounted.close("/a", fi)
    assert mounted.content("/a") == b"ne"


def test_a_close_that_does_not_complete_the_file_sends_nothing(cloud, fs):
    """A shell closes a copy of the descriptor before anything is written, and a child process when it ends."""
    processes = [1]
    mounted = Mounted(fs, cloud.bucket, caller=lambda: processes[-1])
    cloud.put("a", b"before")
    fi = mounted.open("/a", os.O_WRONLY | os.O_TRUNC)
    mounted.flush("/a", fi)
    mounted.write("/a", b"one", 0, fi)
    processes.append(2)
    mounted.flush("/a", fi)
    assert mounted.fs.cat_file(cloud.path("a")) == b"before"
    processes.pop()
    mounted.flush("/a", fi)
    assert mounted.fs.cat_file(cloud.path("a")) == b"one"
    cloud.server.reset()
    mounted.release("/a", fi)
    assert not cloud.server.requests


def test_what_no_close_has_sent_is_sent_when_the_last_handle_goes(cloud, mounted, caplog):
    mounted.close("/empty", mounted.create("/empty"))
    assert mounted.at_origin() == [cloud.path("empty")]
    fi = mounted.create("/a")
    cloud.server.fail(Fault(status=403, times=None))
    mounted.close("/a", fi)
    cloud.server.heal()
    assert "/a was not sent: what was written to it is lost" in caplog.text
    assert mounted.at_origin() == [cloud.path("empty")]


def test_a_file_that_is_open_when_the_mount_ends_is_in_the_log(mounted, caplog):
    fi = mounted.create("/a")
    mounted.write("/a", b"1", 0, fi)
    mounted.end()
    assert "/a was not sent: what was written to it is lost" in caplog.text
    mounted.close("/a", fi)


def test_a_file_deleted_while_it_is_sent_is_gone(mounted, monkeypatch):
    is_sending, may_go_on, pipe_file = threading.Event(), threading.Event(), mounted.fs.pipe_file

    def slow(*args):
        is_sending.set()
        may_go_on.wait()
        pipe_file(*args)

    monkeypatch.setattr(mounted.fs, "pipe_file", slow)
    closing = threading.Thread(target=mounted.close, args=("/a", mounted.create("/a")))
    deleting = threading.Thread(target=mounted.unlink, args=("/a",))
    closing.start()
    is_sending.wait()
    deleting.start()
    until(lambda: not mounted.operations._local_files.paths())
    may_go_on.set()
    closing.join()
    deleting.join()
    assert mounted.at_origin() == []


def test_opening_to_write_and_writing_nothing_sends_nothing(cloud, mounted):
    cloud.put("a", b"1")
    fi = mounted.open("/a", os.O_RDWR)
    cloud.server.reset()
    mounted.close("/a", fi)
    assert not cloud.server.requests


def test_a_failed_upload_is_the_error_of_close_and_leaves_the_object(cloud, mounted, caplog):
    cloud.put("a", b"before")
    fi = mounted.open("/a", os.O_WRONLY | os.O_TRUNC)
    mounted.write("/a", b"after", 0, fi)
    cloud.server.fail(Fault(status=403, times=None))
    assert code_of(mounted.flush, "/a", fi) == errno.EACCES
    cloud.server.heal()
    mounted.release("/a", fi)
    assert "/a was not sent: what was written to it is lost" in caplog.text
    assert mounted.content("/a") == b"before"


def test_a_file_deleted_while_it_is_open_is_never_sent(cloud, mounted):
    fi = mounted.create("/a")
    mounted.write("/a", b"1", 0, fi)
    mounted.unlink("/a")
    assert mounted.getattr(None, fi)["st_size"] == 1
    assert mounted.read(None, 5, 0, fi) == b"1"
    mounted.close(None, fi)
    assert mounted.at_origin() == []


def test_a_write_that_cannot_begin_leaves_no_file_behind(cloud, mounted):
    cloud.put("a", b"1")
    cloud.server.fail(Fault(status=403, times=None))
    assert code_of(mounted.open, "/a", os.O_RDWR) == errno.EACCES
    cloud.server.heal()
    assert mounted.content("/a") == b"1"


def test_writing_to_a_file_open_for_reading_is_ebadf(cloud, mounted):
    cloud.put("a", b"1")
    fi = mounted.open("/a")
    assert code_of(mounted.write, "/a", b"2", 0, fi) == errno.EBADF


# Names.


@pytest.mark.parametrize("place", ["mounted", "at_drive"])
def test_folders_are_made_kept_empty_and_removed(place, request):
    mounted = request.getfixturevalue(place)
    mounted.mkdir("/d", 0o755)
    mounted.mkdir("/d/e", 0o755)
    assert (mounted.names(), mounted.names("/d")) == (["d"], ["e"])
    assert stat.S_ISDIR(mounted.getattr("/d/e")["st_mode"])
    mounted.save("/d/e/f", b"1")
    assert code_of(mounted.rmdir, "/d/e") == errno.ENOTEMPTY
    mounted.unlink("/d/e/f")
    assert mounted.names("/d") == ["e"]
    mounted.rmdir("/d/e")
    mounted.rmdir("/d")
    assert mounted.names() == []
    assert code_of(mounted.getattr, "/d") == errno.ENOENT


def test_a_folder_with_a_placeholder_object_is_removed(cloud, mounted):
    cloud.put("d/", b"")
    assert mounted.names() == ["d"]
    mounted.rmdir("/d")
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
    mounted.mkdir("/d", 0o755)
    mounted.rename("/b", "/d/b")
    mounted.mkdir("/e", 0o755)
    mounted.rename("/d", "/e")
    assert (mounted.names(), mounted.names("/e"), mounted.content("/e/b")) == (["e"], ["b"], b"a")
    mounted.mkdir("/f", 0o755)
    mounted.rename("/f", "/g")
    assert mounted.names() == ["e", "g"]
    assert code_of(mounted.rename, "/g", "/e") == errno.ENOTEMPTY


def test_open_files_move_with_their_folder_and_a_replaced_one_is_never_sent(cloud, mounted):
    mounted.mkdir("/d", 0o755)
    inside, replaced = mounted.create("/d/a"), mounted.create("/b")
    mounted.write("/d/a", b"1", 0, inside)
    mounted.write("/b", b"old", 0, replaced)
    mounted.rename("/d", "/e")
    mounted.write("/e/a", b"2", 1, inside)
    mounted.close("/e/a", inside)
    mounted.rename("/e/a", "/b")
    mounted.close("/b", replaced)
    assert (mounted.names(), mounted.names("/e"), mounted.content("/b")) == (["b", "e"], [], b"12")


def test_a_file_renamed_while_it_is_open_goes_on_under_its_new_name(cloud, mounted):
    fi = mounted.create("/a")
    mounted.write("/a", b"1", 0, fi)
    mounted.rename("/a", "/b")
    mounted.write("/b", b"2", 1, fi)
    mounted.close("/b", fi)
    assert (mounted.names(), mounted.content("/b")) == (["b"], b"12")


def test_a_folder_that_may_be_seen_and_not_opened_is_refused_and_not_empty(drive, at_drive):
    drive.put("shut/a", b"a")
    drive.server.limit(drive.server.folder(f"{drive.name}/shut"))
    assert at_drive.names() == ["shut"]
    assert stat.S_ISDIR(at_drive.getattr("/shut")["st_mode"])
    assert code_of(at_drive.names, "/shut") == code_of(at_drive.getattr, "/shut/a") == errno.EACCES
    assert code_of(at_drive.create, "/shut/b") == code_of(at_drive.rmdir, "/shut") == errno.EACCES
