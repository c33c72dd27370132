"""The command `pack`."""

import errno
import io
import os
import re

import pytest

from cachedfs.cli.output import message_of
from tests.cli.helpers import json_of, run


def test_pack_says_what_it_chose_and_makes_a_store(cloud, tmp_path):
    zarr = pytest.importorskip("zarr")
    for i in range(20):
        cloud.put(f"texts/{i}.txt", b"text %d" % i)
    target = cloud.url("texts.zarr", "gs://")
    result = run("pack", cloud.url("texts", "gs://"), target)
    assert result.stdout == ""
    chosen, _, done = result.stderr.splitlines()
    assert chosen.startswith("data: uint8, chunks 262,144, shards 67,108,864 (")
    assert done.startswith("20 samples, 130 B of files, in 4 objects of ")
    assert done.endswith("verified: 4 objects by the origin's checksum, 0 read back")
    group = zarr.open_group(cloud.url("texts.zarr"), mode="r")
    assert group["data"][:].tobytes().startswith(b"text 0text 1text 2")
    again = run("pack", cloud.url("texts", "gs://"), target, status=1).stderr
    assert "there is a Zarr store here already; overwrite=True" in again
    found = json_of("pack", cloud.url("texts", "gs://"), target, "--overwrite", "--codec", "zstd")
    assert (found["samples"], found["kind"], found["shapes"]["data_offsets"]) == (20, "files", [21])


def test_pack_prints_the_files_that_are_left_out(cloud, tmp_path):
    sink = io.BytesIO()
    pytest.importorskip("PIL.Image").new("L", (2, 2)).save(sink, "png")
    cloud.put("src/0.png", sink.getvalue())
    cloud.put("src/1.png", b"no image")
    arguments = ("pack", "--decode", "image", cloud.url("src", "gs://"), str(tmp_path / "out.zarr"))
    assert "--on-error skip" in run(*arguments, status=1).stderr
    lines = run(*arguments, "--on-error", "skip").stderr.splitlines()
    assert re.match(r"left out: .*1\.png: Pillow cannot decode the image", lines[-2])
    assert "; 1 file left out;" in lines[-1]


def test_pack_of_columns_into_a_local_store_with_options_of_the_csv_reader(cloud, tmp_path):
    zarr = pytest.importorskip("zarr")
    cloud.put("x.csv", b"# made by hand\na\t b\tc\n1\t x\t2\n")
    url, target = cloud.url("x.csv", "gs://"), str(tmp_path / "out.zarr")
    options = r"--csv comment=# --csv skipinitialspace=true --csv delimiter=\t --rename a=n"
    run("pack", *options.split(), "--column", "a=float32", "--column", "b", url, target)
    group = zarr.open_group(target, mode="r")
    assert sorted(group) == ["b", "b_offsets", "n"]
    assert (group["n"].dtype, group["b"][:].tobytes()) == ("float32", b"x")
    wrong = run("pack", *options.split(), "--column", "d", url, target, status=1).stderr
    assert "columns ['d'] do not exist; there are ['a', 'b', 'c']" in wrong


@pytest.mark.parametrize(
    "name", ["codec", "kind", "decode", "chunk-bytes", "shard-bytes", "workers", "on-error", "rename", "csv"]
)
def test_an_option_of_pack_that_cannot_be_is_wrong_usage(name, cloud, tmp_path):
    name, value = f"--{name}", "0" if name in ("shard-bytes", "workers") else "foo"
    err = run("pack", name, value, cloud.url("d", "gs://"), str(tmp_path / "x.zarr"), status=2).stderr
    assert name in err
    assert cloud.asked() == []


def test_a_full_disk_is_named_by_what_is_written():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write says it: of no file
    assert message_of(full, "x.zarr") == "x.zarr: No space left on device"
