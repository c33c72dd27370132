"""dask: arrays, tables and bags, in threads and in the processes of a cluster."""

import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import distributed
import fsspec
import numpy as np
import pandas as pd
import pytest

from tests.libraries.data import ROWS

# A warning of dask itself with pandas 3.1.
dask_and_pandas = pytest.mark.filterwarnings("ignore:The inplace keyword in DataFrame")


@pytest.fixture(scope="module")
def client():
    """Two processes without any configuration but the arguments of the tests."""
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=2, processes=True, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def test_an_array(place):
    url, data = place.url("a.zarr"), np.arange(60 * 40).reshape(60, 40)
    array = da.from_array(data, chunks=(20, 40))
    array.to_zarr(url)
    for _ in place.twice():
        array = da.from_zarr(url)
        assert int(array.sum().compute(scheduler="threads")) == data.sum()


@dask_and_pandas
def test_a_table(place):
    folder = place.url("set")
    frame = dd.from_pandas(ROWS, npartitions=3)
    frame.to_parquet(folder)
    for _ in place.twice(fetches=3):
        frame = dd.read_parquet(folder)
        back = frame.compute(scheduler="threads")  # with strings of Arrow
        pd.testing.assert_frame_equal(back, ROWS, check_dtype=False)


def test_lines_in_blocks(place):
    url = place.url("a.csv")
    ROWS.to_csv(url, index=False)
    for _ in place.twice(fetches=1):
        frame = dd.read_csv(url, blocksize=10_000)
        assert frame.npartitions > 2
        assert int(frame["n"].sum().compute(scheduler="threads")) == ROWS["n"].sum()
        assert db.read_text(url).count().compute(scheduler="threads") == 1001


@dask_and_pandas
@pytest.mark.works
def test_processes_of_a_cluster(place, client):
    url, folder, options = place.url("a.zarr"), place.url("set"), place.options
    data = np.arange(60 * 40).reshape(60, 40)
    client.compute(
        da.from_array(data, chunks=(20, 40)).to_zarr(url, storage_options=options, compute=False)
    ).result()
    client.compute(
        dd.from_pandas(ROWS, npartitions=3).to_parquet(folder, storage_options=options, compute=False)
    ).result()
    for _ in place.twice():
        array = da.from_zarr(url, storage_options=options)
        assert int(client.compute(array.sum()).result()) == data.sum()
        frame = dd.read_parquet(folder, storage_options=options)
        pd.testing.assert_frame_equal(client.compute(frame).result(), ROWS, check_dtype=False)


@pytest.mark.works
def test_the_filesystem_is_pickled_to_a_process(place, client):
    place.put("a.bin", b"bytes")
    for _ in place.twice(fetches=1):
        fs, path = fsspec.url_to_fs(place.url("a.bin"), **place.options)
        assert client.submit(fs.cat_file, path, pure=False).result() == b"bytes"
