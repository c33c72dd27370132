"""Open files: reads, seeks, pickling, versions, the requests they cost, and threads that share one."""

import asyncio
import contextlib
import hashlib
import io
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachedfs.core.open_file import RawFile
from cachedfs.errors import ObjectChanged
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
        st.tuples(st.just("read"), st.integers(-2, 2 * MiB)),
        st.tuples(st.just("read1"), st.integers(1, 100 * KiB)),
        st.tuples(st.just("readinto"), st.integers(0, 300 * KiB)),
        st.tuples(st.just("readline"), st.integers(0, 2000)),
        st.tuples(st.just("tell"), st.none()),
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=operations, cold=st.booleans())
def test_any_sequence_of_reads_returns_what_a_builtin_file_returns(fs, cloud, operations, cold):
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


def test_an_open_file_has_the_attributes_that_libraries_use(fs, cloud):
    with fs.open(
        cloud.path("big"), block_size=5 * MiB, cache_type="readahead", cache_options={"x": 1}
    ) as file:
        assert isinstance(file, io.BufferedReader)
        assert (file.size, file.path, file.mode, file.fs) == (SIZE, cloud.path("big"), "rb", fs)
        assert file.name == file.full_name == cloud.url("big")
        assert file.blocksize == MiB
        assert (file.readable(), file.seekable(), file.writable()) == (True, True, False)
        file.seek(77)
        assert file.loc == 77
        assert file.info()["size"] == SIZE
        assert file.info()["generation"]
        assert hashlib.file_digest(file, "sha256").digest() == hashlib.sha256(DATA[77:]).digest()
    assert file.closed


def test_a_file_refuses_what_a_builtin_file_refuses_and_is_empty_past_its_end(fs, cloud):
    with fs.open(cloud.path("big")) as file:
        with pytest.raises(OSError, match="write"):
            file.write(b"1")
        for place in ((-1,), (-SIZE - 1, 2)):
            with pytest.raises(OSError, match="before the start"):
                file.seek(*place)
        with pytest.raises(ValueError, match="whence"):
            file.seek(0, 9)
        file.seek(SIZE + 5)
        assert file.read() == b""
    for method in (file.read, file.tell, file.readable, file.seekable):
        with pytest.raises(ValueError, match="closed"):
            method()


def test_a_pickled_file_is_not_reopened_at_another_version(fs, cloud):
    with fs.open(cloud.path("big")) as file:
        file.seek(MiB + 3)
        text = pickle.dumps(file)
    with pickle.loads(text) as again:
        assert (again.tell(), again.read(100)) == (MiB + 3, DATA[MiB + 3 : MiB + 103])
    cloud.put("big", bytes(SIZE))
    fs.invalidate_cache()
    with pytest.raises(ObjectChanged, match=f"cachedfs::gs://{cloud.path('big')}.*open it again"):
        pickle.loads(text)


def test_an_open_file_stays_with_its_version_or_raises(cloud):
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
    with fs.open(cloud.path("big")) as file:  # without waiting for `max_age`
        assert file.read() == noise(SIZE, seed=1)


def test_random_reads_of_a_file_fetch_only_their_blocks(fs, cloud):
    big = noise(16 * MiB, seed=3)
    cloud.put("huge", big)
    fs.info(cloud.path("huge"))
    cloud.asked()
    rng = random.Random(1)
    with fs.open(cloud.path("huge")) as file:
        for _ in range(5):
            at = rng.randrange(15) * MiB + 1000
            file.seek(at)
            assert file.read(2000) == big[at : at + 2000]
    assert cloud.server.bytes_sent() <= 5 * MiB
    assert len(cloud.asked()) <= 5


@pytest.mark.parametrize("is_late", [False, True])
def test_sequential_reads_request_each_byte_once(fs, cloud, is_late):
    """Also when the reader is slow and more than a block is buffered."""
    big = noise(30 * MiB + 5, seed=4)
    cloud.put("huge", big)
    engine = fs._objects.engine
    for size, requests in ((300 * KiB, 6), (16 * MiB, 6)):
        fs.evict(cloud.path("huge"))
        fs.invalidate_cache()
        cloud.asked()
        with fs.open(cloud.path("huge")) as file:
            pieces = []
            while piece := file.read(size):
                pieces.append(piece)
                if is_late:
                    until(lambda: engine.active_requests == engine.paused_requests)
        assert b"".join(pieces) == big
        assert cloud.server.bytes_sent() == len(big)
        assert len(cloud.asked()) <= requests


def test_a_damaged_block_on_disk_is_fetched_again(fs, cloud, own_cache, caplog):
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


def test_verify_always_finds_damage_also_after_the_first_read(fs, cloud, own_cache):
    fs, path = fsspec.filesystem("cachedfs", target_protocol="gs", verify_always=True), cloud.path("big")
    with fs.open(path) as file:

        def read_file():
            file.seek(0)
            return b"".join(iter(lambda: file.read(MiB), b""))

        for read in (lambda: fs.cat_file(path), lambda: fs.cat_file(path, 0, 9), read_file):
            expected = read()
            fs._objects.engine.drain(120)
            assert read() == expected  # from the disk
            blocks = [block for block in own_cache.rglob("blocks/*/*") if block.is_file()]
            assert len(blocks) == 4
            for block in blocks:
                with block.open("r+b") as opened:
                    opened.write(b"damaged!")
            assert read() == expected


def test_many_open_files_do_not_wait_for_each_other(fs, cloud):
    data = noise(9 * MiB // 4)
    for i in range(40):  # more than there are connections
        cloud.put(f"many/{i}", data)
    files = [fs.open(cloud.path(f"many/{i}")) for i in range(40)]
    for file in reversed(files):
        with file:
            assert file.read() == data


def test_a_closed_file_opens_no_block_again(fs, cloud):
    """Also when another thread waited to read it while it was closed; the block would stay open."""
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


def test_failed_readahead_of_a_closed_file_is_not_retried(origin, monkeypatch):
    trying, read = [], origin.read

    @contextlib.asynccontextmanager
    async def tried(path, want, pinned):
        if want.start >= 3 * MiB:  # the service stays busy
            trying.append(want)
            await asyncio.Event().wait()
        async with read(path, want, pinned) as reply:
            yield reply

    monkeypatch.setattr(origin, "read", tried)
    origin.put("b/ahead", noise(64 * MiB))
    fs = fsspec.filesystem("cachedfs", target_protocol="gs")
    engine = fs._objects.engine
    with fs.open("b/ahead") as file:
        for _ in range(5):
            file.read(MiB // 2)
        until(lambda: trying)
    until(lambda: not engine.active_requests and not engine.by_block)


@pytest.fixture
def threads():
    """Two threads; each makes a call and returns its result."""
    with ThreadPoolExecutor(1) as a, ThreadPoolExecutor(1) as b:
        yield [lambda call, *args, thread=thread: thread.submit(call, *args).result() for thread in (a, b)]


@pytest.fixture
def shared(fs, cloud):
    """A file shared by threads."""
    with fs.open(cloud.path("big")) as file:
        yield file


def filled(readinto):
    buffer = bytearray(1000)
    return bytes(buffer[: readinto(buffer)])


READS = {
    "read": lambda file: file.read(1000),
    "readinto": lambda file: filled(file.readinto),
    "readinto1": lambda file: filled(file.readinto1),
    "readline": lambda file: file.readline(),
    "lines": next,
    "read1": lambda file: file.read1(1000),
    "peek": lambda file: file.peek(1000),
    "readlines": lambda file: b"".join(file.readlines(1000)),
}
OTHERS = {
    "nothing": lambda file: None,
    "seek": lambda file: file.seek(MiB),
    "seek and read": lambda file: (file.seek(MiB), file.read(10)),
    "seek and read twice": lambda file: (file.seek(MiB), file.read(10), file.read(10)),
    "seek and read lines": lambda file: (file.seek(MiB), next(file), next(file)),
    "size": lambda file: file.seek(0, 2),
    "seek from there": lambda file: file.seek(5, 1),
    "tell": lambda file: file.tell(),
}


@pytest.mark.parametrize(("read", "other"), [*zip(READS, OTHERS, strict=True)])
def test_a_read_begins_where_its_own_thread_sought(shared, threads, read, other):
    a, b = threads
    for position in (100_000, 2 * MiB):  # the second time, both threads have a position in the file
        a(shared.seek, position)
        b(OTHERS[other], shared)
        data = a(READS[read], shared)
        assert data
        assert data == DATA[position : position + len(data)]


def test_each_thread_sees_its_own_position(shared, threads):
    a, b = threads
    a(shared.seek, 1000)
    b(shared.seek, 7000)
    assert (a(shared.tell), b(shared.tell)) == (1000, 7000)
    assert (a(shared.seek, 5, 1), b(shared.seek, -5, 1)) == (1005, 6995)
    assert (a(shared.seek, 0, 2), b(shared.seek, 500)) == (SIZE, 500)
    assert (a(shared.tell), b(shared.tell), shared.tell()) == (SIZE, 500, 500)
    assert (a(shared.seek, -10, 2), b(shared.read, 5)) == (SIZE - 10, DATA[500:505])
    assert a(shared.read) == DATA[-10:]
    assert a(shared.seek, 0, 2) == SIZE  # it only asks for the size, if another thread moves the file
    b(shared.seek, 300)
    assert a(shared.read, 10) == DATA[300:310]
    a(shared.seek, 0, 2)
    assert a(shared.read) == b""


def test_a_file_passed_between_threads_has_one_position(shared, threads):
    a, b = threads
    assert shared.seek(100) == 100
    expected = [DATA[at : at + 10] for at in range(100, 150, 10)]
    assert [run(shared.read, 10) for run in (a, b, a, b, lambda read, size: read(size))] == expected
    assert (a(shared.tell), b(shared.tell)) == (150, 150)
    # A seek is forgotten when another thread has read since.
    a(shared.seek, 5000)
    b(shared.seek, 200)
    assert shared.read(10) == DATA[200:210]
    assert (a(shared.read, 10), b(shared.read, 10)) == (DATA[210:220], DATA[220:230])


def test_a_loop_over_lines_follows_what_is_done_to_the_file_in_it(fs, cloud):
    rng = random.Random(5)
    data = b"".join(rng.randbytes(rng.choice((3, 30, 70_000))) + b"\n" for _ in range(100)) + b"end"
    cloud.put("lines", data)
    acts = {
        0: lambda file: file.seek(1000),
        1: lambda file: file.read(100),
        2: lambda file: (file.seek(-10, 1), file.read(20), file.read(20)),
        3: lambda file: (file.readline(), next(iter(file), b"")),
        4: lambda file: file.seek(file.tell() + 5),
    }
    with fs.open(cloud.path("lines")) as file, io.BytesIO(data) as model:
        for _ in range(30):
            ours, theirs = iter(file), iter(model)
            for _ in range(20):
                assert (next(ours, b""), file.tell()) == (next(theirs, b""), model.tell())
                act = acts.get(rng.randrange(25), lambda file: None)
                assert act(file) == act(model)
                if model.tell() == len(data):
                    assert file.seek(2000) == model.seek(2000)
        file.seek(0)
        assert [*file] == [*io.BytesIO(data)]
        file.seek(0)
        assert [*zip(file, file, strict=False)] == [*zip(*[iter(io.BytesIO(data))] * 2, strict=False)]


def test_after_a_failed_read_the_position_is_unchanged(fs, cloud, threads, monkeypatch):
    a, b = threads
    with fs.open(cloud.path("big")) as file:
        a(file.seek, 2 * MiB)
        b(file.seek, 100)
        with monkeypatch.context() as patch:
            patch.setattr(RawFile, "readinto", lambda raw, buffer: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                a(file.read, 100)
        assert b(file.read, 100) == DATA[100:200]
        assert a(file.read, 100) == DATA[2 * MiB : 2 * MiB + 100]


def test_threads_that_share_a_file_read_right_bytes(shared):
    """Each seeks, then reads, without a lock, as libraries in C++ do."""

    def wrong(seed):
        rng = random.Random(seed)
        places = [(rng.randrange(SIZE - 5000), rng.randrange(1, 5000)) for _ in range(200)]
        return [at for at, n in places if (shared.seek(at), shared.read(n))[1] != DATA[at : at + n]]

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(wrong, range(8))] == [[]] * 8


def test_readahead_starts_again_when_a_block_of_a_cached_file_is_missing(cloud):
    cloud.put("many", DATA := noise(300 * 64 * KiB))
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", block_size="64KiB", request_size="256KiB")
    fs.cat_file(cloud.path("many"), 64 * KiB, 200 * 64 * KiB)
    cloud.server.reset()
    with fs.open(cloud.path("many")) as file:
        assert read_all(file) == DATA  # missing, cached, and missing again
        assert cloud.server.count() <= 30  # 27: the first block, the 200th, and the others by fours
        read_all(file)
    with fs.open(cloud.path("many")) as file:
        cloud.server.reset()
        read_all(file)
    assert cloud.server.count() == 0
