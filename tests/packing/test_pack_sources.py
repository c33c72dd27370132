"""Sources of packing: values are kept exactly, or an error names the source and the solution."""

import gzip
import io
import json
import re

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("PIL")

import h5py
import numpy as np
import pyarrow as pa
import zarr
from PIL import Image

from cachedfs.datasets import pack
from cachedfs.packing.sources import hdf5_file, tars, text_lines
from tests.datasets import virtual
from tests.packing import packs
from tests.packing.packs import lines
from tests.support import noise

ORIENTATION = 0x0112  # tag of EXIF


@pytest.fixture
def short_scan(monkeypatch):
    """Look at a few hundred bytes of a source."""
    monkeypatch.setattr(text_lines, "RANGE_SIZE", 100)
    monkeypatch.setattr(text_lines, "SAMPLED", 2)


def nested(folder, *groups):
    """Return the arrays of groups inside the store that `packs.packed` made."""
    found = {name: zarr.open_group(folder / "out.zarr", mode="r")[name].arrays() for name in groups}
    return {f"{name}/{each}": array[:].tolist() for name, arrays in found.items() for each, array in arrays}


def pages(kind):
    """Return a picture with three pages or frames."""
    made, sink = [Image.fromarray(np.full((4, 4), i, "u1")) for i in range(3)], io.BytesIO()
    made[0].save(sink, kind, save_all=True, append_images=made[1:])
    return sink.getvalue()


def two(kind, first, second):
    """Return two files of one kind, the second of which is not like the first."""
    return {f"0.{kind}": first, f"1.{kind}": second}


def columns_of(**columns):
    return packs.parquet(pa.table(columns))


TABLE = b"a,b\n1,2\n"
SPARSE = {"GNU.sparse.map": "0,1,9,1", "GNU.sparse.size": "10"}
ONE_PAGE_EACH = "it has 3 pages or frames: make a file of each"
OTHER_HEADER = r"1\.csv.* the (first record|columns) .* the first file,? \['a', 'b'\]"
NO_SUCH_TYPE = "expected a type such as int64"


@pytest.mark.parametrize(
    ("files", "options", "match"),
    [
        ({"0.tiff": pages("tiff")}, {"decode": "image"}, rf"0\.tiff: {ONE_PAGE_EACH}"),
        ({"0.png": pages("png")}, {"decode": "image"}, rf"0\.png: {ONE_PAGE_EACH}"),
        ({"x.h5": packs.hdf5(a=packs.vlen("i1", [[1]]), a_offsets=[1])}, {}, "two .* be called 'a_offsets'"),
        ({"x.tar": packs.tar([("a.names", b"1")])}, {}, "two arrays would be called 'names'"),
        ({"x.parquet": columns_of(**{r"a\b": [1]})}, {}, "cannot be the name of an array"),
        ({"x.jsonl": b'{".cachedfs-pack": 1}'}, {}, "'.cachedfs-pack' cannot be the name of an array"),
        ({"x.csv": b"a,a/b\n1,2\n"}, {}, "'a' cannot be the name of an array"),
        ({"x.tar": packs.tar([("a.jpg", b"12")], SPARSE)}, {}, r"'a\.jpg' is sparse: .* without --sparse"),
        (
            two("parquet", columns_of(x=[1]), columns_of(y=[1])),
            {},
            "row 1: column 'x' is not there",
        ),
        (two("parquet", columns_of(x=[1]), columns_of(x=["a"])), {}, r"1\.parquet: Field x has incompatible"),
        (two("csv", TABLE, b"b,c\n3,4\n"), {}, OTHER_HEADER),
        (two("csv", TABLE, b"a;b\n3;4\n"), {}, OTHER_HEADER),
        (two("csv", TABLE, b'"a,b"\n3\n'), {}, OTHER_HEADER),
        (two("csv", TABLE, b"a\n3\n"), {}, OTHER_HEADER),
        ({"x.csv": TABLE}, {"csv": {"sep": ";"}}, "'sep' is none of comment, delimiter, encoding, skipini"),
        ({"x.jsonl": b'{"a": 1}\n'}, {"csv": {"delimiter": ";"}}, "these are options of CSV files"),
        ({"x.jsonl": b'{"a": {}}\n' + b"[" * 100_000}, {}, r"x\.jsonl, line 2: the line is not JSON"),
        ({"x.csv": TABLE}, {"columns": {"a": "ragged utf8"}}, NO_SUCH_TYPE),
        ({"x.csv": TABLE}, {"columns": {"a": "float32[x]"}}, NO_SUCH_TYPE),
        ({"x.csv": TABLE}, {"columns": {"a": "object"}}, NO_SUCH_TYPE),
        ({"x.nc": b"CDF\x01" + bytes(28)}, {}, r"x\.nc: .* NetCDF 3"),
    ],
)
def test_what_cannot_be_packed_is_named(tmp_path, files, options, match):
    with pytest.raises(ValueError, match=match):
        packs.packed(tmp_path, files, **options)
    assert not (tmp_path / "out.zarr" / "zarr.json").exists()


@pytest.mark.parametrize("orientation", [1, 6, 7])
def test_images_are_turned_by_their_exif_orientation(tmp_path, orientation):
    pixels = np.arange(6, dtype="u1").reshape(2, 3)
    turned = {1: pixels, 6: pixels[::-1].T, 7: pixels[::-1, ::-1].T}
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "png", exif=exif)
    files = {"x.png": sink.getvalue()}
    assert packs.packed(tmp_path, files, decode="image")["image"] == [turned[orientation].tolist()]
    assert packs.packed(tmp_path, files, decode="image-raw")["image"] == [pixels.tolist()]


@pytest.mark.parametrize(
    ("name", "data"),
    [*packs.in_each_format([{"a/b": 1, "a/c": 2}]), ("x.h5", packs.hdf5(a__b=[1], a__c=[2]))],
)
def test_names_with_a_slash_are_arrays_of_a_group(tmp_path, name, data):
    packs.packed(tmp_path, {name: data})
    assert nested(tmp_path, "a") == {"a/b": [1], "a/c": [2]}


# HDF5.


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [
        ("int64", [[2**53 + 1, -(2**63)], [], [7]]),
        ("uint64", [[], [2**64 - 1]]),
        ("complex64", [[1 + 2j], []]),
        ("float32", [[], []]),
    ],
)
def test_variable_length_rows_keep_each_number(tmp_path, dtype, rows):
    data = packs.hdf5(ids=packs.vlen(dtype, rows))
    assert packs.packed(tmp_path, {"x.h5": data}) == {"ids": rows}


def test_variable_length_rows_are_read_a_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(hdf5_file, "READ_SIZE", 1 << 16)
    sizes = [1, 0, *[4 << 10] * 300, 5]  # 1.2 MB, of which a row takes 16 bytes until it is read
    rows = [np.full(n, i % 251, "u1") for i, n in enumerate(sizes)]
    read, at_once = hdf5_file._values, []

    def noted(data, field, *where):
        found = read(data, field, *where)
        at_once.append(found[0].nbytes)
        return found

    monkeypatch.setattr(hdf5_file, "_values", noted)
    found = packs.packed(tmp_path, {"x.h5": packs.hdf5(jpeg=packs.vlen("u1", rows))})
    assert found["jpeg"] == [row.tolist() for row in rows]
    assert max(at_once) < 9 << 16  # what is encoded together, and the ends of two rows


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (np.zeros((5, 0, 3)), r"'x' is float64\[0, 3\], which has no values; columns="),
        (
            np.array([b"caf\xc3\xa9", *[b"caf\xe9"] * 4], h5py.string_dtype("utf-8")),
            r"x\.h5: .*: 'x' is not valid UTF-8: .*0xe9.*leave it out",
        ),
        (np.zeros(5, "longdouble"), r"x\.h5: 'x' of type float128 and shape .* leave it out"),
        # h5py itself returns 16777216 for 1.
        (packs.vlen(">i4", [[1]] * 5), r"x\.h5: 'x' has rows of their own lengths of >i4, .* leave it out"),
    ],
)
def test_unsupported_datasets_are_refused(tmp_path, data, match):
    files = {"x.h5": packs.hdf5(x=data, y=np.arange(5))}
    with pytest.raises(ValueError, match=match):
        packs.packed(tmp_path, files)
    assert packs.packed(tmp_path, files, columns=["y"]) == {"y": [0, 1, 2, 3, 4]}


@pytest.mark.parametrize("places", [[1], [0, 1, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("kind", ["h5", "parquet, no type", "parquet, no column"])
def test_files_without_rows_are_skipped(tmp_path, kind, places):
    kind, _, what = kind.partition(", ")
    empty = {"x": pa.array([], pa.null()), "z": []} if what == "no type" else {}
    made = {
        "h5": lambda i: packs.hdf5(x=np.zeros(0, "i8") if i in places else [i]),
        "parquet": lambda i: packs.parquet(pa.table(empty if i in places else {"x": [i]})),
    }
    files = {f"{i}.{kind}": made[kind](i) for i in range(4)}
    if len(places) < 4:
        assert packs.packed(tmp_path, files) == {"x": [i for i in range(4) if i not in places]}
    else:
        with pytest.raises(ValueError, match="nothing to pack"):
            packs.packed(tmp_path, files)


def test_data_in_other_files_is_named(tmp_path):
    virtual.write(tmp_path / "x.h5")
    with pytest.raises(ValueError, match=r"x\.h5: 'x' is a virtual dataset over another file, 'part\.h5'"):
        pack(str(tmp_path / "x.h5"), str(tmp_path / "out.zarr"))
    with h5py.File(tmp_path / "y.h5", "w") as file:
        file["link"] = h5py.ExternalLink("part.h5", "x")
    with pytest.raises(ValueError, match=r"y\.h5: 'link' is a link to another file, 'part\.h5'"):
        pack(str(tmp_path / "y.h5"), str(tmp_path / "out.zarr"))


def test_soft_links_are_packed_as_they_are_read(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["deep/x"] = [1, 2]
        file["y"] = h5py.SoftLink("/deep/x")
        file["again"] = h5py.SoftLink("/deep")
        file["nowhere"] = h5py.SoftLink("/nothing")
    found = packs.packed(tmp_path, {"x.h5": (tmp_path / "x.h5").read_bytes()})
    assert found == {"y": [1, 2]}
    assert nested(tmp_path, "deep", "again") == {"deep/x": [1, 2], "again/x": [1, 2]}


@pytest.mark.parametrize(("target", "path"), [("/a", "a"), ("/deep", "deep/a"), ("/", "deep/a")])
def test_a_circular_link_is_named(tmp_path, target, path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["deep/x"] = [1, 2]
        file[path] = h5py.SoftLink(target)
    files = {"x.h5": (tmp_path / "x.h5").read_bytes()}
    with pytest.raises(ValueError, match=rf"x\.h5: '{path}' is a circular link; columns="):
        packs.packed(tmp_path, files)
    packs.packed(tmp_path, files, columns=["deep/x"])
    assert nested(tmp_path, "deep") == {"deep/x": [1, 2]}


# Tar.


def test_tars_in_webdataset_form_are_read_in_small_pieces(tmp_path, monkeypatch):
    samples = [(f"d/{i:03}", noise(50 * (i % 40), seed=i), str(i).encode()) for i in range(300)]
    files = {}
    for shard in range(3):
        part = samples[100 * shard : 100 * shard + 100]
        members = [
            each for name, image, label in part for each in ((f"{name}.jpg", image), (f"{name}.cls", label))
        ]
        unused = [("d/README", b"no ending"), ("x" * 150 + "/none", b"whose header is several blocks")]
        files[f"{shard}.tar"] = packs.tar([*unused, *members])
    sizes, read = [], tars.TarSource.read

    def noted(self, number):
        for batch in read(self, number):
            sizes.append(sum(each.nbytes for each in batch.values.values()))
            yield batch

    monkeypatch.setattr(tars, "PIECE", 500)
    monkeypatch.setattr(tars.TarSource, "read", noted)
    found = packs.packed(tmp_path, files, chunk_bytes="4KiB", shard_bytes="16KiB")
    assert list(zip(found["names"], found["jpg"], found["cls"], strict=True)) == samples
    assert max(sizes) < 1600  # members of more than 500 bytes are cut; names are not counted


def test_concatenated_tars_are_read_to_their_end(tmp_path):
    datas = [packs.tar([(f"{i}{j}.jpg", b"%d" % j) for j in range(3)]) for i in range(3)]
    found = packs.packed(tmp_path, {"x.tar": b"".join(datas) + bytes(20 << 10)})
    assert found["names"] == [f"{i}{j}" for i in range(3) for j in range(3)]
    assert found["jpg"] == [b"0", b"1", b"2"] * 3
    with pytest.raises(
        ValueError, match=r"x\.tar: cannot be read as a tar: there is no header at byte 10,240"
    ):
        packs.packed(tmp_path, {"x.tar": datas[0] + b"text" * 128})


def test_a_large_member_may_be_rare(tmp_path, monkeypatch):
    monkeypatch.setattr(tars, "SAMPLED_SIZE", 500)  # the large member is not looked at
    members = [
        (f"{i}.{ending}", bytes(n))
        for i in range(9)
        for ending, n in (("jpg", 800), ("cls", 100_001 if i == 8 else 1))
    ]
    found = packs.packed(tmp_path, {"x.tar": packs.tar(members)})
    assert found["cls"] == [bytes(1)] * 8 + [bytes(100_001)]


@pytest.mark.parametrize("damage", [b"\xff" * 512, b"\xff"])
def test_a_damaged_header_is_an_error_and_not_the_end(tmp_path, damage):
    data = packs.tar([(f"{i}.jpg", b"1") for i in range(9)])
    at = 4 * 1024  # of the fifth
    with pytest.raises(
        ValueError, match=r"x\.tar: cannot be read as a tar: there is no header at byte 4,096"
    ):
        packs.packed(tmp_path, {"x.tar": data[:at] + damage + data[at + len(damage) :]})
    for end in (9 * 1024, 9 * 1024 + 512):  # without one or both of the blocks that mark the end
        assert packs.packed(tmp_path, {"x.tar": data[:end]})["names"] == [str(i) for i in range(9)]


def test_names_that_webdataset_splits_in_its_own_way_are_noted(tmp_path):
    members = [("a.jpg", b"1"), ("a.jpg.npy", b"2"), ("b.cls", b"3"), ("b.jpg", b""), ("a.cls", b"4")]
    files = {"x.tar": packs.tar(members)}
    found = {"jpg": [b"1", b"", b""], "jpg.npy": [b"2", b"", b""], "cls": [b"", b"3", b"4"]}
    assert packs.packed(tmp_path, files) == found | {"names": ["a", "b", "a"]}
    assert pack(str(tmp_path / "x.tar"), str(tmp_path / "other.zarr")).notes == [
        "names of members are cut at their first dot, as in WebDataset, so that endings are ['jpg.npy']",
        "members of 'a' do not stand together, and are several samples, as in WebDataset",
    ]


# Columns.


@pytest.mark.parametrize(
    ("values", "given"),
    [
        ([1, 300], "int8"),
        ([1.7], "int8"),
        ([float("nan")], "int64"),
        ([-1], "uint64"),
        ([2**53 + 1.0, 1e19], "int64"),
        ([1, None], "int8"),
        ([[1], [300]], "ragged int8"),
        (["word"], "float32"),
    ],
)
def test_numbers_out_of_range_of_a_type_are_an_error(tmp_path, values, given):
    data = packs.parquet(pa.table({"x": values}))
    with pytest.raises(ValueError, match=r"column 'x': .*columns=\{...\} can give it another type") as error:
        packs.packed(tmp_path, {"x.parquet": data}, columns={"x": given})
    assert re.search(r"x\.parquet, row [12]: ", str(error.value))


@pytest.mark.parametrize(
    ("values", "given", "found"),
    [
        (pa.array([2.0, 3.0]), "uint8", [2, 3]),
        (pa.array([2**64 - 1], pa.uint64()), "uint64", [2**64 - 1]),
        (pa.array([2**60 + 1]), "float32", [2.0**60]),
        (pa.array([[1 / 3], [None]]), "ragged float16", [[0.333251953125], ["nan"]]),
        (pa.array([True, False]), "int8", [1, 0]),
        (pa.array([3], pa.timestamp("us")), "int32", [3]),
        (pa.array(["7"]), "int64", [7]),
        (pa.array([1, None], pa.uint8()), None, [1.0, "nan"]),
    ],
)
def test_numbers_are_converted_to_the_requested_type(tmp_path, values, given, found):
    data = packs.parquet(pa.table({"x": values}))
    (packed,) = packs.packed(tmp_path, {"x.parquet": data}, columns={"x": given}).values()
    assert str(packed) == str(found).replace("'nan'", "nan")


def test_a_parquet_page_that_fails_its_checksum_is_an_error(tmp_path):
    table = pa.table({"x": np.arange(400_000)})
    data = packs.parquet(table, compression="none", use_dictionary=False, write_page_checksum=True)
    for row in (7, 399_000):
        at = data.index(np.int64(row).tobytes())
        with pytest.raises(OSError, match="CRC checksum") as raised:
            packs.packed(tmp_path, {"x.parquet": data[:at] + b"\xff" + data[at + 1 :]})
        assert raised.value.__notes__[0].endswith("x.parquet")
    assert packs.packed(tmp_path, {"x.parquet": data})["x"] == list(range(400_000))


IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
STRUCTS = {
    "image": pa.array([{"bytes": b"\xff\0", "path": "0.png"}, {"bytes": b"", "path": None}, None], IMAGE),
    "a": [{"b": {"raw": b"x", "n": 10 * i}, "m": i, "s": {"q": [i]}} for i in range(3)],
    "plain": [{"n": i} for i in range(3)],
}
COLUMNS = {
    "image.bytes": [b"\xff\0", b"", b""],
    "image.path": ["0.png", "", ""],
    "a.b.raw": [b"x"] * 3,
    "a.b.n": [0, 10, 20],
    "a.m": [0, 1, 2],
    "a.s": [{"q": [i]} for i in range(3)],
    "plain": [{"n": i} for i in range(3)],
}


@pytest.mark.parametrize("columns", [None, ["a.b.raw", "image.path"], ["a.b.n", "a.s", "plain"], ["plain"]])
def test_structs_with_bytes_are_separate_columns_any_of_which_can_be_chosen(tmp_path, columns):
    files = {"x.parquet": packs.parquet(pa.table(STRUCTS), row_group_size=2)}
    found = packs.packed(tmp_path, files, columns=columns)
    assert found == {name: COLUMNS[name] for name in columns or COLUMNS}


def tensors(dtype="float32", shape=(2, 3), **options):
    """Return two tensors of this shape with the numbers from 0, and the same as lists."""
    numbers = np.arange(2 * np.prod(shape)).astype(dtype)
    type_ = pa.fixed_shape_tensor(pa.from_numpy_dtype(numbers.dtype), shape, **options)
    storage = pa.FixedSizeListArray.from_arrays(numbers, int(np.prod(shape)))
    return pa.ExtensionArray.from_storage(type_, storage), numbers.reshape(2, *shape).tolist()


@pytest.mark.parametrize(
    ("dtype", "shape", "is_said"),
    [("float32", (2, 3), True), ("float16", (4,), False), ("int8", (1, 2, 2), False)],
)
def test_tensors_are_fields_of_their_shape(tmp_path, dtype, shape, is_said):
    column, wanted = tensors(dtype, shape, permutation=list(range(len(shape))) if is_said else None)
    image = pa.StructArray.from_arrays([column, pa.array([b"x", b"y"])], ["t", "b"])
    files = {"x.parquet": packs.parquet(pa.table({"t": column, "i": [1, 2], "s": image}), row_group_size=1)}
    found = {"t": wanted, "i": [1, 2], "s.t": wanted, "s.b": [b"x", b"y"]}
    assert packs.packed(tmp_path, files) == found
    flat = np.array(wanted).reshape(2, -1)
    given = [("t", f"float64[{flat.shape[1]}]")]
    assert packs.packed(tmp_path, files, columns=given) == {"t": flat.tolist()}
    assert packs.packed(tmp_path, files, columns=["i"]) == {"i": [1, 2]}


def test_tensors_with_permuted_axes_are_named_and_can_be_lists(tmp_path):
    column, wanted = tensors(permutation=[1, 0])
    files = {"x.parquet": packs.parquet(pa.table({"t": column, "i": [1, 2]}))}
    with pytest.raises(ValueError, match=r"x\.parquet: column 't' is extension<.*columns=.* float32\[6\]"):
        packs.packed(tmp_path, files)
    flat = np.array(wanted).reshape(2, 6).tolist()
    assert packs.packed(tmp_path, files, columns={"t": "float32[6]"}) == {"t": flat, "i": [1, 2]}
    assert packs.packed(tmp_path, files, columns=["i"]) == {"i": [1, 2]}


@pytest.mark.parametrize(
    ("column", "columns", "match"),
    [
        (pa.array([[b"x"]]), None, r"column 'x' is list<.*binary>: JSON has no bytes; columns="),
        (
            pa.array([{"a": [{"b": b"x"}], "c": 1}]),
            None,
            r"column 'x\.a' is list<.*binary>>: JSON has no bytes",
        ),
        (pa.array([b"x"]), {"x": "json"}, "column 'x' is binary: JSON has no bytes"),
    ],
)
def test_bytes_that_would_be_json_are_an_error(tmp_path, column, columns, match):
    files = {"x.parquet": packs.parquet(pa.table({"x": column, "x.y": [1], "z": [2]}))}
    with pytest.raises(ValueError, match=match):
        packs.packed(tmp_path, files, columns=columns)
    assert packs.packed(tmp_path, files, columns=["z"]) == {"z": [2]}


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.jsonl", b'{"x": "%s"}\n'),
        ("x.csv", b"x\n%s\n"),
        ("x.parquet", pa.string()),
        ("x.parquet", pa.binary()),
    ],
)
def test_invalid_text_is_an_error_and_can_be_bytes(tmp_path, name, data):
    if isinstance(data, bytes):
        files = {name: data % b"caf\xe9"}
    else:
        files = {name: packs.parquet(pa.table({"x": pa.array([b"caf\xe9"]).view(data)}))}
    with pytest.raises(ValueError, match=r"UTF-?8.*; columns=\{...\} can give"):
        packs.packed(tmp_path, files, columns={"x": "utf8"})
    assert packs.packed(tmp_path, files, columns={"x": "bytes"}) == {"x": [b"caf\xe9"]}


# Lines.


LATIN = "süß\n".encode() * 1000 + b"caf\xe9\n" + "süß\n".encode() * 2000


def test_invalid_utf8_lines_are_an_error_and_can_be_bytes(tmp_path, short_scan):
    files = {"x.txt": LATIN}
    match = r"x\.txt, line 1,001: byte 0xe9 is not UTF-8: b'caf.xe9'; .*--column data=bytes"
    for columns in (None, ["data"], {"data": "utf8"}):
        with pytest.raises(ValueError, match=match):
            packs.packed(tmp_path, files, columns=columns)
    assert packs.packed(tmp_path, files, columns={"data": "bytes"})["data"] == LATIN.split()
    assert packs.packed(tmp_path, {"y.txt": b"caf\xe9\n"}) == {"data": [b"caf\xe9"]}


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b"\xef\xbb\xbf", []),
        (b"\xef\xbb\xbf\n\ra", ["", "\ra"]),
        (b"\n\xef\xbb\xbf", ["", "\ufeff"]),
        (b"\xef\xbb\xbf\r\nb", ["", "b"]),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_byte_order_mark_alone_is_not_a_line(tmp_path, content, kept, suffix):
    lines = pytest.importorskip("cachedfs.datasets.line_dataset")
    files = {
        f"{i}.txt{suffix}": gzip.compress(each) if suffix else each
        for i, each in enumerate([content, b"last"])
    }
    packed = packs.packed(tmp_path, files, kind="lines")
    urls = [str(tmp_path / name) for name in files]
    assert list(lines.LineDataset(urls, keep_empty=True)) == [*kept, "last"]
    assert list(lines.LineDataset(urls)) == packed["data"] == [*filter(None, kept), "last"]


# JSON.


LATE = b'{"m": {"a": 1}, "label": 1}\n' * 1000


@pytest.mark.parametrize("columns", [None, [("m", "json")]])
@pytest.mark.parametrize(
    "values",
    [
        [{"when": "2020-01-01"}, {"when": "2020-01-01 10:00:00"}],
        [["2020-01-01"], []],
        [{"a": 1}, {"b": [{}]}, {}, None],
        [{"a": None}, {"n": 2**70}, {"n": 0.1}],
        [{"süß": "\U0001f600"}, {"": 1e300}],
    ],
)
def test_json_values_are_those_of_the_line(tmp_path, values, columns):
    data = packs.lines_of([*({"m": value, "label": 7} for value in values), {"label": 7}])
    found = packs.packed(tmp_path, {"x.jsonl": data}, columns=columns)
    assert found.pop("m") == [*values, None]
    assert found == ({} if columns else {"label": [7] * (len(values) + 1)})


def test_late_json_values_are_kept_and_other_names_are_an_error(tmp_path, short_scan):
    files = {"x.jsonl": LATE + b'{"m": {"late": ["2020-01-01"]}, "label": 1}\n' + 2 * LATE}
    assert packs.packed(tmp_path, files)["m"][1000] == {"late": ["2020-01-01"]}
    files = {"x.jsonl": LATE + b'{"m": {}, "label": 1, "late": 1}\n' + 2 * LATE}
    with pytest.raises(ValueError, match=r"x\.jsonl, line 1,001: it has 'late', which the lines .* do not"):
        packs.packed(tmp_path, files)
    assert packs.packed(tmp_path, files, columns=["m"])["m"][1000] == {}


@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize(("kind", "later"), [("csv", "1.5"), ("csv", "word"), ("jsonl", "1.5")])
def test_types_are_found_in_all_parts_of_a_source(tmp_path, short_scan, kind, part, later):
    """One value in the middle or at the end of a file decides the type."""
    values = ["7"] * 4000
    values[2000 * part - 1] = later
    made = {
        "csv": lines("x,text", *(f'{x},"two\nlines, {i:04}"' for i, x in enumerate(values))),
        "jsonl": lines(*(f'{{"x": {x}}}' for x in values)),
    }
    found = packs.packed(tmp_path, {f"x.{kind}": made[kind]})["x"]
    assert found == (values if later == "word" else [float(x) for x in values])


CSV = "x.csv", b"x,y\n", b'1,"two\nlines"\n'
JSONL = "x.jsonl", b"", b'{"x": 1, "y": "two"}\n\n'


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("source", "bad", "reason"),
    [
        (CSV, b'1.5,""\n', "column 'x': Failed to parse string: '1.5'"),
        (CSV, b"1,2,3\n", "CSV parse error: Expected 2 columns, got 3"),
        (CSV, b',""\n', "column 'x': 1 values are missing"),
        (JSONL, b'{"x": oops}\n', "the line is not JSON .*oops"),
        (JSONL, b'{"x": 1, "y": 2}\n', "column 'y': JSON parse error: .* changed from string to n"),
        (JSONL, b'{"y": ""}\n', "column 'x': 1 values are missing"),
    ],
)
def test_a_value_that_does_not_fit_is_named_by_line_and_column(
    tmp_path, monkeypatch, short_scan, suffix, source, bad, reason
):
    monkeypatch.setattr(text_lines, "PIECE", 1000)
    name, head, record = source
    data = head + record * 1000 + bad + record * 2000
    where = "row 1,001" if source is CSV else "line 2,001"  # with the empty lines
    files = {name + suffix: gzip.compress(data) if suffix else data}
    with pytest.raises(ValueError, match=rf"{name}{suffix}, {where}: {reason}"):
        packs.packed(tmp_path, files)
    assert not (tmp_path / "out.zarr" / "zarr.json").exists()


def test_given_columns_are_not_guessed(tmp_path):
    samples = '{"x": 1, "y": 2, "z": 1}', '{"x": "a", "y": 3, "z": []}', '{"x": {}, "y": null}'
    files = {"x.jsonl": lines(*samples)}
    assert packs.packed(tmp_path, files, columns=[("x", "json")]) == {"x": [1, "a", {}]}
    found = packs.packed(tmp_path, files, columns={"x": "json", "z": "json"})
    assert str(found) == "{'x': [1, 'a', {}], 'y': [2.0, 3.0, nan], 'z': [1, [], None]}"
    alone = {"x.jsonl": lines(r'{"x": {"lone": "\ud800"}}')}
    assert packs.packed(tmp_path, alone, columns={"x": "json"}) == {"x": [{"lone": "\ud800"}]}
    with pytest.raises(ValueError, match=r"can give a name another type, such as float64 or json$"):
        packs.packed(tmp_path, files, columns={"x": None, "z": "json"})
    with pytest.raises(ValueError, match=r"columns \['w'\] do not exist; there are \['x', 'y', 'z'\]"):
        packs.packed(tmp_path, files, columns={"x": "json", "z": "json", "w": None})


def test_integers_outside_int64(tmp_path):
    large = {"x.jsonl": lines('{"x": 1}', '{"x": null}', '{"x": 18446744073709551615}')}
    with pytest.raises(ValueError, match="line 3: column 'x': Integer value 18446744073709551615 not in"):
        packs.packed(tmp_path, large)
    samples = '{"x": 1, "y": [1]}', '{"x": 18446744073709551615, "y": [18446744073709551615]}'
    large = {"x.jsonl": lines(*samples)}
    assert packs.packed(tmp_path, large) == {"x": [1, 2**64 - 1], "y": [[1], [2**64 - 1]]}
    for value in ("-1", "18446744073709551615"), ("[-1, 18446744073709551615]", "[]"):
        larger = {"x.jsonl": lines(*(f'{{"x": {each}}}' for each in value))}
        with pytest.raises(ValueError, match=r"column 'x': no integer type holds -1 to 1844674407370955"):
            packs.packed(tmp_path, larger)
        assert packs.packed(tmp_path, larger, columns={"x": "json"})["x"] == [*map(json.loads, value)]


# CSV.


def test_csv_integers_outside_int64(tmp_path):
    with pytest.raises(ValueError, match="column 'x': Integer value 18446744073709551615 not in range"):
        packs.packed(tmp_path, {"x.csv": lines("x,y", "NA,1", "18446744073709551615,2")})
    files = {"a.csv": lines("x", " 7", "+7"), "b.csv": lines("x", "18446744073709551615 ")}
    assert packs.packed(tmp_path, files) == {"x": [7, 7, 2**64 - 1]}


@pytest.mark.parametrize(
    ("header", "record", "found"),
    [
        ('"net, of us";"gross, of us"', "1;2", {"net, of us": [1], "gross, of us": [2]}),
        ('5" x; y,"say ""a;b;c"""', "1,2", {'5" x; y': [1], 'say "a;b;c"': [2]}),
        ('"two;\nlines"|b', '3|"x,;\n,"', {"two;\nlines": [3], "b": ["x,;\n,"]}),
        ('"a, b"', "7", {"a, b": [7]}),
        ("n,text", '7,"say ""hi""\n, and ""more"""', {"n": [7], "text": ['say "hi"\n, and "more"']}),
        ('n;size";text', '7;5" pipe;"two\nlines"', {"n": [7], 'size"': ['5" pipe'], "text": ["two\nlines"]}),
        ('\ufeff"two\nlines",b\r', '1,"c\nd"\r\n2,e', {"two\nlines": [1, 2], "b": ["c\nd", "e"]}),
    ],
)
def test_quotes_and_separators_are_those_of_the_header_and_the_records(tmp_path, header, record, found):
    assert packs.packed(tmp_path, {"x.csv": lines(header, record)}) == found


@pytest.mark.parametrize(
    "other", [b'\xef\xbb\xbfa,"b"\r\n3,4\r\n', b"a,b", b"b,a\n4,3\n", b"\n\na,b\n3,4", b"a,b\r3,4\r"]
)
def test_files_with_equal_headers_are_accepted(tmp_path, other):
    found = packs.packed(tmp_path, {"0.csv": b"a,b\n1,2\n", "1.csv": other})
    assert found == ({"a": [1], "b": [2]} if other == b"a,b" else {"a": [1, 3], "b": [2, 4]})
