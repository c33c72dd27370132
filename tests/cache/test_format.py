"""The format of blocks on the disk: it does not change unnoticed, and damage is a miss."""

import contextlib
import itertools
import os
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachedfs.cache import block_file
from cachedfs.cache.block_file import BadBlock
from cachedfs.common.types import ObjectKey
from tests.cache.audit import audit
from tests.cache.helpers import AMPLE, BLOCK, PAGE, content, file_of, flip, key_of, put, whole


def test_the_bytes_of_a_block_do_not_change():
    key = ObjectKey("gs://test", "bück/é", "17", 1 << 20)
    trailer = block_file.encode_trailer(key, 3, b"hello")
    expected = b"".join([
        b"cachedfs", bytes([3, 0, 0, 0]), bytes([5, 0, 0, 0, 0, 0, 0, 0]),  # magic, format, length
        bytes.fromhex("86a61036"),  # CRC-32 of the only page
        bytes([9, 0, 0, 0]), b"gs://test", bytes([8, 0, 0, 0]), "bück/é".encode(), bytes([2, 0, 0, 0]), b"17",
        bytes([3, 0, 0, 0, 0, 0, 0, 0]), bytes([0, 0, 16, 0, 0, 0, 0, 0]),  # index, block size
        bytes.fromhex("30949d24"), bytes([0x4F, 0, 0, 0]),  # CRC-32 of all that, size of the trailer
    ])  # fmt: skip
    message = "bump the format version (blocks.FORMAT): caches out there hold blocks in the old format"
    assert trailer == expected, message
    assert block_file.block_path(key.digest, 3) == "blocks/7/783a48e8ed6d5dcfbef36bb07f348598-3", message


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


def sealed(body):
    """Return a trailer whose checksum and size are right, whatever it says."""
    return bytes(body) + zlib.crc32(body).to_bytes(4, "little") + (len(body) + 8).to_bytes(4, "little")


def of_format(data, number):
    size = int.from_bytes(data[-4:], "little")
    body = bytearray(data[-size:-8])
    body[8] = number
    return data[:-size] + sealed(body)


def damage(path, how):
    """Change the file of a block, or put something else in its place."""
    data = path.read_bytes()
    if how == "symlink":
        path.rename(path.with_name("real"))
        path.symlink_to("real")
        return
    path.unlink()
    if how == "dangling symlink":
        path.symlink_to("nowhere")
    elif how == "fifo":
        os.mkfifo(path)
    elif how == "another block":
        os.link(path.with_name(path.name[:-1] + "1"), path)
    else:
        path.write_bytes({
            "cut": data[:-1], "empty": b"", "longer": data + b"\0",
            "older": of_format(data, block_file.FORMAT - 1), "newer": of_format(data, block_file.FORMAT + 1),
        }[how])  # fmt: skip


@pytest.mark.parametrize(
    "how",
    ["cut", "empty", "longer", "older", "newer", "symlink", "dangling symlink", "fifo", "another block"],
)
def test_what_is_no_block_is_a_miss_and_goes(cache, how, caplog):
    key = key_of()
    put(cache, key, 0, 1)
    path = file_of(cache, key, 0)
    damage(path, how)
    assert whole(cache, key, 0) is None
    assert not os.path.lexists(path)
    assert whole(cache, key, 0) is None
    assert len([record for record in caplog.records if "is not used" in record.message]) == 1
    put(cache, key, 0)
    assert [whole(cache, key, index) for index in (0, 1)] == [content(key, 0), content(key, 1)]
    assert audit(cache)._replace(corrupt=()).ok


@pytest.mark.parametrize("names", [(), ("file", "other")], ids=["empty", "full"])
def test_a_folder_in_place_of_a_block_is_a_miss_and_makes_way_for_the_next_put(cache, names, caplog):
    key = key_of()
    put(cache, key, 0)
    path = file_of(cache, key, 0)
    path.unlink()
    path.mkdir()
    for name in names:
        (path / name).write_text("somebody's")
    for _ in range(3):
        assert whole(cache, key, 0) is None
        assert not cache.has(key, 0)
    assert len([record for record in caplog.records if "is not used" in record.message]) == 1
    put(cache, key, 0)
    assert whole(cache, key, 0) == content(key, 0)
    assert len(list(path.parents[2].glob("tmp/*/*"))) == len(names)  # an hour to look at them
    assert audit(cache).ok


FUZZ_KEY = key_of("b/fuzz", block_size=4 * PAGE)
FUZZ_DATA = content(FUZZ_KEY, 1, PAGE + 500)
FUZZ_TRAILER = block_file.encode_trailer(FUZZ_KEY, 1, FUZZ_DATA)
ODD = [bytes([value]) * size for value in (0, 1, 0x7F, 0x80, 0xFF) for size in (1, 4, 8)]
splices = st.tuples(
    st.integers(0, len(FUZZ_TRAILER)), st.integers(0, 12), st.binary(max_size=12) | st.sampled_from(ODD)
)


@given(st.lists(splices, min_size=1, max_size=3), st.booleans())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_trailer_whatever_it_says_makes_wrong_bytes_or_another_error(cache, changes, is_sealed):
    """Pieces of it are replaced; `is_sealed`: its own checksum and size are made right again."""
    trailer = bytearray(FUZZ_TRAILER)
    for at, length, piece in changes:
        trailer[at : at + length] = piece
    trailer = sealed(trailer[:-8]) if is_sealed else bytes(trailer)
    with contextlib.suppress(BadBlock):
        assert block_file.parse_trailer(trailer).key
    put(cache, FUZZ_KEY, 1, size=len(FUZZ_DATA))
    file_of(cache, FUZZ_KEY, 1).write_bytes(FUZZ_DATA + trailer)
    cache.close()  # forget the file that was there
    assert whole(cache, FUZZ_KEY, 1) in (None, FUZZ_DATA)
    assert audit(cache).ok


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
    edges = 0, 1, 5, 7, PAGE, PAGE + 7, 2 * PAGE, 3 * PAGE + 90, 4 * PAGE, 9 * PAGE
    for start, stop in [(5, 3), *itertools.combinations_with_replacement(edges, 2)]:
        assert cache.read(key, 0, start, stop) == data[start:stop]
        buffer = bytearray(max(0, stop - start))
        size = cache.read_into(key, 0, start, memoryview(buffer), verify=True)
        assert buffer[:size] == data[start:stop]


def test_verify_looks_again_at_pages_that_were_checked(cache):
    key = key_of()
    put(cache, key, 0)
    assert whole(cache, key, 0) == content(key, 0)
    flip(file_of(cache, key, 0), 100)
    assert whole(cache, key, 0, verify=True) is None


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_removed_block_is_a_miss_also_for_those_that_have_it_open(cache, open_cache, is_damaged):
    key, other = key_of(), open_cache()
    put(cache, key, 0)
    assert whole(other, key, 0) == content(key, 0)
    block = cache.open(key, 0)
    assert block.read(0, PAGE) == content(key, 0)
    if is_damaged:
        flip(file_of(cache, key, 0), 100)
        with pytest.raises(BadBlock):
            cache.read_anew(key, 0)
    else:
        cache.remove_wrong(key, 0)
    assert whole(cache, key, 0) is None
    assert whole(other, key, 0) is None


def test_a_trailer_longer_than_the_probe_is_found(cache):
    key = key_of("b/" + "x" * 9000)
    cache.put([(key.block(0), bytes(BLOCK))], AMPLE)
    assert whole(cache, key, 0) == bytes(BLOCK)
