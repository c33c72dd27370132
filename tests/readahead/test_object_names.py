"""Chunk names as positions in a grid, and grids described by zarr metadata."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachedfs.readahead.object_names import ObjectNames, arrays_in, numbered

V3 = {
    "zarr_format": 3, "node_type": "array", "shape": [10, 256, 30], "data_type": "float32",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 256, 7]}},
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
}  # fmt: skip
V2 = {"zarr_format": 2, "shape": [10, 30], "chunks": [3, 30], "dtype": "<f8"}


def only(name, document):
    arrays = arrays_in(f"b/a/{name}", json.dumps(document).encode())
    assert list(arrays) == ["b/a/"]
    return arrays["b/a/"]


def with_keys(name, **configuration):
    return V3 | {"chunk_key_encoding": {"name": name, "configuration": configuration}}


def test_an_array_has_as_many_chunks_as_its_shape_needs():
    assert only("zarr.json", V3) == ObjectNames("b/a/c/", "/", extents=(10, 1, 5))
    assert only(".zarray", V2) == ObjectNames("b/a/", ".", extents=(4, 1))
    assert only(".zarray", V2 | {"dimension_separator": "/"}).separator == "/"


@pytest.mark.parametrize(
    ("document", "name"),
    [
        (with_keys("default", separator="."), "c.3.0.4"),
        (with_keys("default"), "c/3/0/4"),
        (with_keys("v2"), "3.0.4"),
        (with_keys("v2", separator="/"), "3/0/4"),
    ],
)
def test_chunk_names_of_every_encoding_round_trip(document, name):
    grid = only("zarr.json", document)
    assert grid.chunk(f"b/a/{name}") == (3, 0, 4)
    assert grid.path((3, 0, 4)) == f"b/a/{name}"


@pytest.mark.parametrize(
    "name",
    [
        "c/3/0", "c/3/0/4/1", "c/10/0/0", "c/03/0/4", "c/-1/0/0", "c/x/0/0", "c/3/0/٤", "3/0/4", "zarr.json", "",
    ],
)  # fmt: skip
def test_a_name_outside_the_grid_has_no_position(name):
    assert only("zarr.json", V3).chunk(f"b/a/{name}") is None


def test_consolidated_metadata_describes_every_array_below():
    v3 = {"consolidated_metadata": {"metadata": {"a": V3, "g": {"node_type": "group"}, "g/b": V3}}}
    v2 = {"metadata": {"a/.zarray": V2, "a/.zattrs": {}, "g/b/.zarray": V2, ".zarray": V2}}
    assert sorted(arrays_in("b/zarr.json", json.dumps(v3).encode())) == ["b/a/", "b/g/b/"]
    assert sorted(arrays_in("b/.zmetadata", json.dumps(v2).encode())) == ["b/", "b/a/", "b/g/b/"]


@pytest.mark.parametrize(
    "document",
    [
        b"", b"{", b"\xff\xfe", b"null", b"[]", b"7", b"[" * 100_000, b'{"shape": 7}', b'{"metadata": 7}', b'{"metadata": {"a/.zarray": 7}}',
        json.dumps(V3 | {"shape": [-1, 2, 3]}).encode(), json.dumps(V3 | {"shape": [1, 2]}).encode(),
        json.dumps(V3 | {"shape": [True, 2, 3]}).encode(), json.dumps(V3 | {"chunk_grid": {"name": "rectilinear"}}).encode(),
        json.dumps(V3 | {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 1, 1]}}}).encode(),
        json.dumps(V3 | {"chunk_key_encoding": {"name": "other"}}).encode(),
        json.dumps(with_keys("default", separator="::")).encode(), json.dumps(V3 | {"shape": []}).encode(),
        json.dumps({"consolidated_metadata": {"metadata": {"a": [1]}}}).encode(),
    ],
    ids=lambda document: document[:30].decode(errors="replace"),
)  # fmt: skip
def test_malformed_metadata_describes_nothing(document):
    for name in ("zarr.json", ".zarray", ".zmetadata"):
        assert arrays_in(name, document) == {}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("b/part-00017.json", (ObjectNames("b/part-", tail=".json", width=5), (17,))),
        ("b/img_9.png", (ObjectNames("b/img_", tail=".png", width=0), (9,))),
        ("b/2024/x10y0", (ObjectNames("b/2024/x10y", tail="", width=0), (0,))),
        ("b/100.json", (ObjectNames("b/", tail=".json", width=0), (100,))),
    ],
)
def test_numbered_names_are_split_at_the_last_number(path, expected):
    assert numbered(path) == expected


@given(st.text(max_size=12))
def test_a_numbered_name_round_trips(path):
    found = numbered(path)
    if found is not None:
        assert found[0].path(found[1]) == path
