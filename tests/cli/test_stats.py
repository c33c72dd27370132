"""The command `stats`."""

import json
import re
import signal
import time
from unittest import mock

import fsspec

from cachedfs.cache.counters import Counted
from cachedfs.cache.index.block_rows import CachedPath
from cachedfs.cli.output import print_table
from cachedfs.cli.prometheus import exposition
from cachedfs.cli.stats import charts_of, folders_of
from tests.cli.helpers import in_terminal, json_of, run, start
from tests.support import MiB, forget, noise


def test_stats_show_what_is_there_and_what_all_processes_counted(cloud):
    cloud.put("big", noise(3 * MiB))
    cloud.put("small", noise(1000))
    for _ in range(2):
        run("cat", cloud.url("big", "gs://"))
        forget()  # as in the next process
    cloud.asked()
    found = json_of("stats", "-o", "cache_size=200GB", "-o", "keep_free=1%")
    assert cloud.asked() == []
    assert found["directory"].startswith(str(cloud.cache_dir))
    assert found["blocks"] == 3
    assert 3 * MiB < found["bytes"] < 3.1 * MiB
    assert found["cache_size"] == 200_000_000_000
    assert found["keep_free"] == found["disk_size"] // 100
    assert found["cannot_store"] is None
    assert (found["hits"], found["misses"], found["requests"]) == (3, 3, 1)
    assert (found["bytes_served"], found["bytes_fetched"]) == (6 * MiB, 3 * MiB)
    assert (found["bytes_saved"], found["requests_saved"]) == (3 * MiB, 1)
    assert found["since"].startswith("20")
    shown = run("stats").stdout
    for row in (
        "cache size +auto",
        r"hits +3 of 6 blocks, 50\.0 %",
        r"saved +3\.1 MB, about 1 request",
        r"fetched +3\.1 MB in 1 requests?",
        rf" *3\.1 MB +1 .*{cloud.path('')[:-1]}",  # by folder
    ):
        assert re.search(f"^{row}$", shown, re.MULTILINE), row
    # Names need the room more than times.
    narrow = in_terminal("stats", COLUMNS="60")
    assert re.search(rf"^ *3\.1 MB +1 +{cloud.path('')[:-1]}$", narrow, re.MULTILINE)


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


def test_stats_show_what_drive_accounts_used_today(drive, monkeypatch):
    monkeypatch.setattr("cachedfs.origins.drive.quota.day_of", lambda now: "2026-11-25")
    cache = fsspec.filesystem("cdrive")._objects.engine.cache
    assert json_of("stats")["quota"] == []
    assert "Drive account" not in run("stats").stdout
    cache.quota.add("drive|www.googleapis.com|user-7", "2026-11-25", 40_000_000, 2_500_000_000)
    cache.quota.add("drive|127.0.0.1:1|anon", "2026-11-25", 5, 0)
    cache.quota.add("drive|www.googleapis.com|user-8", "2026-11-24", 5, 0)
    other, mine = json_of("stats")["quota"]
    used = {"units": 40_000_000, "bytes": 2_500_000_000, "units_share": 0.1, "bytes_share": 0.0025}
    assert mine == {"account": "user-7", "day": "2026-11-25", **used}
    assert other["account"] == "anon at 127.0.0.1:1"
    shown = run("stats").stdout
    assert re.search(r"^ *40,000,000 +10\.0 % +2\.5 GB +0\.2 % +user-7$", shown, re.MULTILINE)


def test_stats_name_folders_with_their_age():
    held = [CachedPath(f"b/a/{i}", 10, 1, 100.0 + i, 200.0) for i in range(3)]
    big, small = folders_of([*held, CachedPath("b/c/d/x", 5, 2, None, None)])
    assert (big.pop("oldest").timestamp(), big.pop("newest").timestamp()) == (100.0, 200.0)
    assert big == {"folder": "b/a", "objects": 3, "blocks": 3, "bytes": 30}
    assert (small["folder"], small["blocks"], small["oldest"]) == ("b/c/d", 2, None)


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


def test_the_charts_of_watch_show_the_latest_rates_on_the_right(capsys):
    print_table(charts_of([(0.0, 0.0), (50e6, 0.0), (100e6, 0.0)]))
    read, fetched = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"read +▁▅█  at most 100\.0 MB/s *", read)
    assert re.fullmatch(r"fetched +at most 0 bytes/s *", fetched)


def test_stats_watch_without_a_terminal_is_a_line_a_look(monkeypatch):
    sleep = mock.Mock(side_effect=[None, None, KeyboardInterrupt])
    monkeypatch.setattr("cachedfs.cli.stats.time.sleep", sleep)
    line = (
        r"\d\d:\d\d:\d\d  0 hits, 0 misses; read 0 bytes/s, fetched 0 bytes/s in 0 requests; holds 0 bytes\n"
    )
    assert re.fullmatch(line * 2, run("stats", "-w", "--every", "0.1").stdout)


def test_the_totals_for_prometheus(cloud):
    cloud.put("key", noise(2 * MiB))
    run("cat", cloud.url("key", "gs://"))
    forget()
    shown = run("stats", "--prometheus", "-o", "cache_size=200GB").stdout
    values = dict(re.findall(r"^cachedfs_(\w+)\{directory=\"(?:.*)\"\} (\d+)$", shown, re.MULTILINE))
    assert (values["misses_total"], values["fetched_bytes_total"]) == ("2", str(2 * MiB))
    assert (values["blocks"], values["can_store"]) == ("2", "1")
    for name in values:
        kind = "counter" if name.endswith("_total") else "gauge"
        assert f"\n# TYPE cachedfs_{name} {kind}\n" in shown
    assert "drive" not in shown


def test_what_is_unknown_is_left_out_for_prometheus_and_labels_are_escaped():
    found = {"directory": 'C:\\"a"\n', "blocks": 1, "bytes": 2, "disk_free": 3, "disk_size": 4}
    found |= {"may_hold": None, "cannot_store": "the disk is full"}
    quotas = [{"account": "me", "units": 5, "bytes": 6}, {"account": "you", "units": 7, "bytes": 8}]
    lines = exposition(found, Counted(hits=9), quotas).splitlines()
    assert 'cachedfs_hits_total{directory="C:\\\\\\"a\\"\\n"} 9' in lines
    assert 'cachedfs_can_store{directory="C:\\\\\\"a\\"\\n"} 0' in lines
    assert [line for line in lines if line.startswith("cachedfs_drive_units_today")] == [
        'cachedfs_drive_units_today{account="me"} 5',
        'cachedfs_drive_units_today{account="you"} 7',
    ]
    assert not [line for line in lines if "may_hold" in line]
