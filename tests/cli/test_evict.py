"""The command `evict`."""

import os
import re

import pytest
import typer

from cachedfs.cli.arguments import handling_errors
from tests.cli.helpers import in_terminal, json_of, options, run
from tests.support import MiB, forget, noise


def test_evict_drops_objects_folders_and_patterns_and_asks_nobody(cloud):
    keys = ("key", "a/one", "a/b/two", "ab", "three", "two/a", "other")
    for key in keys:
        cloud.put(key, noise(1000))
    run("cat", *(cloud.url(key, "gs://") for key in keys))
    forget()
    cloud.asked()
    assert re.fullmatch(r"gs://\S+/key: 1\.\d kB freed\n", run("evict", cloud.url("key", "gs://")).stdout)
    assert json_of("evict", cloud.url("key", "gs://"))["freed"] == 0
    for what, left in (("a", 4), ("*x", 4), ("t*", 2), ("", 0)):  # a folder takes all below it, listed or not
        run("evict", f"gs://{cloud.path(what)}")
        assert json_of("stats")["blocks"] == left, what
    assert cloud.asked() == []


def test_evict_of_a_whole_origin_and_of_all(cloud, tmp_path):
    (tmp_path / "local").write_bytes(noise(100))
    cloud.put("key", noise(2 * MiB))
    run("cat", cloud.url("key", "gs://"), str(tmp_path / "local"))
    forget()
    run("evict", "/")
    assert json_of("stats")["blocks"] == 2
    assert json_of("evict", "--all", "--yes")["freed"] > 2 * MiB
    assert (json_of("stats")["blocks"], json_of("stats")["bytes"]) == (0, 0)


def test_evict_all_asks_in_a_terminal_and_drops_nothing_where_nobody_can_be_asked(cloud):
    cloud.put("key", noise(10))
    run("cat", cloud.url("key", "gs://"))
    forget()
    asked = in_terminal("evict", "--all", typed="n\n")
    assert "Evict the whole cache?" in asked
    assert "freed" not in asked
    assert "--yes" in run("evict", "--all", status=2).stderr
    # An empty name is not the default cache.
    assert "cache_dir=''" in run("evict", "--all", "--yes", "--cache-dir", "", status=2).stderr
    assert json_of("stats")["blocks"] == 1
    assert "freed" in in_terminal("evict", "--all", typed="y\n")
    assert "Drop" not in in_terminal("evict", "--all", "--yes")


@pytest.mark.parametrize(("cause", "status"), [(KeyboardInterrupt, 130), (EOFError, None)])
def test_ctrl_c_at_a_question_is_an_interrupt(cause, status):
    def asked():
        try:
            raise cause
        except (KeyboardInterrupt, EOFError):  # as typer does it
            raise typer.Abort from None

    with pytest.raises((typer.Exit, typer.Abort)) as end, handling_errors(options()):
        asked()
    assert getattr(end.value, "exit_code", None) == status


@pytest.mark.parametrize("command", ["evict", "unpin"])
def test_evict_and_unpin_want_urls_or_all(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert "give URLs, or --all" in run(command, status=2).stderr
    assert "--all: give URLs, or --all, and not both" in run(command, "--all", "gs://b/k", status=2).stderr


def test_evict_removes_what_earlier_releases_left(own_cache):
    old = own_cache / f"cachedfs-1-{os.geteuid()}"
    (old / "blocks").mkdir(parents=True)
    (old / "blocks/a").write_bytes(bytes(1500))
    assert json_of("stats")["old_caches"] == [str(old)]
    assert "`cachedfs evict --old` removes" in run("stats").stdout
    assert "alone" in run("evict", "--old", "--all", status=2).stderr
    assert run("evict", "--old").stdout == f"{old}: 1.5 kB freed\n"
    assert not old.exists()
    forget()
    assert "old caches" not in run("stats").stdout
    assert json_of("evict", "--old") == {"freed": 0, "of": {}}


@pytest.mark.parametrize("command", ["stats", "doctor", "unpin --all", "evict --all --yes", "evict --old"])
def test_a_mistyped_cache_directory_is_not_created(command, tmp_path):
    result = run(*command.split(), "--cache-dir", str(tmp_path / "typo"), status=1)
    assert f"{tmp_path}/typo does not exist" in result.output
    assert not (tmp_path / "typo").exists()
