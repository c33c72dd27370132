"""Readahead of zarr chunks and numbered objects: which objects are requested, how often, and before they are read."""

import asyncio
import collections

import fsspec
import numpy as np
import pytest
import xarray as xr
import zarr

from cachedfs.core.downloads import Downloads
from cachedfs.filesystem import CachedFileSystem
from cachedfs.sim import Fault
from tests.support import KiB, MiB, noise, until, until_quiet

KINDS = {
    "v3": {},
    "v3 dots": {"chunk_key_encoding": {"name": "default", "separator": "."}},
    "v3 named as v2": {"chunk_key_encoding": {"name": "v2", "separator": "."}},
    "v2": {"zarr_format": 2},
    "v2 slashes": {"zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "sharded": {"shards": (2, 2, 2), "shape": (4, 4, 8)},
}
SHAPE = (4, 2, 8)
CHUNK_BYTES = 8
# Positions in a new array of three axes without metadata, read one at a time: the first four, and the starts of the
# second row and the second plane.
N_UNFORESEEN = 4 + 1 + 1


@pytest.fixture
def wait_before_reads(monkeypatch):
    """Start each read after all earlier requests are received; otherwise the number of chunks ahead is a race."""
    cat_file, turn = CachedFileSystem._cat_file, asyncio.Lock()

    async def in_turn(fs):
        async with turn:  # first come, first served
            await settled(fs)

    async def waiting(self, *args, **options):
        await self._objects.engine.await_on_loop(in_turn(self))
        return await cat_file(self, *args, **options)

    monkeypatch.setattr(CachedFileSystem, "_cat_file", waiting)


async def settled(fs):
    """Wait until no request is queued or will be; on the loop, where a read queues its requests in one step."""
    engine = fs._objects.engine
    while engine.speculation.queued or engine.speculation._lookups or engine.active_requests:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.001)


@pytest.fixture
def requested_ahead(monkeypatch):
    """The paths of the objects requested before a reader waited for them, in that order."""
    found, run = [], Downloads._run

    def recorded(self, download, path, *args):
        if download.is_speculative:
            found.append(path)
        return run(self, download, path, *args)

    monkeypatch.setattr(Downloads, "_run", recorded)
    return found


def put_folder(cloud, folder, name):
    for path in folder.rglob("*"):
        if path.is_file():
            cloud.put(f"{name}/{path.relative_to(folder)}", path.read_bytes())


def make(cloud, tmp_path, name="a.zarr", shape=SHAPE, written=None, **options):
    """Create an array of chunks with one value each at the service; return its values."""
    options = {"chunks": (1,) * len(shape), "dtype": "i8", "compressors": None} | options
    array = zarr.create_array(tmp_path / name, shape=shape, fill_value=0, **options)
    values = np.arange(1, array.size + 1).reshape(shape)
    if written is None:
        array[...] = values
    else:
        for at in np.ndindex(*shape):
            if written(at):
                array[at] = values[at]
            else:
                values[at] = 0
    put_folder(cloud, tmp_path / name, name)
    return values


def counted(cloud):
    """Return how often each object was requested since the last call, and the bytes received."""
    asked = collections.Counter(request.key for request in cloud.server.requests)
    sent = cloud.server.bytes_sent()
    cloud.server.reset()
    return asked, sent


# In order.
@pytest.mark.parametrize(("kind", "at_once"), list(zip(KINDS, [1, 1, 10, 1, 10, 1], strict=True)))
def test_a_whole_array_costs_one_request_per_object_and_most_are_ahead(
    cloud, tmp_path, requested_ahead, wait_before_reads, kind, at_once
):
    values = make(cloud, tmp_path, **KINDS[kind])
    array = zarr.open_array(cloud.url("a.zarr"), mode="r")
    counted(cloud)
    with zarr.config.set({"async.concurrency": at_once}):
        np.testing.assert_array_equal(array[...], values)
    asked, sent = counted(cloud)
    objects = [
        path for path in (tmp_path / "a.zarr").rglob("*") if path.is_file() and path.name[-1].isdigit()
    ]
    assert len(asked) == len(objects) == (16 if kind == "sharded" else 64)
    assert set(asked.values()) == {1}
    assert sent == sum(path.stat().st_size for path in objects)
    if at_once == 1:
        assert len(requested_ahead) == len(objects) - N_UNFORESEEN
    else:  # how many of zarr's ten reads come before the order is recognized is a race
        assert requested_ahead
    assert len(set(requested_ahead)) == len(requested_ahead)


def test_at_most_one_window_is_requested_and_never_read(cloud, tmp_path, fs):
    make(cloud, tmp_path, shape=(80,))
    options = {"cachedfs": {"read_ahead": 16 * CHUNK_BYTES}}
    array = zarr.open_array(cloud.url("a.zarr"), mode="r", storage_options=options)
    counted(cloud)
    for i in range(40):
        array[i]
    until_quiet(fs._objects.engine)
    asked, _ = counted(cloud)
    assert 40 <= len(asked) <= 56


@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
@pytest.mark.usefixtures("wait_before_reads")
def test_the_grid_is_known_from_consolidated_metadata(cloud, tmp_path, requested_ahead):
    t = np.arange(20 * 5, dtype="f4").reshape(20, 5)
    data = xr.Dataset(dict.fromkeys(("a", "b"), (("time", "x"), t)))
    encoding = {name: {"chunks": (1, 5)} for name in ("a", "b")}
    data.to_zarr(tmp_path / "d.zarr", zarr_format=3, consolidated=True, encoding=encoding)
    put_folder(cloud, tmp_path / "d.zarr", "d.zarr")
    with xr.open_zarr(cloud.url("d.zarr"), consolidated=True, chunks=None) as opened:
        counted(cloud)
        for i in range(20):  # two arrays at a time
            assert opened.isel(time=i).load().equals(data.isel(time=i))
    asked, _ = counted(cloud)
    assert len(asked) == 40
    assert set(asked.values()) == {1}
    assert len(requested_ahead) == 2 * (20 - 4)


# Shards.
def sharded(cloud, tmp_path, n=8):
    values = np.frombuffer(noise(n * 16 * 128 * KiB), "u1").reshape(n * 16, -1)
    array = zarr.create_array(
        tmp_path / "s.zarr",
        shape=values.shape,
        chunks=(1, 128 * KiB),
        shards=(16, 128 * KiB),
        dtype="u1",
        compressors=None,
    )
    array[...] = values
    put_folder(cloud, tmp_path / "s.zarr", "s.zarr")
    return values


def test_the_next_shard_is_requested_whole_if_the_previous_ones_were_read_whole(
    cloud, tmp_path, requested_ahead
):
    values = sharded(cloud, tmp_path)
    array = zarr.open_array(cloud.url("s.zarr"), mode="r")
    counted(cloud)
    for i in range(5 * 16 + 1):
        np.testing.assert_array_equal(array[i], values[i])
    fs = fsspec.filesystem("cachedfs", target_protocol="gs")
    size = fs.info(cloud.path("s.zarr/c/6/0"))["size"]
    until(lambda: fs.cached_extent(cloud.path("s.zarr/c/6/0")) == [(0, size)])


# Nothing to request.
@pytest.mark.parametrize("options", [{"read_ahead": 0}, {"max_age": 0}], ids=str)
def test_nothing_is_requested_ahead_when_it_is_switched_off_or_useless(
    cloud, tmp_path, requested_ahead, options
):
    values = make(cloud, tmp_path, shape=(12,))
    array = zarr.open_array(cloud.url("a.zarr"), mode="r", storage_options={"cachedfs": options})
    np.testing.assert_array_equal(array[...], values)
    assert requested_ahead == []


def test_a_missing_chunk_is_requested_once_and_is_no_error(cloud, tmp_path):
    values = make(cloud, tmp_path, shape=(20, 4), written=lambda at: at[0] % 3 == 0)
    array = zarr.open_array(cloud.url("a.zarr"), mode="r")
    for expected in (80, 0):
        counted(cloud)
        np.testing.assert_array_equal(array[...], values)
        asked, _ = counted(cloud)
        assert sum(asked.values()) == len(asked) == expected


def test_a_speculative_request_that_fails_is_no_error(cloud, tmp_path, fs):
    values = make(cloud, tmp_path, shape=(60,))
    array = zarr.open_array(cloud.url("a.zarr"), mode="r")
    for i in (22, 23, 25):
        cloud.server.fail(Fault(key=f"a.zarr/c/{i}", status=400))  # not retried
    for i in range(20):
        assert array[i] == values[i]
    until(lambda: sum(request.status == 400 for request in cloud.server.requests) == 3)
    until(lambda: not fs._objects.engine.active_requests)
    np.testing.assert_array_equal(array[...], values)


# Numbered objects.
@pytest.mark.parametrize("is_opened", [False, True])
def test_numbered_objects_of_a_listed_folder_are_read_ahead(cloud, fs, requested_ahead, is_opened):
    for i in range(16):
        cloud.put(f"f/part-{i:05}.json", noise(3000, i))
    fs.ls(cloud.path("f"))
    counted(cloud)
    for i in range(16):
        fs._run(settled(fs))
        key = f"f/part-{i:05}.json"
        if is_opened:
            with fsspec.open(cloud.url(key), "rb") as file:
                assert file.read() == noise(3000, i)
        else:
            assert fs.cat_file(cloud.path(key)) == noise(3000, i)
    asked, _ = counted(cloud)
    assert len(asked) == sum(asked.values()) == 16
    assert len(requested_ahead) == 16 - 4


def test_the_start_of_the_next_numbered_file_is_requested_or_all_of_it(cloud, fs, requested_ahead):
    data = noise(3 * MiB)
    for i in range(20):
        cloud.put(f"f/{i}", data)
    fs.ls(cloud.path("f"))
    counted(cloud)
    for i in range(20):
        with fs.open(cloud.path(f"f/{i}")) as file:
            assert file.read(1000) == data[:1000]
    until(lambda: fs.stats().blocks == 20)
    assert len(requested_ahead) >= 12
    asked = {
        cloud.path(request.key): request.headers["range"]
        for request in cloud.server.requests
        if request.kind == "media"
    }
    assert {asked[path] for path in requested_ahead} == {f"bytes=0-{MiB - 1}"}
