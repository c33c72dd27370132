"""The checksums of pages."""

import random

import pytest

from cachedfs.cache.block_file import PAGE, encode_trailer, parse_trailer, wrong_page
from tests.cache.helpers import key_of

DATA = random.Random(5).randbytes(16 * PAGE + 777)


def checksums_of(data):
    return list(parse_trailer(encode_trailer(key_of(), 0, data)).checksums)


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 17])
def test_the_first_page_that_is_damaged_is_found(size):
    checksums = checksums_of(DATA[:size])
    assert wrong_page(memoryview(DATA[:size]), checksums) is None
    for page in range(len(checksums)):
        damaged = bytearray(DATA[:size])
        for at in {page, len(checksums) - 1}:
            damaged[at * PAGE] ^= 1
        assert wrong_page(memoryview(damaged), checksums) == page


def test_pages_in_each_others_place_are_damage():
    checksums = checksums_of(DATA[: 2 * PAGE])
    assert wrong_page(memoryview(DATA[PAGE : 2 * PAGE] + DATA[:PAGE]), checksums) == 0
