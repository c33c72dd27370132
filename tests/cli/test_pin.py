"""The commands `pin` and `unpin`."""

from tests.cli.helpers import json_of, run
from tests.support import MiB, forget, noise


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
    for key in ("a/one", "a/b/two", "ab", "x.txt", "runs/1/a", "runs/1/b/c", "runs/2/a"):
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
    assert run("unpin", "--all").stdout == "all: 2 objects unpinned\n"
    assert json_of("stats")["pins"] == []
    assert cloud.asked() == []


def test_pins_of_all_commands_that_the_cache_may_not_hold_are_named(cloud):
    bound = ("-o", "cache_size=8MiB", "-o", "keep_free=0")
    for name in "ab":
        cloud.put(name, noise(4 * MiB))
    run("pin", *bound, cloud.url("a", "gs://"))
    said = run("pin", *bound, cloud.url("b", "gs://"), status=1).stderr
    assert "all pinned objects are 8.4 MB, more than the" in said
    assert json_of("stats")["pins"] == [cloud.path("a"), cloud.path("b")]
