"""Export and import of cached blocks: requests, damage, versions, limits, kills, and the format."""

import contextlib
import dataclasses
import errno
import gzip
import io
import json
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import zipfile

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from cachedfs.cache.block_store import BlockStore
from cachedfs.common.types import ObjectKey
from cachedfs.errors import CachedFSError, CacheError, ObjectNotFound, OriginUnavailable
from cachedfs.shared import metadata_rows
from cachedfs.shared.metadata_rows import DamagedFile, MetadataImport, decoded_rows, encoded_rows
from cachedfs.snapshot import archive, import_, manifest
from cachedfs.snapshot.exported_metadata import age_kept
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


def check_cache(place):
    cache = BlockStore(str(place.cache_dir), explicit=True)
    report = audit(cache)
    cache.close()
    assert report.ok or (report._replace(leftovers=()).ok and report.leftovers), report


@pytest.fixture
def small_bundles(monkeypatch):
    """Make bundles of about 24 KB."""
    monkeypatch.setattr(archive, "LEAST", 16 * KiB)
    monkeypatch.setattr(archive, "MEAN", 8 * KiB)
    monkeypatch.setattr(import_, "BATCH", 10 * KiB)


SMALL = """
    from cachedfs.snapshot import archive, import_
    import_.BUNDLES_AT_ONCE = 1
    archive.LEAST, archive.MEAN = 16 << 10, 8 << 10
"""


def test_an_export_through_a_cachedfs_url_is_not_cached_itself(cloud, machine):
    fs = machine("a", cloud)
    data = filled(cloud, 20)
    read_all(fs, cloud, data)
    target = cloud.url("carry", "gs://").replace("gs://", "cgs://", 1)
    fs.export_cache(cloud.path("data"), target)
    fs = machine("b", cloud)
    assert fs.import_cache(target).blocks == 20
    assert fs.stats().blocks == 20


# Cost in requests.
def test_hundreds_of_small_objects_are_imported_in_a_few_requests(cloud, machine, clock):
    fs = machine("a", cloud, max_age=3600)  # longer than a slow machine needs
    data = filled(cloud, 200, size=1000)
    read_all(fs, cloud, data)
    target = cloud.url("carry", "gs://")
    cloud.asked()
    done = fs.export_cache(cloud.path("data"), target)
    assert (done.objects, done.blocks, done.bundles) == (200, 200, 1)
    assert cloud.asked() == ["list", *["upload"] * 3]  # bundle, metadata, manifest
    fs = machine("b", cloud, max_age=3600)
    got = fs.import_cache(target)
    assert (got.blocks, got.bytes, got.here, got.left, got.bad) == (200, done.bytes, 0, 0, ())
    assert cloud.asked() == ["list", *["media"] * 4]  # manifest, index and blocks of the bundle, metadata
    read_all(fs, cloud, data)
    assert fs.cat_file(cloud.path("data/3/00003.bin")) == data[cloud.path("data/3/00003.bin")]
    assert cloud.asked() == []
    clock(3601)
    read_all(fs, cloud, data)
    assert cloud.asked() == ["list"]
    check_cache(cloud)


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
    # The path of the folder, and the names in it.
    assert drive.asked() == ["get", *["list"] * 3, *["media"] * 4]
    read_all(fs, drive, data)
    assert drive.asked() == []
    clock(3600)
    read_all(fs, drive, data)
    assert drive.asked() == ["change", *["list"] * 7]
    clock(3600)
    read_all(fs, drive, data)
    assert drive.asked() == ["change"]


def test_a_second_export_or_import_transfers_nothing_twice(cloud, machine, small_bundles):
    fs = machine("a", cloud)
    data = filled(cloud, 100)
    read_all(fs, cloud, data)
    target = cloud.url("carry", "gs://")
    first = fs.export_cache(cloud.path("data"), target)
    assert first.bundles > 4
    assert first.sent > 200_000
    assert fs.export_cache(cloud.path("data"), target)._replace(sent=first.sent) == first
    assert fs.export_cache(cloud.path("data"), target).sent == 0
    cloud.put("data/5/new", b"new")
    fs.ls(cloud.path("data/5"), refresh=True)
    data[cloud.path("data/5/new")] = fs.cat_file(cloud.path("data/5/new"))
    again = fs.export_cache(cloud.path("data"), target)
    assert again.objects == 101
    assert 0 < again.sent < first.sent / 2  # the bundle with the new block, and perhaps the next one
    names = [name for name in fs.ls(cloud.path("carry"), detail=False, refresh=True) if "blocks-" in name]
    assert len(names) == again.bundles  # bundles that the manifest does not name are removed
    fs = machine("b", cloud)
    assert fs.import_cache(target).blocks == 101
    sent = cloud.server.bytes_sent()
    got = fs.import_cache(target)
    assert (got.blocks, got.bytes, got.here) == (0, 0, 101)
    assert cloud.server.bytes_sent() - sent < first.sent / 4  # manifest, indexes and metadata
    fs.evict(cloud.path("data/5"))
    assert fs.import_cache(target).blocks == 11


def test_offline_export_and_import_send_no_request_to_the_origin(cloud, machine, tmp_path):
    data = filled(cloud, 20)
    read_all(machine("a", cloud), cloud, data)
    cloud.asked()
    machine("a", cloud, offline=True).export_cache(cloud.path("data"), str(tmp_path / "carry"))
    fs = machine("b", cloud, offline=True)
    assert fs.import_cache(str(tmp_path / "carry")).blocks == 20
    read_all(fs, cloud, data)
    assert cloud.asked() == []


# An existing export is not lost.
def test_a_target_that_is_not_an_export_of_this_origin_is_not_overwritten(cloud, machine, exported):
    _, folder = exported
    fs, before = machine("a", cloud), {path: path.read_bytes() for path in folder.iterdir()}
    cloud.put("data/0/new", b"new")
    fs.ls(cloud.path("data/0"), refresh=True)
    fs.cat_file(cloud.path("data/0/new"))
    page = json.loads((folder / manifest.NAME).read_bytes())
    for content, message in [
        (b'{"name": "my web page"}', "it is invalid"),
        (json.dumps(page | {"identity": "gs:elsewhere"}).encode(), "of an export from gs:elsewhere"),
    ]:
        (folder / manifest.NAME).write_bytes(content)
        with pytest.raises(CacheError, match=rf"{manifest.NAME}.*{message}.*nothing was sent"):
            fs.export_cache(cloud.path("data"), str(folder))
        assert {path: path.read_bytes() for path in folder.iterdir()} == before | {
            folder / manifest.NAME: content
        }


def test_an_export_that_fails_at_its_manifest_keeps_the_previous_export(
    cloud, machine, exported, monkeypatch
):
    data, folder = exported
    fs, write = machine("a", cloud), LocalFileSystem.pipe_file
    cloud.put("data/0/new", b"new")
    fs.ls(cloud.path("data/0"), refresh=True)
    fs.cat_file(cloud.path("data/0/new"))

    def half(self, path, value, **options):
        if manifest.NAME not in path:
            return write(self, path, value, **options)
        write(self, path, value[: len(value) // 2], **options)
        raise OSError(errno.ENOSPC, "No space left on device", path)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "pipe_file", half)
        with pytest.raises(CachedFSError, match="No space left"):
            fs.export_cache(cloud.path("data"), str(folder))
    assert machine("b", cloud).import_cache(str(folder)).blocks == len(data)
    fs = machine("a", cloud)
    assert fs.export_cache(cloud.path("data"), str(folder)).objects == len(data) + 1
    assert machine("c", cloud).import_cache(str(folder)).blocks == len(data) + 1
    assert not [path for path in folder.iterdir() if "part" in path.name]


def test_an_unusable_temporary_folder_is_named_in_the_error(cloud, machine, tmp_path, monkeypatch):
    read_all(machine("a", cloud), cloud, filled(cloud, 10))
    fs = machine("a", cloud)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(CacheError, match=r"temporary folder .*nowhere.*TMPDIR"):
        fs.export_cache(cloud.path("data"), str(tmp_path / "carry"))


# Damage is detected.
@pytest.fixture
def exported(cloud, machine, tmp_path, small_bundles):
    """Objects, and the folder with an export of them in several bundles."""
    data = filled(cloud, 60)
    fs = machine("a", cloud)
    read_all(fs, cloud, data)
    fs.export_cache(cloud.path("data"), str(tmp_path / "carry"))
    return data, tmp_path / "carry"


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


def test_one_wrong_byte_loses_one_block(cloud, machine, exported):
    data, folder = exported
    bundle = min(folder.glob("blocks-*"))
    flip(bundle, 100 + 700)
    fs = machine("b", cloud)
    got = fs.import_cache(str(folder))
    assert got.blocks == 59
    assert len(got.bad) == 1
    assert bundle.name in got.bad[0]
    assert "page 0 is damaged" in got.bad[0]
    assert not got.ok
    cloud.asked()
    read_all(fs, cloud, data)
    assert cloud.asked() == ["media"]


def test_an_import_beside_one_that_is_stopped_goes_on(cloud, machine, exported, monkeypatch):
    data, target = exported
    monkeypatch.setattr(import_, "OVERDUE_S", 0.0)
    fs = machine("b", cloud)
    identity, cache = fs._objects.identity, fs._objects.engine.cache
    locks = {ObjectKey(identity, path.name, "who imports it?", 0).hash64(0) for path in target.iterdir()}
    assert all(map(cache.locks.take, locks))
    assert fs.import_cache(str(target)).blocks == len(data)
    assert not any(map(cache.locks.take, locks))  # the other one still has them


@pytest.mark.parametrize("harm", ["cut off", "gone", "index"])
def test_a_damaged_bundle_is_named_and_the_others_are_imported(cloud, machine, exported, harm):
    data, folder = exported
    bundle = max(folder.glob("blocks-*"))
    blocks = {b["name"]: b["blocks"] for b in json.loads((folder / manifest.NAME).read_bytes())["bundles"]}
    if harm == "gone":
        bundle.unlink()
    elif harm == "index":
        flip(bundle, -60)
    else:
        bundle.write_bytes(bundle.read_bytes()[:-5000])
    fs = machine("b", cloud)
    got = fs.import_cache(str(folder))
    assert got.blocks == 60 - blocks[bundle.name]
    assert [bundle.name in each for each in got.bad] == [True]
    read_all(fs, cloud, data)


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


@pytest.mark.parametrize("part", [manifest.NAME, "metadata-", "blocks-"])
def test_every_wrong_byte_of_an_export_is_detected(cloud, machine, exported, part):
    data, folder = exported
    path = min(folder.glob(f"{part}*"))
    content = path.read_bytes()
    for at in (700, len(content) - 23):  # of a bundle: in the first block, and in the last entry of the index
        changed = bytearray(content)
        changed[at] ^= 104
        path.write_bytes(changed)
        fs = machine(f"b-{at}", cloud)
        try:
            is_ok = fs.import_cache(str(folder)).ok
        except (OriginUnavailable, ValueError):
            is_ok = False
        tally("bytes of exports changed")
        assert not is_ok or part == manifest.NAME  # the byte was in a time, or a blank
        assert fs.cat_file(name := cloud.path("data/3/00003.bin")) == data[name]


def test_a_folder_that_is_not_an_export_is_an_error(cloud, machine, tmp_path, exported):
    fs = machine("b", cloud)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ObjectNotFound, match="run export again"):
        fs.import_cache(str(tmp_path / "empty"))
    for content, message in [
        (b'{"kind": 3}', "not the manifest of an export"),
        (b'{"kind": "cachedfs export", "format": 4}', r"another release.*export again"),
    ]:
        (exported[1] / manifest.NAME).write_bytes(content)
        with pytest.raises(OriginUnavailable, match=message):
            fs.import_cache(str(exported[1]))
    with pytest.raises(CacheError, match="is cached, so nothing was exported"):
        fs.export_cache((cloud.path("data"), cloud.path("more")), str(tmp_path / "none"))
    with pytest.raises(ValueError, match="no path was given"):
        fs.export_cache([], str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_an_export_with_another_block_size_or_account_is_refused(cloud, machine, exported):
    with pytest.raises(ValueError, match=f"block_size={MiB}"):
        machine("b", cloud, block_size=2 * MiB).import_cache(str(exported[1]))
    other = fsspec.filesystem("cachedfs", target_protocol="gs", target_options={"token": "google_default"})
    with pytest.raises(ValueError, match="as the account, that it was exported with"):
        other.import_cache(str(exported[1]))


# Imported data is never older than `max_age` allows.
@pytest.mark.parametrize("where", ["cloud", "drive"])
def test_objects_that_changed_since_the_export_are_read_anew_after_max_age(
    where, request, machine, clock, tmp_path
):
    place = request.getfixturevalue(where)
    data = filled(place, 30)
    fs = machine("a", place)
    read_all(fs, place, data)
    fs.export_cache(place.path("data"), str(tmp_path / "carry"))
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
    data = filled(drive, 30)
    fs = machine("a", drive)
    read_all(fs, drive, data)
    fs.export_cache(drive.path("data"), str(tmp_path / "carry"))
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
    at = age_kept(checked_at, made_at=made_at, now=now)
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

EXPORT = (
    SMALL
    + """
    import os, signal, sys, warnings, fsspec
    from fsspec.callbacks import Callback
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
)


def child(place, *arguments):
    command = [sys.executable, "-c", textwrap.dedent(EXPORT), *map(str, arguments)]
    return subprocess.Popen(command, env=place._environment(), stdout=subprocess.PIPE, text=True)


def killed(place, *arguments):
    process = child(place, *arguments)
    process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL
    tally("exports and imports killed")


def test_a_killed_export_is_not_complete_and_can_be_resumed(cloud, machine, small_bundles):
    data = filled(cloud, 100)
    read_all(machine("a", cloud), cloud, data)
    forget()
    target = cloud.url("carry", "gs://")
    killed(cloud, "export", target, 100_000)
    fs = machine("b", cloud)
    with pytest.raises(ObjectNotFound, match="no complete export"):
        fs.import_cache(target)
    n_before = sum(info["size"] for info in fs.ls(cloud.path("carry"), refresh=True))
    assert n_before > 60_000
    done = machine("a", cloud).export_cache(cloud.path("data"), target)
    assert done.objects == 100
    assert done.sent + n_before < done.bytes * 1.12  # what a zip file adds to small blocks
    assert machine("b", cloud).import_cache(target).blocks == 100


def test_a_killed_import_leaves_a_valid_cache_and_can_be_resumed(cloud, machine, exported):
    data, folder = exported
    machine("b", cloud)
    forget()
    killed(cloud, "import", folder, 60_000)
    check_cache(cloud)
    fs = machine("b", cloud)
    n_before = fs.stats().blocks
    got = fs.import_cache(str(folder))
    assert 0 < n_before == got.here
    assert got.blocks + got.here == 60
    cloud.asked()
    read_all(fs, cloud, data)
    check_cache(cloud)


# Bundles, without an origin.
def entries(n, size=1000):
    keys = [ObjectKey("gs||", f"b/{i:05}", f"generation:{i}", MiB) for i in range(n)]
    return [archive.BundleEntry(key, 0, size + i % 7) for i, key in enumerate(keys)]


def index_of(some):
    """Return the bundle of these blocks, and its index; the data of each block are zeros."""
    file = io.BytesIO()
    archive.write(file, ((entry, bytes(entry.size)) for entry in some))
    bundle = archive.bundle_of(some)
    assert len(file.getvalue()) == bundle.size
    return bundle, file.getvalue()[bundle.index_at :]


def test_bundles_are_cut_by_content(small_bundles, monkeypatch):
    all_of = entries(2000)
    cuts = list(archive.cut(all_of))
    assert [entry for each in cuts for entry in each] == all_of
    sizes = [sum(entry.size for entry in each) for each in cuts]
    assert min(sizes[:-1]) >= archive.LEAST
    names = [archive.bundle_of(each).name for each in cuts]
    again = [archive.bundle_of(each).name for each in archive.cut(all_of[:700] + all_of[701:])]
    assert len(set(names) - set(again)) <= 2
    monkeypatch.setattr(archive, "MOST_INDEX", 1000)
    assert (
        max(bundle.size - bundle.index_at for bundle in map(archive.bundle_of, archive.cut(all_of))) <= 1000
    )


def test_a_bundle_is_a_zip_file_of_block_files():
    """If a name or comment changes, the format changes: raise `manifest.FORMAT` and update docs/cache-format.md."""
    some, file = entries(2), io.BytesIO()
    archive.write(file, [(entry, bytes(entry.size)) for entry in some])
    with zipfile.ZipFile(file) as opened:
        assert opened.testzip() is None
        members = opened.infolist()
    assert [member.filename for member in members] == [entry.key.name(0) for entry in some]
    assert [member.comment for member in members] == [
        b'["b/00000","generation:0"]',
        b'["b/00001","generation:1"]',
    ]
    assert {member.compress_type for member in members} == {zipfile.ZIP_STORED}
    bundle = archive.bundle_of(some)
    assert bundle.name == "blocks-fda7cca4e7a1a467f531e0145490a790.zip"
    assert (bundle.size, bundle.blocks) == (len(file.getvalue()), 2)


def test_the_index_of_a_bundle_round_trips():
    some = entries(3000)
    bundle, index = index_of(some)
    assert archive.entries_of(bundle, index, "gs||", MiB) == some
    for identity, block_size in (("gs|x|", MiB), ("gs||", 2 * MiB)):
        with pytest.raises(DamagedFile, match="something else"):
            archive.entries_of(bundle, index, identity, block_size)


def test_an_index_with_too_many_blocks_is_refused_before_parsing(monkeypatch):
    bundle, index = index_of(entries(3000))
    monkeypatch.setattr(archive, "zipfile", None)
    with pytest.raises(DamagedFile, match="does not have 1000 blocks"):
        archive.entries_of(dataclasses.replace(bundle, blocks=1000), index, "gs||", MiB)


def test_a_damaged_index_is_refused_or_equivalent():
    some = entries(12)
    bundle, index = index_of(some)
    refused = []
    for at in range(len(index)):
        flipped = [index[:at] + bytes([index[at] ^ change]) + index[at + 1 :] for change in (1, 104, 255)]
        for changed in (*flipped, index[:at], index[:at] + b"x" + index[at:], index[:at] + index[at + 1 :]):
            try:
                # The byte was in a date or a checksum.
                assert archive.entries_of(bundle, changed, "gs||", MiB) == some
            except DamagedFile:
                refused.append(at)
    assert len(refused) > 5 * len(index)


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 3 * MiB))
@settings(max_examples=50)
def test_runs_contain_every_wanted_block_once(wanted, size):
    some = entries(len(wanted), size)
    found = [
        (at, entry) for _, inside in archive.runs(zip(some, wanted, strict=True)) for at, entry in inside
    ]
    assert [entry for _, entry in found] == [
        e for e, is_wanted in zip(some, wanted, strict=True) if is_wanted
    ]
    for span, inside in archive.runs(zip(some, wanted, strict=True)):
        assert span.start == inside[0][0]
        assert span.stop == inside[-1][0] + inside[-1][1].size
        assert span.size <= archive.RUN


# Metadata and manifest, without an origin.
def test_metadata_rows_round_trip_and_equal_rows_make_the_same_file():
    rows = [["object", "b/\udcff\n", 1.5, "{}"], [], [None, {"a": 1}]]
    data = encoded_rows(rows)
    assert list(decoded_rows(io.BytesIO(data))) == rows
    assert encoded_rows(rows) == data


@pytest.mark.parametrize(
    "data",
    [
        b"x", gzip.compress(b"[]\n", mtime=0)[:-1], gzip.compress(b"[]\n", mtime=0) + b"x",
        gzip.compress(b"[]\n[]", mtime=0), gzip.compress(b"[\n", mtime=0), gzip.compress(b"\xff\n", mtime=0),
        gzip.compress(b"[" * 100_000 + b"\n", mtime=0), gzip.compress(b"1" * 100_000 + b"\n", mtime=0),
    ],
)  # fmt: skip
def test_invalid_metadata_rows_are_refused(data):
    with pytest.raises(DamagedFile):
        list(decoded_rows(io.BytesIO(data)))


def test_a_row_that_is_too_long_is_refused_before_decoding(monkeypatch):
    # 33 kB compressed, 33 MB of text, 900 MB decoded.
    data = gzip.compress(b"[" + b"[]," * (11 << 20) + b"[]]\n")
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(DamagedFile, match="too long"):
        list(decoded_rows(io.BytesIO(data)))


def test_a_manifest_with_too_many_values_is_refused_before_decoding(monkeypatch):
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(DamagedFile, match="too many bundles"):
        manifest.Manifest.decode(b"[" + b"[]," * manifest.MOST_BUNDLES * 2 + b"[]]")


@pytest.fixture
def metadata(tmp_path):
    cache = BlockStore(str(tmp_path / "cache"), explicit=True)
    yield cache.metadata
    cache.close()


def test_details_that_are_nested_too_deeply_are_refused(metadata):
    details = {}
    for _ in range(300):  # json accepts more, but a later reader is deeper in calls
        details = {"a": [details]}
    deep = json.dumps(["file", 1, "x", None, details])
    with pytest.raises(DamagedFile, match="is invalid"):
        MetadataImport(metadata, "gs||", float).take(iter([["object", "b/k", 1.0, deep]]))


@pytest.mark.parametrize("is_too_large", [False, True])
def test_a_listing_that_is_too_large_for_memory_is_not_imported(metadata, monkeypatch, is_too_large):
    monkeypatch.setattr(metadata_rows, "_MAX_LISTING", 4000)
    now = time.time()
    info = json.dumps(["file", 1, "x", None, {"many": [0] * 30 if is_too_large else []}])
    children = [["child", f"b/{i}", info] for i in range(3)]
    MetadataImport(metadata, "gs||", float).take(
        iter([["listing", "b", now, 3], *children, ["object", "c/k", now, info]])
    )
    assert metadata.lookup("gs||", "c/k").info.size == 1
    assert (metadata.listing("gs||", "b") is None) is is_too_large


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
TEXTS = st.sampled_from(["a", "a/b", "a/\udcff", ""]) | st.text(max_size=4)
TIMES = st.sampled_from([1.0, 10**400, True]) | JSON
INFOS = JSON.map(json.dumps) | st.sampled_from(['["file",1,"x",null,{}]', '["file",1,"x","\\udcff",{}]'])
ROWS = st.lists(
    JSON
    | st.tuples(st.sampled_from(["listing", "child", "object"]), JSON, JSON, JSON)
    | st.tuples(st.just("listing"), TEXTS, TIMES, st.integers(-1, 2) | st.just(10**400))
    | st.tuples(st.just("child"), TEXTS, INFOS)
    | st.tuples(st.just("object"), TEXTS, TIMES, INFOS),
    max_size=4,
)


@given(ROWS)
@settings(max_examples=200)
def test_arbitrary_rows_are_refused_or_harmless(tmp_path_factory, rows):
    cache = BlockStore(str(tmp_path_factory.getbasetemp() / "hostile"), explicit=True)
    with contextlib.suppress(DamagedFile):
        MetadataImport(cache.metadata, "gs||", float).take(iter(json.loads(json.dumps(rows))))
    cache.close()


@given(
    JSON
    | st.fixed_dictionaries(
        {
            "kind": st.just("cachedfs export"),
            "format": st.just(manifest.FORMAT),
            "bundles": JSON,
            "identity": JSON,
            "block_size": JSON,
            "made_at": JSON,
            "metadata": JSON,
            "metadata_size": JSON,
        }
    )
)
@settings(max_examples=60)
def test_an_arbitrary_manifest_is_refused(found):
    with pytest.raises(DamagedFile):
        manifest.Manifest.decode(json.dumps(found).encode())
