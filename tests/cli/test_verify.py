"""The command `verify`."""

import json

from tests.cache.helpers import flip
from tests.cli.helpers import json_of, run
from tests.support import forget, noise


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
    lines = run("verify", url, status=1).stdout.splitlines()
    removed = f"{cloud.url('a/two', 'gs://')}: 1 block removed: damaged on the disk; block 0: "
    counts = "1 block of 2 objects correct, 1 wrong and removed; 1 complete and equal to the origin's"
    assert lines[0].startswith(removed)
    assert lines[1:] == [f"{url}: {counts}"]
    assert " wrong" not in run("verify", url).stdout


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
