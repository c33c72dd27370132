"""Make a monthly climatology of a Zarr store in the cloud with xarray, and look at it again and again.

The store is opened by its URL; which chunks are read is xarray's business. A second look, in this notebook or in another
one later, reads them from the local disk. Needs xarray; with dask, also what is larger than memory.

python examples/climatology.py                            # on a simulated Google Cloud Storage
python examples/climatology.py gs://bucket/era5.zarr t2m  # on your own, and which of its variables
"""

import sys
import time

import fsspec
import xarray as xr


def climatology(url: str, variable: str | None) -> xr.DataArray:
    """Return the mean of each month of the year, over all years."""
    data = xr.open_zarr(f"cachedfs::{url}")
    return data[variable or next(iter(data))].groupby("time.month").mean("time").compute()


def main(url: str, variable: str | None = None) -> None:
    fs, _ = fsspec.url_to_fs(f"cachedfs::{url}")
    asked = 0
    for look in range(2):
        began = time.perf_counter()
        months = climatology(url, variable)
        seconds, before, asked = time.perf_counter() - began, asked, fs.stats().requests
        print(
            f"look {look}: {dict(months.sizes)} of {months.name} in {seconds:.2f} s, {asked - before} requests"
        )
    for month in months:
        print(f"month {int(month.month):2}: {float(month.mean()):.2f} on average")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(*sys.argv[1:])
    else:
        import simulated

        with simulated.cloud("gs", simulated.weather):
            main("gs://demo/weather.zarr")
