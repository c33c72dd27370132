"""xarray: Zarr by URL, NetCDF by h5netcdf, lazily, appended, and in batches of xbatcher."""

import fsspec
import pytest
import xarray as xr

from tests.libraries.data import consolidating, cube
from tests.support import forget


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("zarr_format", [2, 3])
@consolidating
def test_zarr_is_written_and_read_without_other_arguments(base, zarr_format, consolidated):
    url, ds = f"{base}/c.zarr", cube()
    ds.to_zarr(url, zarr_format=zarr_format, consolidated=consolidated)
    options = {} if consolidated else {"consolidated": False}
    for _ in range(2):
        with xr.open_zarr(url, **options) as back:
            xr.testing.assert_identical(back.load(), cube())
        forget()


@consolidating
def test_a_second_pass_sends_no_request(place):
    url, ds = place.url("c.zarr"), cube()
    ds.to_zarr(url)
    for _ in place.twice():
        with xr.open_zarr(url) as back:
            xr.testing.assert_identical(back.load(), cube())
        with xr.open_dataset(url, engine="zarr") as back:
            xr.testing.assert_identical(back.load(), cube())


@pytest.mark.parametrize("place", ["cachedfs::gs://", "cachedfs::drive://"], indirect=True)
@consolidating
def test_appended_data_is_seen_at_once_also_by_another_process(place):
    urls = {zarr_format: place.url(f"c{zarr_format}.zarr") for zarr_format in (2, 3)}
    for zarr_format, url in urls.items():
        cube(4).to_zarr(url, zarr_format=zarr_format, consolidated=True)
    code = """
        import sys, warnings
        import xarray as xr
        warnings.simplefilter("ignore")
        for line in sys.stdin:
            with xr.open_zarr(line.strip()) as ds:
                print(ds.sizes["time"], float(ds.t.sum()), flush=True)
    """
    with place.machine.talking(code) as other:
        for url in urls.values():
            assert other(url) == f"4 {float(cube(4).t.sum())}"
        more = cube(7).isel(time=slice(4, None))
        for url in urls.values():
            more.to_zarr(url, append_dim="time", consolidated=True)
            with xr.open_zarr(url) as back:
                xr.testing.assert_identical(back.load(), cube(7))
            assert other(url) == f"7 {float(cube(7).t.sum())}"


@consolidating
def test_a_region_is_replaced(place):
    url = place.url("c.zarr")
    cube().to_zarr(url)
    with xr.open_zarr(url) as before:
        before.load()
    part = (cube()[["t"]] * 0).isel(time=slice(1, 2)).drop_vars(["y", "x", "time"])
    part.to_zarr(url, region={"time": slice(1, 2)})
    expected = cube()
    expected["t"][1] = 0
    with xr.open_zarr(url) as back:
        xr.testing.assert_identical(back.load(), expected)


@consolidating
def test_chunks_are_read_lazily(place):
    pytest.importorskip("dask")
    url = place.url("c.zarr")
    cube().chunk(time=1).to_zarr(url)
    for _ in place.twice():
        with xr.open_zarr(url, chunks={}) as lazy:
            assert lazy.t.chunks[0] == (1, 1, 1, 1)
            assert float(lazy.t.mean().compute(scheduler="threads")) == float(cube().t.mean())


def test_netcdf_through_h5netcdf_by_a_file_and_by_its_url(place, tmp_path):
    cube().to_netcdf(tmp_path / "c.nc", engine="h5netcdf")
    url = place.url("c.nc")
    place.put("c.nc", (tmp_path / "c.nc").read_bytes())
    for _ in place.twice(fetches=1):
        with fsspec.open(url) as file, xr.open_dataset(file, engine="h5netcdf") as back:
            xr.testing.assert_identical(back.load(), cube())
        with xr.open_dataset(url, engine="h5netcdf") as back:
            xr.testing.assert_identical(back.load(), cube())


@consolidating
def test_batches_of_xbatcher(place):
    xbatcher = pytest.importorskip("xbatcher")
    url = place.url("c.zarr")
    cube().chunk(time=2).to_zarr(url)
    for _ in place.twice():
        with xr.open_zarr(url) as ds:
            batches = xbatcher.BatchGenerator(ds, input_dims={"time": 2, "y": 6, "x": 8})
            assert [int(batch["time"][0]) for batch in batches] == [0, 2]
            xr.testing.assert_equal(batches[1].load(), cube().isel(time=slice(2, None)))
