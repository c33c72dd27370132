"""Cache directories: which are used or refused."""

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cachedfs.cache import directory, disk
from cachedfs.cache.directory import FORMAT
from cachedfs.cache.index.metadata_records import MetadataRecord
from cachedfs.errors import CacheError
from tests.cache.audit import audit
from tests.cache.faults import replace_call
from tests.cache.helpers import content, file_of, key_of, put, whole

NAME = f"cachedfs-{FORMAT}-{os.getuid()}"


@pytest.mark.parametrize("how", ["symlink", "file", "writable by others", "foreign"])
def test_an_unsafe_subdirectory_is_an_error_if_the_user_named_it_and_else_not_used(
    open_cache, tmp_path, how, caplog
):
    root = tmp_path / NAME
    if how == "symlink":
        (tmp_path / "elsewhere").mkdir(0o700)
        root.symlink_to("elsewhere")
    elif how == "file":
        root.write_text("in the way")
    else:
        root.mkdir()
        root.chmod(0o770 if how == "writable by others" else 0o700)
    if how == "foreign":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(root, 12345, -1)
    with pytest.raises(ValueError, match="give another cache_dir"):
        open_cache(tmp_path)
    cache = open_cache(tmp_path, explicit=False)
    assert cache.root is None
    assert "give another cache_dir" in cache.cannot_store
    for _ in range(2):
        with pytest.raises(CacheError, match="give another cache_dir"):
            put(cache, key_of(), 0)
    assert len(caplog.records) == 1
    assert whole(cache, key_of(), 0) is None
    assert cache.locks.take(7)


@pytest.mark.parametrize("is_network", [False, True])
def test_a_directory_that_cannot_be_written_is_read_and_says_why(
    open_cache, tmp_path, monkeypatch, is_network
):
    monkeypatch.setattr(disk, "is_network", lambda path: is_network)
    put(open_cache(tmp_path), key_of(), 0)
    replace_call(monkeypatch, "os.access", lambda *args, **options: False)
    cache = open_cache(tmp_path)
    assert cache.root is None
    assert "read-only" in cache.cannot_store
    assert whole(cache, key_of(), 0) == content(key_of(), 0)
    with pytest.raises(CacheError):
        put(cache, key_of(), 1)


def test_a_cache_of_an_earlier_format_is_named_and_not_used(open_cache, tmp_path):
    old = tmp_path / f"cachedfs-{FORMAT - 1}-{os.getuid()}"
    for name in (old.name, f"cachedfs-{FORMAT - 1}-99999", f"cachedfs-{FORMAT + 1}-{os.getuid()}", "else"):
        (tmp_path / name).mkdir()
    cache = open_cache(tmp_path)
    put(cache, key_of(), 0)
    assert cache.old_caches == (str(old),)
    assert os.listdir(old) == []


@pytest.mark.parametrize("how", ["no index", "no blocks", "no root", "symlink"])
def test_folders_that_did_not_change_for_a_while_are_checked_again_when_they_do(
    cache, tmp_path, monkeypatch, how
):
    monkeypatch.setattr(directory, "RECENT_S", -1.0)  # so that their states alone count
    for index in range(3):
        put(cache, key_of(), index)
    assert cache._own.is_as_seen()
    outside, root = tmp_path / "outside", Path(cache.root)
    if how == "no index":
        (root / "index.db").unlink()
    elif how == "no blocks":
        shutil.rmtree(root / "blocks")
    elif how == "no root":
        root.rename(outside)
    else:
        (folder,) = root.glob(f"blocks/{key_of().digest[0]}")
        folder.rename(outside)
        folder.symlink_to(outside)
    assert not cache._own.is_as_seen()
    before = sorted(outside.rglob("*"))
    put(cache, key_of(), 9)
    assert file_of(cache, key_of(), 9).resolve().is_relative_to(Path(cache.root).resolve())
    assert sorted(outside.rglob("*")) == before
    assert whole(cache, key_of(), 9) == content(key_of(), 9)
    assert audit(cache)._replace(missing=()).ok


def test_on_a_network_file_system_caches_of_hosts_that_are_gone_are_removed(
    open_cache, tmp_path, monkeypatch
):
    monkeypatch.setattr(disk, "is_network", lambda path: True)
    caches = {}
    for name in ("gone", "idle", "new"):
        replace_call(monkeypatch, "os.uname", lambda name=name: SimpleNamespace(nodename=name))
        caches[name] = open_cache(tmp_path)
        if name != "new":
            put(caches[name], key_of(), *range(3))
            caches[name].pin(key_of().identity, key_of().path)
    for name, days in (("gone", 8), ("idle", 6)):
        for path in (Path(caches[name].root), *Path(caches[name].root).rglob("*")):
            os.utime(path, (0, time.time() - days * 86400))
    for index in range(10):  # each removes a part
        put(caches["new"], key_of(), index)
    assert sorted(os.listdir(tmp_path / NAME)) == ["host-idle", "host-new"]
    assert whole(caches["idle"], key_of(), 2) == content(key_of(), 2)
    assert caches["idle"].pins() == [(key_of().identity, key_of().path)]


def test_on_a_network_file_system_every_host_has_its_own_cache_and_no_locks_are_used(
    open_cache, tmp_path, monkeypatch
):
    monkeypatch.setattr(disk, "is_network", lambda path: True)
    replace_call(monkeypatch, "os.uname", lambda: SimpleNamespace(nodename="one"))
    cache = open_cache(tmp_path)
    assert cache.root == str(tmp_path / NAME / "host-one")
    put(cache, key_of(), 0)
    assert cache.locks.take(7)
    assert not Path(cache.root, "locks").exists()
    cache.metadata.keep_records(
        [MetadataRecord("gs://test", "b/x", None, time.time(), cache.metadata.counter("gs://test", "b/x"))]
    )
    assert cache.metadata.lookup("gs://test", "b/x").counter == open_cache(tmp_path).metadata.counter(
        "gs://test", "b/x"
    )
    replace_call(monkeypatch, "os.uname", lambda: SimpleNamespace(nodename="two"))
    other = open_cache(tmp_path)
    assert not other.has(key_of(), 0)
    assert other.metadata.lookup("gs://test", "b/x") is None
    assert other.metadata.counter("gs://test", "b/x") != cache.metadata.counter("gs://test", "b/x")


MOUNTS = [
    "1 0 8:1 / / rw - ext4 /dev/sda rw",
    "2 1 0:50 / /content/drive rw - fuse.drive drive rw",
    "3 1 0:51 / /mnt/my\\040nfs rw shared:1 - nfs4 host:/x rw",
    "4 3 8:2 / /mnt/my\\040nfs/local rw - fuseblk /dev/sdb rw",
]
KINDS = {
    "/home/me": "ext4", "/content/drive": "fuse", "/content/drive/My Drive/x": "fuse", "/content/drivers": "ext4",
    "/mnt/my nfs/x": "nfs4", "/mnt/my nfs/local/x": "fuseblk",
}  # fmt: skip


@pytest.mark.parametrize("path", KINDS)
def test_the_innermost_mount_tells_the_file_system(path):
    assert disk._type_of_mount(path, MOUNTS) == KINDS[path]


def test_where_a_mapped_page_may_end_the_process_the_index_has_no_shared_memory(
    open_cache, tmp_path, monkeypatch
):
    """Also an index that was copied from a disk where it had a write-ahead log."""
    put(open_cache(tmp_path), key_of(), 0)
    copy = tmp_path / "copy" / NAME
    shutil.copytree(tmp_path / NAME, copy)
    (copy / "index.db-shm").unlink()
    monkeypatch.setattr(disk, "maps_safely", lambda path: False)
    cache = open_cache(copy.parent)
    put(cache, key_of(), 1)
    assert cache.usage()[0] == 2
    assert not (copy / "index.db-shm").exists()
    assert not (copy / "index.db-wal").exists()
