"""Checksums: `verify` of cached objects, and checks of whole objects as they are received."""

import dataclasses
import os
import sys
import types
import urllib.request

import fsspec
import pytest

from cachedfs.cache import block_file
from cachedfs.common import checksums
from cachedfs.errors import ObjectNotFound, OriginUnavailable
from cachedfs.origins import retry
from cachedfs.sim import Fault
from tests.cache.helpers import flip
from tests.support import KiB, MiB, forget, noise

SIZE = 3 * MiB + 17  # four blocks


def files_of(cloud):
    """Return the files of all cached blocks, in the order of their indexes."""
    found = cloud.cache_dir.glob("cachedfs-*/blocks/*/*")
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2], 16))


def corrupt(path, at):
    """Flip a byte as a failing disk does, without changing size or times of the file."""
    status = path.stat()
    flip(path, at)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def rewrite(path, change):
    """Give a block other bytes with valid checksums, as a cache with wrong content."""
    handle = block_file.open_block(os.open(path, os.O_RDONLY), str(path))
    handle.close()
    data = change(path.read_bytes()[: handle.length])
    path.write_bytes(
        data + block_file.encode_trailer(handle.trailer.key.object, handle.trailer.key.index, data)
    )


def alter(path):
    rewrite(path, lambda data: bytes([data[0] ^ 1]) + data[1:])


@pytest.mark.parametrize(("place", "checksum"), [("cloud", "CRC32C"), ("drive", "MD5")])
def test_a_whole_object_is_compared_with_its_checksum_without_a_request(request, place, checksum):
    machine = request.getfixturevalue(place)
    fs, path = fsspec.filesystem("cachedfs", target_protocol=machine.protocol), machine.path("x")
    data = machine.put("x", noise(9 * MiB))
    assert fs.cat_file(path) == data
    machine.asked()
    [found] = fs.verify(path)
    assert (found.path, found.blocks, found.bad, found.missing, found.size) == (path, 9, (), 0, 9 * MiB)
    assert (found.whole, found.ok, machine.asked()) == (True, True, [])
    assert checksum in found.reason
    forget()
    alter(files_of(machine)[4])
    fs = fsspec.filesystem("cachedfs", target_protocol=machine.protocol)
    assert fs.verify(path)[0].whole is False
    assert fs.cat_file(path) == data


@pytest.mark.parametrize("at", [MiB - 1, MiB + 40], ids=["data", "trailer"])
def test_a_flipped_byte_is_found_although_the_block_was_read_before(cloud, fs, at):
    data, path = cloud.put("x", noise(SIZE)), cloud.path("x")
    assert fs.cat_file(path) == data
    fs.verify(path)
    assert fs.cat_file(path) == data  # every page was checked, and its file is open
    corrupt(files_of(cloud)[2], at)
    cloud.asked()
    [found] = fs.verify(path)
    assert (found.blocks, found.bad, found.missing, found.whole, found.ok) == (3, (2,), 0, None, False)
    assert "block 2" in found.reason
    assert fs.cached_extent(path) == [(0, 2 * MiB), (3 * MiB, SIZE)]
    assert cloud.asked() == []
    assert fs.cat_file(path) == data
    assert cloud.asked() == ["media"]
    assert fs.verify(path)[0].whole is True


def test_valid_blocks_that_differ_from_the_origin_are_dropped(cloud, fs, caplog):
    data, path = cloud.put("x", noise(SIZE)), cloud.path("x")
    fs.cat_file(path)
    forget()
    alter(files_of(cloud)[1])
    fs = fsspec.filesystem("cachedfs", target_protocol="gs")
    lie = fs.cat_file(path)
    assert lie != data
    [found] = fs.verify(path)
    assert (found.whole, found.blocks, found.bad, found.ok) == (False, 0, (0, 1, 2, 3), False)
    assert f"{checksums.crc32c_of(data):08x}" in found.reason
    assert f"{checksums.crc32c_of(lie):08x}" in found.reason
    assert found.reason in caplog.text
    assert files_of(cloud) == []
    assert fs.cat_file(path) == data


def test_what_is_not_cached_is_not_checked(cloud):
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", read_ahead=0)  # readahead would fetch the rest
    path = cloud.path("x")
    cloud.put("x", noise(SIZE))
    cloud.put("empty", b"")
    for blocks, span in enumerate([None, (0, 10), (-10, None)]):
        if span is not None:
            fs.cat_file(path, *span)
            fs._objects.engine.drain(120)
        [found] = fs.verify(path)
        assert (found.blocks, found.missing, found.whole, found.ok) == (blocks, 4 - blocks, None, True)
        assert "not all of it" in found.reason
    assert fs.verify(cloud.path("empty"))[0].whole is True
    with pytest.raises(ObjectNotFound):
        fs.verify(cloud.path("nothing"))


def test_verify_reports_a_valid_block_that_is_too_short(cloud, fs):
    cloud.put("x", noise(SIZE))
    fs.cat_file(cloud.path("x"))
    forget()
    rewrite(files_of(cloud)[3], lambda block: block[:10])
    [found] = fsspec.filesystem("cachedfs", target_protocol="gs").verify(cloud.path("x"))
    assert (found.blocks, found.bad, found.whole) == (3, (3,), None)
    assert "10 bytes, not 17" in found.reason


def test_a_missing_checksum_is_requested_unless_offline(cloud, fs):
    path = cloud.path("x")
    cloud.put("x", noise(SIZE))
    fs.cat_file(path)
    known = fs._objects.known(path)
    plain = dataclasses.replace(known.object, details={})
    for offline, asked, whole in ((True, [], None), (False, ["metadata"], True)):
        one = fsspec.filesystem("cachedfs", target_protocol="gs", offline=offline, skip_instance_cache=True)
        one._objects.known(path).info = plain
        cloud.asked()
        [found] = one.verify(path)
        assert (cloud.asked(), found.whole, found.blocks) == (asked, whole, 4)
        assert ("no checksum" in found.reason) is offline


def test_verify_of_a_folder_checks_everything_below_without_a_request(cloud, fs):
    for key in ("a/1", "a/b/2", "a-", "a5", "ab", "c"):
        cloud.put(key, noise(100))
        fs.cat_file(cloud.path(key))
    cloud.put("a/3", b"not read")
    forget()
    cloud.asked()
    offline = fsspec.filesystem("cachedfs", target_protocol="gs", offline=True)
    found = offline.verify(cloud.path("a"))
    assert [each.path for each in found] == [cloud.path("a/1"), cloud.path("a/b/2")]
    assert all(each.whole for each in found)
    assert len(offline.verify(cloud.bucket)) == 6
    assert cloud.asked() == []


# Checks while receiving
def test_wrong_bytes_of_a_small_object_are_never_returned_or_stored(cloud, fs, monkeypatch):
    monkeypatch.setattr(retry, "delay", lambda *args, **options: 0.0)
    truth, lie = b"the truth, " * 1000, "not truth, " * 1000
    cloud.put("x", truth)
    stated = fs.info(cloud.path("x"))
    headers = {
        "Content-Range": f"bytes 0-{len(lie) - 1}/{len(lie)}",
        "x-goog-generation": stated["generation"],
    }
    headers["x-goog-hash"] = f"crc32c={stated['crc32c']},md5={stated['md5Hash']}"
    cloud.server.fail(Fault(kind="media", status=206, body=lie, headers=headers, times=None))
    for read in (fs.cat_file, lambda path: fs.open(path).read(10)):
        with pytest.raises(OriginUnavailable, match="CRC32C"):
            read(cloud.path("x"))
    assert fs.cached_extent(cloud.path("x")) == []
    cloud.server.heal()
    assert fs.cat_file(cloud.path("x")) == truth


@pytest.fixture
def text(cloud):
    """An object of four blocks of text, so that a fault can answer with it."""
    return cloud.put("x", b"the truth, " * (SIZE // 11))


def lie_about(cloud, start, stop, size, times=1):
    """Answer reads that ask for `[start:stop]` first with wrong bytes of the right length."""
    with urllib.request.urlopen(
        f"{cloud.server.endpoint_url}/download/storage/v1/b/{cloud.bucket}/o/x?alt=media"
    ) as reply:
        headers = {name: reply.headers[name] for name in ("x-goog-generation", "x-goog-hash")}
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    lie = ("not truth, " * (SIZE // 11))[: stop - start]
    nth = 1 + start // MiB
    cloud.server.fail(Fault(kind="media", nth=nth, status=206, body=lie, headers=headers, times=times))
    cloud.server.reset()


def read_to_the_end(fs, path, target):
    with fs.open(path, "rb") as file:
        while file.read(100 * KiB):
            pass


@pytest.mark.parametrize(
    "read",
    [lambda fs, path, target: fs.cat_file(path), lambda fs, *paths: fs.get(*paths), read_to_the_end],
    ids=["cat_file", "get", "open"],
)
def test_a_big_object_that_stays_wrong_is_an_error_and_nothing_is_cached(cloud, text, tmp_path, read):
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", read_ahead=0)
    path, target = cloud.path("x"), tmp_path / "x"
    lie_about(cloud, 0, len(text), len(text), times=None)
    with pytest.raises(OriginUnavailable, match=f"CRC32C.*{checksums.crc32c_of(text):08x}"):
        read(fs, path, str(target))
    assert list(tmp_path.glob("x*")) == []
    assert fs.cached_extent(path) == []
    cloud.server.heal()
    assert fs.cat_file(path) == text


@pytest.mark.parametrize(
    "found", [None, types.SimpleNamespace(implementation="python")], ids=["none", "slow"]
)
def test_a_slow_crc32c_implementation_is_not_used(monkeypatch, found):
    assert checksums.has_crc32c()
    monkeypatch.setitem(sys.modules, "google_crc32c", found)
    assert not checksums.has_crc32c.__wrapped__()


def test_an_invalid_checksum_is_ignored():
    for text in (None, "", "!", "AAAA", 5, "AAAAAAAAAA=="):
        assert checksums.stated_of({"crc32c": text, "md5Hash": text}) is None
