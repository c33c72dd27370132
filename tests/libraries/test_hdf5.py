"""h5py, and references to HDF5 chunks by kerchunk and VirtualiZarr."""

import io
import json

import fsspec
import h5py
import numpy as np
import pytest
import xarray as xr

from cachedfs.obspec import CachedStore
from tests.libraries.data import NUMBERS, hdf5

# Zlib is not a codec of Zarr v3, and zarr warns about references with it.
names_zlib = pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")


@pytest.fixture
def url(place):
    place.put("a.h5", hdf5())
    return place.url("a.h5")


def test_h5py_reads_a_file(place, url):
    for _ in place.twice(fetches=1):
        with fsspec.open(url) as file, h5py.File(file) as h5:
            assert h5["d"].attrs["unit"] == "m"
            np.testing.assert_array_equal(h5["d"][500:70_000], NUMBERS[500:70_000])


def test_h5py_writes_into_a_buffer_that_is_uploaded(place):
    url, buffer = place.url("b.h5"), io.BytesIO()
    with h5py.File(buffer, "w") as h5:
        h5["d"] = np.arange(10)
    with fsspec.open(url, "wb") as file:
        file.write(buffer.getvalue())
    for _ in place.twice(fetches=1):
        with fsspec.open(url) as file, h5py.File(file) as h5:
            assert h5["d"][:].tolist() == list(range(10))


@pytest.fixture
def references(url):
    hdf = pytest.importorskip("kerchunk.hdf")
    with fsspec.open(url) as file:
        return hdf.SingleHdf5ToZarr(file, url).translate()


@pytest.mark.parametrize("place", ["cgs://", "cdrive://"], indirect=True)
def test_kerchunk_references_are_read_by_xarray(place, references):
    place.put("references.json", json.dumps(references).encode())
    for _ in place.twice(fetches=1):
        with xr.open_dataset(place.url("references.json"), engine="kerchunk") as ds:
            np.testing.assert_array_equal(ds["d"].values, NUMBERS)


@pytest.mark.parametrize("place", ["cachedfs::gs://", "cachedfs::drive://"], indirect=True)
def test_references_do_not_accept_a_chained_url(references):
    with pytest.raises(ValueError, match="Protocol not known: cachedfs::"):
        xr.open_dataset(references, engine="kerchunk")


@pytest.mark.parametrize("place", ["cgs://", "cdrive://"], indirect=True)
@names_zlib
def test_virtualizarr_references_are_read_by_xarray(place, url, tmp_path):
    vz = pytest.importorskip("virtualizarr")
    from obspec_utils.registry import ObjectStoreRegistry
    from obstore.store import LocalStore

    (tmp_path / "a.h5").write_bytes(hdf5())
    registry, parser = ObjectStoreRegistry({"file://": LocalStore()}), vz.parsers.HDFParser()
    with vz.open_virtual_dataset(f"file://{tmp_path}/a.h5", registry=registry, parser=parser) as virtual:
        references = virtual.vz.rename_paths(url).vz.to_kerchunk(format="dict")
    for _ in place.twice(fetches=1):
        with xr.open_dataset(references, engine="kerchunk") as ds:
            np.testing.assert_array_equal(ds["d"].values, NUMBERS)


@pytest.mark.parametrize("place", ["cgs://", "cdrive://"], indirect=True)
@names_zlib
def test_virtualizarr_reads_through_a_cached_store(place, url):
    vz = pytest.importorskip("virtualizarr")
    from obspec_utils.registry import ObjectStoreRegistry

    folder, parser = place.url(), vz.parsers.HDFParser()
    for _ in place.twice(fetches=1):
        registry = ObjectStoreRegistry({folder: CachedStore(folder)})
        with vz.open_virtual_dataset(url, registry=registry, parser=parser) as virtual:
            assert virtual.sizes == {"phony_dim_0": len(NUMBERS)}
        with xr.open_zarr(parser(url, registry), consolidated=False, zarr_format=3) as ds:
            np.testing.assert_array_equal(ds["d"].values, NUMBERS)


def test_virtualizarr_does_not_accept_our_urls(place, url):
    vz = pytest.importorskip("virtualizarr")
    from obspec_utils.registry import ObjectStoreRegistry

    registry, parser = ObjectStoreRegistry(), vz.parsers.HDFParser()
    with pytest.raises(ValueError, match="Could not find an ObjectStore"):
        vz.open_virtual_dataset(url, registry=registry, parser=parser)
