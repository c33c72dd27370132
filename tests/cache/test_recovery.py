"""What a lost index or a dead process leaves is counted again, or removed."""

import os
from pathlib import Path

import pytest

from cachedfs.cache import block_file
from tests.cache.audit import audit, recount
from tests.cache.helpers import file_of, key_of, put


def stray(cache):
    path = file_of(cache, key_of(), 0).with_name("stray")
    path.write_text("what is this")
    return path


def under_another_name(cache):
    path = file_of(cache, key_of(), 0)
    other = path.with_name(key_of("b/other").name(0))
    os.link(path, other)
    return other


def at_an_impossible_place(cache):
    forged = Path(cache.root, block_file.block_path(key_of().digest, 1 << 63))
    forged.parent.mkdir(exist_ok=True)
    forged.write_bytes(b"x" + block_file.encode_trailer(key_of(), 1 << 63, b"x"))
    return forged


@pytest.mark.parametrize("put_there", [stray, under_another_name, at_an_impossible_place])
def test_what_is_no_block_is_removed_when_files_are_counted(cache, put_there):
    put(cache, key_of(), *range(6))
    before, path = cache.usage(), put_there(cache)
    recount(cache)
    assert not path.exists()
    assert cache.usage() == before
    assert audit(cache).ok
