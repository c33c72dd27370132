"""Values of tables are those that pandas and pyarrow read, or an error names the column and the solution."""

import io

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("pandas")

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.feather

from cachedfs.datasets import pack
from cachedfs.packing.sources import csv_records
from tests.packing import packs
from tests.packing.packs import lines


def as_packed(column):
    """Return a column of pandas as a pack has it: missing text is empty, and booleans with gaps are numbers."""
    if pandas.api.types.is_bool_dtype(column) or pandas.api.types.is_numeric_dtype(column):
        return column.tolist()
    if set(column.dropna()) <= {True, False}:
        return column.astype("float64").tolist()
    return column.fillna("").map(str).tolist()


@pytest.mark.parametrize(
    "values",
    [
        ["0x1f", "7"],
        ["1_000", "2"],
        ["2024-01-01", "2024-01-02"],
        ["1", "-2", "+3", " 4", "5 "],
        ["1.5", "-.5", "+2.", "1e3", "2.5E-3", "7"],
        ["1.5", "inf", "-Infinity", "nan"],
        ["1", "", "3"],
        ["1", "NA", "<NA>", "None", "n/a", "4"],
        ["True", "", "FALSE"],
        ["true", "1"],
        ["18446744073709551615", "1"],
        ["18446744073709551616", "1"],
        ["-1", "18446744073709551615"],
        ["007.5", "01.25"],
        ["1d5", "1"],
        ["--1", "1"],
        ["１", "2"],
        ["", ""],
    ],
)
def test_csv_values_are_those_of_pandas(tmp_path, values):
    data = lines("x,y", *(f'"{value}",a' for value in values))
    (found, _) = packs.packed(tmp_path, {"x.csv": data}).values()
    wanted = as_packed(pandas.read_csv(io.BytesIO(data))["x"]) if any(values) else values
    np.testing.assert_array_equal(np.array(found), np.array(wanted))


def test_integers_with_zeros_in_front_stay_text(tmp_path):
    files = {"x.csv": lines("zip,n", "01234,1", "98765,2", ",3")}
    assert packs.packed(tmp_path, files) == {"zip": ["01234", "98765", ""], "n": [1, 2, 3]}
    files = {"x.csv": lines("zip,n", "01234,1", "98765,2")}
    assert packs.packed(tmp_path, files, columns={"zip": "int64"}) == {"zip": [1234, 98765], "n": [1, 2]}


@pytest.mark.parametrize(
    ("late", "reason"),
    [
        ("007", "'007' has zeros in front, which a number has not"),
        ("-0X1f", "'-0X1f' is hexadecimal"),
        ("1_0", "Failed to parse string: '1_0'"),
    ],
)
def test_a_late_text_among_numbers_is_an_error_that_names_it(tmp_path, monkeypatch, late, reason):
    monkeypatch.setattr("cachedfs.packing.sources.text_lines.RANGE_SIZE", 100)
    monkeypatch.setattr("cachedfs.packing.sources.text_lines.SAMPLED", 2)
    files = {"x.csv": lines("x,y", *["1,a"] * 500, f"{late},a", *["1,a"] * 1500)}
    with pytest.raises(ValueError, match=rf"x\.csv, row 501: column 'x': {reason}.*; columns="):
        packs.packed(tmp_path, files)
    found = packs.packed(tmp_path, files, columns={"x": "utf8"})
    assert (found["x"][500], found["x"][501], found["y"][500]) == (late, "1", "a")


def test_a_record_larger_than_a_block_is_packed(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_records, "BLOCKS", (1000, 20_000))
    texts = [f"{i} " * (1 if i % 50 else 2000) for i in range(200)]
    records = (f'{i},"{text}\n"' for i, text in enumerate(texts))
    found = packs.packed(tmp_path, {"x.csv": lines("i,text", *records)})
    assert found == {"i": list(range(200)), "text": [f"{text}\n" for text in texts]}
    monkeypatch.setattr(csv_records, "BLOCKS", (1000, 5000))
    with pytest.raises(ValueError, match=r"x\.csv: a record of more than 5,000 bytes is not packed as CSV"):
        pack(str(tmp_path / "x.csv"), str(tmp_path / "other.zarr"))


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ("a,b\n1,süß\n2,x\n".encode("utf-16"), {}),
        ("a,b\n1,süß\n2,x\n".encode("latin-1"), {"encoding": "latin-1"}),
        (b"# made by hand\na, b\n1, x\n# and more\n2, y\n", {"comment": "#", "skipinitialspace": True}),
        (b'a, b\n1, "x, y"\n2, z\n', {"skipinitialspace": True}),
        (b"a:b\n1:x\n2:y\n", {"delimiter": ":"}),
    ],
)
def test_options_of_the_csv_reader(tmp_path, data, options):
    wanted = pandas.read_csv(io.BytesIO(data), **{"encoding": "utf-16" if not options else None, **options})
    found = packs.packed(tmp_path, {"x.csv": data}, **({"csv": options} if options else {}))
    assert found == {name: as_packed(wanted[name]) for name in wanted}


GAPS = [
    {"a": 1, "c": 3, "t": True, "k": "x"},
    {"b": 2, "c": None, "k": "y"},
    {"a": 4, "b": 5, "c": 6, "t": False, "k": "z"},
]


@pytest.mark.parametrize(("name", "data"), packs.in_each_format(GAPS))
def test_integers_and_booleans_with_gaps_are_floats_with_nan(tmp_path, name, data):
    nan = float("nan")
    found = packs.packed(tmp_path, {name: data})
    wanted = {"a": [1, nan, 4], "b": [nan, 2, 5], "c": [3, nan, 6], "t": [1, nan, 0]}
    for column, values in wanted.items():
        np.testing.assert_array_equal(found[column], values)
    assert found["k"] == ["x", "y", "z"]
    assert set(packs.packed(tmp_path, {name: data}, columns={"a": "float32"})) == set(found)


LARGE = [{"a": 2**53 + 1, "b": 1}, {"b": 2**53 + 1}, {"a": 1}]


@pytest.mark.parametrize(("name", "data"), packs.in_each_format(LARGE))
def test_large_integers_with_gaps_are_one_error_that_names_all_columns(tmp_path, name, data):
    with pytest.raises(ValueError, match=r"column 'a': .*9007199254740993.*column 'b': .*; columns="):
        packs.packed(tmp_path, {name: data})
    types = {"a": "utf8" if "csv" in name else "float64", "b": "float64"}
    assert set(packs.packed(tmp_path, {name: data}, columns=types)) == {"a", "b"}


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        (pa.array([1, 2]), pa.array([None], pa.null()), [1.0, 2.0, "nan"]),
        (pa.array(["a"]), pa.array([None], pa.null()), ["a", ""]),
        (pa.array([2**40]), pa.array([1], pa.int32()), [2**40, 1]),
        (pa.array([1]), pa.array([2.5]), [1.0, 2.5]),
        (pa.array(["a"]), pa.array(["b"], pa.large_string()), ["a", "b"]),
        (pa.array(["a"]), pa.array(["b", "b"]).dictionary_encode(), ["a", "b", "b"]),
        (pa.array([7], pa.timestamp("us")), pa.array([7], pa.timestamp("ns")), [7000, 7]),
        (pa.array([[1]], pa.list_(pa.int32())), pa.array([[2**40]]), [[1], [2**40]]),
        (pa.array([{"a": 1}]), pa.array([{"b": 2}]), [{"a": 1}, {"b": 2}]),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "feather"])
def test_files_of_different_types_are_unified_as_arrow_does(tmp_path, kind, first, second, wanted):
    files = {f"{i}.{kind}": made(kind, pa.table({"c": each})) for i, each in enumerate((first, second))}
    assert str(packs.packed(tmp_path, files)["c"]) == str(wanted).replace("'nan'", "nan")


def made(kind, table):
    if kind == "parquet":
        return packs.parquet(table)
    sink = io.BytesIO()
    pyarrow.feather.write_feather(table, sink)
    return sink.getvalue()


def test_integers_that_meet_floats_must_be_exact(tmp_path):
    files = {
        "0.parquet": packs.parquet(pa.table({"c": [0.5]})),
        "1.parquet": packs.parquet(pa.table({"c": [2**53 + 1]})),
    }
    with pytest.raises(ValueError, match=r"1\.parquet, row 1: column 'c': .*9007199254740993.*; columns="):
        packs.packed(tmp_path, files)
    assert packs.packed(tmp_path, files, columns={"c": "float64"}) == {"c": [0.5, 2.0**53]}


def test_a_file_that_was_not_looked_at_keeps_its_values_or_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("cachedfs.packing.sources.parquet.SAMPLED", 2)
    monkeypatch.setattr("cachedfs.packing.sources.parquet.SAMPLED_ROWS", 1)
    kept = [pa.array([1], pa.int32()), pa.array([2]), pa.array([3], pa.int32())]
    files = {f"{i}.parquet": packs.parquet(pa.table({"c": each})) for i, each in enumerate(kept)}
    assert packs.packed(tmp_path, files) == {"c": [1, 2, 3]}
    files["1.parquet"] = packs.parquet(pa.table({"c": [2**40]}))
    with pytest.raises(ValueError, match=r"1\.parquet, row 1: column 'c': Integer value 1099511627776"):
        packs.packed(tmp_path, files)
    files["1.parquet"] = packs.parquet(pa.table({"c": ["007"]}))
    with pytest.raises(ValueError, match=r"1\.parquet, row 1: column 'c': it is string, and int32 in the"):
        packs.packed(tmp_path, files)
    kept = [pa.array([0.1], dtype) for dtype in ("f4", "f8", "f4")]
    files = {f"{i}.parquet": packs.parquet(pa.table({"c": each})) for i, each in enumerate(kept)}
    with pytest.raises(ValueError, match=r"1\.parquet, row 1: column 'c': it is double, and float in the"):
        packs.packed(tmp_path, files)


@pytest.mark.parametrize(("name", "data"), packs.in_each_format([{"x": 1}, {"x": 2}]))
def test_hive_folders_are_columns(tmp_path, name, data):
    files = {f"src/label={label}/year={year}/{name}": data for label, year in (("a b", 7), ("c", 8))}
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_bytes(content)
    pack(str(tmp_path / "src"), str(tmp_path / "folder.zarr"))
    assert packs.stored(str(tmp_path / "folder.zarr"), "label", text=True) == ["a b", "a b", "c", "c"]
    assert packs.packed(tmp_path, files, columns=["year", "x"]) == {"year": [7, 7, 8, 8], "x": [1, 2, 1, 2]}
    assert packs.packed(tmp_path, files, columns=["year"]) == {"year": [7, 7, 8, 8]}


@pytest.mark.parametrize(
    ("name", "data", "first", "found"),
    [
        ("x.csv", b"a,a,,a.1,__key__\n1,2,3,4,5\n", "a", ["a", "a.2", "Unnamed: 2", "a.1", "key"]),
        ("x.jsonl", b'{"__key__": 1, "": 2, "key": 3}\n', "__key__", ["key", "Unnamed: 1", "key.1"]),
        ("x.parquet", packs.parquet(pa.table([[1], [2]], names=["a", "a"])), "a", ["a", "a.1"]),
    ],
)
def test_names_that_cannot_be_arrays_are_packed_under_others(tmp_path, name, data, first, found):
    values = {new: [i + 1] for i, new in enumerate(found)}
    assert packs.packed(tmp_path, {name: data}) == values
    assert packs.packed(tmp_path, {name: data}, rename={first: "first"})["first"] == [1]
    with pytest.raises(ValueError, match="columns \\['nowhere'\\] do not exist"):
        packs.packed(tmp_path, {name: data}, rename={"nowhere": "x"})


def test_notes_name_the_columns_that_are_renamed(tmp_path):
    (tmp_path / "x.csv").write_bytes(b"a,a,__b\n1,2,3\n")
    done = pack(str(tmp_path / "x.csv"), str(tmp_path / "out.zarr"))
    assert done.notes == ["column 2, 'a', is packed as 'a.1'", "column 3, '__b', is packed as 'b'"]


def test_arrow_streams_and_files_without_batches_are_read(tmp_path):
    table = pa.table({"x": [1, 2], "text": ["a", "b"]})
    files = {}
    for name, made_by, n in (("0.arrow", pa.ipc.new_file, 0), ("1.arrow", pa.ipc.new_stream, 2)):
        sink = io.BytesIO()
        with made_by(sink, table.schema) as writer:
            for _ in range(n):
                writer.write_table(table)
        files[name] = sink.getvalue()
    assert packs.packed(tmp_path, files) == {"x": [1, 2, 1, 2], "text": ["a", "b", "a", "b"]}
    files["2.arrow"] = b"no table"
    with pytest.raises(ValueError, match=r"1 file cannot be packed.*\n.*2\.arrow: Arrow cannot read it"):
        packs.packed(tmp_path, files)
