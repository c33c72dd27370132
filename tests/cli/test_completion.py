"""What a shell completes."""

import contextlib
import io
import os
import pty
import select
import shlex
import subprocess
import sys
import time
from unittest import mock

import pytest

from cachedfs.cli import main, urls
from tests.cli.helpers import options, run
from tests.support import forget


def known(cloud):
    for key in ("data/a/one", "data/a/two", "data/b", "My Files/x"):
        cloud.put(key, b"1")
    run("ls", cloud.url(prefix="gs://"), cloud.url("data", "gs://"))
    run("ls", cloud.url("data/a", "gs://"))
    run("cat", cloud.url("My Files/x", "gs://"))
    forget()
    cloud.asked()


def completed(cloud, line):
    """Return what fish is offered for the last word of a line."""
    asked = {"_CACHEDFS_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    with (
        mock.patch.dict(os.environ, {**asked, "_TYPER_COMPLETE_ARGS": line}),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.suppress(SystemExit),
    ):
        main([])
    return [line for line in out.getvalue().split("\n") if line]


def test_shells_complete_commands_and_urls_that_are_known(cloud):
    known(cloud)
    bucket = cloud.url(prefix="gs://")
    assert [line.partition("\t")[0] for line in completed(cloud, "cachedfs pre")] == ["prefetch"]
    assert completed(cloud, f"cachedfs ls {bucket}/da") == [f"{bucket}/data/a/", f"{bucket}/data/b"]
    assert completed(cloud, f"cachedfs get -r {bucket}/data/a/t") == [f"{bucket}/data/a/two"]
    assert completed(cloud, f"cachedfs cat '{bucket}/My") == [f"{bucket}/My Files/x"], (
        "cached, and never listed"
    )
    assert completed(cloud, f"cachedfs ls {bucket}/nothing") == []
    assert completed(cloud, "cachedfs ls dri") == ["drive://My Drive/"]
    assert completed(cloud, "cachedfs ls nowhere://x/") == []
    assert cloud.asked() == []


def test_completion_looks_into_the_cache_that_the_line_names(cloud, tmp_path):
    known(cloud)
    bucket = cloud.url(prefix="gs://")
    assert completed(cloud, f"cachedfs --cache-dir {tmp_path}/other ls {bucket}/da") == []
    assert completed(cloud, f"cachedfs ls --cache-dir {cloud.cache_dir} {bucket}/data/b") == [
        f"{bucket}/data/b"
    ]


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


def test_only_lines_of_bash_are_joined():
    environ = {"_CACHEDFS_COMPLETE": "complete_zsh", "COMP_WORDS": "a b : c", "COMP_CWORD": "3"}
    kept = dict(environ)
    urls.rejoin(environ)
    assert environ == kept


def test_bash_completes_urls_in_a_terminal(cloud, tmp_path):
    known(cloud)
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "cachedfs"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m cachedfs "$@"\n')
    script.chmod(0o700)
    environ = cloud._environment() | {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "TERM": "dumb",
        "PS1": "$ ",
    }
    environ |= {"INPUTRC": "/dev/null", "HOME": str(tmp_path)}
    said = subprocess.run(
        ["bash", "-c", "cachedfs --install-completion; true"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "bash completion installed" in said.stdout
    assert (tmp_path / ".bashrc").read_text().strip() == f"source '{tmp_path}/.bash_completions/cachedfs.sh'"
    bucket = cloud.url(prefix="gs://")
    typed = ". .bashrc && echo load''ed\n", f"cachedfs cat {bucket}/data/a/t\t", "\n"
    seen = typed_in_bash(typed, ("loaded", f"{bucket}/data/a/two ", "\n1"), environ)
    assert f"cachedfs cat {bucket}/data/a/two \r\n1" in seen


def typed_in_bash(typed, awaited, environ):
    """Type into an interactive bash, each text once the one before had its answer; return what was seen."""
    master, slave = pty.openpty()
    seen = ""
    with subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"], stdin=slave, stdout=slave, stderr=slave, env=environ, cwd=environ["HOME"], start_new_session=True
    ) as process:  # fmt: skip
        os.close(slave)
        for text, answer in zip(typed, awaited, strict=True):
            os.write(master, text.encode())
            before, deadline = len(seen), time.monotonic() + 120
            while answer not in seen[before:] and time.monotonic() < deadline:
                if select.select([master], [], [], 0.1)[0]:
                    seen += os.read(master, 65536).decode()
        process.kill()
    os.close(master)
    return seen


def test_completion_never_fails(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("boom")

    monkeypatch.setattr(urls, "names_below", broken)
    assert urls.urls_known(options(), "gs://b/") == []
