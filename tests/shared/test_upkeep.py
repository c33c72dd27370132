"""Care of a shared folder, by the command and by those who fill it."""

import grp
import os
import stat
import time

import pytest

from cachedfs.shared.shared_store import BASE
from tests.cli.helpers import json_of, run
from tests.shared.conftest import leave, place_of
from tests.support import MiB, noise

DAY_S = 86400


def large(origin, fs, n=5):
    """Put and read objects of 5 MiB, which get a file each; return them by path."""
    data = {f"b/{i}": origin.put(f"b/{i}", noise(5 * MiB, i)) for i in range(n)}
    assert fs.cat(list(data)) == data
    leave()
    return data


def runs_in(shared):
    return sorted(shared.rglob("runs/*/*"), key=lambda path: path.stat().st_atime)


def used(path, days):
    """Let the last use and the write of a file be so many days ago."""
    os.utime(path, (time.time() - days * DAY_S, time.time() - 30 * DAY_S))


def test_what_was_not_used_for_longest_is_removed(origin, node, shared):
    data = large(origin, node("a"))
    runs = runs_in(shared)
    for number, path in enumerate(runs):
        used(path, days=number + 2)
    (old, lease, new) = (shared / "cachedfs-shared-1" / name for name in ("tmp/old", "leases/x-0", "tmp/new"))
    for path in (old, lease, new):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    used(old, days=30)
    used(lease, days=30)
    size = sum(path.stat().st_size for path in shared.rglob("*") if path.is_file())
    found = json_of("share", "stats", str(shared))
    assert (found["files"], found["bytes"]) == (6, size - 3)
    done = json_of("share", "clean", str(shared), "--size", "16MiB")
    assert (done["removed"], done["files"]) == (2, 4)
    assert runs_in(shared) == runs[2::-1]
    assert (old.exists(), lease.exists(), new.exists()) == (False, False, True)
    origin.log.clear()
    assert node("b").cat(list(data)) == data
    assert len({path for kind, path, _ in origin.log if kind == "read"}) == 2
    assert json_of("share", "clean", str(shared), "--size", "1GB")["removed"] == 0


def test_the_use_of_a_file_is_noted_once_a_day(origin, node, shared):
    data = large(origin, node("a"))
    for path in runs_in(shared):
        used(path, days=3)
    times = {path: path.stat().st_mtime_ns for path in runs_in(shared)}
    assert node("b").cat(list(data)[:2]) == dict(list(data.items())[:2])
    leave()
    is_new = [path.stat().st_atime > time.time() - DAY_S for path in runs_in(shared)]
    assert sum(is_new) == 2
    assert {path: path.stat().st_mtime_ns for path in runs_in(shared)} == times  # of which ages are counted


def test_a_shared_cache_stays_within_its_size_as_it_is_filled(origin, node, shared):
    large(origin, node("a"), n=8)
    origin.put("b/large", noise(6 * MiB, 9))
    fs = node("b", shared_cache_size="55MiB")
    fs.cat_file("b/large")  # more than a tenth
    origin.put("b/small", noise(MiB, 10))
    fs.cat_file("b/small")
    leave()
    assert all(path.stat().st_size < 6 * MiB for path in shared.rglob("*") if path.is_file())
    origin.put("c/small", noise(MiB, 11))
    node("c", shared_cache_size="20MiB").cat_file("c/small")
    leave()
    assert sum(path.stat().st_size for path in shared.rglob("*") if path.is_file()) <= 20 * MiB


def test_a_shared_cache_that_one_user_filled_is_given_to_the_group(origin, node, shared):
    origin.put("b/large", noise(8 * MiB))
    node("a").cat_file("b/large")
    leave()
    for folder, _, names in os.walk(shared):
        os.chmod(folder, 0o777)
        for name in names:
            os.chmod(f"{folder}/{name}", 0o644)
    os.symlink("/dev/null", shared / BASE / "link")
    for folder in (shared, shared.with_name("new")):
        run("share", "init", str(folder), "--group", grp.getgrgid(os.getgid()).gr_name)
    assert stat.S_IMODE(shared.with_name("new").stat().st_mode) == 0o2770
    assert shared.stat().st_gid == os.getgid()
    modes = {path.is_dir(): stat.S_IMODE(path.stat().st_mode) for path in [shared, *shared.rglob("[!l]*")]}
    assert modes == {True: 0o2770, False: 0o660}
    assert stat.S_IMODE(os.stat("/dev/null").st_mode) != 0o660


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["init", "/proc/x"], 1, ""),
        (["stats", "/missing"], 1, "no shared cache"),
        (["clean", "/missing", "--size", "10%"], 2, "like 200GB"),
        (["clean", "/missing", "--size", "1GB"], 1, "nothing was put there yet"),
        (["stats", "/missing", "--size", "1GB"], 2, "--size"),
        (["remove", "/missing"], 2, "init, stats, clean"),
        (["init", "/tmp/x", "--group", "no-such-group"], 2, "no-such-group"),
    ],
)
def test_mistakes_are_named(arguments, status, text):
    assert text in run("share", *arguments, status=status).output


def test_a_folder_that_cannot_be_made_is_named_with_what_to_do(tmp_path, monkeypatch):
    folder = place_of(tmp_path / "missing" / "shared")
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*missing: make it"):
        folder.check()

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(PermissionError, match=r"this user may not use .*cachedfs share init"):
        folder.check()


@pytest.mark.usefixtures("on_a_network")
def test_what_came_from_a_shared_cache_or_an_import_is_evicted_alone(cloud, shared, tmp_path):
    option, carried = ("-o", f"shared_cache={shared}"), str(tmp_path / "carried.zip")
    for name in ("shared", "exported", "own"):
        cloud.put(name, noise(1000))
    run("cat", cloud.url("shared", "gs://"), *option)
    leave()
    run("cat", cloud.url("exported", "gs://"))
    run("export", cloud.url("exported", "gs://"), carried)
    place = ("--cache-dir", str(tmp_path / "other"))
    run("cat", cloud.url("shared", "gs://"), cloud.url("own", "gs://"), *option, *place)
    leave()
    run("import", carried, *place)
    assert json_of("stats", *place)["blocks"] == 3
    assert "alone" in run("evict", "--from-shared", "--all", *place, status=2).stderr
    assert json_of("evict", "--from-shared", *place)["freed"] > 2000
    assert "read where it is" in run("evict", "--from-shared", *place).stderr
    assert json_of("stats", *place)["blocks"] == 1
    cloud.asked()
    run("cat", cloud.url("own", "gs://"), *place)
    assert cloud.asked() == []


def test_stats_and_doctor_say_whether_it_is_used(cloud, shared, tmp_path):
    option = ("-o", f"shared_cache={shared}")
    cloud.put("x", noise(1000))
    run("cat", cloud.url("x", "gs://"), *option)
    leave()
    run("cat", cloud.url("x", "gs://"), *option, "--cache-dir", str(tmp_path / "other"))
    leave()
    found = json_of("stats", *option, "--cache-dir", str(tmp_path / "other"))
    assert (found["shared_cache"], found["bytes_shared"], found["bytes_fetched"]) == (str(shared), 1000, 0)
    assert "1.0 kB" in run("stats", *option, "--cache-dir", str(tmp_path / "other")).stdout
    shared.chmod(0o777)
    assert "all users can write" in json_of("stats", *option)["shared_cache"]
    [check] = [each for each in json_of("doctor", *option) if each["name"] == "shared cache"]
    assert check["state"] == "warn"
