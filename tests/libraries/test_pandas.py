"""pandas: tables in every format, by URL."""

import gzip
import json

import fsspec
import pandas as pd
import pytest

from cachedfs.filesystem import write_file
from tests.libraries.data import ROWS


def test_csv(base):
    url = f"{base}/a.csv"
    ROWS.to_csv(url, index=False)
    pd.testing.assert_frame_equal(pd.read_csv(url), ROWS, check_exact=False)
    ROWS.iloc[:10].to_csv(url, index=False)
    assert len(pd.read_csv(url)) == 10


def packed(place):
    """Return the decompressed content of a gzip object."""
    return gzip.decompress(place.fs.cat_file(place.path("a.csv.gz"))).decode()


@pytest.mark.parametrize("place", ["cgs://", "cdrive://"], indirect=True)
def test_csv_is_compressed_by_its_suffix(place):
    url = place.url("a.csv.gz")
    ROWS.to_csv(url, index=False)
    for _ in place.twice(fetches=1):
        pd.testing.assert_frame_equal(pd.read_csv(url), ROWS, check_exact=False)
        assert packed(place) == ROWS.to_csv(index=False)


def test_csv_is_compressed_on_request(place):
    url = place.url("a.csv.gz")
    ROWS.to_csv(url, index=False, compression="gzip")
    for _ in place.twice(fetches=1):
        pd.testing.assert_frame_equal(pd.read_csv(url, compression="gzip"), ROWS, check_exact=False)
        assert packed(place) == ROWS.to_csv(index=False)


@pytest.mark.parametrize("place", ["cachedfs::gs://", "cachedfs::drive://"], indirect=True)
def test_the_suffix_of_a_chained_url_is_not_recognized(place, caplog, monkeypatch):
    monkeypatch.setattr(write_file, "_warned", set())
    url = place.url("a.csv.gz")
    ROWS.to_csv(url, index=False, compression="gzip")
    with pytest.raises(UnicodeDecodeError):
        pd.read_csv(url)
    assert not caplog.messages
    for name in ("a.csv", "a.csv.gz", "b.csv.bz2"):
        ROWS.to_csv(place.url(name), index=False)
    (message,) = caplog.messages
    single = url.replace("cachedfs::gs", "cgs").replace("cachedfs::drive", "cdrive")
    assert f"{url}: " in message
    assert f"{single}, or compression='gzip'" in message


def test_parquet(place):
    url = place.url("a.parquet")
    ROWS.to_parquet(url)
    for _ in place.twice(fetches=1):
        pd.testing.assert_frame_equal(pd.read_parquet(url), ROWS)
        pd.testing.assert_frame_equal(pd.read_parquet(url, columns=["n"]), ROWS[["n"]])


def test_partitioned_parquet_is_written_and_read_as_a_folder(place):
    url = place.url("parts")
    rows = ROWS.assign(half=ROWS["n"] // 500)
    rows.to_parquet(url, partition_cols=["half"])
    for _ in place.twice(fetches=2):
        back = pd.read_parquet(url).sort_values("n").reset_index(drop=True)
        pd.testing.assert_frame_equal(back[["n", "x", "name"]], ROWS)
        assert set(back["half"].astype(int)) == {0, 1}


def test_json_lines(place):
    url = place.url("a.jsonl")
    with fsspec.open(url, "wt", encoding="utf-8") as file:
        for i in range(100):
            file.write(json.dumps({"i": i, "text": "naïve ✓"}) + "\n")
    for _ in place.twice(fetches=1):
        frame = pd.read_json(url, lines=True)
        assert (len(frame), frame["text"][99]) == (100, "naïve ✓")


def test_options_in_storage_options(place, monkeypatch):
    for protocol in ("cachedfs", "gs", "drive"):
        monkeypatch.delitem(fsspec.config.conf, protocol, raising=False)
    url, options = place.url("a.csv"), place.options
    ROWS.to_csv(url, index=False, storage_options=options)
    for _ in place.twice(fetches=1):
        frame = pd.read_csv(url, storage_options=options)
        pd.testing.assert_frame_equal(frame, ROWS, check_exact=False)
