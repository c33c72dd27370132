"""An open object behaves as a builtin file does, whether its bytes are here or have to come."""

import asyncio
import contextlib
import io
import pickle
import random

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachedfs import engines
from cachedfs.errors import ObjectChanged
from cachedfs.model import Range
from cachedfs.rawreader import AT_HOME, RawReader
from tests.fakes import FakeOrigin
from tests.support import KiB, MiB, forget, noise, until

SIZE = 3 * MiB + 12345
DATA = noise(SIZE)


@pytest.fixture
def fs(cloud):
    cloud.put("big", DATA)
    return fsspec.filesystem("cachedfs", target_protocol="gs")


operations = st.lists(
    st.one_of(
        st.tuples(st.just("seek"), st.integers(0, SIZE + 100)),
        st.tuples(st.just("read"), st.integers(0, 2 * MiB)),
        st.tuples(st.just("read1"), st.integers(1, 100 * KiB)),
        st.tuples(st.just("readinto"), st.integers(0, 300 * KiB)),
        st.tuples(st.just("readline"), st.integers(0, 2000)),
        st.tuples(st.just("tell"), st.none()),
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=operations, cold=st.booleans())
def test_any_sequence_of_reads_gives_the_bytes_that_a_builtin_file_gives(fs, cloud, operations, cold):
    if cold:
        fs.evict(cloud.path("big"))
    model = io.BytesIO(DATA)
    with fs.open(cloud.path("big")) as file:
        for name, argument in operations:
            if name == "readinto":
                ours, theirs = bytearray(argument), bytearray(argument)
                assert (file.readinto(ours), ours) == (model.readinto(theirs), theirs)
            elif name == "read1":
                piece = file.read1(argument)
                assert piece == model.read(len(piece))
                assert piece or model.tell() >= SIZE
            elif argument is None:
                assert getattr(file, name)() == getattr(model, name)()
            else:
                assert getattr(file, name)(argument) == getattr(model, name)(argument)
        assert file.read() == model.read()


def test_lines_are_those_of_the_object(cloud):
    text = "\n".join(f"line {i} äöü" for i in range(50_000))
    cloud.put("lines", text.encode())
    with fsspec.open(cloud.url("lines"), "rt") as file:
        assert [line.rstrip("\n") for line in file] == text.split("\n")


def test_a_file_carries_what_libraries_look_for(fs, cloud):
    with fs.open(
        cloud.path("big"), block_size=5 * MiB, cache_type="readahead", cache_options={"x": 1}
    ) as file:
        assert isinstance(file, io.BufferedReader)
        assert (file.size, file.path, file.name, file.mode) == (
            SIZE,
            cloud.path("big"),
            cloud.path("big"),
            "rb",
        )
        assert file.fs is fs
        assert file.blocksize == MiB
        assert file.readable()
        assert file.seekable()
        assert not file.writable()
        file.seek(77)
        assert file.loc == 77
        assert file.info()["size"] == SIZE
        assert file.info()["generation"]
        assert file.full_name == cloud.url("big")
        with fsspec.open(file.full_name) as again:
            assert again.read(10) == DATA[:10]
    assert file.closed


def test_seeking_outside_is_told(fs, cloud):
    with fs.open(cloud.path("big")) as file:
        with pytest.raises(OSError, match="before the start"):
            file.seek(-1)
        with pytest.raises(ValueError, match="whence"):
            file.seek(0, 9)
        file.seek(SIZE + 5)
        assert file.read() == b""


def test_a_file_pickles_by_path_and_position(fs, cloud):
    with fs.open(cloud.path("big")) as file:
        file.seek(MiB + 3)
        with pickle.loads(pickle.dumps(file)) as copy:
            assert copy.tell() == MiB + 3
            assert copy.read(100) == DATA[MiB + 3 : MiB + 103]


def test_a_pickled_file_is_not_reopened_at_another_version(fs, cloud):
    with fs.open(cloud.path("big")) as file:
        text = pickle.dumps(file)
    cloud.put("big", bytes(SIZE))
    fs.invalidate_cache()
    with pytest.raises(ObjectChanged, match=f"cachedfs::gs://{cloud.path('big')}.*open it again"):
        pickle.loads(text)


def test_a_file_stays_with_its_version_or_raises(cloud):
    cloud.put("big", DATA)
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", request_size="1MiB", read_ahead=0)
    with fs.open(cloud.path("big")) as file:
        assert file.read(100) == DATA[:100]
        cloud.put("big", noise(SIZE, seed=1))
        file.seek(2 * MiB)
        with pytest.raises(ObjectChanged):
            file.read(100)
        file.seek(0)
        assert file.read(MiB) == DATA[:MiB]
    fs.invalidate_cache()
    assert fs.cat_file(cloud.path("big")) == noise(SIZE, seed=1)


def test_a_handle_that_jumps_about_reads_blocks_and_no_more(fs, cloud):
    big = noise(40 * MiB, seed=3)
    cloud.put("huge", big)
    fs.info(cloud.path("huge"))
    cloud.asked()
    rng = random.Random(1)
    with fs.open(cloud.path("huge")) as file:
        for _ in range(5):
            at = rng.randrange(39) * MiB + 1000
            file.seek(at)
            assert file.read(2000) == big[at : at + 2000]
    assert cloud.server.bytes_sent() <= 5 * MiB
    assert len(cloud.asked()) <= 5


class Grudging(FakeOrigin):
    """Gives the next piece of a body once somebody waits for it."""

    piece_size = 4 * KiB

    async def _body(self, number, data):
        async for piece in super()._body(number, data):
            (here,) = engines._engines.values()
            while not any(flight._arrivals for flight in here.airborne):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.001)
            yield piece


@pytest.mark.parametrize("n_bytes", [60 * KiB, 8 * KiB, 32 * KiB])
def test_what_is_read_of_one_block_asks_for_no_other_however_slowly_it_comes(monkeypatch, n_bytes):
    origin = Grudging()
    origin.install(monkeypatch)
    data = origin.put("b/slow", noise(300_000))
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", block_size=64 * KiB)
    fs.info("b/slow")
    origin.log.clear()
    with fs.open("b/slow") as file:
        file.seek(260_000 - n_bytes)
        assert file.read(n_bytes) == data[260_000 - n_bytes : 260_000]
    assert [want for _, _, want in origin.log] == [Range(3 * 64 * KiB, 4 * 64 * KiB)]


@pytest.mark.parametrize("is_late", [False, True])
def test_reading_in_sequence_asks_for_each_byte_once(fs, cloud, is_late):
    """Also by who comes late: much more than a block is there then, and it is read at once."""
    big = noise(30 * MiB + 5, seed=4)
    cloud.put("huge", big)
    for size, requests in ((300 * KiB, 6), (16 * MiB, 6)):
        fs.evict(cloud.path("huge"))
        fs.invalidate_cache()
        cloud.asked()
        with fs.open(cloud.path("huge")) as file:
            pieces = []
            while piece := file.read(size):
                pieces.append(piece)
                if is_late:
                    until(lambda: all(flight.paused for flight in fs._source.engine.airborne))
        assert b"".join(pieces) == big
        assert cloud.server.bytes_sent() == len(big)
        assert len(cloud.asked()) <= requests


def test_a_block_that_is_bad_on_disk_is_fetched_again(fs, cloud, own_cache, caplog):
    assert fs.cat_file(cloud.path("big")) == DATA
    forget()
    cloud.asked()
    blocks = [path for path in own_cache.rglob("blocks/*/*") if path.is_file()]
    assert len(blocks) == 4
    for path in blocks:
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)
    fs = fsspec.filesystem("cachedfs", target_protocol="gs")
    with fs.open(cloud.path("big")) as file:
        assert file.read() == DATA
    assert set(cloud.asked()) == {"media"}
    assert fs.cat_file(cloud.path("big")) == DATA
    assert "damaged" in caplog.text


def test_an_empty_object_is_empty(fs, cloud):
    cloud.put("empty", b"")
    with fs.open(cloud.path("empty")) as file:
        assert file.read() == b""
        assert file.size == 0
    assert fs.cat_file(cloud.path("empty")) == b""
    assert fs.cat_file(cloud.path("empty"), -5) == b""


def test_a_hundred_open_handles_do_not_wait_for_one_another(fs, cloud):
    for i in range(40):
        cloud.put(f"many/{i}", noise(9 * MiB // 4, seed=i))
    files = [fs.open(cloud.path(f"many/{i}")) for i in range(40)]
    for i in reversed(range(40)):
        assert files[i].read() == noise(9 * MiB // 4, seed=i)
        files[i].close()


def test_a_closed_handle_takes_nothing_in_hand_again(fs, cloud):
    """Also when another thread waited to read it while it was closed: a block would stay open for ever."""
    file = fs.open(cloud.path("big"))
    raw = file.raw
    file.read(10)
    file.close()
    for read in (lambda: raw.readinto(bytearray(10)), raw.readall):
        with pytest.raises(ValueError, match="closed file"):
            read()


def read_all(file):
    file.seek(0)
    return b"".join(iter(lambda: file.read(64 * KiB), b""))


def test_a_handle_that_fetched_all_of_its_file_then_looks_for_nothing(cloud, monkeypatch):
    cloud.put("many", noise(300 * 64 * KiB))
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", block_size="64KiB")
    looks = []
    look = RawReader._look_ahead
    with fs.open(cloud.path("many")) as file:
        read_all(file)
        fs._source.engine.drain(120)
        hits = fs.stats().hits
        monkeypatch.setattr(RawReader, "_look_ahead", lambda raw: (looks.append(raw), look(raw)))
        for block in random.Random(1).sample(range(300), 300):
            file.seek(block * 64 * KiB + 5)
            assert file.read(1000)
        # Until the four runs of before are forgotten, and once for each block from then on.
        assert AT_HOME <= len(looks) <= AT_HOME + 10
        assert fs.stats().hits == hits + 300
        read_all(file)
        assert len(looks) <= AT_HOME + 10
        assert fs.stats().hits == hits + 600


def test_what_is_read_ahead_for_nobody_is_not_tried_again(origin, monkeypatch):
    trying, read = [], origin.read

    @contextlib.asynccontextmanager
    async def tried(path, want, pinned):
        if want.start >= 3 * MiB:  # the service is busy, and stays so
            trying.append(want)
            await asyncio.Event().wait()
        async with read(path, want, pinned) as reply:
            yield reply

    monkeypatch.setattr(origin, "read", tried)
    origin.put("b/ahead", noise(64 * MiB))
    fs = fsspec.filesystem("cachedfs", target_protocol="gs")
    engine = fs._source.engine
    with fs.open("b/ahead") as file:
        for _ in range(5):
            file.read(MiB // 2)
        until(lambda: trying)
    until(lambda: not engine.airborne and not engine.flights)


def test_a_handle_that_was_at_home_reads_ahead_again_where_something_is_missing(cloud):
    cloud.put("many", DATA := noise(300 * 64 * KiB))
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", block_size="64KiB", request_size="256KiB")
    fs.cat_file(cloud.path("many"), 64 * KiB, 200 * 64 * KiB)
    cloud.server.reset()
    with fs.open(cloud.path("many")) as file:
        assert read_all(file) == DATA  # cold, at home, and cold again
        assert cloud.server.count() <= 30  # 27: the first block, the 200th, and the others by fours
        read_all(file)
    with fs.open(cloud.path("many")) as file:
        cloud.server.reset()
        read_all(file)
    assert cloud.server.count() == 0
