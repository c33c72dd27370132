"""Packing: the samples of every kind of source are unchanged, read by zarr alone."""

import gzip
import threading

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("PIL")

import xarray
import zarr
from fsspec.core import url_to_fs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachedfs.datasets import pack
from cachedfs.packing import Packing, store
from cachedfs.packing.sources import hdf5_file, parquet, text_lines
from cachedfs.packing.sources.source_files import SourceFiles
from tests.packing import packs
from tests.support import KiB, noise

SMALL = {"chunk_bytes": "4KiB", "shard_bytes": "16KiB"}  # so that a small source has many shards


@pytest.fixture
def small_pieces(monkeypatch):
    """Read sources in small pieces, so that a small source has many."""
    for module in (text_lines, hdf5_file):
        monkeypatch.setattr(module, "PIECE", 4 * KiB)
    monkeypatch.setattr(parquet, "READ", 4 * KiB)


def test_one_file_on_s3_is_packed_and_read_back(s3):
    """The second parameter of s3fs's `cat_file` is a version."""
    s3.put("src/a.jsonl", b'{"text": "one"}\n{"text": "two"}\n')
    pack(f"s3://{s3.path('src/a.jsonl')}", s3.url("out.zarr"))
    assert packs.stored(s3.url("out.zarr"), "text", text=True) == ["one", "two"]


def some_files(place, n=30):
    """Put files of 0 to 9 KB below two folders, and one of 70 KB; return their bytes by name, in natural order."""
    sizes = {f"{'a' if i < n // 2 else 'b'}/{i}.bin": 331 * i for i in range(n)} | {"b/large": 70_001}
    return {name: place.put(f"src/{name}", noise(size, seed=size)) for name, size in sizes.items()}


@pytest.mark.parametrize("service", ["cloud", "drive"])
def test_files_keep_their_bytes_and_names(service, request):
    place = request.getfixturevalue(service)
    files = some_files(place)
    done = pack(place.url("src"), place.url("out.zarr"), **SMALL)
    assert done.samples == 31
    assert [data.tobytes() for data in packs.stored(place.url("out.zarr"), "data")] == list(files.values())
    assert packs.stored(place.url("out.zarr"), "names", text=True) == list(files)
    assert done.objects == -(-sum(map(len, files.values())) // (16 * KiB)) + 3
    assert f"{done.objects} objects by the origin's checksum" in done.verified


@pytest.mark.parametrize("kind", ["files", "jsonl", "tar"])
def test_a_list_keeps_its_order_and_may_name_a_file_twice(tmp_path, kind):
    for i in range(3):
        made = {"files": b"%d" % i, "jsonl": b'{"x": "%d"}' % i, "tar": packs.tar([(f"{i}.x", b"%d" % i)])}
        (tmp_path / f"{i}.{kind}").write_bytes(made[kind])
    order = [2, 0, 1, 0]
    pack([str(tmp_path / f"{i}.{kind}") for i in order], str(tmp_path / "out.zarr"), kind=kind)
    found = packs.stored(str(tmp_path / "out.zarr"), "data" if kind == "files" else "x", text=True)
    assert found == [str(i) for i in order]


def test_a_file_costs_one_request_and_a_shard_one_upload(cloud):
    some_files(cloud, n=20)
    cloud.asked()
    done = pack(cloud.url("src"), cloud.url("out.zarr"), n_workers=1)
    asked = cloud.asked()
    # The empty one is not requested; two metadata documents are looked up.
    assert asked.count("media") <= 20 + 2
    # Metadata of four arrays and the group, and the plan.
    assert asked.count("upload") == done.objects + 4 + 1 + 1


def test_images_of_one_shape_are_an_array_and_others_are_ragged(tmp_path):
    pixels = [np.full((8, 6, 3), i, "u1") for i in range(20)]
    files = {f"{i}.png": packs.png(each) for i, each in enumerate(pixels)}
    assert packs.packed(tmp_path, files, decode="image", **SMALL)["image"] == np.array(pixels).tolist()
    files["3.png"] = packs.png(np.full((4, 5), 7, "u1"))
    found = packs.packed(tmp_path, files, decode="image", **SMALL)
    assert found["image_shape"][2:4] == [[8, 6, 3], [4, 5, 1]]
    assert found["image"][2:4] == [[2] * 144, [7] * 20]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_json_lines_become_columns(tmp_path, suffix, small_pieces, monkeypatch):
    reads, opened = [], text_lines.opened
    monkeypatch.setattr(text_lines, "opened", lambda *given: reads.append(given[1]) or opened(*given))
    samples = packs.records(1400)
    datas = [packs.lines_of(samples[:700]), packs.lines_of(samples[700:])]
    files = {f"{i}.jsonl{suffix}": gzip.compress(data) if suffix else data for i, data in enumerate(datas)}
    found = packs.packed(tmp_path, files, **SMALL)
    expected = [float("nan") if each["score"] is None else each["score"] for each in samples]
    np.testing.assert_array_equal(found.pop("score"), expected)
    assert found == {name: [each[name] for each in samples] for name in samples[0] if name != "score"}
    assert sorted(reads) == [0, 0, 1, 1]  # for the first lines, and for all of the pieces
    assert min(map(len, datas)) > 20 * text_lines.PIECE


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.binary(max_size=30).filter(lambda line: b"\n" not in line and not line.endswith(b"\r")), min_size=1
    ),
    st.integers(2, 50),
    st.booleans(),
)
def test_each_line_is_packed_once_wherever_pieces_end(tmp_path_factory, found, size, has_end):
    folder = tmp_path_factory.mktemp("lines")
    content = b"\n".join(found) + b"\n" * has_end
    (folder / "x.txt").write_bytes(content)
    expected = [line.removesuffix(b"\r") for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n")]
    expected = [line for line in expected if line]
    if not expected:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_lines, "PIECE", size)
        pack(str(folder / "x.txt"), str(folder / "out.zarr"))
    assert [line.tobytes() for line in packs.stored(str(folder / "out.zarr"), "data")] == expected


def test_parquet_with_large_row_groups(cloud, small_pieces):
    first, second = packs.table(900), packs.table(500, start=900)
    cloud.put("src/0.parquet", packs.parquet(first, row_group_size=600))
    cloud.put("src/1.parquet", packs.parquet(second))
    pack(cloud.url("src/*.parquet"), cloud.url("out.zarr"), **SMALL)
    url = cloud.url("out.zarr")
    group = zarr.open_group(url, mode="r")
    assert group["number"][:].tolist() == list(range(1400))
    assert packs.stored(url, "text", text=True) == first["text"].to_pylist() + second["text"].to_pylist()
    np.testing.assert_array_equal(group["vector"][:900], np.arange(3600.0).reshape(-1, 4))
    assert xarray.open_zarr(url)["when"].dtype.kind == "M"
    assert xarray.open_zarr(url)["when"][1000].values == np.datetime64("1970-01-01T00:00:01", "ms")


def test_hdf5_keeps_names_and_types(cloud, small_pieces):
    images = np.random.default_rng(0).integers(0, 255, (150, 9, 9), dtype="u1")
    for i in range(2):
        part = slice(75 * i, 75 * i + 75)
        data = packs.hdf5(
            train__image=images[part], label=np.arange(150)[part], word=[f"w{i}" for i in range(150)][part]
        )
        cloud.put(f"src/{i}.h5", data)
    pack(cloud.url("src"), cloud.url("out.zarr"), **SMALL)
    group = zarr.open_group(cloud.url("out.zarr"), mode="r")
    np.testing.assert_array_equal(group["train/image"][:], images)
    assert group["label"][:].tolist() == list(range(150))
    assert packs.stored(cloud.url("out.zarr"), "word", text=True) == [f"w{i}" for i in range(150)]


def test_hdf5_rows_larger_than_a_shard_are_cut(tmp_path, small_pieces):
    data = np.random.default_rng(0).normal(size=(3, 60, 70, 2)).astype("f4")
    found = packs.packed(tmp_path, {"x.h5": packs.hdf5(field=data)}, **SMALL)
    assert found["field"] == data.tolist()
    assert np.prod(zarr.open_group(tmp_path / "out.zarr", mode="r")["field"].shards) * 4 <= 16 * KiB


def test_zarr_xarray_and_tensorstore_read_the_same(tmp_path):
    tensorstore = pytest.importorskip("tensorstore")
    vectors = np.random.default_rng(0).normal(size=(500, 12)).astype("f4")
    (tmp_path / "x.h5").write_bytes(packs.hdf5(vector=vectors, word=[f"w{i}" for i in range(500)]))
    url = str(tmp_path / "out.zarr")
    done = pack(str(tmp_path / "x.h5"), url, codec="zstd", **SMALL)
    with xarray.open_zarr(url) as opened:
        np.testing.assert_array_equal(opened["vector"].values, vectors)
        assert dict(opened.sizes)["sample"] == 500
    offsets = zarr.open_group(url)["word_offsets"][:]
    for name, expected in (("vector", vectors), ("word_offsets", offsets)):
        kvstore = {"driver": "file", "path": f"{url}/{name}/"}
        found = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}).result().read().result()
        np.testing.assert_array_equal(found, expected)
    assert any("zstd (as asked for)" in line for line in done.layout)
    made = {path.name for path in (tmp_path / "out.zarr").iterdir()}
    assert made == {"vector", "word", "word_offsets", "zarr.json"}


def refused(error, match, *arguments, **options):
    with pytest.raises(error, match=match) as caught:
        pack(*arguments, **options)
    return caught.value


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kind": "zip"}, "kind='zip': expected one of files"),
        ({"codec": "gzip"}, "codec='gzip': expected one of none, lz4, zstd"),
        ({"chunk_bytes": 0}, "chunk_bytes=0"),
        ({"decode": "video"}, "decode='video' of files"),
        ({"columns": ["a"]}, "files have none"),
        ({"kind": "lines", "columns": ["a"]}, "lines are data, 'utf8' or 'bytes', and have no others"),
    ],
)
def test_invalid_options_are_refused(cloud, options, match):
    cloud.put("src/a", b"1")
    refused(ValueError, match, cloud.url("src"), cloud.url("out.zarr"), **options)
    assert "upload" not in cloud.asked()


def test_an_existing_target_is_not_overwritten(cloud):
    cloud.put("src/a", b"1")
    cloud.put("mine/precious.txt", b"!")
    refused(FileExistsError, "not a Zarr store", cloud.url("src"), cloud.url("mine"), overwrite=True)
    pack(cloud.url("src"), cloud.url("out.zarr"))
    refused(
        FileExistsError, "a Zarr store here already; overwrite=True", cloud.url("src"), cloud.url("out.zarr")
    )
    pack(cloud.url("src"), cloud.url("out.zarr"), overwrite=True)
    refused(ValueError, "is inside the source", cloud.url("src"), cloud.url("src/out.zarr"))


@pytest.mark.parametrize("service", ["cloud", "drive"])
def test_a_target_whose_name_is_a_pattern_is_taken_literally(service, request):
    place = request.getfixturevalue(service)
    place.put("src/a", b"1")
    for name in ("run1.zarr", "run[1].zarr"):
        pack(place.url("src"), place.url(name))
    fs, path = url_to_fs(place.url(""))

    def contents(folder):
        fs.invalidate_cache()
        return {name.partition(".zarr/")[2]: fs.ukey(name) for name in fs.find(f"{path}/{folder}")}

    kept = contents("run1.zarr")
    pack(place.url("src"), place.url("run[1].zarr"), codec="none", overwrite=True)
    assert contents("run1.zarr") == kept
    assert contents("run[1].zarr").keys() == kept.keys()


def test_a_planned_pack_can_run_again(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    packing = Packing(str(tmp_path / "a"), str(tmp_path / "out.zarr"))
    assert packing.run().samples == packing.run(overwrite=True).samples == 1


def test_the_source_is_never_removed(cloud, tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a").write_bytes(b"1")
    made = tmp_path / "out.zarr"
    pack(str(tmp_path / "src"), str(made))
    (made / "raw").mkdir()
    inside = made / "raw" / "x.jsonl"
    inside.write_text('{"x": 1}\n')
    before = sorted(made.rglob("*"))
    for source in (made, inside, [inside], f"cachedfs::file://{made}/raw"):
        refused(ValueError, "is inside the target", source, str(made), overwrite=True)
    assert sorted(made.rglob("*")) == before


def test_a_cached_source_can_be_packed_offline(tmp_path):
    (tmp_path / "src").mkdir()
    for i in range(3):
        (tmp_path / "src" / f"{i}.txt").write_text(f"file {i}")
    source, target = f"cachedfs::file://{tmp_path / 'src'}", str(tmp_path / "out.zarr")
    options = {"cache_dir": str(tmp_path / "cache"), "max_age": 3600}
    fs, path = url_to_fs(source, cachedfs=options)
    fs.cat(fs.find(path))
    offline = {"cachedfs": options | {"offline": True}}
    pack(source, target, storage_options=offline)
    assert packs.stored(target, "data", text=True) == ["file 0", "file 1", "file 2"]
    inside = f"local://{tmp_path / 'src' / 'out.zarr'}"
    refused(ValueError, "is inside the source", source, inside, storage_options=offline)


def test_a_list_names_files(cloud):
    cloud.put("src/a", b"1")
    match = "src is a folder, but a list must contain files only"
    refused(IsADirectoryError, match, [cloud.url("src")], cloud.url("out.zarr"))


@pytest.mark.parametrize("is_list", [False, True])
def test_a_file_that_changed_between_two_runs_is_packed_anew(cloud, is_list, monkeypatch):
    source = [cloud.url(f"src/{i}.jsonl") for i in (0, 1)] if is_list else cloud.url("src")
    for i in (0, 1):
        cloud.put(f"src/{i}.jsonl", b'{"x": 1}\n' * 500)
    with monkeypatch.context() as broken:
        broken.setattr(store.ZarrTarget, "finish", None)
        refused(TypeError, "not callable", source, cloud.url("out.zarr"))
    cloud.put("src/1.jsonl", b'{"x": 7}\n' * 500)  # of the same size
    # Cached metadata of the source may be used for the scan, but not at the end.
    noticed = "an incomplete pack of another source|added, removed or changed"
    refused((FileExistsError, ValueError), noticed, source, cloud.url("out.zarr"))
    pack(source, cloud.url("out.zarr"), overwrite=True)
    assert zarr.open_group(cloud.url("out.zarr"), mode="r")["x"][:].tolist() == [1] * 500 + [7] * 500


def test_a_source_that_changes_during_a_pack_is_an_error(cloud, monkeypatch):
    for i in range(4):
        cloud.put(f"src/{i}", noise(100))
    ranges = SourceFiles.ranges

    def read_and_change_the_source(self, *arguments):
        found = ranges(self, *arguments)
        cloud.put("src/2", noise(100, seed=1))
        return found

    monkeypatch.setattr(SourceFiles, "ranges", read_and_change_the_source)
    refused(ValueError, "added, removed or changed", cloud.url("src"), cloud.url("out.zarr"))
    with pytest.raises(FileNotFoundError):
        zarr.open_group(cloud.url("out.zarr"), mode="r")


def test_a_corrupted_write_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a").write_bytes(noise(1000))
    put = store.ZarrTarget.put

    def torn(self, name, data):
        put(self, name, data[:-1] + b"!" if name.startswith("data/") else data)

    monkeypatch.setattr(store.ZarrTarget, "put", torn)
    differs = "the stored object differs from the written one: bytes 0 to"
    refused(OSError, differs, str(tmp_path / "src"), str(tmp_path / "out.zarr"))
    assert not list((tmp_path / "out.zarr").glob("data/*"))


def test_the_folders_of_a_store_at_drive_are_made_together(monkeypatch):
    target, together = store.ZarrTarget("memory://store.zarr"), threading.Barrier(3, timeout=60)
    monkeypatch.setattr(target, "protocol", "drive")
    monkeypatch.setattr(target.fs, "makedirs", lambda path, exist_ok: together.wait())
    target.begin({}, ["a", "b", "c"], replaces=False)
    assert not together.broken
