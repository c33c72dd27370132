"""The command `evict`."""

import os
import re

import pytest
import typer

from cachedfs.cli.arguments import handling_errors
from tests.cli.helpers import in_terminal, json_of, options, run
from tests.support import MiB, forget, noise


def test_evict_drops_objects_and_asks_nobody(cloud):
    cloud.put("key", noise(2 * MiB))
    cloud.put("other", noise(MiB))
    run("cat", cloud.url("key", "gs://"), cloud.url("other", "gs://"))
    forget()
    cloud.asked()
    result = run("evict", cloud.url("key", "gs://"))
    assert re.fullmatch(r"gs://\S+/key: 2\.1 MB freed\n", result.stdout)
    assert cloud.asked() == []
    assert json_of("stats")["blocks"] == 1
    assert json_of("evict", cloud.url("key", "gs://"))["freed"] == 0


def test_evict_of_a_folder_drops_all_below_it_listed_or_not(cloud):
    keys = ("a/one", "a/b/two", "ab", "three")
    for key in keys:
        cloud.put(key, noise(1000))
    run("cat", *(cloud.url(key, "gs://") for key in keys))
    forget()
    cloud.asked()
    assert json_of("evict", cloud.url("a", "gs://"))["freed"] > 2000
    assert json_of("stats")["blocks"] == 2
    assert json_of("evict", cloud.url(prefix="gs://"))["freed"] > 2000
    assert json_of("stats")["blocks"] == 0
    assert cloud.asked() == []


def test_evict_of_a_pattern_takes_what_is_cached(cloud):
    for key in ("three", "two/a"):
        cloud.put(key, noise(1000))
    run("cat", cloud.url("three", "gs://"), cloud.url("two/a", "gs://"))
    forget()
    cloud.asked()
    assert json_of("evict", cloud.url("*x", "gs://"))["freed"] == 0
    assert json_of("evict", cloud.url("t*", "gs://"))["freed"] > 2000
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
    forget()
    cloud.asked()
    run("cat", cloud.url("key", "gs://"))
    assert "media" in cloud.asked()


def test_evict_all_asks_in_a_terminal(cloud):
    cloud.put("key", noise(10))
    run("cat", cloud.url("key", "gs://"))
    forget()
    asked = in_terminal("evict", "--all", typed="n\n")
    assert "Drop the whole cache?" in asked
    assert "freed" not in asked
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


def test_evict_all_drops_nothing_where_nobody_can_be_asked(cloud):
    cloud.put("key", noise(10))
    run("cat", cloud.url("key", "gs://"))
    forget()
    assert "--yes" in run("evict", "--all", status=2).stderr
    assert json_of("stats")["blocks"] == 1


def test_an_empty_name_is_not_the_default_cache(cloud):
    cloud.put("key", b"1")
    run("cat", cloud.url("key", "gs://"))
    forget()
    assert "cache_dir=''" in run("evict", "--all", "--yes", "--cache-dir", "", status=2).stderr
    assert json_of("stats")["blocks"] == 1


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
