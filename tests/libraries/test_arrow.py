"""pyarrow: the filesystem itself, bare or wrapped."""

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyarrow.fs import FSSpecHandler, PyFileSystem

from tests.libraries.data import ROWS


def test_a_table(place):
    path, fs = place.path("a.parquet"), place.fs
    table = pa.Table.from_pandas(ROWS)
    pq.write_table(table, path, filesystem=fs)
    for _ in place.twice(fetches=1):
        fs = place.fs
        table = pq.read_table(path, filesystem=fs)
        pd.testing.assert_frame_equal(table.to_pandas(), ROWS)
    assert pq.read_table(path, filesystem=fs, filters=[("n", "<", 10)]).num_rows == 10


def test_a_dataset(place):
    path, fs = place.path("set"), place.fs
    table = pa.Table.from_pandas(ROWS.assign(half=ROWS["n"] // 500))
    ds.write_dataset(table, path, filesystem=fs, format="parquet", partitioning=["half"])
    for _ in place.twice(fetches=2):
        fs = place.fs
        found = ds.dataset(path, filesystem=fs, partitioning=["half"])
        assert found.count_rows() == len(ROWS)
        assert found.to_table(filter=ds.field("half") == 1)["n"].to_pylist() == list(range(500, 1000))


def test_an_arrow_filesystem(place):
    path, fs = place.path("a.feather"), place.fs
    arrow = PyFileSystem(FSSpecHandler(fs))
    with arrow.open_output_stream(path) as sink, pa.ipc.new_file(sink, pa.schema({"n": pa.int64()})) as file:
        file.write(pa.record_batch({"n": list(range(1000))}))
    for _ in place.twice(fetches=1):
        arrow = PyFileSystem(FSSpecHandler(place.fs))
        assert arrow.get_file_info(path).size == place.fs.size(path)
        with arrow.open_input_file(path) as source:
            assert pa.ipc.open_file(source).read_all()["n"].to_pylist() == list(range(1000))


def test_a_table_by_url_needs_a_prefix(place):
    url = place.url("a.parquet")
    ROWS.to_parquet(url)
    for _ in place.twice(fetches=1):
        assert pq.read_table(f"fsspec+{url}").num_rows == len(ROWS)
        assert ds.dataset(f"fsspec+{url}").count_rows() == len(ROWS)
    with pytest.raises(pa.ArrowInvalid):
        pq.read_table(url)
