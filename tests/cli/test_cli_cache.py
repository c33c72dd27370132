"""Commands about the cache: statistics, pins, advice, and shell urls."""

import contextlib
import dataclasses
import io
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import fsspec
import pytest

from cachedfs.cache.index.block_rows import CachedPath
from cachedfs.cli import main, urls
from cachedfs.cli.speed import Speeds, facts, read_at_once
from cachedfs.cli.stats import folders_of, text_of_use
from cachedfs.common.types import Counted
from cachedfs.report.analysis import RunFigures
from cachedfs.sim import Fault
from tests.cli.test_cli import in_terminal, interrupted, json_of, run, start
from tests.support import MiB, forget, noise

# What all processes counted.


def test_what_all_processes_counted_is_added_up(cloud):
    cloud.put("big", noise(3 * MiB))
    cloud.put("small", noise(1000))
    code = "import os, fsspec; print(len(fsspec.open(f'cachedfs::gs://{os.environ[\"BUCKET\"]}/big').open().read()))"
    for _ in range(2):
        assert cloud.python(code) == f"{3 * MiB}\n"
    cloud.asked()
    found = json_of("stats")
    assert cloud.asked() == []
    assert (found["hits"], found["misses"], found["requests"]) == (3, 3, 1)
    assert (found["bytes_served"], found["bytes_fetched"]) == (6 * MiB, 3 * MiB)
    assert (found["bytes_saved"], found["requests_saved"]) == (3 * MiB, 1)
    assert found["since"].startswith("20")
    shown = run("stats").stdout
    assert re.search(r"^hits +3 of 6 blocks, 50\.0 %$", shown, re.MULTILINE)
    assert re.search(r"^saved +3\.1 MB, about 1 request$", shown, re.MULTILINE)
    assert re.search(r"^fetched +3\.1 MB in 1 requests?$", shown, re.MULTILINE)


def test_stats_show_what_drive_accounts_used_today(drive, monkeypatch):
    monkeypatch.setattr("cachedfs.origins.drive.quota.day_of", lambda now: "2026-11-25")
    cache = fsspec.filesystem("cdrive")._objects.engine.cache
    assert json_of("stats")["quota"] == []
    assert "Drive account" not in run("stats").stdout
    cache.quota.add("drive|www.googleapis.com|user-7", "2026-11-25", 40_000_000, 2_500_000_000)
    cache.quota.add("drive|127.0.0.1:1|anon", "2026-11-25", 5, 0)
    cache.quota.add("drive|www.googleapis.com|user-8", "2026-11-24", 5, 0)
    other, mine = json_of("stats")["quota"]
    assert mine == {
        "account": "user-7",
        "day": "2026-11-25",
        "units": 40_000_000,
        "bytes": 2_500_000_000,
        "units_share": 0.1,
        "bytes_share": 0.0025,
    }
    assert other["account"] == "anon at 127.0.0.1:1"
    shown = run("stats").stdout
    assert re.search(r"^ *40,000,000 +10\.0 % +2\.5 GB +0\.2 % +user-7$", shown, re.MULTILINE)


def test_a_process_tells_what_it_counts_while_it_reads(cloud):
    cloud.put("big", noise(3 * MiB))
    code = """
        import os, sys, fsspec
        fs = fsspec.filesystem("cachedfs", target_protocol="gs")
        path = os.environ["BUCKET"] + "/big"
        for line in sys.stdin:
            for i in range(64):
                fs.cat_file(path, MiB * (i % 3), MiB * (i % 3) + 10)
            print(fs.stats().hits, flush=True)
    """.replace("MiB", str(MiB))
    with cloud.talking(code) as ask:
        deadline = time.monotonic() + 120
        while (found := json_of("stats"))["hits"] < 64 and time.monotonic() < deadline:
            counted = int(ask("go"))
    assert found["hits"] >= 64, "while it reads"
    found = json_of("stats")
    assert (found["hits"], found["misses"]) == (counted, 3), "and not twice"


def test_what_is_saved_follows_from_what_was_counted():
    counted = Counted(
        hits=80, misses=20, requests=5, bytes_fetched=20, bytes_served=100, evictions=1, since=9.0
    )
    assert (counted.hit_ratio, counted.bytes_saved, counted.requests_saved) == (0.8, 80, 20)
    assert Counted(hits=10, misses=1, requests=50).requests_saved == 10, (
        "one a block at most: the others were questions"
    )
    assert Counted(bytes_fetched=9).bytes_saved == 0, "read ahead and not read"
    assert Counted().hit_ratio is None
    later = counted._replace(hits=85)
    assert later.since_then(counted) == Counted(hits=5, since=9.0)
    anew = Counted(hits=3, since=10.0)
    assert anew.since_then(counted) == anew


def test_stats_name_folders_with_their_age():
    held = [CachedPath(f"b/a/{i}", 10, 1, 100.0 + i, 200.0) for i in range(3)] + [
        CachedPath("b/c/d/x", 5, 2, None, None)
    ]
    big, small = folders_of(held)
    assert (big["oldest"].timestamp(), big["newest"].timestamp()) == (100.0, 200.0)
    assert big | {"oldest": None, "newest": None} == {
        "folder": "b/a",
        "objects": 3,
        "blocks": 3,
        "bytes": 30,
        "oldest": None,
        "newest": None,
    }
    assert (small["folder"], small["blocks"], small["oldest"]) == ("b/c/d", 2, None)
    many = folders_of(CachedPath(f"b{i}/x", i + 1, 1, 1.0, 1.0) for i in range(20))
    assert len(many) == 8
    assert (many[-1]["folder"], many[-1]["objects"]) == ("13 others", 13)
    assert sum(each["bytes"] for each in many) == 210


def test_stats_name_what_is_here_by_folder(cloud):
    for key in ("a/one", "a/two", "c/three"):
        cloud.put(key, noise(1000))
        run("cat", cloud.url(key, "gs://"))
    forget()
    found = json_of("stats")["folders"]
    assert [(each["folder"], each["objects"]) for each in found] == [
        (cloud.path("a"), 2),
        (cloud.path("c"), 1),
    ]
    assert re.search(rf"^ *2\.\d kB +2 .*{cloud.path('a')}$", run("stats").stdout, re.MULTILINE)
    seen = in_terminal("stats", COLUMNS="60")
    assert re.search(rf"^ *2\.\d kB +2 +{cloud.path('a')}$", seen, re.MULTILINE), (
        "names have more need of the room than times"
    )


def test_stats_say_that_pins_leave_no_room(cloud):
    cloud.put("big", noise(6 * MiB))
    bound = ("-o", "cache_size=64MiB")  # of a larger one, the bookkeeping alone would exceed the one below
    run("prefetch", *bound, cloud.url("big", "gs://"))
    run("pin", *bound, cloud.url("big", "gs://"))
    forget()
    assert "beside what is pinned" in json_of("stats", "-o", "cache_size=8MiB")["cannot_store"]
    too_small = "the cache may hold 0 bytes now, less than one block (1.0 MB): raise cache_size"
    assert json_of("stats", "-o", "cache_size=1MB")["cannot_store"].startswith(too_small)
    assert json_of("stats")["cannot_store"] is None


def test_stats_of_a_cache_that_cannot_be_written_have_all_their_names(cloud, tmp_path):
    usual = json_of("stats")
    (tmp_path / "file").write_text("in the way")
    nowhere = json_of("stats", "--cache-dir", str(tmp_path / "file"))
    assert nowhere.keys() == usual.keys()
    assert nowhere.pop("cannot_store")
    unknown = ("directory", "may_hold", "disk_free", "since")
    assert {nowhere[name] for name in unknown} == {None}
    assert (nowhere["blocks"], nowhere["hits"], nowhere["folders"]) == (0, 0, [])


def test_stats_watch_tells_what_happens_until_ctrl_c(cloud):
    cloud.put("big", noise(3 * MiB))
    process = start(cloud, "stats", "--watch", "--every", "0.1", "--json")
    first = json.loads(process.stdout.readline())
    assert (first["hits"], first["misses"], first["blocks"]) == (0, 0, 0)
    run("cat", cloud.url("big", "gs://"))
    forget()
    looks = []
    while sum(look["misses"] for look in looks) < 3 or looks[-1]["blocks"] < 3:
        looks.append(json.loads(process.stdout.readline()))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (0, b"")
    assert sum(look["bytes_fetched"] for look in looks) == 3 * MiB
    assert looks[-1]["blocks"] == 3


def test_stats_watch_in_a_pipe_is_a_line_a_look(cloud):
    process = start(cloud, "stats", "-w", "--every", "0.1")
    lines = [process.stdout.readline().decode() for _ in range(2)]
    process.stdout.close()  # as `head -2` does
    assert process.wait(120) == 141
    process.stderr.close()
    for line in lines:
        assert re.fullmatch(
            r"\d\d:\d\d:\d\d  0 hits, 0 misses; read 0 bytes/s, fetched 0 bytes/s in 0 requests; holds 0 bytes\n",
            line,
        )


# pin and unpin


def test_pin_of_folders_patterns_and_what_is_not_here(cloud):
    for key in ("a/one", "a/b/two", "x.txt", "y.bin"):
        cloud.put(key, noise(1000))
    done = json_of("pin", cloud.url("a", "gs://"), cloud.url("*.txt", "gs://"))
    assert [(each["objects"], each["bytes"], each["cached"]) for each in done] == [(2, 2000, 0), (1, 1000, 0)]
    assert json_of("stats")["pins"] == [cloud.path(key) for key in ("a/b/two", "a/one", "x.txt")]
    url = cloud.url("y.bin", "gs://")
    said = f"{url}: 1 object of 1.0 kB pinned, "
    assert run("pin", url).stdout == f"{said}0 bytes of them cached; prefetch fetches the rest\n"
    run("cat", url)
    assert run("pin", url).stdout == f"{said}1.0 kB of them cached\n"
    assert "no such object" in run("pin", cloud.url("nothing", "gs://"), status=1).stderr


def test_unpin_asks_nobody_and_knows_folders_patterns_and_all(cloud, tmp_path):
    for key in ("a/one", "a/b/two", "ab", "x.txt", "y.bin", "runs/1/a", "runs/1/b/c", "runs/2/a"):
        cloud.put(key, b"1")
    (tmp_path / "local").write_bytes(b"1")
    run("pin", cloud.url(prefix="gs://"), str(tmp_path / "local"))
    forget()
    cloud.asked()
    assert run("unpin", cloud.url("a", "gs://")).stdout == f"{cloud.url('a', 'gs://')}: 2 objects unpinned\n"
    assert json_of("unpin", cloud.url("*.txt", "gs://"))["unpinned"] == 1
    assert json_of("unpin", cloud.url("a", "gs://"))["unpinned"] == 0
    assert json_of("unpin", cloud.url("run*/1", "gs://"))["unpinned"] == 2, "all below a folder that matches"
    assert json_of("unpin", cloud.url("runs/*", "gs://"))["unpinned"] == 1
    assert len(json_of("stats")["pins"]) == 3
    assert run("unpin", "--all").stdout == "all: 3 objects unpinned\n"
    assert json_of("stats")["pins"] == []
    assert cloud.asked() == []
    run("unpin", status=2)
    run("unpin", "--all", "gs://b/k", status=2)


def test_pins_of_more_than_the_cache_may_hold_are_named(cloud):
    cloud.put("big", noise(9 * MiB))
    result = run("pin", "-o", "cache_size=5MiB", "-o", "keep_free=0", cloud.url("big", "gs://"), status=1)
    assert "more than the" in result.stderr
    assert json_of("stats")["pins"] == [cloud.path("big")]


def test_pins_of_several_commands_are_added_up(cloud):
    bound = ("-o", "cache_size=8MiB", "-o", "keep_free=0")
    for name in "ab":
        cloud.put(name, noise(4 * MiB))
    run("pin", *bound, cloud.url("a", "gs://"))
    assert (
        "all pinned objects are 8.4 MB, more than the"
        in run("pin", *bound, cloud.url("b", "gs://"), status=1).stderr
    )


def test_cat_of_a_pattern_is_all_of_them_by_name(cloud):
    for key in ("a.txt", "b.txt", "c.bin"):
        cloud.put(key, key.encode())
    assert run("cat", cloud.url("*.txt", "gs://")).stdout == "a.txtb.txt"
    assert "nothing has such a name" in run("cat", cloud.url("*.tif", "gs://"), status=1).stderr


def test_cat_into_a_file_shows_how_far_it_is_and_leaves_only_bytes(cloud, tmp_path):
    data = cloud.put("big", noise(20 * MiB))
    url = cloud.url("big", "gs://")
    for option, is_shown in ([], True), (["--json"], False):
        with open(tmp_path / "copy", "w") as copy:
            seen = in_terminal("cat", *option, url, stdout=copy, TERM="xterm")
        assert ("/21.0 MB" in seen) == is_shown
        assert (tmp_path / "copy").read_bytes() == data


# doctor


def test_doctor_says_how_fast_reads_can_be():
    run = RunFigures(elapsed_s=1.0, latency_s=0.05, n_at_once=16, bytes_per_s=150e6, n_to_fill=3)
    one_by_one = (
        "Small objects one by one: 20 a second; as a list by fs.cat, 16 in flight: up to 320 a second."
    )
    known = f"{one_by_one} The link gives 150.0 MB/s; 3 requests at a time fill it."
    assert facts(run, 50e6) == known
    run = dataclasses.replace(run, size=4 * 10**9, held=0.25, n_files=9)
    share = "Of 4.0 GB here the cache holds 25.0 %: that share of each further epoch is hits."
    assert facts(run, 50e6) == f"{known} {share}"
    needed = "3 requests at a time would fill a link of 1 Gbit/s, 30 one of 10."
    assert facts(dataclasses.replace(run, n_to_fill=None, held=None), 50e6) == f"{one_by_one} {needed}"


@pytest.mark.parametrize(("all_per_s", "n"), [(150e6, 3), (50e6, 1), (320e6, 7), (390e6, None)])
def test_what_fills_the_link_is_known_only_if_more_requests_are_no_faster(all_per_s, n):
    speeds = Speeds(0.05, size=50, whole_s=1e-6, n_tried=8, part=int(all_per_s / 8), took_s=1.0)
    assert speeds.n_to_fill == n
    assert speeds._replace(part=0, took_s=0.0).n_to_fill is None, "too small to tell"


def test_a_full_cache_that_gives_up_what_comes_is_named():
    counted = Counted(
        hits=10, misses=100, requests=100, bytes_fetched=1, bytes_served=2, evictions=90, since=1.0
    )
    assert "raise cache_size" in text_of_use(counted, 95, 100)[1]
    assert text_of_use(counted, 10, 100)[1] == "", "evicted by somebody's command"
    assert text_of_use(counted._replace(evictions=10), 95, 100)[1] == ""
    assert text_of_use(Counted(), 0, 100) == ("no block was read yet", "")


def test_doctor_measures_the_link_and_says_what_to_set(cloud, tmp_path):
    for i in range(3):
        cloud.put(f"d/{i}", noise(7 * MiB, i))
    checks = {check["name"]: check["found"] for check in json_of("doctor", cloud.url("d", "gs://"))}
    assert re.match(r"8 requests, .* in \d+ ms: ", checks["at once"])
    assert "Of 22.0 MB here the cache holds 100.0 %" in checks["settings"]
    limit = r"(The link|Waiting for answers) limits: reading all of it takes about |not known: more requests"
    assert re.match(limit, checks["limit"])
    assert checks["use"] == "no block was read yet"
    tight = {
        check["name"]: check["found"]
        for check in json_of(
            "doctor",
            "--cache-dir",
            str(tmp_path / "other"),
            "-o",
            "cache_size=16MiB",
            "-o",
            "keep_free=0",
            cloud.url("d", "gs://"),
        )
    }
    assert re.search(r'cache_size="1GB"|larger disk', tight["to set"])


def test_doctor_reads_parts_of_an_object_on_s3(s3):
    s3.put("k", noise(1000))
    fs = fsspec.filesystem("cachedfs", target_protocol="s3")
    read_at_once(fs.origin_fs, s3.path("k"), n=2, size=400, of=1000)
    asked = [each.headers["range"] for each in s3.server.requests if each.kind == "media"]
    assert sorted(asked) == ["bytes=0-399", "bytes=400-799"]


# What a shell completes.


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
    if "20" in words:
        words, begun = ["cachedfs", "ls", "-o", "a=b", "20"], "gs://b/year="
    environ = {"_CACHEDFS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(at)}
    urls.rejoin(environ)
    assert (shlex.split(environ["COMP_WORDS"]), environ["COMP_CWORD"]) == (words, str(len(words) - 1))
    assert environ["_CACHEDFS_BEGUN"] == begun


def test_only_lines_of_bash_are_joined():
    environ = {"_CACHEDFS_COMPLETE": "complete_zsh", "COMP_WORDS": "a b : c", "COMP_CWORD": "3"}
    kept = dict(environ)
    urls.rejoin(environ)
    assert environ == kept
    none = {}
    urls.rejoin(none)
    assert none == {}


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
    assert urls.urls_known(SimpleNamespace(), "gs://b/") == []


def test_fsspec_sees_the_pins_of_the_command_line(cloud):
    cloud.put("key", noise(10))
    run("pin", cloud.url("key", "gs://"))
    fs = fsspec.filesystem("cachedfs", target_protocol="gs")
    fs.unpin(cloud.path("key"))
    assert json_of("stats")["pins"] == []


@pytest.mark.parametrize(("command", "kind"), [("doctor", "media"), ("pin", "list")])
def test_ctrl_c_while_the_cloud_does_not_answer(cloud, command, kind):
    cloud.put("d/a", noise(2 * MiB))
    cloud.server.fail(Fault(kind=kind, stall_s=3600, times=None))
    assert interrupted(lambda: cloud.server.count(kind=kind), command, cloud.url("d", "gs://")) == ""
