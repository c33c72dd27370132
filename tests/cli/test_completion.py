"""What a shell completes."""

import contextlib
import io
import os
import shlex
from unittest import mock

import pytest

from cachedfs.cli import main, urls
from tests.cli.helpers import run
from tests.support import forget


def known(cloud):
    for key in ("data/a/one", "data/a/two", "data/b", "My Files/x"):
        cloud.put(key, b"1")
    run("ls", cloud.url(prefix="gs://"), cloud.url("data", "gs://"))
    run("ls", cloud.url("data/a", "gs://"))
    run("cat", cloud.url("My Files/x", "gs://"))
    forget()
    cloud.asked()


def offered(environ):
    """Return what a shell that asks with these variables is offered for the last word of a line."""
    with (
        mock.patch.dict(os.environ, environ),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.suppress(SystemExit),
    ):
        main([])
    return [line for line in out.getvalue().split("\n") if line]


def completed(line):
    """Return what fish is offered for the last word of a line."""
    asked = {"_CACHEDFS_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    return offered({**asked, "_TYPER_COMPLETE_ARGS": line})


def test_shells_complete_commands_and_urls_that_are_known(cloud):
    known(cloud)
    bucket = cloud.url(prefix="gs://")
    assert [line.partition("\t")[0] for line in completed("cachedfs pre")] == ["prefetch"]
    assert completed(f"cachedfs ls {bucket}/da") == [f"{bucket}/data/a/", f"{bucket}/data/b"]
    assert completed(f"cachedfs get -r {bucket}/data/a/t") == [f"{bucket}/data/a/two"]
    assert completed(f"cachedfs cat '{bucket}/My") == [f"{bucket}/My Files/x"], "cached, and never listed"
    assert completed(f"cachedfs ls {bucket}/nothing") == []
    assert completed("cachedfs ls dri") == ["drive://My Drive/"]
    assert completed("cachedfs ls nowhere://x/") == []
    assert cloud.asked() == []


def test_completion_looks_into_the_cache_that_the_line_names(cloud, tmp_path):
    known(cloud)
    bucket = cloud.url(prefix="gs://")
    assert completed(f"cachedfs --cache-dir {tmp_path}/other ls {bucket}/da") == []
    assert completed(f"cachedfs ls --cache-dir {cloud.cache_dir} {bucket}/data/b") == [f"{bucket}/data/b"]


@pytest.mark.parametrize(
    ("line", "at", "words", "begun"),
    [
        ("cachedfs ls gs : //b/k", 4, ["cachedfs", "ls", "//b/k"], "gs:"),
        ("cachedfs pack gs : //b/a gs : //b/z", 7, ["cachedfs", "pack", "gs://b/a", "//b/z"], "gs:"),
        ("cachedfs ls cachedfs :: gs : //b", 6, ["cachedfs", "ls", "//b"], "cachedfs::gs:"),
        (
            "cachedfs ls -o a = b gs : //b/year = 20",
            10,
            ["cachedfs", "ls", "-o", "a=b", "20"],
            "gs://b/year=",
        ),
        ("cachedfs cat drive : //My\\ Dri", 4, ["cachedfs", "cat", "//My Dri"], "drive:"),
        ("cachedfs cat 'drive://My Dri", 2, ["cachedfs", "cat", "drive://My Dri"], ""),
        ("cachedfs ls gs :", 3, ["cachedfs", "ls", ":"], "gs"),
        ("cachedfs ", 1, ["cachedfs", ""], ""),
    ],
)
def test_what_bash_splits_is_joined_again(line, at, words, begun):
    environ = {"_CACHEDFS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(at)}
    urls.rejoin(environ)
    assert (shlex.split(environ["COMP_WORDS"]), environ["COMP_CWORD"]) == (words, str(len(words) - 1))
    assert environ["_CACHEDFS_BEGUN"] == begun


def test_bash_is_offered_what_follows_the_colon_quoted(cloud):
    known(cloud)
    bucket = cloud.path("")
    asked = {"_CACHEDFS_COMPLETE": "complete_bash", "COMP_CWORD": "4"}
    assert offered({**asked, "COMP_WORDS": f"cachedfs cat gs : //{bucket}data/a/t"}) == [
        f"//{bucket}data/a/two"
    ]
    assert offered({**asked, "COMP_WORDS": f"cachedfs cat gs : //{bucket}My"}) == [f"//{bucket}My\\ Files/x"]
