"""Attributes, dimensions and coordinates of HDF5 and NetCDF files in a pack: xarray reads from it what it reads from them."""

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("PIL")
pytest.importorskip("h5netcdf")
pytest.importorskip("torch")

import h5netcdf
import h5py
import xarray as xr
import zarr

from cachedfs.datasets import ZarrDataset, pack
from tests.packing import packs

DAYS = "days since 2000-01-01"


def climate(file):
    """Write variables of each kind that a NetCDF file may have."""
    file.dimensions = {"time": None, "lat": 3, "lon": 4, "nv": 2, "unused": 5}
    file.resize_dimension("time", 4)
    values = {
        "t": ("i2", ("time", "lat", "lon"), np.arange(48) - 5),
        "ice": ("f4", ("time", "lat"), [1e20, *range(11)]),
        "sun": ("f8", ("time",), [1, np.nan, 3, 4]),
        "code": ("i1", ("time",), [0, 1, -1, 5]),
        "time": ("f8", ("time",), [0, 1, 59, 60]),
        "bounds": ("f8", ("time", "nv"), range(8)),
        "lead": ("i4", ("time",), [1, 2, 3, -9]),
        "lat": ("f4", ("lat",), [-1, 0, 1]),
        "area": ("f4", ("lat", "lon"), range(12)),
        "nv": ("f4", ("lat", "nv"), range(6)),  # the name of a dimension of others
        "crs": ("i4", (), [7]),
        "inner/wind": ("f4", ("time", "lat"), range(12)),
    }
    fills = {
        "t": np.int16(-1),
        "ice": np.float32(1e20),
        "sun": np.nan,
        "code": np.int8(-1),
        "lead": np.int32(-9),
    }
    for name, (dtype, dimensions, data) in values.items():
        array = np.array(data, dtype).reshape([len(file.dimensions[name]) or 4 for name in dimensions])
        file.create_variable(name, dimensions, dtype, fillvalue=fills.get(name))[...] = array
    cities = file.create_variable("city", ("lat",), h5py.string_dtype())
    cities[...] = np.array(["Köln", "", "Oslo"], object)
    for path, attributes in ATTRIBUTES.items():
        (file if path == "/" else file[path]).attrs.update(attributes)


ATTRIBUTES = {
    "/": {"title": "süß", "levels": np.array([1, 2], "i4"), "Conventions": "CF-1.8", "empty": ""},
    "t": {"scale_factor": 0.01, "add_offset": 273.15, "coordinates": "area", "grid_mapping": "crs"},
    "ice": {"missing_value": np.float32(1e20), "valid_range": np.array([0, 20], "f4")},
    "code": {"_Unsigned": "true"},
    "time": {"units": DAYS, "calendar": "proleptic_gregorian", "bounds": "bounds"},
    "lead": {"units": "hours"},
    "lat": {"units": "degrees_north"},
    "crs": {"grid_mapping_name": "latitude_longitude", "semi_major_axis": 6378137.0},
    "inner": {"comment": "inner"},
    "inner/wind": {"units": "m s-1"},
}


def written(path, write, **options):
    with h5netcdf.File(path, "w", **options) as file:
        write(file)
    return str(path)


def both(source, target):
    """Return the groups of a source and of its pack, as xarray decodes them."""
    with xr.open_datatree(source, engine="h5netcdf") as tree:
        expected = {node.path: node.to_dataset(inherit=False).load() for node in tree.subtree}
    with xr.open_datatree(target, engine="zarr") as tree:
        found = {node.path: node.to_dataset(inherit=False).load() for node in tree.subtree}
    del found["/"].attrs["cachedfs_pack"]
    return expected, found


def test_xarray_reads_the_same_from_a_pack(tmp_path):
    source, target = written(tmp_path / "x.nc", climate), str(tmp_path / "x.zarr")
    packed = pack(source, target)
    expected, found = both(source, target)
    assert expected.keys() == found.keys() == {"/", "/inner"}
    for path, dataset in expected.items():
        xr.testing.assert_identical(found[path], dataset)
    np.testing.assert_allclose(found["/"]["t"].values[0, 1], [np.nan, 273.15, 273.16, 273.17])
    assert packed.notes == ["shared by all samples: lat, area, nv, crs, city"]
    samples = ("bounds", "code", "ice", "inner/wind", "lead", "sun", "t", "time")
    assert ZarrDataset(target).arrays == samples
    assert packed.samples == 4


def test_columns_decide_on_coordinates_too(tmp_path):
    source, target = written(tmp_path / "x.nc", climate), str(tmp_path / "x.zarr")
    packed = pack(source, target, columns=["t", "lat"])
    assert {name for name, _ in zarr.open_group(target, mode="r").arrays()} == {"t", "lat"}
    assert packed.notes == ["shared by all samples: lat", "left out, as columns= does not name it: time"]
    expected, found = both(source, target)
    del expected["/"]["t"].encoding["coordinates"]
    np.testing.assert_array_equal(found["/"]["t"].values, expected["/"]["t"].values)
    assert found["/"]["lat"].identical(expected["/"]["lat"])
    pack(source, target, columns=["lat"], overwrite=True)
    assert ZarrDataset(target, arrays="lat")[2] == 1


def test_what_zarr_cannot_keep_is_named(tmp_path):
    colors = h5py.enum_dtype({"red": 0, "blue": 3}, "u1")
    records = np.zeros(1, [("a", "i4")])[0]
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(3, dtype="i2")
        file["word"] = ["a", "b", "c"]
        file.create_dataset("color", data=[0, 3, 0], dtype=colors)
        file["letter"] = np.array(b"q", "S1")
        file["record"] = records
        file["x"].attrs.update({"scale_factor": np.float32(0.5), "missing_value": np.nan, "raw": b"\xff"})
        file["x"].attrs.update({"_FillValue": 0.5, "reference": file["word"].ref, "record": records})
        file["word"].attrs["_FillValue"] = "none"
        file["x"].attrs["nothing"] = h5py.Empty("f4")
    packed = pack(str(tmp_path / "x.h5"), str(tmp_path / "x.zarr"))
    group = zarr.open_group(tmp_path / "x.zarr", mode="r")
    assert dict(group["x"].attrs) == {"scale_factor": 0.5, "nothing": []}
    assert dict(group["color"].attrs) == {"flag_values": [0, 3], "flag_meanings": "red blue"}
    assert group["letter"][()] == "q"
    assert xr.open_zarr(str(tmp_path / "x.zarr"))["x"].values.tolist() == [0, 0.5, 1]
    lost = ("_FillValue", "missing_value", "raw", "record", "reference")
    left_out = [f"attribute {name!r} of 'x' is left out: Zarr cannot hold its value" for name in lost]
    assert sorted(packed.notes) == sorted(
        [
            *left_out,
            "attribute '_FillValue' of 'word' is left out: Zarr cannot hold its value",
            "'x': xarray decodes it as float64, as Zarr keeps no types of attributes (scale_factor float32)",
            "'letter' of bytes is packed as text",
            "left out: 'record' of type [('a', '<i4')] and shape () cannot be packed; leave it out: columns=[...]",
            "shared by all samples: letter",
        ]
    )


def test_characters_are_texts(tmp_path):
    words = np.array([list("ab"), ["c", ""]], "S1")
    (tmp_path / "x.h5").write_bytes(packs.hdf5(word=words, words=words.reshape(2, 1, 2), x=[1, 2]))
    packed = pack(str(tmp_path / "x.h5"), str(tmp_path / "x.zarr"))
    assert [each.tobytes() for each in packs.stored(str(tmp_path / "x.zarr"), "word")] == [b"ab", b"c"]
    assert zarr.open_group(tmp_path / "x.zarr", mode="r")["words"][:].tobytes() == b"abc\0"
    assert packed.notes == ["'words' of characters is packed as uint8"]


def test_the_largest_dataset_decides_on_the_samples(tmp_path):
    """As in files of satellites: an image, and bounds of its times along a dimension of their own."""

    def write(file):
        file.dimensions = {"y": 3, "x": 2, "bound": 2}
        file.create_variable("image", ("y", "x"), "u1", data=np.arange(6).reshape(3, 2))
        file.create_variable("bounds", ("bound",), "f8", data=np.array([7.0, 8.0]))
        file.create_variable("name", ("y",), h5py.string_dtype())[...] = np.array(["a", "", "c"], object)

    source, target = written(tmp_path / "x.nc", write), str(tmp_path / "x.zarr")
    assert pack(source, target).notes == ["shared by all samples: bounds"]
    expected, found = (
        each["/"].drop_vars(["name", "name_offsets"], errors="ignore") for each in both(source, target)
    )
    assert found.identical(expected)
    assert ZarrDataset(target, named=True)[2]["name"] == "c"
    assert ZarrDataset(target).arrays == ("image", "name")


def day(path, start, *, lat=(1.0, 2.0), units=DAYS, run=0):
    def write(file):
        file.dimensions = {"time": 2, "lat": 2}
        file.create_variable("time", ("time",), "i8", data=np.array([start, start + 1])).attrs["units"] = (
            units
        )
        file.create_variable("lat", ("lat",), "f8", data=np.array(lat))
        file.create_variable("t", ("time", "lat"), "f4", data=np.full((2, 2), start))
        file.create_variable("run", (), "i4", data=np.int32(run))
        file.attrs["history"] = f"day {start}"

    return written(path, write)


def test_several_files_are_one_dataset_as_in_xarray(tmp_path):
    sources = [day(tmp_path / f"{i}.nc", 2 * i, run=i) for i in range(3)]
    packed = pack(sources, str(tmp_path / "x.zarr"))
    assert packed.notes == ["left out: 'run': each file has one value", "shared by all samples: lat"]
    each = [xr.load_dataset(source).drop_vars("run") for source in sources]
    found = xr.open_zarr(str(tmp_path / "x.zarr"))
    xr.testing.assert_equal(found, xr.concat(each, "time", data_vars=None))
    assert found.attrs["history"] == "day 0"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"units": "days since 2001-01-01"}, "'units' of 'time' is 'days since 2001-01-01', and 'd"),
        ({"lat": (1, 3)}, "'lat', which all samples share, has other values than in the first"),
    ],
)
def test_files_whose_values_mean_something_else_are_refused(tmp_path, other, message):
    sources = [day(tmp_path / "0.nc", 0), day(tmp_path / "1.nc", 2, **other)]
    with pytest.raises(ValueError, match=rf"1\.nc: {message}"):
        pack(sources, str(tmp_path / "x.zarr"))
    pack(sources, str(tmp_path / "y.zarr"), columns=["t"])
    assert zarr.open_group(tmp_path / "y.zarr", mode="r")["t"][:, 0].tolist() == [0, 0, 2, 2]
