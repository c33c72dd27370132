"""Access patterns: what reads of one object cost, with blocks of 64 KiB, requests of 8 blocks and windows of 64."""

import random

import fsspec
import pytest

from cachedfs.common.types import Range
from cachedfs.core.engine import Engine
from tests.support import KiB, noise, until

BLOCK, REQUEST, WINDOW = 64 * KiB, 512 * KiB, 4096 * KiB


def filesystem(**options):
    options = {"block_size": BLOCK, "request_size": REQUEST, "read_ahead": WINDOW, **options}
    return fsspec.filesystem("cachedfs", target_protocol="gs", **options)


@pytest.fixture
def fs(origin):
    return filesystem()


def block_received(fs):
    """Wait until no request is in flight; return how many bytes of `b/k` were received."""
    engine = fs._objects.engine
    until(lambda: not (engine.speculation.queued or engine.speculation._lookups or engine.active_requests))
    engine.drain(120)
    return engine.bytes_fetched


def requested(origin):
    return [what for kind, _, what in origin.log if kind == "read"]


def put(fs, origin, n_blocks, key="b/k"):
    """Put an object of n blocks, cache its metadata and let the writer find the size of the cache."""
    data = origin.put(key, noise(n_blocks * BLOCK))
    fs.info(key)
    engine = fs._objects.engine
    # The writer looks it up; with an origin this fast, readers would not see it.
    engine.window(fs._objects.config)
    until(lambda: engine.cache.allowed is not None)
    origin.log.clear()
    return data


def read_block(fs, data, index, how):
    at = index * BLOCK + 1000
    if how == "ranges":
        assert fs.cat_file("b/k", at, at + 5000) == data[at : at + 5000]
        return
    with fs.open("b/k") as file:
        file.seek(at)
        assert file.read(5000) == data[at : at + 5000]


HOW = pytest.mark.parametrize("how", ["ranges", "handles"])


@HOW
def test_the_second_read_of_a_small_object_fetches_all_of_it(fs, origin, how):
    data = put(fs, origin, 8)
    read_block(fs, data, 7, how)
    assert block_received(fs) == BLOCK
    read_block(fs, data, 3, how)
    assert block_received(fs) == 8 * BLOCK
    assert sorted(requested(origin), key=lambda want: want.start) == [
        Range(0, 3 * BLOCK),
        Range(3 * BLOCK, 7 * BLOCK),
        Range(7 * BLOCK, 8 * BLOCK),
    ]
    for index in range(8):
        read_block(fs, data, index, how)
    assert len(requested(origin)) == 3


@HOW
def test_random_reads_of_an_object_fetch_the_rest_in_large_requests(fs, origin, how):
    data, rng = put(fs, origin, 192), random.Random(1)
    for _ in range(120):
        read_block(fs, data, rng.randrange(192), how)
        block_received(fs)
    assert 150 * BLOCK < block_received(fs) <= 192 * BLOCK, "no byte twice"
    assert len(requested(origin)) <= 70


@pytest.fixture(params=["at once", "later"])
def stored(request, monkeypatch):
    """Blocks are on disk, and no longer in memory, before the reader that waited for them takes them."""
    run = Engine.run

    def run_and_store(engine, coroutine):
        result = run(engine, coroutine)
        engine.drain(120)
        return result

    if request.param == "at once":
        monkeypatch.setattr(Engine, "run", run_and_store)


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize(
    ("how", "n_reads"), [("ranges", 11), ("handles", 11), ("ranges", 12), ("handles", 16)]
)
def test_random_reads_that_stop_waste_at_most_one_window(fs, origin, how, n_reads):
    data = put(fs, origin, 192)
    for index in random.Random(2).sample(range(192), n_reads):
        read_block(fs, data, index, how)
    in_vain = block_received(fs) - n_reads * BLOCK
    assert in_vain == 0 if n_reads < 12 else in_vain <= WINDOW + (n_reads - 11) * REQUEST


def test_where_bytes_are_limited_random_reads_fetch_little_in_vain_until_much_was_read(fs, origin):
    origin.is_metered = True
    data = put(fs, origin, 480)
    order = random.Random(3).sample(range(480), 200)
    for index in order[:80]:
        read_block(fs, data, index, "ranges")
    assert block_received(fs) <= 2 * 80 * BLOCK + WINDOW
    for index in order[80:]:
        read_block(fs, data, index, "ranges")
    assert block_received(fs) == 480 * BLOCK


@pytest.mark.parametrize("options", [{"read_ahead": 0}, {"cache_size": 256 * BLOCK}])
def test_the_rest_is_not_fetched_if_it_does_not_fit_or_readahead_is_off(origin, options):
    fs = filesystem(**options)
    data = put(fs, origin, 192)
    for index in random.Random(4).sample(range(192), 30):
        read_block(fs, data, index, "ranges")
    assert block_received(fs) == 30 * BLOCK


def test_reading_only_the_first_bytes_fetches_at_most_two_blocks(fs, origin):
    put(fs, origin, 192)
    for _ in range(3):
        with fs.open("b/k") as file:
            file.read(100)
    assert block_received(fs) <= 2 * BLOCK
    assert len(requested(origin)) == 1


def test_open_files_of_one_object_are_each_read_ahead(fs, origin):
    n, n_files = 96, 5
    data = put(fs, origin, n * n_files)
    files = [fs.open("b/k") for _ in range(n_files)]
    for number, file in enumerate(files):
        file.seek(number * n * BLOCK)
    for at in range(0, n * BLOCK, 4 * BLOCK):
        for number, file in enumerate(files):
            start = number * n * BLOCK + at
            assert file.read(4 * BLOCK) == data[start : start + 4 * BLOCK]
    assert block_received(fs) == len(data), "no byte twice"
    assert len(requested(origin)) <= 1.3 * n * n_files / 8 + 4 * n_files
    for file in files:
        file.close()


@pytest.mark.parametrize("is_known", [False, True])
def test_the_first_pass_over_a_file_has_no_hits_and_the_second_one_only_hits(fs, origin, is_known):
    data = put(fs, origin, 96) if is_known else origin.put("b/k", noise(96 * BLOCK))
    for n_hits in (0, 96):
        with fs.open("b/k") as file:
            assert b"".join(iter(lambda file=file: file.read(BLOCK // 2), b"")) == data
        assert block_received(fs) == len(data)
        assert fs.stats().hits == n_hits
