"""Blocks as bytes on disk: the format does not change unnoticed, and nothing but the right block is ever believed."""

import os
import zlib

import pytest

from cachedfs.cache import blocks
from cachedfs.cache.blocks import BadBlock
from cachedfs.model import ObjectKey
from tests.cache.rig import AMPLE, BLOCK, PAGE, content, file_of, flip, key_of, put, whole


def test_the_bytes_of_a_block_do_not_change():
    key = ObjectKey("gs://test", "bück/é", "17", 1 << 20)
    trailer = blocks.encode_trailer(key, 3, b"hello")
    expected = b"".join([
        b"cachedfs", bytes([1, 0, 0, 0]), bytes([5, 0, 0, 0, 0, 0, 0, 0]),  # magic, format, length
        bytes.fromhex("86a61036"),  # CRC-32 of the only page
        bytes([9, 0, 0, 0]), b"gs://test", bytes([8, 0, 0, 0]), "bück/é".encode(), bytes([2, 0, 0, 0]), b"17",
        bytes([3, 0, 0, 0, 0, 0, 0, 0]), bytes([0, 0, 16, 0, 0, 0, 0, 0]),  # index, block size
        bytes.fromhex("8841fb85"), bytes([0x4F, 0, 0, 0]),  # CRC-32 of all that, size of the trailer
    ])  # fmt: skip
    message = "bump the format version (blocks.FORMAT): caches out there hold blocks in the old format"
    assert trailer == expected, message
    assert blocks.place(key.digest, 3) == "blocks/7b/783a48e8ed6d5dcfbef36bb07f348598-3", message


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 17])
def test_a_trailer_says_what_was_encoded(size):
    key, data = key_of("b/\udcff", block_size=1 << 20), os.urandom(size)
    found = blocks.parse_trailer(blocks.encode_trailer(key, 7, data))
    assert found.key == key
    assert (found.index, found.length) == (7, size)
    assert found.checksums == tuple(zlib.crc32(data[at : at + PAGE]) for at in range(0, size, PAGE))


def test_every_flipped_bit_of_a_trailer_is_noticed():
    trailer = blocks.encode_trailer(key_of(), 1, b"some data")
    for at in range(len(trailer)):
        damaged = bytearray(trailer)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(BadBlock):
            blocks.parse_trailer(bytes(damaged))


def test_every_flipped_byte_of_a_block_is_a_miss_and_the_file_goes(cache):
    key = key_of()
    put(cache, key, 0, size=40)
    path = file_of(cache, key, 0)
    for at in range(path.stat().st_size):
        put(cache, key, 0, size=40)
        flip(path, at)
        assert whole(cache, key, 0) is None
        assert not path.exists()
    assert cache.usage() == (0, 0)


def _cut(path):
    os.truncate(path, path.stat().st_size - 1)


def _empty(path):
    os.truncate(path, 0)


def _lengthen(path):
    with path.open("ab") as file:
        file.write(b"\0")


def _another_format(path):
    whole = path.read_bytes()
    size = int.from_bytes(whole[-4:], "little")
    body = bytearray(whole[-size:-8])
    body[8] += 1
    path.write_bytes(whole[:-size] + body + zlib.crc32(body).to_bytes(4, "little") + whole[-4:])


def _symlink(path):
    path.rename(path.with_name("real"))
    path.symlink_to("real")


def _fifo(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [_cut, _empty, _lengthen, _another_format, _symlink, _fifo])
def test_what_is_no_block_is_a_miss_and_goes(cache, damage, caplog):
    key = key_of()
    put(cache, key, 0)
    path = file_of(cache, key, 0)
    damage(path)
    assert whole(cache, key, 0) is None
    assert not os.path.lexists(path)
    assert whole(cache, key, 0) is None
    assert len([record for record in caplog.records if "is not used" in record.message]) == 1
    put(cache, key, 0)
    assert whole(cache, key, 0) == content(key, 0)


def test_the_block_of_another_key_is_a_miss(cache):
    key, other = key_of(), key_of(version="v2")
    put(cache, key, 0)
    put(cache, other, 0)
    file_of(cache, other, 0).replace(file_of(cache, key, 0))
    assert whole(cache, key, 0) is None


def test_a_flipped_byte_of_one_page_does_not_spoil_the_others(cache):
    key = key_of(block_size=4 * PAGE)
    put(cache, key, 0)
    flip(file_of(cache, key, 0), 2 * PAGE + 5)
    assert cache.read(key, 0, 0, PAGE) == content(key, 0)[:PAGE]
    assert cache.read(key, 0, 2 * PAGE, 2 * PAGE + 1) is None


@pytest.mark.parametrize("at", [0, PAGE - 1, PAGE, 2 * PAGE + 99])
def test_read_into_checks_edge_pages_and_whole_ones(open_cache, at):
    key, buffer = key_of(block_size=4 * PAGE), memoryview(bytearray(2 * PAGE + 200))
    put(open_cache(), key, 0, size=3 * PAGE + 100)
    flip(file_of(open_cache(), key, 0), at)
    reader = open_cache()
    assert reader.read_into(key, 0, 3 * PAGE, buffer[:50]) == 50
    assert reader.read_into(key, 0, 0, buffer) == -1


def test_reads_are_slices_of_the_block(cache):
    key = key_of(block_size=4 * PAGE)
    data = content(key, 0, 3 * PAGE + 100)
    put(cache, key, 0, size=len(data))
    for start, stop in [
        (0, 0),
        (5, 3),
        (0, 1),
        (7, PAGE + 7),
        (PAGE, 2 * PAGE),
        (3 * PAGE + 90, 4 * PAGE),
        (9 * PAGE, 10 * PAGE),
    ]:
        assert cache.read(key, 0, start, stop) == data[start:stop]
        if start < stop:
            buffer = bytearray(stop - start)
            size = cache.read_into(key, 0, start, memoryview(buffer), verify=True)
            assert buffer[:size] == data[start:stop]


def test_verify_looks_again_at_pages_that_were_checked(cache):
    key = key_of()
    put(cache, key, 0)
    assert whole(cache, key, 0) == content(key, 0)
    flip(file_of(cache, key, 0), 100)
    assert whole(cache, key, 0, verify=True) is None


def test_a_block_replaced_by_a_damaged_one_is_checked_again(cache):
    key = key_of()
    put(cache, key, 0)
    assert whole(cache, key, 0) == content(key, 0)
    path = file_of(cache, key, 0)
    damaged = bytearray(path.read_bytes())
    damaged[100] ^= 1
    path.with_name("new").write_bytes(damaged)
    path.with_name("new").replace(path)
    cache.close()
    assert whole(cache, key, 0) is None


def test_an_empty_block_is_a_block(cache):
    key = key_of()
    put(cache, key, 0, size=0)
    assert cache.read(key, 0, 0, 10) == b""


def test_a_trailer_longer_than_the_probe_is_found(cache):
    key = key_of("b/" + "x" * 9000)
    cache.put([(key.block(0), bytes(BLOCK))], AMPLE)
    assert whole(cache, key, 0) == bytes(BLOCK)
