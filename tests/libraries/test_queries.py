"""polars and DuckDB: files and filesystems handed to their readers."""

import io

import duckdb
import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from tests.libraries.data import ROWS


def test_polars_accepts_open_files_and_not_our_urls(place):
    pl = pytest.importorskip("polars")
    url, frame = place.url("a.parquet"), pl.from_pandas(ROWS)
    with fsspec.open(url, "wb") as file:
        frame.write_parquet(file)
    for _ in place.twice(fetches=1):
        with fsspec.open(url) as file:
            frame = pl.read_parquet(file)
        pd.testing.assert_frame_equal(frame.to_pandas(), ROWS)
        with fsspec.open(url) as file:
            assert pl.scan_parquet(file).filter(pl.col("n") >= 990).collect()["n"].sum() == sum(
                range(990, 1000)
            )
    with pytest.raises(FileNotFoundError):
        pl.read_parquet(url)


def test_polars_scans_a_dataset_of_arrow(place):
    pl = pytest.importorskip("polars")
    ROWS.to_parquet(place.url("set/0.parquet"))
    ROWS.to_parquet(place.url("set/1.parquet"))
    for _ in place.twice(fetches=2):
        path, fs = place.path("set"), place.fs
        rows = pl.scan_pyarrow_dataset(ds.dataset(path, filesystem=fs))
        assert rows.filter(pl.col("n") >= 990).collect().height == 20


@pytest.mark.parametrize("place", ["cgs://", "cdrive://"], indirect=True)
def test_duckdb_reads_writes_and_finds_files(place):
    url, folder = place.url("set/0.parquet"), place.url("set")
    ROWS.to_parquet(url)
    ROWS.to_csv(place.url("a.csv"), index=False)
    for _ in place.twice(fetches=2):
        fs = place.fs
        with duckdb.connect() as con:
            con.register_filesystem(fs)
            assert con.sql(f"FROM '{url}' WHERE n >= 990").fetchall()[0] == (990, ROWS["x"][990], "row 990")
            assert con.sql(f"SELECT count(*) FROM '{folder}/*.parquet'").fetchall() == [(1000,)]
            assert con.sql(f"SELECT sum(n) FROM '{place.url('a.csv')}'").fetchall() == [(499500,)]
    with duckdb.connect() as con:
        con.register_filesystem(place.fs)
        con.sql(f"COPY (SELECT 42 AS a) TO '{folder}/1.parquet'")
    assert pd.read_parquet(f"{folder}/1.parquet")["a"].tolist() == [42]


@pytest.mark.parametrize("options", ["OVERWRITE_OR_IGNORE, ", "APPEND, "])
@pytest.mark.parametrize("place", ["cgs://", "cdrive://"], indirect=True)
def test_duckdb_partitions_into_a_new_folder(place, options):
    fs = place.fs
    with duckdb.connect() as con:
        con.register_filesystem(fs)
        rows = "(SELECT range AS n, range % 3 AS x FROM range(9))"
        con.sql(f"COPY {rows} TO '{place.url('out')}' (FORMAT parquet, {options}PARTITION_BY (x))")
        assert con.sql(
            f"SELECT sum(n), count(DISTINCT x) FROM '{place.url('out')}/*/*.parquet'"
        ).fetchall() == [(36, 3)]
    assert fs.ls(place.path("out"), detail=False) == [place.path(f"out/x={x}") for x in range(3)]


@pytest.mark.parametrize("place", ["cgs://", "cdrive://"], indirect=True)
def test_duckdb_sums_what_its_threads_read_from_one_file(place):
    """The threads share an open file, and each seeks and reads in two calls."""
    url, fs, data = place.url("big.parquet"), place.fs, io.BytesIO()
    pq.write_table(pa.table({"a": range(200_000)}), data, row_group_size=5_000)
    place.machine.put("big.parquet", data.getvalue())
    expected = sum(range(0, 200_000, 3))
    for _ in range(10):
        with duckdb.connect(config={"threads": 8}) as con:
            con.register_filesystem(fs)
            assert con.sql(f"SELECT sum(a) FROM '{url}' WHERE a % 3 = 0").fetchall() == [(expected,)]


@pytest.mark.parametrize("place", ["cachedfs::gs://", "cachedfs::drive://"], indirect=True)
def test_duckdb_does_not_accept_a_chained_url(place):
    url = place.url("a.parquet")
    ROWS.to_parquet(url)
    with duckdb.connect() as con:
        con.register_filesystem(place.fs)
        with pytest.raises(duckdb.IOException, match="No files found"):
            con.sql(f"FROM '{url}'")
