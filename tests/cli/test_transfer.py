"""The commands `export` and `import`."""

import re

from tests.cache.helpers import flip
from tests.cli.helpers import json_of, run
from tests.support import MiB, forget, noise


def test_export_and_import_carry_a_cache(cloud, tmp_path):
    for i in range(20):
        cloud.put(f"d/{i:02}", noise(1000, i))
    run("prefetch", cloud.url("d", "gs://"))
    target = str(tmp_path / "carry")
    text = run("export", cloud.url("d", "gs://"), target).stderr
    assert re.match(r"20 objects, 20 blocks, 20\.0 kB in 2 files; 20\.0 kB sent in ", text)
    assert "; all of it was there already\n" in run("export", cloud.url("d", "gs://"), target).stderr
    forget()
    again = ("import", target, "--cache-dir", str(tmp_path / "other"))
    done = json_of(*again)
    assert (done["blocks"], done["here"], done["left"], done["bad"]) == (20, 0, 0, [])
    assert run(*again).stderr == "0 blocks, 0 bytes fetched; 20 were here already\n"


def test_import_of_what_is_damaged_or_does_not_fit_fails(cloud, tmp_path):
    cloud.put("d/a", noise(4 * MiB))
    run("prefetch", cloud.url("d", "gs://"))
    target = tmp_path / "carry"
    run("export", cloud.url("d", "gs://"), str(target))
    forget()
    small = ("import", str(target), "--cache-dir", str(tmp_path / "small"), "-o", "cache_size=3MiB")
    assert re.search(r"; [234] have no room: raise cache_size", run(*small, status=1).stderr)
    flip(next(target.rglob("runs/*/*")), 5000)
    forget()
    broken = run("import", str(target), "--cache-dir", str(tmp_path / "other"), status=1).stderr
    assert broken.count("block 0 of") == 1
    assert "3 blocks, 3.1 MB fetched" in broken
    assert "run export again" in run("import", str(tmp_path / "none"), status=1).stderr


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
