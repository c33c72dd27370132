"""The command `prefetch`."""

import json
import re

from cachedfs.cli import prefetch
from cachedfs.sim import Fault
from tests.cli.helpers import interrupted, json_of, run
from tests.support import MiB, forget, noise


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


def test_prefetch_of_more_than_fits_stops_and_drives_out_nothing_of_another_url(cloud, monkeypatch):
    monkeypatch.setattr(prefetch, "HELD_S", 0.2)
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
    sent = cloud.server.bytes_sent()
    run("prefetch", "-o", "cache_size=20MiB", *urls, status=1)
    assert cloud.server.bytes_sent() - sent <= 3 * MiB  # what is here is not fetched again, and stays


def test_prefetch_goes_on_after_an_interrupt(cloud):
    for i in range(40):
        cloud.put(f"d/{i:02}", noise(1000, i))
    cloud.server.fail(Fault(kind="media", nth=20, times=None, stall_s=3600))

    def is_half_done():
        blocks = len(list(cloud.cache_dir.glob("cachedfs-*/blocks/*/*")))
        return len(cloud.server.requests) > 20 and blocks >= 15

    said = interrupted(is_half_done, "prefetch", cloud.url("d", "gs://"))
    assert said.endswith("; run the same command again to continue\n")
    cloud.server.heal()
    done = json_of("prefetch", cloud.url("d", "gs://"))
    assert done["files"] == 40
    assert done["here"] >= 15_000
    assert done["fetched"] + done["here"] == 40_000
