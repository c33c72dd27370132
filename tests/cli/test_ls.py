"""The command `ls`."""

from tests.cli.helpers import json_of, run
from tests.support import MiB, noise


def test_ls_prints_urls_that_open_the_same_again(cloud):
    cloud.put("a/one", b"1")
    cloud.put("two", b"22")
    assert run("ls", cloud.url(prefix="gs://")).stdout.split() == [
        cloud.url("a", "gs://") + "/",
        cloud.url("two", "gs://"),
    ]
    for prefix in ("gs://", "cgs://", "cachedfs::gs://"):
        assert run("ls", cloud.url("two", prefix)).stdout.strip() == cloud.url("two", prefix)


def test_ls_long_has_size_time_and_cached_bytes(cloud):
    cloud.put("big", noise(3 * MiB))
    cloud.put("a/one", b"1")
    run("cat", "--range", "0:10", cloud.url("big", "gs://"))
    found = json_of("ls", "-l", cloud.url(prefix="gs://"))
    assert [entry["type"] for entry in found] == ["directory", "file"]
    big = found[1]
    assert (big["url"], big["size"], big["cached"]) == (cloud.url("big", "gs://"), 3 * MiB, MiB)
    assert big["modified"].startswith("20")
    cloud.asked()
    lines = run("ls", "-l", cloud.url(prefix="gs://")).stdout.splitlines()
    assert cloud.asked() == []
    assert [len(line.split("\t")) for line in lines] == [4, 4]
    assert lines[0].split("\t")[:3] == ["-", "-", "-"]


def test_ls_recursive_and_patterns(cloud):
    for key in ("a/b/one", "a/two", "x.txt", "y.bin"):
        cloud.put(key, b"1")
    below = run("ls", "-R", cloud.url("a", "gs://")).stdout.split()
    assert below == [
        cloud.url("a/b", "gs://") + "/",
        cloud.url("a/b/one", "gs://"),
        cloud.url("a/two", "gs://"),
    ]
    assert run("ls", cloud.url("*.txt", "gs://")).stdout.split() == [cloud.url("x.txt", "gs://")]


def test_ls_of_local_paths(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one").write_bytes(b"1")
    monkeypatch.chdir(tmp_path)
    assert run("ls", "data").stdout.split() == [str(tmp_path / "data" / "one")]
    assert run("ls", f"file://{tmp_path}/data").stdout.split() == [f"file://{tmp_path}/data/one"]
    assert run("cat", "data/one").stdout == "1"
