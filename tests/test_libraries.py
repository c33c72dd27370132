"""Every URL form of the design, with the libraries that people use, as they come."""

import functools
import gzip
import http.server
import io
import json
import threading
import zipfile

import fsspec
import h5py
import numpy as np
import pandas as pd
import pyarrow.dataset as dataset
import pyarrow.parquet as parquet
import pytest
import xarray as xr
import zarr
from fsspec.callbacks import Callback

from tests.support import KiB, MiB, forget, noise

ROWS = pd.DataFrame(
    {"n": range(1000), "x": np.linspace(0, 1, 1000), "name": [f"row {i}" for i in range(1000)]}
)
FORMS = ["cachedfs::gs://", "cgs://", "cachedfs::gcs://"]
OTHERS = ["cachedfs::memory://", "cachedfs::file://"]

# xarray and zarr say so whenever a v3 store is consolidated.
uploading = pytest.mark.filterwarnings("ignore:Sending a large body directly")  # gcsfs to aiohttp
consolidating = pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")


@pytest.fixture
def fs(cloud):
    return fsspec.filesystem("cachedfs", target_protocol="gs")


@pytest.fixture(params=[*FORMS, *OTHERS])
def base(request, cloud, tmp_path, monkeypatch):
    """A URL, in each form, under which a test may write and read."""
    if request.param == "cachedfs::file://":
        # Zarr writes into folders that it never made: local files need this option of fsspec's for it.
        monkeypatch.setitem(fsspec.config.conf, "file", {"auto_mkdir": True})
        (tmp_path / "data").mkdir()
        return f"cachedfs::file://{tmp_path}/data"
    if request.param == "cachedfs::memory://":
        fsspec.filesystem("memory").store.clear()
        return "cachedfs::memory://data"
    return f"{request.param}{cloud.bucket}/data"


def cube(n: int = 4) -> xr.Dataset:
    t = np.arange(n * 6 * 8, dtype="f4").reshape(n, 6, 8)
    return xr.Dataset(
        {"t": (("time", "y", "x"), t), "p": (("time", "y", "x"), t + 1000)},
        coords={"time": np.arange(n), "y": np.arange(6), "x": np.arange(8)},
    )


# Tables.


def test_csv_in_every_form(base):
    ROWS.to_csv(f"{base}/a.csv", index=False)
    pd.testing.assert_frame_equal(pd.read_csv(f"{base}/a.csv"), ROWS, check_exact=False)
    ROWS.iloc[:10].to_csv(f"{base}/a.csv", index=False)
    assert len(pd.read_csv(f"{base}/a.csv")) == 10


def test_compressed_csv_in_every_form(base):
    ROWS.to_csv(f"{base}/a.csv.gz", index=False)
    pd.testing.assert_frame_equal(pd.read_csv(f"{base}/a.csv.gz"), ROWS, check_exact=False)


def test_parquet_in_every_form(base):
    ROWS.to_parquet(f"{base}/a.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(f"{base}/a.parquet"), ROWS)
    pd.testing.assert_frame_equal(pd.read_parquet(f"{base}/a.parquet", columns=["n"]), ROWS[["n"]])


def test_partitioned_parquet_is_written_and_read_as_a_folder(base):
    rows = ROWS.assign(half=ROWS["n"] // 500)
    rows.to_parquet(f"{base}/parts", partition_cols=["half"])
    back = pd.read_parquet(f"{base}/parts").sort_values("n").reset_index(drop=True)
    pd.testing.assert_frame_equal(back[["n", "x", "name"]], ROWS)
    assert set(back["half"].astype(int)) == {0, 1}


def test_json_lines_in_text_mode_in_every_form(base):
    with fsspec.open(f"{base}/a.jsonl", "wt") as file:
        for i in range(100):
            file.write(json.dumps({"i": i, "text": "naïve ✓"}) + "\n")
    with fsspec.open(f"{base}/a.jsonl", "rt", encoding="utf-8") as file:
        assert [json.loads(line)["i"] for line in file] == list(range(100))
    assert len(pd.read_json(f"{base}/a.jsonl", lines=True)) == 100


def test_options_reach_us_and_the_target(cloud, tmp_path):
    ours = {"cache_dir": str(tmp_path / "elsewhere"), "block_size": 64 * KiB}
    theirs = {"token": "anon", "endpoint_url": cloud.server.endpoint_url, "consistency": "size"}
    data = cloud.put("a.bin", noise(200 * KiB))
    with fsspec.open(cloud.url("a.bin"), cachedfs=ours, gs=theirs) as file:
        assert file.read() == data
        assert file.blocksize == 64 * KiB
        assert file.fs.target_options == theirs
        assert file.fs.stats().cache_dir.startswith(ours["cache_dir"])
    for options in ({"target_options": theirs}, {"gs": theirs}):
        fs = fsspec.filesystem("cachedfs", target_protocol="gs", **ours, **options)
        assert fs.cat_file(cloud.path("a.bin")) == data
        assert fs.target_options == theirs
    for options in ({"target_options": theirs}, {"gs": theirs}, {"gcs": theirs}):
        fs = fsspec.filesystem("cgs", **ours, **options)
        assert fs.cat_file(cloud.path("a.bin")) == data
        assert fs.target_options == theirs
    for prefix, options in (
        ("cgs://", {**ours, "gs": theirs}),
        ("cachedfs::gcs://", {"cachedfs": ours, "gcs": theirs}),
    ):
        with fsspec.open(cloud.url("a.bin", prefix), **options) as file:
            assert file.fs.target_options == theirs
            assert file.read() == data
    frame = pd.DataFrame({"n": [1, 2]})
    frame.to_csv(cloud.url("a.csv"), index=False, storage_options={"cachedfs": ours, "gs": theirs})
    back = pd.read_csv(cloud.url("a.csv"), storage_options={"cachedfs": ours, "gs": theirs})
    pd.testing.assert_frame_equal(back, frame)


# Zarr and xarray.


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("zarr_format", [2, 3])
@consolidating
def test_xarray_writes_and_reads_zarr_with_no_other_argument(base, zarr_format, consolidated):
    cube().to_zarr(f"{base}/c.zarr", zarr_format=zarr_format, consolidated=consolidated)
    options = {} if consolidated else {"consolidated": False}
    for _ in range(2):
        with xr.open_zarr(f"{base}/c.zarr", **options) as back:
            xr.testing.assert_identical(back.load(), cube())
        forget()


@pytest.mark.parametrize("zarr_format", [2, 3])
@consolidating
def test_appended_data_is_seen_here_and_by_another_process_at_once(cloud, zarr_format):
    url = cloud.url("c.zarr")
    cube(4).to_zarr(url, zarr_format=zarr_format, consolidated=True)
    code = """
        import os, sys, warnings
        import xarray as xr
        warnings.simplefilter("ignore")
        for line in sys.stdin:
            with xr.open_zarr(f"cachedfs::gs://{os.environ['BUCKET']}/c.zarr") as ds:
                print(ds.sizes["time"], float(ds.t.sum()), flush=True)
    """
    with cloud.talking(code) as other:
        assert other("look") == f"4 {float(cube(4).t.sum())}"
        more = cube(7).isel(time=slice(4, None))
        more.to_zarr(url, append_dim="time", consolidated=True)
        with xr.open_zarr(url) as back:
            xr.testing.assert_identical(back.load(), cube(7))
        assert other("look") == f"7 {float(cube(7).t.sum())}"


@consolidating
def test_a_region_is_replaced(cloud):
    url = cloud.url("c.zarr")
    cube().to_zarr(url)
    with xr.open_zarr(url) as before:
        before.load()
    (cube()[["t"]] * 0).isel(time=slice(1, 2)).drop_vars(["y", "x", "time"]).to_zarr(
        url, region={"time": slice(1, 2)}
    )
    expected = cube()
    expected["t"][1] = 0
    with xr.open_zarr(url) as back:
        xr.testing.assert_identical(back.load(), expected)


@consolidating
def test_xarray_reads_lazily_with_dask(cloud):
    pytest.importorskip("dask")
    url = cloud.url("c.zarr")
    cube().chunk(time=1).to_zarr(url)
    with xr.open_zarr(url, chunks={}) as lazy:
        assert lazy.t.chunks[0] == (1, 1, 1, 1)
        assert float(lazy.t.mean().compute(scheduler="threads")) == float(cube().t.mean())


@pytest.mark.parametrize(
    "options",
    [{"zarr_format": 2}, {"zarr_format": 3}, {"zarr_format": 3, "shards": (20, 20)}],
    ids=["v2", "v3", "sharded"],
)
def test_zarr_arrays_are_created_opened_and_resized(base, options):
    url, data = f"{base}/a.zarr", np.arange(40 * 40).reshape(40, 40)
    array = zarr.create_array(url, shape=data.shape, chunks=(10, 10), dtype=data.dtype, **options)
    array[:] = data
    for mode in ("r", "r+"):
        np.testing.assert_array_equal(zarr.open(url, mode=mode)[:], data)
    array.resize((60, 40))
    array[40:] = data[:20]
    forget()
    again = zarr.open_array(url, mode="r")
    np.testing.assert_array_equal(again[:], np.concatenate([data, data[:20]]))
    np.testing.assert_array_equal(again[5:8, 33:35], data[5:8, 33:35])


@pytest.mark.parametrize("zarr_format", [2, 3])
@consolidating
def test_zarr_groups_with_and_without_consolidation(base, zarr_format):
    url = f"{base}/g.zarr"
    group = zarr.open_group(url, mode="w", zarr_format=zarr_format)
    for name in ("a", "b/c"):
        group.create_array(name, shape=(5,), dtype="i4", chunks=(2,))[:] = np.arange(5)
    assert sorted(name for name, _ in group.members(max_depth=None)) == ["a", "b", "b/c"]
    for consolidate in (False, True):
        if consolidate:
            zarr.consolidate_metadata(url)
        forget()
        opened = zarr.open_group(url, mode="r", use_consolidated=consolidate)
        assert opened["b/c"][:].tolist() == [0, 1, 2, 3, 4]
    del zarr.open_group(url, mode="a", use_consolidated=False)["a"]
    with pytest.raises(KeyError):
        zarr.open_group(url, mode="r", use_consolidated=False)["a"]


# HDF5.


@pytest.fixture
def hdf5(cloud):
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        file.create_dataset("d", data=np.arange(100_000), chunks=(1000,), compression="gzip")
        file["d"].attrs["unit"] = "m"
    cloud.put("a.h5", buffer.getvalue())
    return cloud.url("a.h5")


def test_h5py_reads_a_file_object(hdf5):
    for _ in range(2):
        with fsspec.open(hdf5) as raw, h5py.File(raw, "r") as file:
            assert file["d"].attrs["unit"] == "m"
            np.testing.assert_array_equal(file["d"][500:70_000], np.arange(500, 70_000))
        forget()


def test_h5py_writes_through_a_file_object(cloud, tmp_path):
    with fsspec.open(cloud.url("b.h5"), "wb") as raw:
        buffer = io.BytesIO()
        with h5py.File(buffer, "w") as file:
            file["d"] = np.arange(10)
        raw.write(buffer.getvalue())
    with fsspec.open(cloud.url("b.h5")) as raw, h5py.File(raw, "r") as file:
        assert file["d"][:].tolist() == list(range(10))


def test_netcdf_through_xarray_and_h5netcdf(cloud, tmp_path):
    cube().to_netcdf(tmp_path / "c.nc", engine="h5netcdf")
    cloud.put("c.nc", (tmp_path / "c.nc").read_bytes())
    with fsspec.open(cloud.url("c.nc")) as file, xr.open_dataset(file, engine="h5netcdf") as back:
        xr.testing.assert_identical(back.load(), cube())


# fsspec's own methods.


def test_open_files_by_glob_and_by_list(cloud):
    for i in range(12):
        cloud.put(f"f/{i:02}.txt", f"text {i}".encode())
    for files in (
        fsspec.open_files(cloud.url("f/*.txt"), "rt"),
        fsspec.open_files([cloud.url(f"f/{i:02}.txt") for i in range(12)], "rt"),
        fsspec.open_files(cloud.url("f/*.txt", "cgs://"), "rt"),
    ):
        assert len(files) == 12
        with files as opened:
            assert [file.read() for file in opened] == [f"text {i}" for i in range(12)]


def test_open_files_writes_too(cloud, fs):
    with fsspec.open_files(cloud.url("out/*.txt"), "wt", num=3) as files:
        for i, file in enumerate(files):
            file.write(f"part {i}")
    assert fs.cat(cloud.path("out/*")) == {cloud.path(f"out/{i}.txt"): f"part {i}".encode() for i in range(3)}


def test_cat_takes_many_paths_in_every_form_and_globs(cloud, fs):
    for i in range(5):
        cloud.put(f"f/{i}", noise(100, i))
    expected = {cloud.path(f"f/{i}"): noise(100, i) for i in range(5)}
    for prefix in ("", "gs://", "cachedfs::gs://"):
        assert fs.cat([cloud.url(f"f/{i}", prefix) for i in range(5)]) == expected
    assert fs.cat(cloud.url("f/*")) == expected
    assert fs.cat(cloud.path("f"), recursive=True, on_error="omit") == expected  # it gives the folder too
    absent = cloud.path("f/absent")
    with pytest.raises(FileNotFoundError):
        fs.cat([*expected, absent])
    assert fs.cat([*expected, absent], on_error="omit") == expected
    assert isinstance(fs.cat([*expected, absent], on_error="return")[absent], FileNotFoundError)


def test_cat_ranges_of_several_objects(cloud, fs):
    objects = {cloud.path(f"f/{i}"): cloud.put(f"f/{i}", noise(3 * MiB, i)) for i in range(3)}
    paths = [*objects, *objects]
    starts, ends = [0, 5, -100, MiB - 1, 2 * MiB, None], [10, 2 * MiB, None, MiB + 1, 3 * MiB, None]
    expected = [objects[path][a:b] for path, a, b in zip(paths, starts, ends, strict=True)]
    for _ in range(2):
        assert fs.cat_ranges(paths, starts, ends) == expected
    assert fs.cat_ranges(paths, 0, 10) == [objects[path][:10] for path in paths]
    found = fs.cat_ranges([*objects, cloud.path("absent")], 0, 1, on_error="return")
    assert isinstance(found[-1], FileNotFoundError)


class Counting(Callback):
    """Sizes and steps of each transfer, by the name of what is written."""

    def __init__(self, **options):
        super().__init__(**options)
        self.branches = {}

    def branched(self, path_1, path_2, **kwargs):
        return self.branches.setdefault(path_2, Counting())


@uploading
def test_get_and_put_tell_their_callbacks_the_sizes(cloud, fs, tmp_path):
    sizes = {f"{i}.bin": 1000 * i + 1 for i in range(4)} | {"big.bin": 3 * MiB}
    local = tmp_path / "local"
    local.mkdir()
    for name, size in sizes.items():
        (local / name).write_bytes(noise(size, size))
    put = Counting()
    fs.put(f"{local}/", cloud.url("up/"), recursive=True, callback=put)
    assert (put.size, put.value) == (5, 5) or (put.size, put.value) == (6, 6)  # fsspec may count the folder
    for _ in range(2):
        got, target = Counting(), tmp_path / f"back-{_}"
        fs.get(cloud.url("up"), str(target), recursive=True, callback=got)
        assert {path.name: path.stat().st_size for path in target.iterdir()} == sizes
        for name, size in sizes.items():
            branch = got.branches[str(target / name)]
            assert (branch.size, branch.value) == (size, size)
            assert (target / name).read_bytes() == noise(size, size)
    one = Counting()
    fs.get_file(cloud.path("up/big.bin"), tmp_path / "one", callback=one)
    assert (one.size, one.value) == (3 * MiB, 3 * MiB)
    one = Counting()
    fs.put_file(tmp_path / "one", cloud.path("up/one"), callback=one)
    assert (one.size, one.value) == (3 * MiB, 3 * MiB)
    assert fs.cat_file(cloud.path("up/one")) == noise(3 * MiB, 3 * MiB)


def test_upload_and_download_are_put_and_get(cloud, fs, tmp_path):
    (tmp_path / "a").write_bytes(b"data")
    fs.upload(str(tmp_path / "a"), cloud.url("a"))
    fs.download(cloud.url("a"), str(tmp_path / "b"))
    assert (tmp_path / "b").read_bytes() == b"data"


def test_find_glob_walk_and_du_agree(cloud, fs):
    tree = {f"t/{a}/{b}.txt": noise(10 * a + b, b) for a in range(3) for b in range(4)}
    for key, data in tree.items():
        cloud.put(key, data)
    paths = sorted(map(cloud.path, tree))
    for form in ("", "gs://", "cachedfs::gs://"):
        top = cloud.url("t", form)
        assert fs.find(top) == paths
        assert fs.glob(f"{top}/**/*.txt") == paths
        assert fs.glob(f"{top}/1/*") == [path for path in paths if "/1/" in path]
        assert fs.glob(f"{top}/*") == [cloud.path(f"t/{a}") for a in range(3)]
        walked = {root: (sorted(dirs), sorted(files)) for root, dirs, files in fs.walk(top)}
        assert walked[cloud.path("t")] == (["0", "1", "2"], [])
        assert walked[cloud.path("t/2")] == ([], [f"{b}.txt" for b in range(4)])
        assert fs.du(top) == sum(map(len, tree.values()))
        assert fs.du(top, total=False) == {cloud.path(key): len(data) for key, data in tree.items()}
        assert fs.ls(top, detail=False) == [cloud.path(f"t/{a}") for a in range(3)]
        assert sorted(fs.expand_path(top, recursive=True, maxdepth=2)) == sorted(
            [cloud.path("t"), *(cloud.path(f"t/{a}") for a in range(3)), *paths]
        )
    assert fs.find(cloud.path("t"), maxdepth=1) == []
    assert fs.find(cloud.path("t"), maxdepth=1, withdirs=True) == [
        cloud.path("t"),
        *(cloud.path(f"t/{a}") for a in range(3)),
    ]
    assert fs.isdir(cloud.path("t/1"))
    assert fs.isfile(cloud.path("t/1/1.txt"))
    assert fs.size(cloud.path("t/1/1.txt")) == 11
    assert fs.sizes([cloud.path("t/1/1.txt"), cloud.path("t/2/1.txt")]) == [11, 21]


def test_head_tail_and_read_block(cloud, fs):
    data = cloud.put("a.txt", b"one\ntwo\nthree\nfour\n")
    assert fs.head(cloud.path("a.txt"), 3) == data[:3]
    assert fs.tail(cloud.path("a.txt"), 5) == data[-5:]
    assert fs.read_block(cloud.path("a.txt"), 2, 6, delimiter=b"\n") == b"two\nthree\n"
    assert fs.read_text(cloud.path("a.txt")) == data.decode()
    assert fs.read_bytes(cloud.path("a.txt"), start=4, end=7) == b"two"


def test_what_is_stored_as_gzip_is_read_as_stored_and_unpacked_by_infer(cloud, fs):
    text = b"".join(b"line %d\n" % i for i in range(20_000))
    packed = gzip.compress(text)
    cloud.put("a.txt.gz", packed, content_encoding="gzip")
    for _ in range(2):
        with fsspec.open(cloud.url("a.txt.gz"), compression="infer") as file:
            assert file.read() == text
        assert fs.cat_file(cloud.path("a.txt.gz"), 100, 200) == packed[100:200]
        assert fs.info(cloud.path("a.txt.gz"))["size"] == len(packed)
        assert fs.info(cloud.path("a.txt.gz"))["contentEncoding"] == "gzip"
        forget()
    with fsspec.open(cloud.url("a.txt.gz"), "rt", compression="infer") as file:
        assert sum(1 for _ in file) == 20_000


def test_a_url_given_back_by_us_opens_the_same_object(base):
    with fsspec.open(f"{base}/a.bin", "wb") as file:
        file.write(b"abc")
    with fsspec.open(f"{base}/a.bin") as file:
        name = file.full_name
    with fsspec.open(name) as file:
        assert file.read() == b"abc"
    assert fsspec.open(f"{base}/a.bin").full_name == name


def test_a_mapper_is_a_mapping_of_the_objects(base):
    mapper = fsspec.get_mapper(f"{base}/m")
    mapper["a/b"] = b"1"
    mapper["c"] = b"2"
    assert dict(mapper) == {"a/b": b"1", "c": b"2"}
    assert mapper.getitems(["a/b", "nothing"], on_error="omit") == {"a/b": b"1"}
    del mapper["c"]
    assert list(mapper) == ["a/b"]
    with pytest.raises(KeyError):
        mapper["c"]


def test_a_reference_filesystem_reads_through_us(cloud):
    data = cloud.put("raw.bin", noise(3 * MiB))
    references = {f"part{i}": [cloud.url("raw.bin", "cgs://"), i * MiB, MiB] for i in range(3)}
    fs = fsspec.filesystem("reference", fo=references, fs=fsspec.filesystem("cgs"))
    assert fs.cat("part1") == data[MiB : 2 * MiB]
    assert fs.cat([*references]) == {f"part{i}": data[i * MiB : (i + 1) * MiB] for i in range(3)}


def test_arrow_takes_the_filesystem_itself(cloud, fs):
    fs.pipe_file(cloud.path("a.parquet"), ROWS.to_parquet())
    table = parquet.read_table(cloud.path("a.parquet"), filesystem=fs)
    pd.testing.assert_frame_equal(table.to_pandas(), ROWS)
    dataset.write_dataset(table, cloud.path("set"), filesystem=fs, format="parquet")
    assert dataset.dataset(cloud.path("set"), filesystem=fs).count_rows() == len(ROWS)


@consolidating
def test_open_dataset_with_the_engine_named(cloud):
    cube().to_zarr(cloud.url("c.zarr"))
    with xr.open_dataset(cloud.url("c.zarr"), engine="zarr") as back:
        xr.testing.assert_identical(back.load(), cube())


def test_a_zip_file_is_read_through_us(cloud):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        packed.writestr("d/rows.csv", ROWS.to_csv(index=False))
    cloud.put("a.zip", buffer.getvalue())
    for prefix in FORMS:
        back = pd.read_csv(f"zip://d/rows.csv::{cloud.url('a.zip', prefix)}")
        pd.testing.assert_frame_equal(back, ROWS, check_exact=False)


def test_web_pages_are_named_by_their_urls(tmp_path):
    (tmp_path / "rows.csv").write_text(ROWS.to_csv(index=False))

    class Silent(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    handler = functools.partial(Silent, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/rows.csv"
            pd.testing.assert_frame_equal(pd.read_csv(f"cachedfs::{url}"), ROWS, check_exact=False)
            fs, path = fsspec.url_to_fs(f"cachedfs::{url}")
            assert path == url
            assert fs.unstrip_protocol(path) == f"cachedfs::{url}"
            assert fs.cat_file(url) == (tmp_path / "rows.csv").read_bytes()
            assert fs.exists(url)
            assert not fs.exists(f"{url}.not")
        finally:
            forget()  # closes the connections
            server.shutdown()
