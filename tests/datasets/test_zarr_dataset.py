"""ZarrDataset: values as zarr reads them, groups, errors, requests, changes, threads and workers."""

import collections
import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numcodecs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import zarr  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.data import default_collate  # noqa: E402

from cachedfs.datasets import codecs, zarr_layout, zarr_reader  # noqa: E402
from cachedfs.datasets.loader import Loader  # noqa: E402
from cachedfs.datasets.zarr_dataset import ZarrDataset  # noqa: E402
from cachedfs.errors import ObjectChanged  # noqa: E402
from tests.support import KiB, MiB, noise, until  # noqa: E402

BYTES = zarr.codecs.BytesCodec


def put_folder(cloud, folder, name):
    for path in folder.rglob("*"):
        if path.is_file():
            cloud.put(f"{name}/{path.relative_to(folder)}", path.read_bytes())


def values_of(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if dtype.kind == "c":
        return (rng.random(shape) + 1j * rng.random(shape)).astype(dtype)
    if dtype.kind == "f":
        return rng.normal(size=shape).astype(dtype)
    return rng.integers(0, 100, shape).astype(dtype)


def made(folder, shape, dtype="f4", *, values=None, **options):
    """Write an array of random or the given values."""
    array = zarr.create_array(folder, shape=shape, dtype=dtype, **options)
    array[...] = values_of(shape, dtype) if values is None else values
    return array


def sharded_by(folder, shape, shard, dtype, **codec):
    """Make an array with any options of shards, for which zarr warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        codecs = [zarr.codecs.ShardingCodec(**codec)]
        return zarr.create(store=folder, shape=shape, chunks=shard, dtype=dtype, zarr_format=3, codecs=codecs)


def same(found, expected):
    if expected.dtype.kind in "biufcM":  # of strings NumPy makes a type as long as the longest
        assert found.dtype == expected.dtype.newbyteorder("=")
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found, expected)


def check(url, array, **options):
    """Compare every way to read an array with zarr."""
    expected = np.asarray(array[...])
    dataset = ZarrDataset(url, **options)
    assert len(dataset) == len(expected)
    n = len(expected)
    shuffled = np.random.default_rng(1).permutation(n)
    for order in (range(n), shuffled, [-1, 0, 0, n // 2, -1]):
        found = dataset.__getitems__(order)
        same(np.stack([np.asarray(one) for one in found]), expected[list(order)])
        if expected.dtype.kind in "biufc":
            batch = dataset.batch(order)
            assert batch.dtype == torch.as_tensor(expected.astype(expected.dtype.newbyteorder("="))[:1]).dtype
            same(batch.numpy(), expected[list(order)])
    for i in (0, n - 1):
        same(np.asarray(dataset[i]), np.asarray(expected[i]))
    return dataset


# Values as zarr reads them.

SHAPE, CHUNK, SHARD = (23, 6, 5), (4, 3, 5), (8, 6, 5)
V3 = {
    "bytes": {"compressors": None},
    "big": {"serializer": BYTES(endian="big"), "compressors": None},
    "blosc": {"compressors": zarr.codecs.BloscCodec(cname="lz4", shuffle="bitshuffle")},
    "zstd": {"compressors": zarr.codecs.ZstdCodec(level=3)},
    "zstd checked": {"compressors": zarr.codecs.ZstdCodec(checksum=True)},
    "gzip": {"compressors": zarr.codecs.GzipCodec()},
    "crc32c": {"compressors": [zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()]},
    "crc32c alone": {"compressors": zarr.codecs.Crc32cCodec()},
    "transposed": {"filters": zarr.codecs.TransposeCodec(order=(2, 0, 1))},
    "transposed twice": {
        "filters": [zarr.codecs.TransposeCodec(order=(2, 0, 1)), zarr.codecs.TransposeCodec(order=(0, 2, 1))]
    },
    "transposed, big": {
        "filters": zarr.codecs.TransposeCodec(order=(1, 2, 0)),
        "serializer": BYTES(endian="big"),
    },
    "dots": {"chunk_key_encoding": {"name": "default", "separator": "."}},
    "named as v2": {"chunk_key_encoding": {"name": "v2", "separator": "/"}},
}
PLACES = {
    "chunks": {"chunks": CHUNK},
    "shards": {"chunks": CHUNK, "shards": SHARD},
    "one a chunk": {"chunks": (1, 6, 5), "shards": SHARD},
    "all": {"chunks": (30, 8, 8)},
}


# Each codec at two positions, and each position with about half of the other codecs.
@pytest.mark.parametrize(
    ("kind", "place"), [(kind, [*PLACES][(i + j) % 4]) for i, kind in enumerate(V3) for j in (0, 1)]
)
def test_every_v3_codec_is_decoded_as_by_zarr(tmp_path, kind, place):
    folder = tmp_path / "a.zarr"
    check(str(folder), made(folder, SHAPE, fill_value=np.nan, **PLACES[place], **V3[kind]))


V2 = {
    "none": {"compressors": None},
    "blosc": {"compressors": numcodecs.Blosc(cname="zstd", shuffle=2)},
    "zstd": {"compressors": numcodecs.Zstd(5)},
    "lz4": {"compressors": numcodecs.LZ4()},
    "gzip": {"compressors": numcodecs.GZip()},
    "zlib": {"compressors": numcodecs.Zlib()},
    "bz2": {"compressors": numcodecs.BZ2()},
    "delta": {"filters": [numcodecs.Delta("<i4")], "compressors": numcodecs.Zstd()},
    "shuffle": {"filters": [numcodecs.Shuffle(4)], "compressors": numcodecs.Zlib()},
    "both": {"filters": [numcodecs.Delta("<i4"), numcodecs.Shuffle(4)], "compressors": numcodecs.LZ4()},
    "filter alone": {"filters": [numcodecs.Delta("<i4")], "compressors": None},
    "slashes": {"chunk_key_encoding": {"name": "v2", "separator": "/"}},
}


@pytest.mark.parametrize(("kind", "order"), [*zip(V2, "CF" * 6, strict=True)])
def test_every_v2_codec_is_decoded_as_by_zarr(tmp_path, kind, order):
    folder = tmp_path / "a.zarr"
    check(str(folder), made(folder, SHAPE, "<i4", chunks=CHUNK, zarr_format=2, order=order, **V2[kind]))


TYPES = ["?", "i1", "u1", "<i2", ">i2", "<u2", "<u4", ">f4", "<f2", "<f8", ">f8", "<c8", ">c16", "<u8", "<M8[s]"]  # fmt: skip


@pytest.mark.parametrize(("dtype", "zarr_format"), [(dtype, 2 + i % 2) for i, dtype in enumerate(TYPES)])
@pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification")
def test_every_number_type_is_read_in_native_byte_order(tmp_path, dtype, zarr_format):
    options = {"shards": (6, 4)} if zarr_format == 3 else {}
    folder = tmp_path / "a.zarr"
    check(str(folder), made(folder, (11, 4), dtype, chunks=(3, 2), zarr_format=zarr_format, **options))


@st.composite
def any_array(draw):
    n_axes = draw(st.integers(1, 4))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(n_axes))
    chunks = tuple(draw(st.integers(1, 5)) for _ in range(n_axes))
    options = {"shape": shape, "chunks": chunks, "dtype": draw(st.sampled_from(["u1", "<f4", ">i8"]))}
    options["zarr_format"] = draw(st.sampled_from([2, 3]))
    is_sharded = options["zarr_format"] == 3 and draw(st.booleans())
    if is_sharded:
        options["shards"] = tuple(part * draw(st.integers(1, 3)) for part in chunks)
        where = draw(st.sampled_from(["start", "end"]))
        options["shards"] = {"shape": options["shards"], "index_location": where}
    if options["zarr_format"] == 2:
        options["order"] = draw(st.sampled_from("CF"))
    elif draw(st.booleans()):
        options["filters"] = zarr.codecs.TransposeCodec(order=draw(st.permutations(range(n_axes))))
    options["compressors"] = draw(st.sampled_from([None, "auto"]))
    options["fill_value"] = draw(st.integers(0, 100))
    return options


@given(any_array(), st.data())
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
def test_any_array_reads_as_with_zarr_also_where_it_was_never_written(tmp_path, options, data):
    array = zarr.create_array(tmp_path / "h.zarr", overwrite=True, **options)
    for _ in range(data.draw(st.integers(0, 3))):
        at = tuple(data.draw(st.integers(0, n - 1)) for n in array.shape)
        array[at] = 7
    check(str(tmp_path / "h.zarr"), array, pool=data.draw(st.sampled_from([0, 1000, "1MiB"])))


@pytest.mark.parametrize("fill_value", [-1.5, np.nan, np.inf, None])
def test_unwritten_chunks_are_the_fill_value(tmp_path, fill_value):
    kinds = [{"zarr_format": 2}, {}, {"shards": (4, 4)}]
    for i, options in enumerate(kinds[: 1 if fill_value is None else 3]):  # Zarr v3 always has one
        folder = tmp_path / f"{i}.zarr"
        array = zarr.create_array(
            folder, shape=(8, 4), chunks=(2, 2), dtype="f8", fill_value=fill_value, **options
        )
        array[5, 1] = 3
        check(str(folder), array)


def test_shards_with_other_index_positions_checksums_and_byte_orders(tmp_path):
    for where, index_codec in (("start", BYTES(endian="big")), ("end", BYTES())):
        folder = tmp_path / where
        options = {"index_location": where, "index_codecs": [index_codec]}
        array = sharded_by(folder, (9, 6), (4, 6), "i4", chunk_shape=(2, 3), codecs=[BYTES()], **options)
        array[...] = values_of((9, 6), "i4")
        check(str(folder), array)


# Chunks that zarr decodes for us.


@pytest.mark.filterwarnings(
    "ignore:.*V3 spec", "ignore:Numcodecs codecs are not", "ignore:Combining a `sharding_indexed`"
)
@pytest.mark.parametrize(
    "kind", ["string", "sharded string", "structured", "v2 string", "delta", "nested", "packed shards"]
)
def test_chunks_of_any_type_and_codec_are_read_and_declared(tmp_path, kind):
    folder, numbers = tmp_path / "a.zarr", np.arange(7)
    if kind.endswith("string"):
        words = np.array([f"word {i}" for i in numbers])
        version = 2 if kind == "v2 string" else 3
        options = {"shards": (6,)} if kind == "sharded string" else {}
        array = made(folder, (7,), str, chunks=(3,), zarr_format=version, values=words, **options)
    elif kind == "structured":
        records = np.array([(i, i / 2) for i in numbers], [("a", "i4"), ("b", "f4")])
        array = made(folder, (7,), records.dtype, chunks=(3,), zarr_format=2, values=records)
    elif kind == "delta":
        delta = zarr.codecs.numcodecs.Delta(dtype="i4")
        array = made(folder, (7,), "i4", chunks=(3,), filters=delta, values=numbers)
    elif kind == "nested":
        inner = zarr.codecs.ShardingCodec(chunk_shape=(1,))
        array = sharded_by(folder, (7,), (6,), "i4", chunk_shape=(3,), codecs=[inner])
        array[:] = numbers
    else:
        codecs = [zarr.codecs.ShardingCodec(chunk_shape=(3,)), zarr.codecs.GzipCodec()]
        array = zarr.create(store=folder, shape=(7,), chunks=(6,), dtype="i4", zarr_format=3, codecs=codecs)
        array[:] = numbers
    dataset = check(str(folder), array)
    read = {item if isinstance(item, str) else item[0] for item in dataset.items(range(7))}
    assert read == {str(path) for path in folder.rglob("*") if path.is_file() and path.name[0] not in "z."}
    again = pickle.loads(pickle.dumps(dataset))
    assert np.asarray(again[2]).tolist() == np.asarray(array[2]).tolist()


# Groups.


def make_group(folder, n=20, zarr_format=3, **image):
    group = zarr.create_group(folder, zarr_format=zarr_format)
    image = {"chunks": (1, 4, 3)} | image
    group.create_array("image", shape=(n, 4, 3), dtype="u1", **image)[...] = values_of((n, 4, 3), "u1")
    group.create_array("label", shape=(n,), chunks=(6,), dtype=">i8")[...] = np.arange(n)
    return group


@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
@pytest.mark.parametrize("is_consolidated", [False, True])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_the_arrays_of_a_group_are_one_sample(tmp_path, caplog, zarr_format, is_consolidated):
    group = make_group(tmp_path / "g.zarr", zarr_format=zarr_format)
    deeper = group.create_group("deeper")
    deeper.create_array("other", shape=(3,), dtype="i4")
    deeper.create_group("still").create_array("twin", shape=(20,), dtype="i4")[...] = np.arange(20)
    if is_consolidated:
        zarr.consolidate_metadata(tmp_path / "g.zarr")
    url, images = str(tmp_path / "g.zarr"), group["image"][...]
    dataset = ZarrDataset(url)
    assert dataset.arrays == ("deeper/still/twin", "image", "label")
    assert "left out 'deeper/other' (3)" in caplog.text
    assert dataset.group_size == 1
    twin, image, label = dataset[-2]
    same(image, images[-2])
    assert twin == label == 18
    label, image = ZarrDataset(url, arrays=("label", "image"))[3]
    same(image, images[3])
    assert label == 3
    (alone,) = ZarrDataset(url, arrays=["image"])[3]
    for one in (alone, ZarrDataset(url, arrays="image")[3], ZarrDataset(f"{url}/image")[3]):
        same(one, images[3])
    assert ZarrDataset(url, named=True)[3].keys() == {"deeper/still/twin", "image", "label"}


@pytest.mark.parametrize(
    "options", [{}, {"named": True}, {"arrays": "image"}, {"arrays": ["label"]}], ids=str
)
def test_a_batch_is_what_torch_makes_of_the_samples(tmp_path, options):
    make_group(tmp_path / "g.zarr")
    dataset = ZarrDataset(str(tmp_path / "g.zarr"), **options)
    order = [3, 19, 3, 0, 7]
    found, expected = dataset.batch(order), default_collate(dataset.__getitems__(order))
    assert type(found) is type(expected)

    def flat(batch):
        if isinstance(batch, torch.Tensor):
            return [batch]
        return list(batch.values()) if isinstance(batch, dict) else list(batch)

    for one, other in zip(flat(found), flat(expected), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_transform_and_collate_get_each_sample(tmp_path):
    make_group(tmp_path / "g.zarr")

    def transform(sample):
        image, label = sample
        image += 1  # each sample has its own memory
        return int(image.sum()), int(label)

    url = str(tmp_path / "g.zarr")
    dataset, plain = ZarrDataset(url, transform=transform), ZarrDataset(url)
    sums, labels = dataset.batch([4, 4, 1])
    assert labels.tolist() == [4, 4, 1]
    assert sums[0] == sums[1] == plain[4][0].sum() + 12
    assert plain.batch([4, 1], collate=lambda samples: [int(label) for _, label in samples]) == [4, 1]


class Doubled(ZarrDataset):
    def __getitem__(self, index):
        return 2 * super().__getitem__(index)


def test_a_batch_uses_the_methods_of_a_derived_class(tmp_path):
    zarr.create_array(tmp_path / "a.zarr", data=np.arange(6))
    ((batch),) = Loader(Doubled(str(tmp_path / "a.zarr")), batch_size=6)
    assert batch.tolist() == [0, 2, 4, 6, 8, 10]


# Errors.


def test_arrays_of_different_lengths_are_an_error_that_names_them(tmp_path):
    group = make_group(tmp_path / "g.zarr")
    group.create_array("other", shape=(3,), dtype="i4")
    group.create_array("scalar", shape=(), dtype="i4")
    with pytest.raises(ValueError, match=r"'image' 20, 'label' 20, 'other' 3"):
        ZarrDataset(str(tmp_path / "g.zarr"))
    with pytest.raises(ValueError, match=r"'scalar' no axes"):
        ZarrDataset(str(tmp_path / "g.zarr"), arrays=["scalar"])


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_arrays_that_all_samples_share_are_left_out_unless_named(tmp_path, zarr_format):
    xr = pytest.importorskip("xarray")
    arrays = {
        "temperature": (("time", "lat"), np.arange(6).reshape(2, 3)),
        "time": ("time", [7, 8]),
        "lat": ("lat", [1.0, 2.0, 3.0]),
        "links": (("lat", "edge"), np.eye(3)),
        "crs": ((), 5),
    }
    url = str(tmp_path / "g.zarr")
    xr.Dataset(arrays).to_zarr(url, zarr_format=zarr_format, consolidated=False)
    dataset = ZarrDataset(url, named=True)
    assert dataset.arrays == ("temperature", "time")
    assert {name: row.tolist() for name, row in dataset[1].items()} == {"temperature": [3, 4, 5], "time": 8}
    assert ZarrDataset(url, arrays=("lat", "links")).arrays == ("lat", "links")


def test_a_missing_array_is_named(tmp_path):
    url = str(tmp_path / "g.zarr")
    with pytest.raises(FileNotFoundError, match=r"g\.zarr is not a Zarr array or group"):
        ZarrDataset(url)
    make_group(tmp_path / "g.zarr")
    with pytest.raises(ValueError, match=r"g\.zarr: expected each name once, and 'label' occurs twice in"):
        ZarrDataset(url, ("label", "label"))
    with pytest.raises(FileNotFoundError, match=r"g\.zarr has no array 'picture', 'sound'"):
        ZarrDataset(url, arrays=("picture", "label", "sound"))
    zarr.create_group(tmp_path / "empty.zarr")
    with pytest.raises(FileNotFoundError, match="no arrays"):
        ZarrDataset(str(tmp_path / "empty.zarr"))
    with pytest.raises(ValueError, match="named=True"):
        ZarrDataset(url, arrays="label", named=True)
    with pytest.raises(ValueError, match="pool='10%'"):
        ZarrDataset(url, pool="10%")
    for wrong in ("[]", "[" * 100_000):
        (tmp_path / "g.zarr/label/zarr.json").write_text(wrong)
        with pytest.raises(ValueError, match=r"g\.zarr/label has no valid Zarr metadata"):
            ZarrDataset(url, ("image", "label"))
        with pytest.raises(ValueError, match=r"g\.zarr has no valid Zarr metadata"):
            ZarrDataset(url)


def notes(error):
    return "\n".join(error.value.__notes__)


def sharded(folder, n=32, **options):
    options = {"chunks": (1, 1000), "shards": (8, 1000), "dtype": "u1", "compressors": None} | options
    array = zarr.create_array(folder, shape=(n, 1000), overwrite=True, **options)
    array[...] = np.frombuffer(noise(n * 1000), "u1").reshape(n, 1000)
    return array


CHECKED = [zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()]


def flipped(data):
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


def of_60_bytes(data):
    return numcodecs.Zstd().encode(np.ones(60, "u1"))


@pytest.mark.parametrize(
    ("options", "name", "damaged", "message"),
    [
        ({"chunks": (1, 1000)}, "c/9/0", of_60_bytes, "60"),
        ({"chunks": (1, 1000), "compressors": CHECKED}, "c/9/0", flipped, "CRC-32C"),
        ({"chunks": (4, 1000), "compressors": CHECKED}, "c/2/0", flipped, "CRC-32C"),
        ({"shards": (8, 1000), "chunks": (4, 1000), "compressors": CHECKED}, "c/1/0", flipped, "CRC-32C"),
        (
            {
                "shards": {"shape": (8, 1000), "index_location": "start"},
                "chunks": (1, 1000),
                "compressors": None,
            },
            "c/1/0",
            lambda data: data[:1500],
            r"c/1/0 is truncated: its index has a chunk at bytes 1\d+ to ",
        ),
        ({"shards": (8, 1000), "chunks": (1, 1000)}, "c/1/0", lambda data: data[:3], "CRC-32C"),
        ({"shards": (8, 1000), "chunks": (1, 1000)}, "c/1/0", lambda data: data[:-1] + b"!", "CRC-32C"),
    ],
)
def test_damaged_bytes_name_the_sample_and_do_not_affect_others(tmp_path, options, name, damaged, message):
    values = np.frombuffer(noise(32 * 1000), "u1").reshape(32, 1000)
    made(tmp_path / "a.zarr", values.shape, "u1", values=values, **options)
    path = tmp_path / "a.zarr" / name
    path.write_bytes(damaged(path.read_bytes()))
    dataset = ZarrDataset(str(tmp_path / "a.zarr"))
    for _ in range(2):
        with pytest.raises(ValueError, match=message) as error:
            dataset.batch([0, 9, 30])
        assert "in sample 9 of ZarrDataset(" in notes(error)
        assert name in notes(error)
    same(dataset[30], values[30])


def test_an_error_of_the_origin_is_not_a_missing_chunk(tmp_path, monkeypatch):
    array = sharded(tmp_path / "a.zarr", shards=None)
    dataset = ZarrDataset(str(tmp_path / "a.zarr"))
    (tmp_path / "a.zarr/c/3/0").unlink()
    cat_file = type(dataset.fs).cat_file

    def refused(self, path, *args, **options):
        if path.endswith("c/5/0"):
            raise PermissionError(path)
        return cat_file(self, path, *args, **options)

    monkeypatch.setattr(type(dataset.fs), "cat_file", refused)
    assert dataset[3].sum() == 0
    with pytest.raises(PermissionError) as error:
        dataset.batch([3, 4, 5])
    assert "in sample 5 of" in notes(error)
    same(dataset[4], array[4])


# Cost in requests.


def counted(cloud):
    asked = collections.Counter(request.key for request in cloud.server.requests)
    sent = cloud.server.bytes_sent()
    cloud.server.reset()
    return asked, sent


@pytest.fixture
def decoded(monkeypatch):
    """The number of decoded chunks."""
    counts = collections.Counter()
    array = codecs.ChunkDecoder.array

    def counting(self, data):
        counts["array"] += 1
        return array(self, data)

    monkeypatch.setattr(codecs.ChunkDecoder, "array", counting)
    return counts


def test_a_chunk_used_by_several_batches_is_decoded_once_if_the_pool_has_room(tmp_path, decoded):
    array = made(tmp_path / "a.zarr", (64, 10), chunks=(8, 10))
    batches = np.split(np.random.default_rng(0).permutation(64), 16)
    for pool_size, n_decoded in (("1MiB", 8), (0, sum(len({*batch // 8}) for batch in batches))):
        decoded.clear()
        dataset = ZarrDataset(str(tmp_path / "a.zarr"), pool=pool_size)
        for batch in batches:
            same(dataset.batch(batch).numpy(), array[...][batch])
        assert decoded["array"] == n_decoded
        assert not dataset._direct._state.pool._chunks  # at the end of an epoch, none is needed again
    dataset = ZarrDataset(str(tmp_path / "a.zarr"), pool=5 * 576)
    for i in range(0, 64, 8):
        dataset[i]
    assert (len(dataset._direct._state.pool._chunks), dataset._direct._state.pool._size) == (5, 5 * 576)


def test_the_index_of_a_shard_is_read_and_decoded_once_per_process(tmp_path, monkeypatch):
    array, decode, n = sharded(tmp_path / "a.zarr"), zarr_layout.ShardIndexFormat.decode, []
    monkeypatch.setattr(
        zarr_layout.ShardIndexFormat, "decode", lambda self, data: n.append(1) or decode(self, data)
    )
    dataset = ZarrDataset(str(tmp_path / "a.zarr"))
    order = np.random.default_rng(0).permutation(32)
    for _ in range(2):
        list(dataset.items(order))
        for batch in np.split(order, 8):
            same(dataset.batch(batch).numpy(), array[...][batch])
    assert len(n) == 4
    pickle.loads(pickle.dumps(dataset)).batch(order)
    assert len(n) == 8


def blocks_of(text):
    """Return the first block of a request's range, and the one after its last."""
    start, stop = map(int, text.split("-"))
    assert start % MiB == 0
    return start // MiB, stop // MiB + 1


def test_a_cold_epoch_requests_no_byte_twice_and_the_next_requests_nothing(cloud, tmp_path):
    options = {"chunks": (1, 64 * KiB), "shards": (64, 64 * KiB), "compressors": None}
    values = np.frombuffer(noise(4 * 64 * 64 * KiB), "u1").reshape(4 * 64, 64 * KiB)
    made(tmp_path / "a.zarr", values.shape, "u1", values=values, **options)
    put_folder(cloud, tmp_path / "a.zarr", "a.zarr")
    counted(cloud)
    options = {"cachedfs": {"read_ahead": 0}}
    dataset = ZarrDataset(cloud.url("a.zarr"), storage_options=options)
    asked, _ = counted(cloud)
    assert asked == {"a.zarr/zarr.json": 1}
    order = np.random.default_rng(0).permutation(len(values))
    first = order[:64]
    same(dataset.batch(first).numpy(), values[first])
    for batch in np.split(order[64:], 3):
        same(dataset.batch(batch).numpy(), values[batch])
    ranges = collections.defaultdict(list)
    for request in cloud.server.requests:
        ranges[request.key].append(request.headers["range"].removeprefix("bytes="))
    counted(cloud)
    assert len(ranges) == 4
    for asked in ranges.values():
        index, *others = asked
        assert index.startswith("-")
        blocks = [block for text in others for block in range(*blocks_of(text))]
        # The request for the last index, of 1028 bytes, fetched everything.
        assert sorted(blocks) == [0, 1, 2, 3]
    for again in (dataset, pickle.loads(pickle.dumps(dataset))):
        for batch in np.split(order, 8):
            same(again.batch(batch).numpy(), values[batch])
    assert counted(cloud) == ({}, 0)


def test_the_items_of_shards_are_their_index_and_then_chunk_ranges(tmp_path):
    array = sharded(tmp_path / "a.zarr", n=200)
    dataset = ZarrDataset(str(tmp_path / "a.zarr"))
    found = list(dataset.items(range(200)))
    shard = str(tmp_path / "a.zarr/c/0/0")
    assert found[0] == (shard, -132, None)
    ranges = [item for item in found if item[2] is not None]
    assert (len(ranges), len(found)) == (200, 200 + 25)
    for (path, start, stop), values in zip(ranges, array[...], strict=True):
        with open(path, "rb") as file:
            file.seek(start)
            assert file.read(stop - start) == values.tobytes()
    first = {path: found.index((path, -132, None)) for path, _, stop in found if stop is None}
    assert all(first[item[0]] < i for i, item in enumerate(found) if item[2] is not None)


def test_opening_requests_only_the_metadata(cloud, tmp_path):
    make_group(tmp_path / "g.zarr")
    make_group(tmp_path / "h.zarr", zarr_format=2)
    for name in ("g.zarr", "h.zarr"):
        put_folder(cloud, tmp_path / name, name)
    counted(cloud)
    ZarrDataset(cloud.url("g.zarr"), arrays=("image", "label"))
    asked, _ = counted(cloud)
    assert asked == {"g.zarr/image/zarr.json": 1, "g.zarr/label/zarr.json": 1}
    ZarrDataset(cloud.url("h.zarr/image"))
    asked, _ = counted(cloud)
    assert asked["h.zarr/image/.zarray"] == 1
    assert set(asked.values()) == {1}


# Stores that change.


@pytest.mark.parametrize("is_written_here", [False, True])
@pytest.mark.parametrize("options", [{}, {"shards": (8,)}], ids=str)
def test_the_samples_of_a_rewritten_chunk_are_all_new(cloud, tmp_path, options, is_written_here):
    for value in (1, 2):
        array = zarr.create_array(tmp_path / f"{value}", shape=(8,), chunks=(4,), dtype="i4", **options)
        array[...] = value
    put_folder(cloud, tmp_path / "1", "a.zarr")
    max_age = 60 if is_written_here else 0
    dataset = ZarrDataset(cloud.url("a.zarr"), storage_options={"cachedfs": {"max_age": max_age}})
    assert dataset[0] == 1
    if is_written_here:
        dataset.fs.put(str(tmp_path / "2" / "c"), cloud.url("a.zarr"), recursive=True)
    else:
        put_folder(cloud, tmp_path / "2", "a.zarr")
    assert [dataset[i] for i in range(1, 8)] == [2] * 7


def test_a_chunk_replaced_while_it_is_decoded_is_not_cached_as_new(cloud, tmp_path, monkeypatch):
    for value in (1, 2):
        zarr.create_array(tmp_path / f"{value}", shape=(4,), chunks=(4,), dtype="i4")[...] = value
    put_folder(cloud, tmp_path / "1", "a.zarr")
    dataset = ZarrDataset(cloud.url("a.zarr"))
    array = codecs.ChunkDecoder.array

    def then_replaced(self, data):
        dataset.fs.put(str(tmp_path / "2" / "c"), cloud.url("a.zarr"), recursive=True)
        dataset.fs.info(cloud.url("a.zarr/c/0"))
        return array(self, data)

    monkeypatch.setattr(codecs.ChunkDecoder, "array", then_replaced)
    assert dataset[0] == 1
    monkeypatch.setattr(codecs.ChunkDecoder, "array", array)
    assert [dataset[i] for i in range(1, 4)] == [2] * 3


@pytest.mark.parametrize("options", [{}, {"shards": (8,)}], ids=str)
def test_cached_chunks_of_a_local_array_are_of_its_present_version(tmp_path, options):
    array = zarr.create_array(tmp_path / "a.zarr", shape=(8,), chunks=(4,), dtype="i4", **options)
    array[...] = 1
    dataset = ZarrDataset(str(tmp_path / "a.zarr"))
    assert dataset[0] == 1
    array[...] = 2
    assert [dataset[i] for i in range(1, 8)] == [2] * 7


def test_a_chunk_written_after_it_was_found_missing_is_read(cloud, tmp_path):
    array = zarr.create_array(tmp_path / "a.zarr", shape=(16,), chunks=(4,), shards=(8,), dtype="i4")
    array[:4] = 1
    put_folder(cloud, tmp_path / "a.zarr", "a.zarr")
    dataset = ZarrDataset(cloud.url("a.zarr"), storage_options={"cachedfs": {"max_age": 0}})
    assert [dataset[i] for i in (0, 4, 8)] == [1, 0, 0]
    array[...] = 2
    put_folder(cloud, tmp_path / "a.zarr", "a.zarr")
    assert [dataset[i] for i in (1, 5, 9)] == [2, 2, 2]


@pytest.mark.parametrize("max_age", [0, 60])
def test_a_shard_replaced_right_after_its_index_was_read(cloud, tmp_path, monkeypatch, max_age):
    array = sharded(tmp_path / "a.zarr", compressors=zarr.codecs.ZstdCodec())
    put_folder(cloud, tmp_path / "a.zarr", "a.zarr")
    dataset = ZarrDataset(cloud.url("a.zarr"), storage_options={"cachedfs": {"max_age": max_age}})
    decode, read = zarr_layout.ShardIndexFormat.decode, []

    def then_replaced(self, data):
        found = decode(self, data)
        read.append(1)
        if len(read) == 1:
            array[...] = values_of((32, 1000), "u1")
            put_folder(cloud, tmp_path / "a.zarr", "a.zarr")
            dataset.fs.invalidate_cache()
        return found

    monkeypatch.setattr(zarr_layout.ShardIndexFormat, "decode", then_replaced)
    for samples in ([3], [4, 5], [29, 3]):
        same(dataset.batch(samples).numpy(), array[...][samples])


def test_a_shard_that_is_replaced_again_and_again_is_an_error(cloud, tmp_path, monkeypatch):
    sharded(tmp_path / "a.zarr")
    put_folder(cloud, tmp_path / "a.zarr", "a.zarr")
    dataset = ZarrDataset(cloud.url("a.zarr"), storage_options={"cachedfs": {"max_age": 0}})
    decode = zarr_layout.ShardIndexFormat.decode

    def then_replaced(self, data):
        put_folder(cloud, tmp_path / "a.zarr", "a.zarr")
        return decode(self, data)

    monkeypatch.setattr(zarr_layout.ShardIndexFormat, "decode", then_replaced)
    with pytest.raises(ObjectChanged, match=r"a\.zarr/c/1/0 is replaced faster than it is read") as error:
        dataset[9]
    assert "in sample 9 of" in notes(error)


def test_a_removed_shard_with_a_version_is_an_error(cloud, tmp_path):
    sharded(tmp_path / "a.zarr")
    put_folder(cloud, tmp_path / "a.zarr", "a.zarr")
    dataset = ZarrDataset(cloud.url("a.zarr"), storage_options={"cachedfs": {"max_age": 0}})
    dataset[8]
    cloud.delete("a.zarr/c/1/0")
    with pytest.raises(FileNotFoundError, match=r"a\.zarr/c/1/0") as error:
        dataset[9]
    assert "in sample 9 of" in notes(error)


# Threads and processes.


def test_many_threads_decode_each_chunk_once(tmp_path, decoded, monkeypatch):
    monkeypatch.setattr(zarr_reader, "INLINE", 0)
    array = made(tmp_path / "a.zarr", (256, 100), chunks=(16, 50), shards=(64, 100))
    values = array[...]
    dataset = ZarrDataset(str(tmp_path / "a.zarr"))
    order = np.random.default_rng(0).permutation(256)
    with ThreadPoolExecutor(8) as threads:
        batches = np.split(order, 32)
        for batch, found in zip(batches, threads.map(dataset.batch, batches), strict=True):
            same(found.numpy(), values[batch])
    assert decoded == {"array": 32}


def test_a_thread_reads_a_chunk_itself_if_the_other_thread_fails(tmp_path, monkeypatch):
    array = made(tmp_path / "a.zarr", (8, 10), chunks=(8, 10))
    dataset = ZarrDataset(str(tmp_path / "a.zarr"))
    decode, begun, go_on = codecs.ChunkDecoder.array, threading.Event(), threading.Event()

    def failing_once(self, data):
        if begun.is_set():
            return decode(self, data)
        begun.set()
        go_on.wait(120)
        raise RuntimeError("once")

    monkeypatch.setattr(codecs.ChunkDecoder, "array", failing_once)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(dataset.batch, [1, 2])
        begun.wait(120)
        second = threads.submit(dataset.batch, [3, 4])
        until(
            lambda: [chunk.left for chunk in dataset._direct._state.pool._chunks.values()] == [4]
        )  # it waits
        go_on.set()
        with pytest.raises(RuntimeError, match="once"):
            first.result()
        same(second.result().numpy(), array[3:5])
    same(dataset.batch([5]).numpy(), array[5:6])


@pytest.mark.parametrize(
    ("shape", "options", "group_size"),
    [
        ((100, 64, 64), {"chunks": (5, 64, 64)}, 5),
        ((1000, 64, 64), {"chunks": (1, 64, 64), "shards": (500, 64, 64)}, 256),  # a MiB of them
        ((1000, 64, 64), {"chunks": (5, 64, 64), "shards": (500, 64, 64)}, 255),  # whole chunks
        ((1000, 64, 64), {"chunks": (1, 64, 64), "shards": (50, 64, 64)}, 50),  # at most a shard
        ((8, 2048, 1024), {"chunks": (2, 512, 512), "shards": (4, 2048, 1024)}, 2),  # at least a chunk
    ],
)
def test_a_group_is_what_one_fetch_contains(tmp_path, shape, options, group_size):
    zarr.create_array(tmp_path / "a.zarr", shape=shape, dtype="u1", **options)
    assert ZarrDataset(str(tmp_path / "a.zarr")).group_size == group_size
