"""URLs and options on the command line."""

import json
import sys

import pytest
from fsspec.registry import _registry

from cachedfs.cli import urls
from tests.cli.helpers import options, run


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("my-bucket/key", "has no protocol, and no local file has this name: write gs://my-bucket/key"),
        ("gs:/my-bucket/key", "is no URL: write gs://my-bucket/key"),
        ("cachedfs::gs:/my-bucket/key", "is no URL: write cachedfs::gs://my-bucket/key"),
        ("cachedfs::", "a path is missing, as in cachedfs::gs://my-bucket"),
        ("cachedfs::gs", "a path is missing, as in cachedfs::gs://..."),
        ("MyDrive/data", "'drive://My Drive/data' for Google Drive"),
        ("My Drive/data", "write 'drive://My Drive/data' for Google Drive"),
        ("xyz://a/b", "no protocol that is installed is called 'xyz'"),
        ("Drive://My Drive/a", "did you mean drive://?"),
        ("gss://my-bucket/key", "did you mean gs://?"),
        (" gs://my-bucket/key", "did you mean gs://?"),
        ("/no/such/file", "/no/such/file"),
    ],
)
def test_urls_that_cannot_be(url, said):
    assert said in run("ls", url, status=1).stderr


@pytest.mark.parametrize(
    ("words", "whole"),
    [
        (["ls", "drive://My", "Drive/x"], "drive://My Drive/x"),
        (["get", "cachedfs::drive://My", "Drive"], "cachedfs::drive://My Drive"),
        (["mount", "drive://Shared", "with", "me/x", "mnt"], "drive://Shared with me/x"),
        (["ls", "My", "Drive/x"], "drive://My Drive/x"),
        (["pack", "/content/drive/Shared", "drives/x", "out"], "/content/drive/Shared drives/x"),
        (["evict", "drive://My Drive/a", "b"], "drive://My Drive/a b"),
        (["get", "gs://my-bucket/a", "b", "."], "gs://my-bucket/a b"),
    ],
)
def test_a_url_that_is_not_quoted_is_wrong_usage(words, whole):
    said = " ".join(run(*words, status=2).stderr.translate({ord("│"): " "}).split())
    assert f"quote it: '{whole}'" in said


def test_words_after_a_url_may_be_local_files_links_and_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b").touch()
    given = ["gs://my-bucket/a", "b", "./c", "1sTWaJ_j7PkjzaBWtNc3IzovK5hQf21FbOw9yLeeLPNQ"]
    assert urls.check_quoted(given) == given


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)  # any import of it fails
    monkeypatch.delitem(_registry, "s3", raising=False)  # imported by another test
    assert 'pip install "cachedfs[s3]"' in run("ls", "s3://my-bucket", status=1).stderr


def test_what_is_read_through_the_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").touch()
    assert urls.cached_url("gs://b/k") == "cachedfs::gs://b/k"
    assert urls.cached_url("drive://My Drive/a") == "cachedfs::drive://My Drive/a"
    for url in ("cachedfs::gs://b/k", "cgs://b/k", "cdrive://My Drive/a"):
        assert urls.cached_url(url) == url
    listed = run("ls", "-o", "auto_mkdir=false", f"cachedfs::{tmp_path}").stdout.split()
    assert f"cachedfs::file://{tmp_path}/key" in listed
    assert urls.cached_url("key") == f"cachedfs::file://{tmp_path}/key"


def test_options_go_where_they_belong(cloud, tmp_path):
    given = ("max_age=0", "token=anon", "requester_pays=true", "cache_size=1GB")
    common = options(options=given, cache_dir="/x")
    assert common.split() == (
        {"max_age": 0, "cache_size": "1GB", "cache_dir": "/x"},
        {"token": "anon", "requester_pays": True},
    )
    cloud.put("key", b"1")
    for prefix in ("gs://", "cgs://", "cachedfs::gs://"):
        url = cloud.url("key", prefix)
        run("cat", "-o", "max_age=0", "-o", f"endpoint_url={cloud.server.endpoint_url}", url)
        assert len(cloud.asked()) == 1, "max_age=0 reached cachedfs"
    result = run("ls", "-o", "endpoint_url=http://127.0.0.1:1", cloud.url("key", "gs://"), status=1)
    assert "127.0.0.1:1" in result.stderr, "endpoint_url reached the origin"


def test_options_before_and_after_the_command(cloud, tmp_path):
    (tmp_path / "x").mkdir()
    before = run("--json", "--cache-dir", str(tmp_path / "x"), "stats").stdout
    after = run("stats", "--json", "--cache-dir", str(tmp_path / "x")).stdout
    assert json.loads(before)["directory"] == json.loads(after)["directory"]
    assert str(tmp_path / "x") in before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ls -o cache_sise=1 gs://b", "did you mean"),
        ("ls -o max_age gs://b", "NAME=VALUE"),
        ("cat --range 10 gs://b/k", "START:STOP"),
        ("ls -o max_age=lots gs://b", "max_age='lots'"),
        ("ls -o max_agee=0 gs://b", "max_age"),
    ],
)
def test_mistaken_options_are_wrong_usage(words, said):
    assert said in run(*words.split(), status=2).stderr
