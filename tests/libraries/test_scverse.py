"""AnnData: tables of cells in HDF5 and Zarr, opened lazily."""

import fsspec
import h5py
import numpy as np
import pandas as pd
import pytest
import zarr

# It is of pandas 2, and zarr warns of what is consolidated.
pytestmark = pytest.mark.filterwarnings("ignore")
anndata = pytest.importorskip("anndata")


@pytest.fixture(autouse=True)
def settings():
    """Write what is to become the default, and the texts of pandas 3."""
    new = {"zarr_write_format": 3, "auto_shard_zarr_v3": False, "allow_write_nullable_strings": True}
    with anndata.settings.override(**new):
        yield


def cells():
    obs = pd.DataFrame({"kind": ["a", "b"] * 50}, index=[f"cell {i}" for i in range(100)])
    return anndata.AnnData(np.arange(100 * 20, dtype="f4").reshape(100, 20), obs=obs)


def test_anndata_is_read_from_an_open_file_or_backed_by_a_local_path(place, tmp_path):
    url = place.url("cells.h5ad")
    cells().write_h5ad(tmp_path / "cells.h5ad")
    place.put("cells.h5ad", (tmp_path / "cells.h5ad").read_bytes())
    for _ in place.twice(fetches=1):
        with fsspec.open(url) as file, h5py.File(file) as opened:
            assert anndata.io.read_elem(opened).X.tolist() == cells().X.tolist()
        fs = place.fs
        with fs.local_path(url) as path:
            backed = anndata.read_h5ad(path, backed="r")
            assert backed[10:12].X.tolist() == cells().X[10:12].tolist()
            backed.file.close()
            lazy = anndata.experimental.read_lazy(path)
            assert lazy[10:12].X.compute().tolist() == cells().X[10:12].tolist()


def test_anndata_is_read_lazily_from_zarr(place):
    url = place.url("cells.zarr")
    cells().write_zarr(url)
    for _ in place.twice():
        lazy = anndata.experimental.read_lazy(zarr.open_group(url, mode="r"))
        assert lazy[10:12].X.compute().tolist() == cells().X[10:12].tolist()
        assert anndata.read_zarr(url).obs["kind"].tolist() == ["a", "b"] * 50
