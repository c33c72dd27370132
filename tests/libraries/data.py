"""Data for library tests: a table, a cube, and an HDF5 file."""

import io

import h5py
import numpy as np
import pandas as pd
import pytest
import xarray as xr

ROWS = pd.DataFrame(
    {"n": range(1000), "x": np.linspace(0, 1, 1000), "name": [f"row {i}" for i in range(1000)]}
)

NUMBERS = np.arange(1, 100_001)  # none of them is the default fill value of HDF5

# xarray and zarr warn whenever a v3 store is consolidated.
consolidating = pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")

# JAX and Lance warn about forks once they are imported; forked workers never call them.
forking = pytest.mark.filterwarnings("ignore:os.fork.. was called", "ignore:lance is not fork-safe")


def cube(n: int = 4) -> xr.Dataset:
    t = np.arange(n * 6 * 8, dtype="f4").reshape(n, 6, 8)
    return xr.Dataset(
        {"t": (("time", "y", "x"), t), "p": (("time", "y", "x"), t + 1000)},
        coords={"time": np.arange(n), "y": np.arange(6), "x": np.arange(8)},
    )


def hdf5() -> bytes:
    """Return a file with the numbers in compressed chunks."""
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        file.create_dataset("d", data=NUMBERS, chunks=(10_000,), compression="gzip")
        file["d"].attrs["unit"] = "m"
    return buffer.getvalue()
