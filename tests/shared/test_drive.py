"""A shared cache in a folder of Google Drive: few requests, few files, and not all of the account's storage."""

import asyncio
import contextlib
import math
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest

from cachedfs.cache.block_store import BlockStore
from cachedfs.common.types import CacheBounds, ObjectKey
from cachedfs.config import DRIVE_SIZE, Config
from cachedfs.origins.drive.origin import DriveOrigin
from cachedfs.shared.leases import Leases
from cachedfs.shared.piece import GATHERED
from cachedfs.shared.shared_drive import SharedDrive
from cachedfs.shared.shared_store import BASE
from cachedfs.shared.whole_files import WholeFiles
from tests.cli.helpers import json_of
from tests.shared.conftest import asked, flush, leave, place_of, quiet, read_all
from tests.support import MiB, noise


@pytest.fixture
def place(drive):
    """The URL of a shared cache on Drive. The origin of the data is another one, see `origin`."""
    return drive.url("shared", "drive://")


def kept_at(place):
    """Return the names of the files of the shared cache, without what tells the time."""
    names = [path.rpartition("/")[2] for path in fsspec.filesystem("drive").find(f"{place}/{BASE}")]
    return sorted(name for name in names if not name.startswith("tmp."))


def test_what_one_session_has_read_the_next_one_reads_from_few_large_files(
    put_there, origin, node, drive, place
):
    data = put_there(n=60, shared_cache=place)
    kinds = [name.partition(".")[0] for name in kept_at(place)]
    assert kinds == ["gathered", *["runs"] * 3]  # the small ones, and 20 MiB in pieces of 8
    drive.asked()
    fs = node("b", shared_cache=place)
    read_all(fs, data)
    assert asked(origin) == []
    # The end of the gathered file, the file, and the pieces: each at most by two requests.
    assert 2 + 3 <= drive.asked().count("media") <= 2 + 2 * 3
    assert fs.stats().requests == 0
    drive.asked()
    read_all(fs, data)
    assert drive.asked() == []


def test_there_are_no_leases_on_drive(origin, node, place, monkeypatch):
    monkeypatch.setattr(Leases, "take", None)
    data, fs = origin.put("b/k", noise(8 * MiB)), node("a", shared_cache=place)
    fs._objects.engine.shared.reads.leases._met_at = math.inf  # it would take one before it asks the origin
    fs.ls("b")
    assert fs.cat_file("b/k") == data


def test_a_folder_of_a_shared_drive_is_a_shared_cache_too(put_there, origin, node, drive):
    drive.server.share_drive(drive.name)
    place = f"cdrive://shared:{drive.name}/cache"
    data = put_there(n=3, shared_cache=place)
    read_all(node("b", shared_cache=place), data)
    assert asked(origin) == []


def test_a_small_local_cache_is_not_filled_with_what_nobody_asked_for(put_there, node, drive, place):
    data = put_there(n=9, shared_cache=place)
    fs = node("b", shared_cache=place, cache_size="1MiB", block_size="64KiB")
    small = [path for path in data if path != "b/big"]
    assert fs.cat_file(small[0]) == data[small[0]]
    drive.asked()
    assert fs.cat_file(small[1]) == data[small[1]]
    assert drive.asked() == ["media"]


def test_what_is_replaced_there_is_deleted_and_not_in_the_trash(origin, node, drive, place):
    fs, kept = node("a", shared_cache=place), []
    for name in ("b/one", "b/two"):
        origin.put(name, noise(10_000))
        fs.cat_file(name)
        flush(fs)
        kept.append(kept_at(place))
    [before], [after] = kept
    assert after != before  # it has both
    assert drive.server.find(f"{drive.name}/shared/{BASE}/{before}") == []


def test_the_last_tenth_of_the_accounts_storage_stays_free(put_there, drive, place, monkeypatch, caplog):
    async def storage_quota(self, path):
        return 1000 * MiB, 99 * MiB

    monkeypatch.setattr(DriveOrigin, "storage_quota", storage_quota)
    put_there(n=3, shared_cache=place)
    assert kept_at(place) == []
    [message] = quiet(caplog)
    assert "less than 1/10 of the account's storage is free" in message


def test_a_shared_cache_on_drive_has_a_size_limit_by_default():
    given = {"shared_cache": "cdrive://My Drive/x"}
    assert Config.resolve(given).shared[0] == "drive://My Drive/x"
    assert Config.resolve(given).shared.size == DRIVE_SIZE
    assert Config.resolve({**given, "shared_cache_size": "7GB"}).shared.size == 7_000_000_000
    assert Config.resolve({"shared_cache": "gs://b/x"}).shared.size is None


async def read_whole(files, name, key):
    return await files.get(name, key, CacheBounds(size=None, keep_free=0), with_next=True)


def test_objects_of_another_account_are_not_kept_under_its_name(filled, node, shared, tmp_path):
    data = filled(n=3)
    fs = node("a")
    read_all(fs, data)
    ours, info = fs._objects.identity, fs._objects.known("b/d/0/0").info
    leave()
    folder = place_of(shared)
    (name,) = folder.listed(GATHERED)
    for identity, is_kept in ((f"{ours}|another", False), (ours, True)):
        cache = BlockStore(str(tmp_path / "b"), explicit=True)
        key = ObjectKey(identity, info.path, info.fingerprint, MiB)
        with contextlib.closing(cache), ThreadPoolExecutor(1) as pool:
            whole = WholeFiles(folder, cache, pool, {})
            found = asyncio.run(read_whole(whole, name, key))
            assert len(found.index().pieces) == 3
            assert cache.has(key, 0) == is_kept


def test_share_clean_removes_files_on_drive(origin, node, drive, place):
    data = {f"b/{i}": origin.put(f"b/{i}", noise(5 * MiB, i)) for i in range(3)}
    assert node("a", shared_cache=place).cat(list(data)) == data
    leave()
    assert json_of("share", "stats", place)["files"] == 4
    assert json_of("share", "clean", place, "--size", "6MiB")["bytes"] <= 6 * MiB
    with contextlib.closing(SharedDrive(place, is_read_only=True)) as found:
        found.check()
        assert len(list(found.files())) <= 2
