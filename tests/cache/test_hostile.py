"""Hostile surroundings: other users, strange umasks, planted symlinks, odd names."""

import contextlib
import os
import shutil
import tempfile
import unicodedata
from pathlib import Path

import pytest

from cachedfs.cache.directory import FORMAT
from cachedfs.cache.index.metadata_records import MetadataRecord
from cachedfs.common.types import ObjectInfo
from cachedfs.errors import CacheError
from tests.cache.audit import audit, recount
from tests.cache.days import use
from tests.cache.helpers import AMPLE, content, file_of, key_of, put, whole

ORIGIN, NOW = "gs://test", 1.7e9
US, THEM = 12345, 12346  # users of no name
USE = "tests.cache.helpers:use_as"
NAME = f"cachedfs-{FORMAT}-{os.geteuid()}"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


# Other users, strange umasks
@pytest.fixture
def shared():
    """A folder that every user of the machine can reach: pytest's own are for us alone."""
    folder = Path(tempfile.mkdtemp(prefix="cachedfs-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@needs_root
@pytest.mark.parametrize(
    ("owner", "mode", "umask"), [(0, 0o1777, 0), (0, 0o1777, 0o077), (THEM, 0o777, 0o777)]
)
def test_under_any_umask_and_in_anybody_s_folder_the_cache_works_and_is_ours_alone(
    shared, fork_server, owner, mode, umask
):
    shared.chmod(mode)
    os.chown(shared, owner, owner)
    for _ in range(2):  # the second process finds what the first one made
        root = Path(fork_server.run(USE, str(shared), US, umask).result)
    assert root == shared / f"cachedfs-{FORMAT}-{US}"
    for path in [root, *root.rglob("*")]:
        status = path.lstat()
        assert (status.st_uid, status.st_mode & 0o777) == (US, 0o700 if path.is_dir() else 0o600), path


@needs_root
def test_what_another_user_puts_in_place_of_our_folder_is_neither_believed_nor_written(open_cache, shared):
    """In a folder that anybody may write, and that is not sticky, he can rename ours away."""
    key, other = key_of(), key_of("b/other")
    forger = open_cache(shared / "his")
    forged = b"forged" + content(key, 0)[6:]
    forger.put([(key.block(0), forged), (other.block(0), forged)], AMPLE)
    forger.metadata.keep_records(
        [MetadataRecord(ORIGIN, "b/x", ObjectInfo("b/x", size=5, fingerprint="forged"), NOW, 5)]
    )
    forger.metadata.counter(ORIGIN, "b/x")
    forger.close()
    cache = open_cache(shared / "ours")
    put(cache, key, 0)
    cache.metadata.counter(ORIGIN, "b/x")
    cache.close()
    his = Path(forger.root)
    for path in [his, *his.rglob("*")]:
        os.chown(path, THEM, THEM)
    Path(cache.root).rename(shared / "away")
    his.rename(cache.root)
    before = snapshot(Path(cache.root, "blocks"))
    cache._own.look_at = 0.0
    cache._own.index.look_again()
    assert whole(cache, key, 0) is None
    assert whole(cache, other, 0) is None
    assert cache.metadata.lookup(ORIGIN, "b/x") is None
    with pytest.raises(CacheError, match=f"belongs to user {THEM}"):
        put(cache, key, 1)
    with pytest.raises(CacheError):
        cache.metadata.keep_records([MetadataRecord(ORIGIN, "b/x", None, NOW, 5)])
    with pytest.raises(ValueError, match=f"belongs to user {THEM}"):
        open_cache(shared / "ours")
    assert snapshot(Path(cache.root, "blocks")) == before


# Planted symlinks
def snapshot(folder):
    """Return what is below a folder, down to the bytes and the time they were written."""
    found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*"))}
    return {
        name: (path.lstat().st_ino, path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for name, path in found.items()
    }


PLACES = [
    "blocks", "tmp", "local-copies", "folder of blocks", "index.db", "index.db-wal", "index.db-shm", "index.db-journal",
    "locks", "change-counters", "access-records", "block",
]  # fmt: skip


@pytest.mark.parametrize("dangling", [False, True])
@pytest.mark.parametrize("name", PLACES)
def test_a_planted_symlink_is_never_followed_to_write_outside(open_cache, tmp_path, name, dangling):
    cache = open_cache(tmp_path / "c")
    put(cache, key_of(), 0, 1)
    cache.metadata.keep_records([MetadataRecord(ORIGIN, "b/y", None, NOW, 5)])
    cache.metadata.counter(ORIGIN, "b/x")
    cache.locks.take(9)
    block, outside = file_of(cache, key_of(), 0), tmp_path / "outside"
    place = {"folder of blocks": block.parent, "block": block}.get(name) or Path(cache.root, name)
    outside.mkdir()
    target = outside / "precious"
    if not dangling and place.is_dir():
        shutil.copytree(place, target)  # all that is there is ours, and would be taken for ours
    elif not dangling:
        target.write_bytes(place.read_bytes() if place.exists() else b"somebody's")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    place.symlink_to(target)
    before = snapshot(outside)
    cache._own.look_at = cache._own._again_at = 0.0
    cache._own.index.look_again()
    use(cache, AMPLE)
    with contextlib.suppress(ValueError):  # a new process may refuse the whole directory
        use(open_cache(tmp_path / "c"), AMPLE)
    assert snapshot(outside) == before


# Names made to break things

NFC, NFD = unicodedata.normalize("NFC", "b/é"), unicodedata.normalize("NFD", "b/é")
NAMES = [
    "b/..", "b/../../../../etc/passwd", "../b", "/etc/passwd", "b//x", "b/x/", "b/.", "", "b/\0", "b/x\0y", "b/x",
    "b/x\ny", "b/\r\n", "b/\ud800", "b/\udcff", NFC, NFD, "b/" + "é" * 511, "b/" + "é" * 510 + "e\u0301", "b/" + "\U0001f600" * 255,
    "b/%00", "b/%2e%2e", "b/'; DROP TABLE blocks; --", "b/{}", "b/%s%n", "-rf", "~", "b/*", "b/\u202e", "CON", "b/\ufeff",
]  # fmt: skip


def test_names_of_any_kind_are_kept_apart_and_stay_inside(open_cache, tmp_path):
    assert NFC != NFD
    cache = open_cache(tmp_path / "c")
    counters = {name: cache.metadata.counter(ORIGIN, name) for name in NAMES}
    for name in NAMES:
        put(cache, key_of(name), 0, size=100)
        info = ObjectInfo(name, size=100, fingerprint=f"of {name}")
        cache.metadata.keep_records([MetadataRecord(ORIGIN, name, info, NOW, counters[name])])
        cache.pin(ORIGIN, name)
    cache.close()
    again = open_cache(tmp_path / "c")
    for name in NAMES:
        assert whole(again, key_of(name), 0) == content(key_of(name), 0, 100)
        assert again.metadata.lookup(ORIGIN, name).info.fingerprint == f"of {name}"
        again.metadata.changed(ORIGIN, [name])
    assert set(again.pins()) == {(ORIGIN, name) for name in NAMES}
    assert audit(again).ok
    recount(again)  # from the trailers alone
    assert again.usage()[0] == len(NAMES)
    again.evict(ORIGIN, NFC)
    assert not again.has(key_of(NFC), 0)
    assert again.has(key_of(NFD), 0)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert [path.name for path in (tmp_path / "c").iterdir()] == [NAME]
