"""Exact counts of the requests of each operation: cold, warm, and after a restart."""

import json

import fsspec
import numpy as np
import pytest
import xarray as xr

from cachedfs.core import objects
from cachedfs.sim import Fault, GCSServer
from tests.support import AGE_S, MiB, files_below, forget, noise


def test_an_unknown_small_object_costs_one_request_then_none(cloud):
    data = cloud.put("a.bin", noise(40_000))
    for expected in (["media"], [], []):
        with fsspec.open(cloud.url("a.bin")) as file:
            assert file.read() == data
        assert cloud.asked() == expected
        if not expected:
            forget()  # the last time as in a new process


def test_a_new_process_costs_no_request(cloud):
    cloud.put("a.json", json.dumps({"x": 1}).encode())
    code = """
        import fsspec, json, os
        with fsspec.open(f"cachedfs::gs://{os.environ['BUCKET']}/a.json") as f:
            print(json.load(f)["x"])
    """
    with fsspec.open(cloud.url("a.json")) as file:
        assert json.load(file) == {"x": 1}
    assert cloud.asked() == ["media"]
    forget()
    assert cloud.python(code) == "1\n"
    assert cloud.asked() == []


def test_exists_then_open_costs_two_requests_then_none(cloud, fs):
    data = cloud.put("a.bin", noise(1000))
    for expected in (["media", "metadata"], []):
        assert fs.exists(cloud.path("a.bin"))
        assert fs.open(cloud.path("a.bin")).read() == data
        assert cloud.asked() == expected


def test_a_suffix_of_an_unknown_object_costs_one_request_and_whole_blocks(cloud, fs):
    data = cloud.put("a.bin", noise(5 * MiB + 17))
    assert fs.cat_file(cloud.path("a.bin"), -1000) == data[-1000:]
    assert cloud.asked() == ["media"]
    assert fs.cat_file(cloud.path("a.bin"), 5 * MiB) == data[5 * MiB :]
    assert cloud.asked() == []


def test_a_listing_answers_for_its_children_and_for_missing_names(cloud, fs):
    for i in range(20):
        cloud.put(f"d/{i}", noise(100, i))
    assert len(fs.ls(cloud.path("d"))) == 20
    assert cloud.asked() == ["list"]
    assert fs.info(cloud.path("d/7"))["size"] == 100
    assert not fs.exists(cloud.path("d/nothing"))
    assert cloud.asked() == []
    forget()
    assert len(fs.ls(cloud.path("d"))) == 20
    assert not fs.exists(cloud.path("d/nothing"))
    assert cloud.asked() == []


def test_a_long_listing_is_asked_for_again_in_parts(cloud, fs, monkeypatch):
    monkeypatch.setattr("cachedfs.cache.metadata_store.PART", 2)
    before = "bcdefghijklmnopqrstu"
    for name in before:
        cloud.put(f"d/{name}", noise(100))
    assert fs.ls(cloud.path("d"), detail=False) == [cloud.path(f"d/{name}") for name in before]
    assert cloud.asked() == ["list"]
    cloud.delete("d/d")
    for name in "avz":
        cloud.put(f"d/{name}", noise(100))
    after = "abcefghijklmnopqrstuvz"
    assert fs.ls(cloud.path("d"), detail=False, refresh=True) == [cloud.path(f"d/{name}") for name in after]
    assert cloud.asked() == ["list"] * 7  # of three names or more; there would be ten of two


def test_opening_a_listed_object_costs_only_its_data(cloud, fs):
    cloud.put("d/a", noise(100))
    fs.ls(cloud.path("d"))
    cloud.asked()
    with fs.open(cloud.path("d/a")) as file:
        assert cloud.asked() == []
        file.read()
    assert cloud.asked() == ["media"]


def test_find_costs_one_request_per_thousand_objects_then_none(cloud, fs):
    for i in range(60):
        cloud.put(f"t/{i % 5}/{i % 3}/{i}", b"x")
    found = fs.find(cloud.path("t"))
    assert len(found) == 60
    assert cloud.asked() == ["list"]
    forget()
    fs = fsspec.filesystem("cachedfs", target_protocol="gs")
    assert fs.find(cloud.path("t")) == found
    assert len(fs.glob(cloud.path("t/*/1/*"))) == 20
    assert len(list(fs.walk(cloud.path("t")))) == 1 + 5 + 15
    assert cloud.asked() == []


def test_reading_the_end_of_a_big_object_costs_two_requests_and_three_mib(tmp_path):
    (tmp_path / "origin" / "far").mkdir(parents=True)
    with (tmp_path / "origin" / "far" / "k").open("wb") as file:
        file.truncate(1 << 30)
    with GCSServer(profile="off", folder=tmp_path / "origin") as server:
        # The request of the opening goes on until the first read asks for another part.
        server.fail(Fault(kind="media", stall_after=MiB, stall_s=3600))
        origin = {"token": "anon", "endpoint_url": server.endpoint_url}
        with fsspec.open("cachedfs::gs://far/k", gs=origin) as file:
            file.seek(-65536, 2)
            assert len(file.read()) == 65536
        assert server.bytes_sent() <= 3 * MiB
        assert len(server.requests) <= 2


# Libraries.
def data_set():
    t = np.arange(4 * 6 * 8, dtype="f4").reshape(4, 6, 8)
    return xr.Dataset(
        {"t": (("time", "y", "x"), t), "p": (("time", "y", "x"), t)},
        coords={"time": np.arange(4), "y": np.arange(6)},
    )


# Three or four requests of the opening are for missing files: .zgroup, .zattrs or zarr.json, .zmetadata.
@pytest.mark.parametrize(
    ("zarr_format", "consolidated", "opening"), [(2, True, 6), (2, False, 19), (3, True, 6), (3, False, 11)]
)
@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
def test_open_zarr_sends_each_request_once_and_none_after_a_restart(
    cloud, tmp_path, monkeypatch, zarr_format, consolidated, opening
):
    monkeypatch.setattr(objects, "ABSENCE_S", AGE_S)  # a busy machine may take longer than ten seconds
    data_set().to_zarr(tmp_path / "c.zarr", zarr_format=zarr_format, consolidated=consolidated)
    for name, data in files_below(tmp_path / "c.zarr").items():
        cloud.put(f"c.zarr/{name}", data)
    with xr.open_zarr(cloud.url("c.zarr"), consolidated=consolidated) as ds:
        keys = [request.key for request in cloud.server.requests]
        assert len(keys) == len(set(keys))
        assert len(cloud.asked()) <= opening
        ds.load()
    assert cloud.asked() == ["media", "media"]  # one chunk of each variable
    for _ in range(2):
        with xr.open_zarr(cloud.url("c.zarr"), consolidated=consolidated) as ds:
            assert ds.load().identical(data_set())
        assert cloud.asked() == []
        forget()
