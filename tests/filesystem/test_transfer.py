"""Export and import of cached blocks: requests, damage, versions, limits and kills."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import zipfile
from unittest import mock

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachedfs.cache.block_store import BlockStore
from cachedfs.common.types import ObjectKey
from cachedfs.errors import CacheError, ObjectNotFound, OriginUnavailable
from cachedfs.filesystem import import_
from cachedfs.filesystem.import_ import age_kept
from cachedfs.shared import gatherer, shared_folder
from cachedfs.shared.shared_folder import OpenShared
from tests.cache.audit import audit
from tests.cache.helpers import flip
from tests.support import KiB, MiB, forget, noise, tally

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly")  # raised by gcsfs in aiohttp


@pytest.fixture
def machine(own_cache, tmp_path, monkeypatch):
    """Go to another machine: `machine("b")` is a filesystem with its own cache and nothing in memory."""

    def go(name, place, **options):
        forget()
        directory = tmp_path / f"cache-{name}"
        given = {"cache_dir": str(directory), "keep_free": 0, **options}
        monkeypatch.setitem(fsspec.config.conf, "cachedfs", given)
        place.cache_dir = directory
        return fsspec.filesystem("cachedfs", target_protocol=place.protocol)

    return go


def filled(place, n, size=2000, folders=10):
    """Put n objects; return them by path."""
    names = {f"data/{i % folders}/{i:05}.bin": noise(size, seed=i) for i in range(n)}
    return {place.path(name): place.put(name, content) for name, content in names.items()}


def read_all(fs, place, data):
    assert fs.cat(fs.find(place.path("data"))) == data


def exported_to(target, place, machine, n=20):
    """Export n objects from machine "a"; return them by path."""
    data, fs = filled(place, n), machine("a", place)
    read_all(fs, place, data)
    assert fs.export_cache(place.path("data"), str(target)).objects == n
    return data


def check_cache(place):
    cache = BlockStore(str(place.cache_dir), explicit=True)
    report = audit(cache)
    cache.close()
    assert report.ok or (report._replace(leftovers=()).ok and report.leftovers), report


@pytest.fixture
def small_files(monkeypatch):
    """Make files of about 24 KB."""
    monkeypatch.setattr(gatherer, "FILE", 24 * KiB)


# Cost in requests.
def test_hundreds_of_small_objects_are_imported_in_a_few_requests(cloud, machine, clock):
    fs = machine("a", cloud, max_age=3600)  # longer than a slow machine needs
    data = filled(cloud, 200, size=1000)
    read_all(fs, cloud, data)
    target = cloud.url("carry", "gs://")
    cloud.asked()
    done = fs.export_cache(cloud.path("data"), target)
    assert (done.objects, done.blocks, done.bundles) == (200, 200, 2)
    assert cloud.asked() == ["list", *["upload"] * 2]  # blocks, metadata
    fs = machine("b", cloud, max_age=3600)
    got = fs.import_cache(target)
    assert (got.blocks, got.bytes, got.here, got.left, got.bad) == (200, done.bytes, 0, 0, ())
    assert cloud.asked() == ["list", *["media"] * 3]  # index and blocks of a file, metadata
    read_all(fs, cloud, data)
    assert fs.cat_file(cloud.path("data/3/00003.bin")) == data[cloud.path("data/3/00003.bin")]
    assert cloud.asked() == []
    clock(3601)
    read_all(fs, cloud, data)
    assert cloud.asked() == ["list"]
    check_cache(cloud)


def test_a_second_export_or_import_transfers_nothing_twice(cloud, machine, small_files):
    fs = machine("a", cloud)
    data = filled(cloud, 100)
    read_all(fs, cloud, data)
    target = cloud.url("carry", "gs://")
    first = fs.export_cache(cloud.path("data"), target)
    assert first.bundles > 4
    assert first.sent == first.bytes == 200_000
    assert fs.export_cache(cloud.path("data"), target) == first._replace(sent=0)
    cloud.put("data/5/new", b"new")
    fs.ls(cloud.path("data/5"), refresh=True)
    data[cloud.path("data/5/new")] = fs.cat_file(cloud.path("data/5/new"))
    again = fs.export_cache(cloud.path("data"), target)
    assert (again.objects, again.sent, again.bundles) == (101, 3, first.bundles + 1)
    names = fs.find(cloud.path("carry"), refresh=True)
    assert len(names) == again.bundles  # the metadata of before is removed
    fs = machine("b", cloud)
    assert fs.import_cache(target).blocks == 101
    cloud.asked()
    got = fs.import_cache(target)
    assert (got.blocks, got.bytes, got.here) == (0, 0, 101)
    assert cloud.asked() == ["list", *["media"] * again.bundles]  # indexes and metadata
    fs.evict(cloud.path("data/5"))
    assert fs.import_cache(target).blocks == 11


@pytest.mark.parametrize("where", ["here", "there"])
def test_an_export_is_a_shared_cache_and_a_shared_cache_is_an_export(cloud, machine, tmp_path, where):
    place = str(tmp_path / "carry") if where == "here" else cloud.url("carry", "gs://")
    data = exported_to(place.replace("gs://", "cgs://"), cloud, machine)  # it is not cached itself
    fs = machine("b", cloud, shared_cache=place)
    read_all(fs, cloud, data)
    assert fs.stats().requests == 0
    cloud.put("more", noise(9 * MiB))
    more = fs.cat_file(cloud.path("more"))
    fs = machine("c", cloud)
    assert fs.import_cache(place.replace("gs://", "cgs://")).blocks == fs.stats().blocks == 29
    cloud.asked()
    read_all(fs, cloud, data)
    assert fs.cat_file(cloud.path("more")) == more
    assert cloud.asked() == []


@pytest.mark.parametrize("where", ["here", "there"])
def test_an_export_in_one_zip_file_replaces_an_earlier_one(cloud, machine, tmp_path, small_files, where):
    target = str(tmp_path / "carry.zip") if where == "here" else cloud.url("carry.zip", "gs://")
    data = filled(cloud, 40)
    for part in (0, 20):
        fs = machine("a", cloud)
        read = {path: data[path] for path in sorted(data)[: 20 + part]}
        assert fs.cat(list(read)) == read
        assert fs.export_cache(cloud.path("data"), target).blocks == len(read)
    assert machine("b", cloud).import_cache(target).blocks == 40
    assert os.listdir(tmp_path).count("carry.zip.part") == 0


def test_an_export_that_fails_keeps_the_previous_export(cloud, machine, exported, monkeypatch):
    data, folder = exported
    fs = machine("a", cloud)
    cloud.put("data/0/new", b"new")
    fs.ls(cloud.path("data/0"), refresh=True)
    fs.cat_file(cloud.path("data/0/new"))

    def full(fd, buffers, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shared_folder.disk, "write_all", full)
        with pytest.raises(OSError, match="No space left"):
            fs.export_cache(cloud.path("data"), str(folder))
    assert machine("b", cloud).import_cache(str(folder)).blocks == len(data)
    fs = machine("a", cloud)
    assert fs.export_cache(cloud.path("data"), str(folder)).objects == len(data) + 1
    assert machine("c", cloud).import_cache(str(folder)).blocks == len(data) + 1


# Damage is detected.
@pytest.fixture
def exported(cloud, machine, tmp_path, small_files):
    """Objects, and the folder with an export of them in several files."""
    return exported_to(tmp_path / "carry", cloud, machine, 60), tmp_path / "carry"


def test_damaged_blocks_are_left_out_of_an_export(cloud, machine, tmp_path):
    data = filled(cloud, 30)
    fs = machine("a", cloud)
    read_all(fs, cloud, data)
    fs = machine("a", cloud)  # none of them was read in this process
    for block in sorted(cloud.cache_dir.glob("*/blocks/*/*"))[::3]:
        flip(block, 10)
    done = fs.export_cache(cloud.path("data"), str(tmp_path / "carry"))
    assert (done.objects, done.blocks) == (20, 20)
    fs = machine("b", cloud)
    assert fs.import_cache(str(tmp_path / "carry")).blocks == 20
    read_all(fs, cloud, data)


def with_blocks(folder):
    """Return the files of an export that have blocks."""
    return sorted(path for path in folder.rglob("gathered/*") if OpenShared(path).index().pieces)


def with_metadata(folder):
    (path,) = set(folder.rglob("gathered/*")) - {*with_blocks(folder)}
    return path


def test_an_import_beside_one_that_is_stopped_goes_on(cloud, machine, exported, monkeypatch):
    data, target = exported
    monkeypatch.setattr(import_, "OVERDUE_S", 0.0)
    fs = machine("b", cloud)
    cache = fs._objects.engine.cache
    names = [f"gathered/{path.name}" for path in with_blocks(target)]
    locks = {ObjectKey("", name, "who imports it?", 0).hash64(0) for name in names}
    assert all(map(cache.locks.take, locks))
    assert fs.import_cache(str(target)).blocks == len(data)
    assert not any(map(cache.locks.take, locks))  # the other one still has them


@pytest.mark.parametrize("change", ["compressed", "header", "cut off"])
def test_what_is_damaged_in_a_zip_file_is_named(cloud, machine, tmp_path, small_files, change):
    path = tmp_path / "carry.zip"
    exported_to(path, cloud, machine)
    with zipfile.ZipFile(path) as file:
        members = {each.filename: file.read(each) for each in file.infolist()}
    first = next(iter(members))
    if change == "cut off":
        members[first] = members[first][:-1]
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            is_deflated = change == "compressed" and name == first
            file.writestr(name, content, zipfile.ZIP_DEFLATED if is_deflated else zipfile.ZIP_STORED)
    if change == "header":
        flip(path, 26)  # the length of a name
    got = machine("b", cloud).import_cache(str(path))
    assert (got.blocks < 20, len(got.bad)) == (True, 1)


@pytest.mark.parametrize("harm", [700, -60, -23, "cut off"])  # in the first block, and in the index
@pytest.mark.parametrize("part", ["metadata", "blocks"])
def test_every_wrong_byte_of_an_export_is_detected(cloud, machine, exported, part, harm):
    """The file is named, and all that is not in it is imported."""
    data, folder = exported
    file = with_metadata(folder) if part == "metadata" else with_blocks(folder)[0]
    is_one_block = part == "blocks" and harm == 700
    n = 60 if part == "metadata" else 1 if is_one_block else len(OpenShared(file).index().pieces)
    if harm == "cut off":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        flip(file, harm)
    tally("bytes of exports changed")
    fs = machine("b", cloud)
    got = fs.import_cache(str(folder))
    assert got.blocks == 60 - n
    assert [file.name in each for each in got.bad] == [not got.ok] == [True]
    assert ("page 0 of a piece is damaged" in got.bad[0]) == is_one_block
    cloud.asked()
    read_all(fs, cloud, data)
    assert cloud.asked() == ["list"] * (part == "metadata") + ["media"] * n


def test_metadata_that_cannot_be_stored_makes_the_import_fail(cloud, machine, exported, monkeypatch):
    def full(*args, **options):
        raise CacheError("the disk is full")

    data, folder = exported
    fs = machine("b", cloud)
    monkeypatch.setattr(fs._objects.engine.cache.metadata, "keep_records", full)
    monkeypatch.setattr(fs._objects.engine.cache.metadata, "keep_listings", full)
    got = fs.import_cache(str(folder))
    assert (got.blocks, got.ok) == (60, False)
    assert ["not stored: the disk is full" in each for each in got.bad] == [True]
    read_all(fs, cloud, data)


def test_what_is_no_export_is_an_error(cloud, machine, tmp_path):
    fs, archive = machine("b", cloud), tmp_path / "carry.zip"
    (tmp_path / "empty").mkdir()
    for name in ("empty", "none"):
        with pytest.raises(ObjectNotFound, match="run export again"):
            fs.import_cache(str(tmp_path / name))
    with pytest.raises(ObjectNotFound, match=r"carry.zip"):
        fs.import_cache(str(archive))
    archive.write_bytes(noise(1000))
    with pytest.raises(OriginUnavailable, match="no zip file"):
        fs.import_cache(str(archive))
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("../../x", b"x")
    with pytest.raises(ObjectNotFound, match="run export again"):
        fs.import_cache(str(archive))


def test_what_cannot_be_exported_is_an_error(cloud, machine, tmp_path):
    fs = machine("b", cloud)
    with pytest.raises(CacheError, match="is cached, so nothing was exported"):
        fs.export_cache((cloud.path("data"), cloud.path("more")), str(tmp_path / "none"))
    with pytest.raises(ValueError, match="no path was given"):
        fs.export_cache([], str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_an_export_of_another_account_is_refused(cloud, machine, exported):
    machine("b", cloud)
    other = fsspec.filesystem("cachedfs", target_protocol="gs", target_options={"token": "google_default"})
    with pytest.raises(ValueError, match="as the account, that it was exported with"):
        other.import_cache(str(exported[1]))


@pytest.mark.parametrize(
    ("before", "after", "n"), [(MiB, 4 * MiB, 6), (4 * MiB, MiB, 21), (3 * MiB, MiB, 21)]
)
def test_an_import_fills_blocks_of_any_size(cloud, machine, tmp_path, before, after, n):
    data = cloud.put("data/big", noise(21 * MiB))
    machine("a", cloud, block_size=before).cat_file(cloud.path("data/big"))
    fs = machine("a", cloud, block_size=before, offline=True)
    cloud.asked()
    fs.export_cache(cloud.path("data"), str(tmp_path / "carry"))
    fs = machine("b", cloud, block_size=after, offline=True)
    assert fs.import_cache(str(tmp_path / "carry")).blocks == n
    assert fs.cat_file(cloud.path("data/big")) == data
    assert cloud.asked() == []


# Imported data is never older than `max_age` allows.
@pytest.mark.parametrize("where", ["cloud", "drive"])
def test_objects_that_changed_since_the_export_are_read_anew_after_max_age(
    where, request, machine, clock, tmp_path
):
    place = request.getfixturevalue(where)
    data = exported_to(tmp_path / "carry", place, machine, 30)
    changed = place.path("data/3/00003.bin")
    data[changed] = place.put("data/3/00003.bin", b"another")
    data[place.path("data/4/new")] = place.put("data/4/new", b"new")
    place.delete("data/5/00005.bin")
    del data[place.path("data/5/00005.bin")]
    clock(61)
    fs = machine("b", place)
    assert fs.import_cache(str(tmp_path / "carry")).blocks == 30
    assert fs.cat_file(changed) == b"another"
    read_all(fs, place, data)


def test_imported_metadata_keeps_its_age(cloud, machine, clock, tmp_path):
    cloud.put("data/a", b"old")
    fs = machine("a", cloud)
    fs.cat_file(cloud.path("data/a"))
    clock(40)
    fs.export_cache(cloud.path("data"), str(tmp_path / "carry"))
    cloud.put("data/a", b"new")
    fs = machine("b", cloud)
    fs.import_cache(str(tmp_path / "carry"))
    assert fs.cat_file(cloud.path("data/a")) == b"old"
    clock(25)  # 65 seconds after the lookup
    assert fs.cat_file(cloud.path("data/a")) == b"new"


@pytest.mark.parametrize("is_listed", [True, False])
def test_an_import_does_not_undo_writes_of_this_machine(cloud, machine, clock, tmp_path, is_listed):
    data = filled(cloud, 20)
    fs = machine("a", cloud, max_age=float("inf"))
    assert fs.cat(fs.find(cloud.path("data")) if is_listed else list(data)) == data
    fs.export_cache(cloud.path("data"), str(tmp_path / "carry"))
    clock(5)
    fs = machine("b", cloud, max_age=float("inf"))
    fs.pipe_file(cloud.path("data/3/00003.bin"), b"mine")
    fs.pipe_file(cloud.path("data/3/new"), b"new")
    fs.import_cache(str(tmp_path / "carry"))
    assert fs.cat_file(cloud.path("data/3/00003.bin")) == b"mine"
    cloud.asked()
    assert fs.cat_file(cloud.path("data/4/00004.bin")) == data[cloud.path("data/4/00004.bin")]
    assert cloud.asked() == []
    assert cloud.path("data/3/new") in fs.find(cloud.path("data"))


def test_a_later_change_feed_does_not_confirm_imported_metadata(drive, machine, clock, tmp_path):
    exported_to(tmp_path / "carry", drive, machine, 30)
    drive.put("data/3/00003.bin", b"another")
    clock(61)
    fs = machine("b", drive)
    drive.put("other/x", b"x")
    assert len(fs.ls(drive.path("other"))) == 1  # its feed begins after the change
    fs.import_cache(str(tmp_path / "carry"))
    assert fs.cat_file(drive.path("data/3/00003.bin")) == b"another"


@given(st.floats(0, 2e9), st.floats(0, 1e6), st.floats(-1e6, 1e6))
@settings(max_examples=50)
def test_metadata_never_becomes_younger_by_an_import(checked_at, age, later):
    made_at = checked_at + age
    now = made_at + later  # the clocks of the machines may differ
    with mock.patch.object(import_.clock, "now", return_value=now):
        at = age_kept(checked_at, made_at=made_at)
    assert at <= checked_at
    assert now - at >= age * (1 - 1e-6) - 1e-3


# The size limit.
def test_an_import_keeps_the_size_limit_and_pinned_blocks(cloud, machine, tmp_path):
    data = filled(cloud, 24, size=MiB, folders=1)
    fs = machine("a", cloud)
    read_all(fs, cloud, data)
    fs.export_cache(cloud.path("data"), str(tmp_path / "carry"))
    fs = machine("b", cloud, cache_size="12MiB")
    pinned = cloud.put("pinned", noise(4 * MiB, seed=99))
    fs.pin(cloud.path("pinned"))
    assert fs.cat_file(cloud.path("pinned")) == pinned
    got = fs.import_cache(str(tmp_path / "carry"))
    assert got.blocks + got.left == 24
    assert 5 <= got.blocks <= 8
    assert fs.cached_extent(cloud.path("pinned")) == [(0, 4 * MiB)]
    assert fs.stats().bytes_cached <= 12 * MiB
    again = fs.import_cache(str(tmp_path / "carry"))
    assert again.here == got.blocks  # the rest does not displace blocks that are cached
    assert again.blocks <= 1
    read_all(fs, cloud, data)
    check_cache(cloud)


# Kills.

EXPORT = """
    import os, signal, sys, warnings, fsspec
    from fsspec.callbacks import Callback
    from cachedfs.shared import gatherer
    gatherer.FILE = 24 << 10
    warnings.simplefilter("ignore")

    class Deadly(Callback):
        def relative_update(self, inc=1):
            super().relative_update(inc)
            if self.value > int(sys.argv[3]):
                os.kill(os.getpid(), signal.SIGKILL)

    fs = fsspec.filesystem("cachedfs", target_protocol="gs")
    if sys.argv[1] == "export":
        print(fs.export_cache(os.environ["BUCKET"] + "/data", sys.argv[2], callback=Deadly()).sent)
    else:
        print(fs.import_cache(sys.argv[2], callback=Deadly()).blocks)
"""


def killed(place, *arguments):
    command = [sys.executable, "-c", textwrap.dedent(EXPORT), *map(str, arguments)]
    done = subprocess.run(command, env=place._environment(), capture_output=True, timeout=600, check=False)
    assert done.returncode == -signal.SIGKILL
    tally("exports and imports killed")


def test_a_killed_export_is_not_complete_and_can_be_resumed(cloud, machine, small_files):
    data = filled(cloud, 100)
    read_all(machine("a", cloud), cloud, data)
    forget()
    target = cloud.url("carry", "gs://")
    killed(cloud, "export", target, 100_000)
    with pytest.raises(ObjectNotFound, match="no complete export"):
        machine("b", cloud).import_cache(target)
    done = machine("a", cloud).export_cache(cloud.path("data"), target)
    assert done.objects == 100
    assert done.sent <= 100_000
    assert machine("b", cloud).import_cache(target).blocks == 100


def test_a_killed_import_leaves_a_valid_cache_and_can_be_resumed(cloud, machine, exported):
    data, folder = exported
    machine("b", cloud)
    forget()
    killed(cloud, "import", folder, 60_000)
    fs = machine("b", cloud)
    n_before = fs.stats().blocks
    got = fs.import_cache(str(folder))
    assert 0 < got.here <= n_before  # others were being written
    assert got.blocks + got.here == 60
    cloud.asked()
    read_all(fs, cloud, data)
    check_cache(cloud)


def test_an_export_adds_to_those_of_other_machines_and_origins(cloud, drive, machine, tmp_path):
    folder, everything = str(tmp_path / "carry"), {}
    for name, place in (("a", cloud), ("b", cloud), ("c", drive)):
        path = place.path(f"data/{name}")
        everything[path] = place.put(f"data/{name}", noise(1000))
        fs = machine(name, place)
        fs.cat_file(path)
        assert fs.export_cache(place.path("data"), folder).objects == 1
    fs = machine("d", cloud)
    assert fs.import_cache(folder).blocks == 2
    assert fs.cat(list(everything)[:2]) == dict(list(everything.items())[:2])
    assert machine("d", drive).import_cache(folder).blocks == 1


def test_a_drive_session_after_an_import_lists_only_expired_folders(drive, machine, clock):
    fs = machine("a", drive)
    data = filled(drive, 40, folders=4)
    read_all(fs, drive, data)
    clock(3600)
    read_all(fs, drive, data)  # polls the change feed, so all metadata is an hour younger
    target = drive.url("carry", "drive://")
    assert fs.export_cache(drive.path("data"), target).objects == 40
    drive.asked()
    fs = machine("b", drive)
    assert fs.import_cache(target).blocks == 40
    assert drive.asked() == [
        *["list"] * 2,
        *["media"] * 3,
    ]  # the folders above, and the names in the last one
    read_all(fs, drive, data)
    assert drive.asked() == []
    clock(3600)
    read_all(fs, drive, data)
    assert drive.asked() == ["change", "get", *["list"] * 7]
    clock(3600)
    read_all(fs, drive, data)
    assert drive.asked() == ["change"]
