"""The command line: output, exit status, requests, interrupts and errors."""

import asyncio
import contextlib
import doctest
import errno
import functools
import io
import json
import logging
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import warnings
from unittest import mock

import fsspec
import pytest
import typer
from fsspec.registry import _registry
from typer.testing import CliRunner

from cachedfs import log_events
from cachedfs.cli import get, main, output, reading, urls
from cachedfs.cli.app import app
from cachedfs.cli.arguments import FAILED, INTERRUPTED, PIPE_CLOSED, CommonOptions, handling_errors
from cachedfs.cli.pack import naming
from cachedfs.common.atomic_files import filled
from cachedfs.core import engines
from cachedfs.core.store_queue import StoreQueue
from cachedfs.mount.unsent import keep
from cachedfs.origins.retry import RetryPolicy
from cachedfs.sim import Fault, GCSServer
from tests.cache.helpers import flip
from tests.support import ROOT, MiB, forget, noise, until

COMMANDS = [command.name for command in app.registered_commands]
PAGE = (ROOT / "docs/cli.md").read_text(encoding="utf-8")


def run(*arguments, status=0, stdin=None):
    """Run a command in this process; return the result after looking at its exit status."""
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result


def json_of(*arguments):
    return json.loads(run(*arguments, "--json").stdout)


def start(cloud, *arguments, **options):
    """Start the command line as a new process that is configured like this one."""
    command = [sys.executable, "-m", "cachedfs", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=cloud._environment(), stdout=pipe, stderr=pipe, **options)


def finished(cloud, *arguments, status=0):
    process = start(cloud, *arguments)
    out, err = process.communicate(timeout=600)
    assert process.returncode == status, err
    return out, err.decode()


def in_terminal(*arguments, typed="", stdout=None, **environ):
    """Run a command in this process on a terminal of 80 columns without colours; return what is seen there."""
    master, slave = pty.openpty()
    os.write(master, typed.encode())
    seen = []

    def look():
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while data := os.read(master, 65536):
                seen.append(data)

    looking = threading.Thread(target=look)
    looking.start()
    environ = {"TERM": "dumb", "COLUMNS": "80", "LINES": "25", **environ}
    with (
        open(slave, closefd=False) as keys,
        open(slave, "w", closefd=False) as screen,
        mock.patch.multiple(sys, stdin=keys, stdout=stdout or screen, stderr=screen),
        mock.patch.dict(os.environ, environ),
        contextlib.suppress(SystemExit),
    ):
        main(arguments)
    os.close(slave)
    looking.join()
    os.close(master)
    forget()
    return b"".join(seen).decode().replace("\r\n", "\n")


def interrupted(when, *arguments):
    """Run a command in this process that gets Ctrl-C once `when()` is true; it ends with 130 and says nothing on stdout."""
    is_over = threading.Event()

    def ctrl_c():
        while not is_over.wait(0.005):
            if when():
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=ctrl_c)
    thread.start()
    try:
        result = run(*arguments, status=INTERRUPTED)
    finally:
        is_over.set()
        thread.join()
    assert result.stdout == ""
    engines._close_all()  # as the end of the process does
    return result.stderr


# Names that a terminal would obey


HOSTILE = "a\x1b]0;owned\x07\x9b31m\u202e b"
SHOWN = r"a\033]0;owned\a\302\23331m\342\200\256 b"


def test_names_are_escaped_on_a_terminal_as_ls_b_does(cloud):
    cloud.put(f"a/{HOSTILE}", b"1")
    above = cloud.url("a", "gs://")
    name = f"{above}/{HOSTILE}"
    for line in (["ls", above], ["ls", "-l", above], ["pin", name], ["stats"], ["cat", f"{name}.x"]):
        seen = in_terminal("--debug", *line, COLUMNS="200")
        assert SHOWN in seen, seen
        assert not set("\x1b\x07\x9b\u202e") & set(seen)


def test_names_in_a_pipe_are_as_they_are(cloud):
    cloud.put(f"a/{HOSTILE}", b"1")
    assert run("ls", cloud.url("a", "gs://")).stdout == f"{cloud.url('a', 'gs://')}/{HOSTILE}\n"
    assert HOSTILE in run("cat", cloud.url(f"{HOSTILE}x", "gs://"), status=1).stderr


def test_only_what_cannot_be_seen_is_escaped():
    seen = "naïve 日本語\u3000\u00a0 👨\u200d👩 می\u200cخواهم \\ '"
    assert output.escaped(seen) == seen
    assert output.escaped("\t\r\n\x00\x7f\udc80\u2028") == r"\t\r\n\000\177\355\262\200\342\200\250"


# ls


def test_ls_prints_urls_that_open_the_same_again(cloud):
    cloud.put("a/one", b"1")
    cloud.put("two", b"22")
    assert run("ls", cloud.url(prefix="gs://")).stdout.split() == [
        cloud.url("a", "gs://") + "/",
        cloud.url("two", "gs://"),
    ]
    for prefix in ("gs://", "cgs://", "cachedfs::gs://"):
        assert run("ls", cloud.url("two", prefix)).stdout.strip() == cloud.url("two", prefix)


def test_ls_in_a_narrow_terminal_has_room_for_names(cloud):
    name = "a-name-of-some-length.bin"
    cloud.put(f"a/{name}", noise(1000))
    seen = in_terminal("ls", "-l", cloud.url("a", "gs://"), COLUMNS="40")
    assert seen.splitlines()[-1].split() == ["1.0", "kB", name]


def test_ls_twice_is_one_request(cloud):
    cloud.put("a/one", b"1")
    url = cloud.url("a", "gs://")
    first = run("ls", "-l", url).stdout
    forget()
    assert cloud.asked() == ["list"]
    assert run("ls", "-l", url).stdout == first
    assert cloud.asked() == []


def test_ls_long_has_size_time_and_cached_bytes(cloud):
    cloud.put("big", noise(3 * MiB))
    cloud.put("a/one", b"1")
    run("cat", "--range", "0:10", cloud.url("big", "gs://"))
    found = json_of("ls", "-l", cloud.url(prefix="gs://"))
    assert [entry["type"] for entry in found] == ["directory", "file"]
    big = found[1]
    assert (big["url"], big["size"], big["cached"]) == (cloud.url("big", "gs://"), 3 * MiB, MiB)
    assert big["modified"].startswith("20")
    lines = run("ls", "-l", cloud.url(prefix="gs://")).stdout.splitlines()
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
    assert "nothing has such a name" in run("ls", cloud.url("*.tif", "gs://"), status=1).stderr


def test_ls_of_local_paths(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one").write_bytes(b"1")
    monkeypatch.chdir(tmp_path)
    assert run("ls", "data").stdout.split() == [str(tmp_path / "data" / "one")]
    assert run("ls", f"file://{tmp_path}/data").stdout.split() == [f"file://{tmp_path}/data/one"]
    assert run("cat", "data/one").stdout == "1"


# cat


def test_cat_gives_the_bytes_and_the_second_one_asks_nobody(cloud):
    data = cloud.put("big", noise(20 * MiB + 7))
    small = cloud.put("small", noise(100))
    urls = [cloud.url("big", "gs://"), cloud.url("small", "gs://")]
    assert run("cat", *urls).stdout_bytes == data + small
    assert "media" in cloud.asked()
    forget()
    assert run("cat", *urls).stdout_bytes == data + small
    assert cloud.asked() == []


def test_cat_ranges_are_slices(cloud):
    data = cloud.put("key", noise(9 * MiB))
    for text in ("0:10", "-10:", "5:", ":", "2000000:2000010", ":-5", "3:1", "9999999:", "100:9000000"):
        start, stop = (int(part) if part else None for part in text.split(":"))
        assert run("cat", "--range", text, cloud.url("key", "gs://")).stdout_bytes == data[start:stop]


def test_cat_of_a_small_range_is_one_request(cloud):
    cloud.put("key", noise(20 * MiB))
    run("cat", "--range", "9000000:9000010", cloud.url("key", "gs://"))
    assert cloud.asked() == ["media"]


def test_a_slash_at_the_end_is_part_of_the_name_of_an_object_and_not_of_a_folder(cloud):
    cloud.put("d/", b"bytes")
    cloud.put("d/x", b"1")
    url = f"gs://{cloud.path('d/')}"
    assert run("cat", url).stdout == "bytes"
    assert run("ls", url).stdout == run("ls", cloud.url("d", "gs://")).stdout == f"{url}\n{url}x\n"
    assert json.loads(run("prefetch", "--json", url).stdout)["files"] == 2


def test_cat_ends_quietly_when_its_reader_does(cloud):
    cloud.put("key", noise(30 * MiB))
    process = start(cloud, "cat", cloud.url("key", "gs://"))
    assert len(process.stdout.read(10)) == 10
    process.stdout.close()
    assert process.wait(120) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


# get


def test_get_copies_objects_and_folders(cloud, tmp_path):
    files = {"a/one": noise(10), "a/b/two": noise(5 * MiB), "three": b""}  # not all at a time
    for key, data in files.items():
        cloud.put(key, data)
    result = run("get", "-r", cloud.url(prefix="gs://"), str(tmp_path / "new" / "copy"))
    assert re.match(r"3 files, 5\.2 MB in .*; 0 bytes of them from the cache", result.stderr)
    assert {
        str(path.relative_to(tmp_path / "new" / "copy")): path.read_bytes()
        for path in (tmp_path / "new").rglob("*")
        if path.is_file()
    } == files


def test_get_in_a_terminal_shows_bytes_and_files_to_the_end(cloud, tmp_path):
    for name in "ab":
        cloud.put(f"d/{name}", noise(MiB))
    seen = in_terminal(
        "get", "-r", cloud.url("d", "gs://"), str(tmp_path / "to"), TERM="xterm", COLUMNS="100"
    )
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    assert re.search(r" 2\.1/2\.1 MB +2/2 files .* finishing", plain)


def test_get_says_what_came_from_the_cache(cloud, tmp_path):
    cloud.put("key", noise(2 * MiB))
    first = json_of("get", cloud.url("key", "gs://"), str(tmp_path / "one"))
    second = json_of("get", cloud.url("key", "gs://"), str(tmp_path / "two"))
    assert (first["files"], first["bytes"], first["from_cache"]) == (1, 2 * MiB, 0)
    assert (second["bytes"], second["from_cache"]) == (2 * MiB, 2 * MiB)


def test_get_copies_the_others_where_one_file_has_no_bytes(drive, tmp_path):
    drive.put("f/a.txt", b"one")
    drive.server.document(f"{drive.name}/f/report", "words")
    drive.put("f/z.txt", b"two!")
    told = run("get", "-r", drive.url("f"), str(tmp_path / "copy"), status=1)
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == {
        "a.txt": b"one",
        "z.txt": b"two!",
    }
    first, second = told.stderr.splitlines()
    assert re.match(r"cachedfs: .*/f/report.*document of Google's own", first)
    assert re.match(r"2 files, 7 bytes in .*; 1 file not copied$", second)
    done = json.loads(run("get", "--json", "-r", drive.url("f"), str(tmp_path / "again"), status=1).stdout)
    assert (done["files"], done["bytes"], done["from_cache"]) == (2, 7, 7)
    assert [(each["url"], each["type"]) for each in done["failed"]] == [
        (drive.url("f/report"), "NotDownloadable")
    ]
    alone = run("get", drive.url("f/report"), str(tmp_path / "one"), status=1)
    assert alone.stderr.startswith("cachedfs: ")


def test_prefetch_fills_the_cache_and_run_again_fetches_nothing(cloud):
    for i in range(20):
        cloud.put(f"d/{i}", noise(1000, i))
    cloud.put("big", noise(9 * MiB))
    urls = [cloud.url("d", "gs://") + "/", cloud.url("big", "cgs://"), cloud.url("d/1*", "gs://")]
    result = run("prefetch", *urls)
    assert result.stdout == ""
    assert re.fullmatch(r"32 files, 9.5 MB fetched in .* s, .*/s; 11.0 kB were here already\n", result.stderr)
    forget()
    assert cloud.asked() == ["list"] + ["media"] * 22
    done = json_of("prefetch", *urls)
    assert (done["files"], done["fetched"], done["here"], done["failed"]) == (32, 0, 9 * MiB + 31_000, [])
    assert run("prefetch", *urls).stderr == "32 files, 9.5 MB were here already\n"
    forget()
    assert cloud.asked() == []


def test_prefetch_names_what_cannot_be_had_and_fetches_the_rest(cloud):
    for i in range(3):
        cloud.put(f"d/{i}", b"1")
    urls = [cloud.url(name, "gs://") for name in ("nothing", "d")]
    result = run("prefetch", *urls, status=1)
    assert "nothing: no such object or folder" in result.stderr
    assert "3 files, 3 bytes fetched" in result.stderr
    assert "; 1 not fetched" in result.stderr
    cloud.server.fail(Fault(kind="media", key="e/x", status=403, times=None))
    for name in "xy":
        cloud.put(f"e/{name}", b"1")
    urls.append(cloud.url("e", "gs://"))
    done = json.loads(run("prefetch", "--json", *urls, status=1).stdout)
    assert (done["files"], done["errors"]) == (4, 2)
    assert {(each["url"], each["type"]) for each in done["failed"]} == {
        (cloud.url("nothing", "gs://"), "ObjectNotFound"),
        (cloud.url("e/x", "gs://"), "AccessDenied"),
    }


def test_prefetch_of_more_than_fits_stops_and_says_so(cloud):
    for i in range(30):
        cloud.put(f"d/{i:02}", noise(MiB, i))
    url = cloud.url("d", "gs://")
    result = run("prefetch", "-o", "cache_size=20MiB", url, status=1)
    found = re.search(r"(\d+) of 30 objects are here, and more would drive out", result.stderr)
    assert 10 <= int(found[1]) < 20
    sent = cloud.server.bytes_sent()
    run("prefetch", "-o", "cache_size=20MiB", url, status=1)
    assert cloud.server.bytes_sent() - sent <= 3 * MiB  # what is here is not fetched again, and stays


def test_prefetch_of_one_url_does_not_drive_out_that_of_another(cloud):
    for name, n in (("a", 8), ("b", 24)):
        for i in range(n):
            cloud.put(f"{name}/{i:02}", noise(MiB, i))
    urls = [cloud.url(name, "gs://") for name in "ab"]
    result = run("prefetch", "-o", "cache_size=20MiB", *urls, status=1)
    found = re.search(r"a and 1 more: (\d+) of 32 objects are here, and more would drive out", result.stderr)
    forget()
    listed = run("ls", "-l", "-o", "cache_size=20MiB", *urls).stdout.splitlines()
    here = [line.split("\t")[-1] for line in listed if line.split("\t")[2] == str(MiB)]
    assert len(here) == int(found[1]) > 8
    assert {cloud.url(f"a/{i:02}", "gs://") for i in range(8)} < set(here)


def test_prefetch_goes_on_after_an_interrupt(cloud):
    for i in range(40):
        cloud.put(f"d/{i:02}", noise(1000, i))
    cloud.server.fail(Fault(kind="media", nth=20, times=None, stall_s=3600))
    process = start(cloud, "prefetch", cloud.url("d", "gs://"))
    until(lambda: len(cloud.server.requests) > 20)
    until(lambda: len(list(cloud.cache_dir.glob("cachedfs-*/blocks/*/*"))) >= 15)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (INTERRUPTED, b"")
    assert b"; run the same command again to continue\n" in err
    assert b"Traceback" not in err
    cloud.server.heal()
    done = json_of("prefetch", cloud.url("d", "gs://"))
    assert done["files"] == 40
    assert done["here"] >= 15_000
    assert done["fetched"] + done["here"] == 40_000


def test_prefetch_in_a_terminal_shows_a_bar_that_goes_away(cloud):
    cloud.put("d/a", noise(3 * MiB))
    seen = in_terminal("prefetch", cloud.url("d", "gs://"), TERM="xterm")
    assert "MB/s" in seen
    assert "1 file, 3.1 MB fetched" in seen


def test_pack_says_what_it_chose_and_makes_a_store(cloud, tmp_path):
    zarr = pytest.importorskip("zarr")
    for i in range(20):
        cloud.put(f"texts/{i}.txt", b"text %d" % i)
    target = cloud.url("texts.zarr", "gs://")
    result = run("pack", cloud.url("texts", "gs://"), target)
    assert result.stdout == ""
    chosen, others, done = result.stderr.splitlines()
    assert others == "names, data_offsets, names_offsets: little beside the samples; zstd"
    assert chosen.startswith("data: uint8, chunks 262,144, shards 67,108,864 (")
    assert (
        "; none (kept as it is" in chosen or "; zstd (samples are" in chosen or "; lz4 (samples are" in chosen
    )
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


def test_pack_of_columns_into_a_local_store(cloud, tmp_path):
    zarr = pytest.importorskip("zarr")
    cloud.put("x.csv", b"a,b,c\n1,x,2\n3,y,4\n")
    target = tmp_path / "out.zarr"
    run("pack", "--column", "a=float32", "--column", "b", cloud.url("x.csv", "gs://"), str(target))
    group = zarr.open_group(str(target), mode="r")
    assert sorted(group) == ["a", "b", "b_offsets"]
    assert group["a"].dtype == "float32"
    wrong = run("pack", "--column", "d", cloud.url("x.csv", "gs://"), str(target), status=1)
    assert "columns ['d'] do not exist; there are ['a', 'b', 'c']" in wrong.stderr


@pytest.mark.parametrize(
    "option",
    [
        "--codec foo",
        "--kind foo",
        "--decode foo",
        "--chunk-bytes foo",
        "--shard-bytes 0",
        "--workers 0",
        "--on-error foo",
    ],
)
def test_an_option_of_pack_that_cannot_be_is_wrong_usage(option, cloud, tmp_path):
    name, value = option.split()
    err = run("pack", name, value, cloud.url("d", "gs://"), str(tmp_path / "x.zarr"), status=2).stderr
    assert f"Invalid value for {name}" in err
    assert cloud.asked() == []


def test_pack_onto_a_full_disk_names_the_target(monkeypatch):
    with pytest.raises(OSError, match=r"No space left on device: 'x\.zarr'"), naming("x.zarr"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write says it: of no file


def test_pack_on_a_cluster_that_is_not_there(cloud, tmp_path, monkeypatch):
    distributed = pytest.importorskip("distributed")
    client = distributed.Client
    monkeypatch.setattr(distributed, "Client", lambda address, timeout: client(address, timeout=0.01))
    cloud.put("d/x", b"1")
    arguments = ["pack", "--dask", "tcp://127.0.0.1:1", cloud.url("d", "gs://"), str(tmp_path / "out.zarr")]
    assert "127.0.0.1:1" in run(*arguments, status=1).stderr


def test_pack_interrupted_goes_on(cloud, tmp_path):
    for i in range(4):
        cloud.put(f"d/{i}", noise(MiB, seed=i))
    arguments = ["pack", "--shard-bytes", "1MiB", cloud.url("d", "gs://"), str(tmp_path / "out.zarr")]
    plan = tmp_path / "out.zarr/.cachedfs-pack/plan.json"
    cloud.server.fail(Fault(kind="media", key="d/3", nth=2, times=None, stall_s=3600))
    assert "Traceback" not in interrupted(plan.exists, *arguments)
    cloud.server.heal()
    assert "4 samples, 4.19 MB of files" in run(*arguments).stderr
    assert not plan.parent.exists()


def test_export_and_import_carry_a_cache(cloud, tmp_path):
    for i in range(20):
        cloud.put(f"d/{i:02}", noise(1000, i))
    run("prefetch", cloud.url("d", "gs://"))
    target = str(tmp_path / "carry")
    text = run("export", cloud.url("d", "gs://"), target).stderr
    assert re.match(r"20 objects, 20 blocks, 2\d\.\d kB in 1 bundle; 2\d\.\d kB sent in ", text)
    assert "; all of it was there already\n" in run("export", cloud.url("d", "gs://"), target).stderr
    forget()
    again = ("import", target, "--cache-dir", str(tmp_path / "other"))
    done = json_of(*again)
    assert (done["blocks"], done["here"], done["left"], done["bad"]) == (20, 0, 0, [])
    assert run(*again).stderr == "0 blocks, 0 bytes fetched; 20 were here already\n"
    cloud.asked()
    run("cat", cloud.url("d/07", "gs://"), "--cache-dir", str(tmp_path / "other"))
    assert cloud.asked() == []


def test_import_of_what_is_damaged_or_does_not_fit_fails(cloud, tmp_path):
    cloud.put("d/a", noise(4 * MiB))
    run("prefetch", cloud.url("d", "gs://"))
    target = tmp_path / "carry"
    run("export", cloud.url("d", "gs://"), str(target))
    forget()
    small = ("import", str(target), "--cache-dir", str(tmp_path / "small"), "-o", "cache_size=3MiB")
    assert re.search(r"; [234] have no room: raise cache_size", run(*small, status=1).stderr)
    flip(next(target.glob("blocks-*")), 5000)
    forget()
    broken = run("import", str(target), "--cache-dir", str(tmp_path / "other"), status=1).stderr
    assert broken.count("block 0 of") == 1
    assert "3 blocks, 3.1 MB fetched" in broken
    assert "manifest" in run("import", str(tmp_path / "none"), status=1).stderr


def test_export_of_a_pattern_takes_what_is_cached_and_asks_nobody(cloud, tmp_path):
    for key in ("runs/1/a", "runs/1/b/c", "runs/2/a", "x.txt"):
        cloud.put(key, noise(1000))
        run("cat", cloud.url(key, "gs://"))
    forget()  # as the end of its process does: all that came is stored
    cloud.asked()
    target = str(tmp_path / "to")
    assert json_of("export", cloud.url("r*/1", "gs://"), target)["objects"] == 2
    assert (
        json_of("export", cloud.url("*.txt", "gs://"), cloud.url("runs/*", "gs://"), target)["objects"] == 4
    )
    nothing = run("export", cloud.url("*.bin", "gs://"), target, status=1).stderr
    assert (
        f"{cloud.url('*.bin', 'gs://')}: nothing that is cached has such a name: prefetch it first" in nothing
    )
    assert cloud.asked() == []
    assert (
        "./new.cache for a new local folder"
        in run("export", cloud.url("x.txt", "gs://"), "new.cache", status=1).stderr
    )


def test_export_wants_one_origin(cloud, tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    result = run("export", cloud.url("a", "gs://"), str(tmp_path / "file"), str(tmp_path / "to"), status=2)
    assert "they are of several origins" in result.stderr
    assert (
        "is cached, so nothing was exported"
        in run("export", cloud.url("a", "gs://"), str(tmp_path / "to"), status=1).stderr
    )


def test_get_copies_the_others_where_one_url_names_nothing(cloud, tmp_path):
    for name in ("a", "c"):
        cloud.put(name, noise(1000))
    urls = [cloud.url(name, "gs://") for name in "abc"]
    result = run("get", "--json", *urls, str(tmp_path), status=1)
    done = json.loads(result.stdout)
    assert (done["files"], done["bytes"]) == (2, 2000)
    assert [(each["url"], each["type"]) for each in done["failed"]] == [(urls[1], "ObjectNotFound")]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["a", "c"]


def test_get_goes_where_cp_would(cloud, tmp_path):
    for key in ("a/one", "two"):
        cloud.put(key, b"1")
    folder, two = cloud.url("a", "gs://"), cloud.url("two", "gs://")
    (tmp_path / "here").mkdir()
    run("get", two, str(tmp_path / "here"))
    run("get", "-r", folder, str(tmp_path / "here"))
    run("get", two, str(tmp_path / "other"))
    run("get", "-r", folder, two, str(tmp_path / "both"))
    run("get", cloud.url("t*", "gs://"), str(tmp_path / "matched"))
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    wanted = {"here/two", "here/a/one", "other", "both/a/one", "both/two", "matched/two"}
    assert {name for name in found if not name.startswith("cache/")} == wanted


def test_get_refuses_what_would_mix_files_and_directories(cloud, tmp_path):
    cloud.put("a/one", b"1")
    (tmp_path / "here" / "one").mkdir(parents=True)
    (tmp_path / "file").touch()
    one = cloud.url("a/one", "gs://")
    assert "is a directory" in run("get", one, str(tmp_path / "here"), status=1).stderr
    assert "-r copies folders" in run("get", cloud.url("a", "gs://"), str(tmp_path / "x"), status=1).stderr
    assert (
        "is no directory"
        in run("get", "-r", cloud.url("a", "gs://"), str(tmp_path / "file"), status=1).stderr
    )
    assert "file: File exists" in run("get", one, str(tmp_path / "file" / "x"), status=1).stderr
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize(
    ("names", "clash", "local"),
    [
        (["*/x"], ("a/x", "b/x"), "x"),
        (["a/x", "c", "b/x"], ("a/x", "b/x"), "x"),
        (["d"], ("d//x", "d/x"), "x"),
        (["a", "e/a"], ("a/x", "e/a/x"), "a/x"),
        (["f/a", "a"], ("f/a", "a"), "a"),
        (["g"], ("g/y", "g/y/w"), "y"),
    ],
)
def test_get_refuses_what_would_be_one_local_file(cloud, tmp_path, names, clash, local):
    for key in ("a/x", "b/x", "c", "d//x", "d/x", "e/a/x", "f/a", "g/y", "g/y/w"):
        cloud.put(key, key.encode())
    target = tmp_path / "to"
    urls = [cloud.url(name, "gs://") for name in names]
    said = run("get", "-r", *urls, str(target), status=1).stderr
    assert all(cloud.url(key, "gs://") + " " in said for key in clash)
    assert f"{target / local} can be one file only; nothing was written" in said
    assert not target.exists()


def test_get_copies_once_what_several_urls_name(cloud, tmp_path):
    for key in ("a/x", "a/y", "b/a/z"):
        cloud.put(key, key.encode())
    urls = [cloud.url("a/*", "gs://"), cloud.url("a/x", "cgs://"), cloud.url("a*/*", "gs://")]
    assert json_of("get", *urls, str(tmp_path / "to"))["files"] == 2
    folders = [cloud.url(name, "gs://") for name in ("a", "b/a")]
    assert (
        json_of("get", "-r", *folders, str(tmp_path / "to"))["files"] == 3
    )  # of one name, they come together
    found = {
        str(path.relative_to(tmp_path / "to")) for path in (tmp_path / "to").rglob("*") if path.is_file()
    }
    assert found == {"x", "y", "a/x", "a/y", "a/z"}


def test_a_target_that_cannot_be_is_wrong_usage(cloud, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    cloud.put("one", b"1")
    url = cloud.url("one", "gs://")
    for command in ("get", "export"):
        assert "TARGET: it is missing" in run(command, url, status=2).stderr
        assert "Missing argument 'TARGET'" in run(command, status=2).stderr
    # As with gsutil cp; a folder named gs: was made for it.
    assert "is a URL" in run("get", url, cloud.url("copy", "gs://"), status=2).stderr
    (tmp_path / "here").write_bytes(b"kept")
    assert "here is a file" in run("get", url, url, "here", status=2).stderr
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["here"]
    assert not (tmp_path / "gs:").exists()


def test_a_file_that_cannot_be_written_is_named(cloud, tmp_path, monkeypatch):
    cloud.put("one", b"1")
    url = cloud.url("one", "gs://")
    said = run("get", url, "/proc/x", status=1).stderr
    assert (
        said == "cachedfs: /proc/x: No such file or directory\n"
    )  # the temporary one beside it is of no use

    def full(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Full(io.FileIO):
        write = full

    monkeypatch.setattr("builtins.open", lambda name, *rest: Full(name, "w"))
    with pytest.raises(OSError, match=re.escape(f"No space left on device: '{tmp_path}/one'")):
        asyncio.run(filled(str(tmp_path / "one"), lambda file: asyncio.to_thread(file.write, b"1")))
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_get_writes_nowhere_but_below_its_target(cloud, tmp_path):
    cloud.put("a/../../escaped", b"1")
    result = run("get", "-r", cloud.url("a", "gs://"), str(tmp_path / "x" / "y"), status=1)
    assert "leads out of" in result.stderr
    assert not list(tmp_path.rglob("escaped"))


def test_get_copies_the_others_where_one_name_cannot_be_local(cloud, tmp_path):
    long = "n" * 300
    names = {
        "up": "d/../up",
        "nul": "d/a\0b",
        "long": f"d/{long}",
        "below": f"d/{'m' * 300}/x",
        "slash": "d/e/",
    }
    for key in ("d/a", "d/e/b", *names.values()):
        cloud.put(key, b"1")
    result = run("get", "-r", cloud.url("d", "gs://"), str(tmp_path / "to"), status=1)
    *failed, done = result.stderr.splitlines()
    for key in names.values():
        assert any(f"gs://{cloud.path(key)} cannot be a local file: " in line for line in failed), key
    assert done.startswith("2 files, 2 bytes in ")
    found = [path.relative_to(tmp_path / "to") for path in (tmp_path / "to").rglob("*") if path.is_file()]
    assert sorted(map(str, found)) == ["a", "e/b"]
    for key in (names["nul"], names["long"]):
        alone = run("get", cloud.url(key, "gs://"), str(tmp_path) + "/", status=1).stderr
        assert alone.startswith(f"cachedfs: {cloud.url(key, 'gs://')} cannot be a local file: ")
    many = json.loads(run("get", "--json", cloud.url("d/*", "gs://"), str(tmp_path), status=1).stdout)
    assert (many["files"], len(many["failed"])) == (1, 2)


@pytest.mark.parametrize(("size", "n"), [(1, 128), (5 << 20, 64), (1 << 40, 8), (None, 8)])
def test_get_bounds_files_and_memory(size, n):
    assert get.Copy(None, "key", "key", size).n_at_once == n


# stats and evict


def test_stats_show_what_is_there(cloud):
    cloud.put("key", noise(2 * MiB))
    run("cat", cloud.url("key", "gs://"))
    forget()
    cloud.asked()
    found = json_of("stats", "-o", "cache_size=200GB", "-o", "keep_free=10%")
    assert cloud.asked() == []
    assert found["directory"].startswith(str(cloud.cache_dir))
    assert found["blocks"] == 2
    assert 2 * MiB < found["bytes"] < 2.1 * MiB
    assert found["cache_size"] == 200_000_000_000
    assert found["keep_free"] == found["disk_size"] // 10
    assert found["cannot_store"] is None
    shown = run("stats").stdout
    assert re.search(r"^cache size +auto$", shown, re.MULTILINE)
    assert "2.1 MB" in shown


def test_stats_say_how_much_may_be_held(cloud):
    run("stats")
    auto, bound = (
        json_of("stats", *option) for option in ([], ["-o", "cache_size=64MiB", "-o", "keep_free=0"])
    )
    assert 0 <= auto["may_hold"] <= auto["disk_size"] // 2
    assert 58 * MiB < bound["may_hold"] <= 64 * MiB, "what the index takes is in the bound"


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


def test_evict_of_a_pattern_takes_what_was_listed(cloud):
    for key in ("three", "two/a"):
        cloud.put(key, noise(1000))
    run("cat", cloud.url("three", "gs://"), cloud.url("two/a", "gs://"))
    forget()
    result = run("evict", cloud.url("t*", "gs://"))
    assert "nothing was cached" in result.stdout
    assert "finds names only in cached listings" in result.stderr
    run("ls", cloud.url(prefix="gs://"))
    cloud.asked()
    assert json_of("evict", cloud.url("t*", "gs://"))["freed"] > 2000
    assert cloud.asked() == []


def test_evict_of_a_whole_origin(cloud, tmp_path):
    (tmp_path / "local").write_bytes(b"1")
    cloud.put("key", b"1")
    run("cat", cloud.url("key", "gs://"), str(tmp_path / "local"))
    forget()
    run("evict", "/")
    assert json_of("stats")["blocks"] == 1
    run("evict", "gs://")
    assert json_of("stats")["blocks"] == 0


def test_evict_all(cloud, tmp_path):
    (tmp_path / "local").write_bytes(noise(100))
    cloud.put("key", noise(2 * MiB))
    run("cat", cloud.url("key", "gs://"), str(tmp_path / "local"))
    forget()
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

    with pytest.raises((typer.Exit, typer.Abort)) as end, handling_errors(CommonOptions()):
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


# verify


def damage(cloud, name):
    """Flip a byte of the only cached block of an object of this size."""
    [path] = [
        path
        for path in cloud.cache_dir.glob("cachedfs-*/blocks/*/*")
        if name.encode() in path.read_bytes()[-4096:]
    ]
    flip(path, 0)


def test_verify_names_what_was_wrong_drops_it_and_fails(cloud):
    for key in ("a/one", "a/two"):
        cloud.put(key, noise(1000))
        run("cat", cloud.url(key, "gs://"))
    url = cloud.url("a", "gs://")
    said = run("verify", url)
    assert said.stdout == f"{url}: 2 blocks of 2 objects correct; 2 complete and equal to the origin's\n"
    assert said.stderr == "", "no progress in a pipe"
    forget()
    damage(cloud, "a/two")
    cloud.asked()
    result = run("verify", url, status=1)
    lines = result.stdout.splitlines()
    assert lines[0].startswith(
        f"{cloud.url('a/two', 'gs://')}: 1 block dropped: damaged on the disk; block 0: "
    )
    assert (
        lines[1]
        == f"{url}: 1 block of 2 objects correct, 1 wrong and dropped; 1 complete and equal to the origin's"
    )
    assert len(lines) == 2
    assert cloud.asked() == []
    assert (
        run("verify", url).stdout
        == f"{url}: 1 block of 1 object correct; 1 complete and equal to the origin's\n"
    )


def test_verify_as_json(cloud):
    data = cloud.put("one", noise(1000))
    cloud.put("two", b"2")
    urls = [cloud.url(key, "gs://") for key in ("one", "two")]
    run("cat", urls[0])
    assert json_of("verify", *urls) == [
        {"url": urls[0], "blocks": 1, "bad": [], "missing": 0, "size": len(data), "whole": True}
        | {"reason": "its CRC32C is the origin's"},
        {"url": urls[1], "blocks": 0, "bad": [], "missing": 1, "size": 1, "whole": None}
        | {"reason": "not all of it is in the cache"},
    ]
    forget()
    damage(cloud, "one")
    result = run("verify", "--json", urls[0], status=1)
    [found] = json.loads(result.stdout)
    assert (found["bad"], found["whole"]) == ([0], None)


# sim and demo


def test_sim_runs_until_it_is_told_to_end(cloud, monkeypatch):
    process = start(cloud, "sim", "gcs", "--port", "0", "--seed", "1")
    address = process.stdout.readline().decode().strip()
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon", "endpoint_url": address})
    assert [entry["url"] for entry in json_of("ls", "gs://")] == ["gs://my-bucket"]
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0
    assert out == b""
    told = err.decode()
    assert f"export FSSPEC_GS_ENDPOINT_URL={address}\n" in told
    assert "cachedfs ls -l gs://\n" in told
    assert "Traceback" not in told


def test_sim_of_a_drive(cloud, tmp_path, monkeypatch):
    (tmp_path / "mine" / "data").mkdir(parents=True)
    (tmp_path / "mine" / "data" / "a.txt").write_text("hello")
    process = start(cloud, "sim", "drive", "--port", "0", "--folder", str(tmp_path / "mine"))
    process.stdout.readline()
    told = [process.stderr.readline().decode().split() for _ in range(3)]
    exported = dict(words[1].split("=", 1) for words in told[1:])
    options = {"token": exported["FSSPEC_DRIVE_TOKEN"], "endpoint_url": exported["FSSPEC_DRIVE_ENDPOINT_URL"]}
    monkeypatch.setitem(fsspec.config.conf, "drive", options)
    assert run("cat", "drive://My Drive/data/a.txt").stdout == "hello"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)
    assert process.returncode == 0


def test_sim_on_a_port_that_is_taken(cloud):
    port = cloud.server.endpoint_url.rpartition(":")[2]
    result = run("sim", "gcs", "--port", port, status=1)
    assert f"port {port}: Address already in use; --port 0 takes a free one" in result.stderr
    assert "export" not in result.stderr


def test_sim_serves_a_folder_that_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert "there is no folder" in run("sim", "gcs", "--folder", str(tmp_path / "typo"), status=2).stderr
    assert not (tmp_path / "typo").exists()


def test_demo_is_the_demo(monkeypatch):
    from cachedfs.demo import comparison

    given = []
    monkeypatch.setattr(comparison, "main", lambda arguments: given.append(arguments) or 3)
    run("demo", status=3)
    assert given == [[]]


# doctor


def test_doctor_finds_all_well(cloud):
    cloud.put("key", noise(9 * MiB))
    checks = {check["name"]: check for check in json_of("doctor", cloud.url("key", "gs://"))}
    assert {check["state"] for check in checks.values()} <= {
        "ok",
        "warn",
    }  # the disk under the tests may be slow
    of_origin = ["access", "metadata", "first byte", "one request", "at once", "settings", "limit", "to set"]
    assert list(checks)[-8:] == of_origin
    assert str(cloud.cache_dir) in checks["cache directory"]["found"]
    assert re.search(r"\b8\.4 MB in \d+ ms", checks["one request"]["found"])
    assert "at a time" in checks["settings"]["found"]
    assert json_of("stats")["blocks"] == 0, "past the cache"


def test_doctor_looks_at_folders(cloud):
    cloud.put("a/one", b"1")
    checks = {check["name"]: check["found"] for check in json_of("doctor", cloud.url("a", "gs://"))}
    assert "is a folder with 1 entry" in checks["access"]
    assert checks["endpoint"] == cloud.server.endpoint_url.removeprefix("http://")
    assert "fs.cat" in checks["settings"]


def test_doctor_leaves_nothing_behind(cloud):
    run("doctor")
    left = [path.name for path in cloud.cache_dir.rglob("*") if path.is_file()]
    assert set(left) <= {
        "index.db",
        "index.db-wal",
        "index.db-shm",
        "locks",
        "access-records",
        "change-counters",
    }


def test_doctor_names_the_files_of_a_mount_that_were_not_sent(cloud, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert "unsent files" not in {check["name"] for check in json_of("doctor")}
    path = tmp_path / "file"
    path.write_bytes(b"1" * 500)
    for name in ("b/old", "b/new"):
        with path.open("rb") as file:
            keep(file, name)
    checks = {check["name"]: check for check in json_of("doctor")}
    check = checks["unsent files"]
    assert (check["state"], check["found"][:22]) == ("warn", "2 files, 1.0 kB, writt")
    assert check["found"].endswith("-b_new")
    assert "Copy them" in check["advice"]


def test_doctor_fails_with_the_real_error(cloud):
    result = run("doctor", cloud.url("nothing", "gs://"), status=1)
    assert re.search(r"^fail +access .*nothing", result.stdout, re.MULTILINE)
    cloud.server.forbid(cloud.bucket)
    checks = json.loads(run("doctor", "--json", cloud.url("key", "gs://"), status=1).stdout)
    assert checks[-1]["state"] == "fail"
    assert "anon" in checks[-1]["found"] + checks[-1]["advice"]


def test_doctor_says_who_signs_in_at_drive_and_what_they_may_do(drive, tmp_path, monkeypatch):
    drive.put("f/big.bin", noise(9 * MiB))
    (item,) = drive.server.find(f"{drive.name}/f/big.bin")
    drive.server.edit(item["id"], capabilities={"canEdit": False, "canTrash": False})
    told = {check["name"]: check for check in json_of("doctor", drive.url("f/big.bin"))}
    at = list(told).index("identity")
    of_drive = [
        "identity",
        "account",
        "access",
        "rights",
        "metadata",
        "first byte",
        "one request",
        "at once",
        "settings",
        "limit",
        "to set",
    ]
    assert list(told)[at:] == of_drive
    assert told["identity"]["found"] == "anonymous"
    assert told["account"]["found"] == "me@example.com; 0 bytes used of 16.1 GB"
    assert told["rights"]["found"] == "this account may read"
    assert "27 if its project" in told["settings"]["found"]
    folder = {check["name"]: check["found"] for check in json_of("doctor", drive.url("f"))}
    assert folder["rights"] == "this account may read, list, change, add to, remove"
    for url in ("drive://", "drive://Shared with me", "drive://My Drive"):
        assert {check["state"] for check in json_of("doctor", url)} <= {"ok", "warn"}


def test_doctor_names_the_faster_keys_of_an_array_whose_chunks_are_in_folders(drive):
    for key in ("zarr.json", "c/0/0", "c/0/1"):
        drive.put(f"nested/{key}", b"x")
    for key in ("zarr.json", "c/0", "c/1"):
        drive.put(f"flat/{key}", b"x")
    (chunks,) = (check for check in json_of("doctor", drive.url("nested")) if check["name"] == "chunks")
    assert (chunks["state"], '"separator": "."' in chunks["advice"]) == ("warn", True)
    assert "chunks" not in [check["name"] for check in json_of("doctor", drive.url("flat"))]


@pytest.mark.parametrize(
    ("scopes", "state", "found"),
    [
        (["drive"], "ok", "drive: reading and writing"),
        (["cloud-platform", "drive.readonly"], "warn", "drive.readonly: reading; writes are refused"),
        (["cloud-platform"], "fail", "none of Drive's (cloud-platform)"),
    ],
)
def test_doctor_knows_what_a_sign_in_is_good_for(drive, tmp_path, scopes, state, found):
    saved = {
        "access_token": "ya29.x", "client_id": "me.apps", "client_secret": "SECRET", "refresh_token": "SECRET",
        "token_expiry": None, "token_uri": f"{drive.server.endpoint_url}/token",
        "scopes": [f"https://www.googleapis.com/auth/{scope}" for scope in scopes],
    }  # fmt: skip
    (tmp_path / "saved.json").write_text(json.dumps(saved))
    result = run(
        "doctor", "--json", "-o", f"token={tmp_path}/saved.json", drive.url(), status=state == "fail"
    )
    told = {check["name"]: check for check in json.loads(result.stdout)}
    assert told["identity"]["found"].startswith("saved OAuth credentials of client me.apps")
    assert (told["scopes"]["state"], told["scopes"]["found"]) == (state, found)
    assert "SECRET" not in result.stdout


def test_doctor_says_why_there_is_no_way_to_drive(drive, monkeypatch, tmp_path):
    import fsspec.config

    drive.server.require_token("another")
    (failed,) = [check for check in failing("-o", "token=ya29.old", drive.url()) if check["name"] == "access"]
    assert "it has expired or was revoked: pass a new one" in failed["found"]
    drive.server.require_no_token()
    monkeypatch.setitem(fsspec.config.conf, "drive", {"endpoint_url": drive.server.endpoint_url})
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG", "HOME"):
        monkeypatch.setenv(name, "" if name.startswith("GOOGLE") else str(tmp_path))
    monkeypatch.setattr("google.auth.compute_engine._metadata._NO_GCE_CHECK", True)
    (failed,) = failing(drive.url())
    assert "auth.authenticate_user()" in failed["found"]
    (failed,) = failing("-o", "token=anon", "-o", "endpoint_url=http://127.0.0.1:9", drive.url())
    assert "Connect call failed" in failed["found"]


def failing(*arguments):
    """Return the checks of a doctor that are not well."""
    checks = json.loads(run("doctor", "--json", *arguments, status=1).stdout)
    return [check for check in checks if check["state"] == "fail"]


def test_doctor_names_what_is_wrong_with_the_cache(tmp_path):
    (tmp_path / "file").touch()
    result = run("doctor", "--cache-dir", str(tmp_path / "file" / "x"), status=1)
    assert re.search(r"^fail +cache directory", result.stdout, re.MULTILINE)
    result = run("doctor", "-o", "cache_size=1000", status=1)
    assert re.search(r"^fail +room", result.stdout, re.MULTILINE)


def test_doctor_sees_a_misspelt_configuration(monkeypatch):
    import fsspec.config

    monkeypatch.setitem(fsspec.config.conf, "cachedfs", {"cache_sise": 1})
    result = run("doctor", status=1)
    assert "did you mean 'cache_size'?" in result.stdout


# Errors, options, what is said on stderr.


@pytest.mark.parametrize("command", ["ls", "cat", "get"])
def test_a_missing_object_is_one_line(cloud, command, tmp_path):
    target = [str(tmp_path / "x")] if command == "get" else []
    result = run(command, cloud.url("nothing", "gs://"), *target, status=1)
    assert result.stdout == ""
    assert re.fullmatch(r"cachedfs: .*nothing: no such object.*\n", result.stderr)


@pytest.mark.parametrize("command", ["ls", "cat", "pin", "verify"])
def test_where_one_of_several_urls_names_nothing_the_others_are_done(cloud, command):
    for name in ("a", "c"):
        cloud.put(name, b"of " + name.encode())
    urls = [cloud.url(name, "gs://") for name in ("a", "b", "c", "d*")]
    alone = [run(command, urls[at]).stdout for at in (0, 2)]
    result = run(command, *urls, status=1)
    assert result.stdout == "".join(alone) != ""
    told = result.stderr.splitlines()
    assert [urls[1] in told[0], urls[3] in told[1], len(told)] == [True, True, 2]
    if command != "cat":
        result = run(command, "--json", *urls, status=1)
        assert [each["url"] for each in json.loads(result.stdout)] == [urls[0], urls[2]]
        assert [json.loads(line)["error"]["url"] for line in result.stderr.splitlines()] == [urls[1], urls[3]]


def test_errors_as_json(cloud):
    result = run("cat", "--json", cloud.url("nothing", "gs://"), status=1)
    error = json.loads(result.stderr)["error"]
    assert result.stdout == ""
    assert (error["type"], error["url"]) == ("ObjectNotFound", cloud.url("nothing", "gs://"))
    assert "no such object" in error["message"]


def test_no_traceback_unless_debug(cloud):
    url = cloud.url("nothing", "gs://")
    assert len(run("cat", url, status=1).stderr.splitlines()) == 1
    told = CliRunner().invoke(app, ["cat", "--debug", url]).stderr
    assert "Traceback (most recent call last)" in told
    assert told.splitlines()[-1].startswith("cachedfs: ")


def test_what_nobody_expected_asks_for_a_report(monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("boom")

    monkeypatch.setattr(reading, "entries_of", broken)
    result = run("ls", ".", status=1)
    assert result.stderr == (
        "cachedfs: unexpected RuntimeError: boom (run with --debug for the traceback; please report)\n"
    )


def test_an_interrupt_is_130(monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(reading, "entries_of", interrupted)
    assert run("ls", ".", status=130).output == ""


@pytest.mark.parametrize("module", ["typer", "fsspec"])  # before a command, and in it
def test_ctrl_c_in_what_python_executes_as_text_is_130_too(cloud, tmp_path, module):
    # As where a dataclass is made while a module is imported.
    (tmp_path / f"{module}.py").write_text("exec('raise KeyboardInterrupt')")
    environ = cloud._environment() | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "cachedfs", "cat", cloud.url("key", "gs://")]
    done = subprocess.run(command, env=environ, capture_output=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_ctrl_c_in_the_middle_of_a_copy(cloud, tmp_path):
    cloud.put("key", noise(20 * MiB))
    cloud.server.fail(Fault(kind="media", nth=2, times=None, stall_s=3600))
    target = tmp_path / "copy" / "key"
    assert (
        interrupted(lambda: list(tmp_path.glob("copy/*.part")), "get", cloud.url("key", "gs://"), str(target))
        == ""
    )
    assert list(tmp_path.glob("copy/*")) == []


def test_ctrl_c_while_drive_does_not_answer(drive, monkeypatch):
    drive.server.fail(Fault(kind="list", stall_s=3600, times=100))
    monkeypatch.setattr(
        "cachedfs.origins.drive.client.RetryPolicy", functools.partial(RetryPolicy, stall_s=3600.0)
    )
    assert interrupted(lambda: drive.server.count(kind="list"), "ls", drive.url()) == ""


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
        (["get", "-r", "cdrive://My", "Drive/x", "."], "cdrive://My Drive/x"),
        (["mount", "drive://Shared", "with", "me/x", "mnt"], "drive://Shared with me/x"),
        (["doctor", "drive://My", "Drive/x"], "drive://My Drive/x"),
        (["pack", "/content/drive/Shared", "drives/x", "out"], "/content/drive/Shared drives/x"),
        (["pin", "drive://shared:Team", "A/x"], "drive://shared:Team A/x"),
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
    common = CommonOptions(
        options=("max_age=0", "token=anon", "requester_pays=true", "cache_size=1GB"), cache_dir="/x"
    )
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
    before = run("--json", "--cache-dir", str(tmp_path / "x"), "stats").stdout
    after = run("stats", "--json", "--cache-dir", str(tmp_path / "x")).stdout
    assert json.loads(before)["directory"] == json.loads(after)["directory"]
    assert str(tmp_path / "x") in before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ls -o cache_sise=1 gs://b", "did you mean"),
        ("ls -o max_age gs://b", "NAME=VALUE"),
        ("doctor -o max_age", "NAME=VALUE"),
        ("cat --range 10 gs://b/k", "START:STOP"),
        ("ls -o max_age=lots gs://b", "max_age='lots'"),
        ("ls -o max_age=-1 gs://b", "max_age"),
        ("ls -o concurrency=1.5 gs://b", "concurrency"),
        ("ls -o block_size=1 gs://b", "block_size"),
        ("ls -o max_agee=0 gs://b", "max_age"),
    ],
)
def test_mistaken_options_are_wrong_usage(words, said):
    assert said in run(*words.split(), status=2).stderr


def test_what_storing_warns_of_at_the_end_is_a_line_as_the_others(cloud, monkeypatch):
    drain = StoreQueue.drain

    def late(self, timeout_s=5.0):
        drain(self, timeout_s)
        logging.getLogger("cachedfs.cache").warning("blocks are not cached")

    cloud.put("key", b"1")
    monkeypatch.setattr(StoreQueue, "drain", late)
    assert run("cat", cloud.url("key", "gs://")).stderr == "cachedfs: warning: blocks are not cached\n"


def test_log_and_warnings_are_single_lines(capsys):
    with output.log_in_lines(debug=False):
        logging.getLogger("cachedfs.core").warning("the %s is away", "origin")
        logging.getLogger("cachedfs.core").info("nobody needs this")
        warnings.simplefilter("always")
        warnings.warn("this is old", DeprecationWarning, stacklevel=1)
    assert (
        capsys.readouterr().err == "cachedfs: warning: the origin is away\ncachedfs: warning: this is old\n"
    )


def test_trouble_with_the_cache_is_a_line_and_no_failure(cloud, tmp_path):
    cloud.put("key", b"data")
    (tmp_path / "file").touch()
    result = run("cat", "--cache-dir", str(tmp_path / "file"), cloud.url("key", "gs://"))
    assert result.stdout == "data"
    assert re.fullmatch(r"cachedfs: warning: blocks are not cached: .*\n", result.stderr)


@pytest.mark.parametrize("package", ["typer", "rich"])
@pytest.mark.parametrize(
    "entry",
    [
        "from cachedfs.cli import main; main()",  # the script
        "import runpy; runpy.run_module('cachedfs', run_name='__main__')",
    ],
)
def test_without_its_packages_it_says_what_to_install(cloud, package, entry):
    code = f"import sys; sys.modules[{package!r}] = None; {entry}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=cloud._environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1
    assert done.stderr == 'The command line needs typer and rich: pip install "cachedfs[cli]"\n'


def test_help_imports_no_filesystem():
    code = """
        import sys
        from cachedfs import cli
        try:
            cli.main(["ls", "--help"])
        except SystemExit:
            pass
        print(sorted({"fsspec", "aiohttp", "sqlite3", "asyncio"} & set(sys.modules)))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.endswith("\n[]\n")


def test_help_that_nobody_reads_to_its_end_is_a_closed_pipe(cloud):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "cachedfs", "ls", "--help"]
    process = subprocess.run(command, env=cloud._environment(), stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, b"")


@pytest.mark.parametrize("line", ["stats", "cat"])
def test_with_its_output_closed_a_command_does_its_work(cloud, line):
    cloud.put("key", b"data")
    url = "" if line == "stats" else cloud.url("key", "gs://")
    command = f'"{sys.executable}" -m cachedfs {line} {url} >&-'
    done = subprocess.run(
        command, shell=True, env=cloud._environment(), stderr=subprocess.PIPE, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "unexpected" not in done.stderr


@pytest.mark.parametrize("line", ["sim nothing", "sim gcs --profile zzz", "sim drive --quota zzz"])
def test_a_cloud_that_cannot_be_is_not_announced(line):
    assert "export" not in run(*line.split(), status=2).output


# Help and page.


def test_the_help_has_one_line_for_each_command_in_the_order_of_the_page(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    below = run("--help").stdout.partition("Commands")[2]
    on_page = re.findall(r"\[`(\w+)`\]\(#", "".join(re.findall(r"^\|.*?\|", PAGE, re.MULTILINE)))
    assert re.findall(r"^│ (\w*) ", below, re.MULTILINE) == on_page == COMMANDS
    assert run("--version").stdout == "cachedfs 0.1.0\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = run(command, "--help").stdout
    assert "Exit status 0: success, 1: failure, 2: wrong usage, 130: Ctrl-C" in text
    assert re.search(rf"^ cachedfs {command}\b", text.partition("Examples")[2], re.MULTILINE)
    assert "…" not in text
    for line in text.partition("Examples")[2].splitlines():
        assert not line.strip() or line.startswith(" cachedfs "), f"wrapped: {line}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_is_on_the_page(command):
    assert f"## {command}\n" in PAGE
    section = PAGE.partition(f"## {command}\n")[2].partition("\n## ")[0]
    assert f"cachedfs {command}" in section


def test_exit_statuses_on_the_page():
    statuses = {int(number) for number in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    assert statuses == {0, 2, FAILED, INTERRUPTED, PIPE_CLOSED}


def sessions():
    """Yield (is about, command, output) of what the page shows, in order; what runs until Ctrl-C is tested above."""
    for note, text in re.findall(r"^```text ?(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        for command, shown in re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
            if not command.startswith("cachedfs sim"):
                yield note == "about", command, shown


def shell(command):
    """Do what a shell does with a line of the page: variables, one command, then `> file` or `| program`."""
    line, _, program = command.partition(" | ")
    line, _, file = line.partition(" > ")
    words = shlex.split(line)
    environ = dict(word.split("=", 1) for word in words[: words.index("cachedfs")])
    arguments = words[words.index("cachedfs") + 1 :]
    log_events(environ.get("CACHEDFS_EVENTS"))  # read when a process begins
    if not program and not file:
        return in_terminal(*arguments, **environ)
    with open(file or "piped", "w") as stdout:
        in_terminal(*arguments, stdout=stdout, **environ)
    if file:
        return ""
    with open("piped") as piped:
        return subprocess.run(shlex.split(program), stdin=piped, capture_output=True, text=True).stdout


def test_the_page_shows_what_is_printed(tmp_path, monkeypatch):
    # Of a name that is always as long: lines are broken where they are.
    with tempfile.TemporaryDirectory() as home, GCSServer(profile="off") as server:
        server.make_bucket("my-bucket")
        lines = b"".join(b'{"text": "line %d"}\n' % i for i in range(1000))
        server.put("my-bucket", "train.jsonl", lines)
        server.put("my-bucket", "big.bin", noise(32 << 20))
        for i in range(100):
            server.put("my-bucket", f"texts/{i:03}.txt", b"text %d" % i)
        monkeypatch.chdir(home)
        monkeypatch.setenv("HOME", home)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        gs = {"token": "anon", "endpoint_url": server.endpoint_url}
        monkeypatch.setitem(fsspec.config.conf, "gs", gs)
        monkeypatch.setitem(fsspec.config.conf, "cachedfs", {"keep_free": 0})
        compare = doctest.OutputChecker().check_output
        for is_about, command, shown in sessions():
            printed = shell(command)
            same = compare(*(comparable(text, is_about) for text in (shown, printed)), doctest.ELLIPSIS)
            assert same, f"{command} prints\n{printed}\nand not\n{shown}"
        monkeypatch.chdir(tmp_path)


def comparable(text, is_about):
    """Return what of a text does not depend on the machine and on how the test sets it up."""
    text = re.sub(r"\w+ +options.*?(?=\w+ +cache directory)", "", text, flags=re.DOTALL)
    text = re.sub(r"\w+ +write speed.*?(?=\w+ +index)", "", text, flags=re.DOTALL)
    text = re.sub(r"\w+ +limit .*?(?=\w+ +to set)", "", text, flags=re.DOTALL)
    # What fills a link is seen where several requests get more than one does, and not on a busy machine.
    text = re.sub(
        r"(The\s+link\s+gives.*?fill\s+it\.|\d+\s+requests\s+at\s+a\s+time\s+would.*?of\s+10\.)",
        "",
        text,
        flags=re.DOTALL,
    )
    if is_about:
        text = re.sub(r"\d[\d.,]*( [kMG]?B\b| bytes)?", "#", text)
    return " ".join(text.split()) + "\n"
