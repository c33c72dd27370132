"""The command `cat`."""

import json

from tests.cli.helpers import in_terminal, run, start
from tests.support import MiB, forget, noise


def test_cat_gives_the_bytes_and_the_second_one_asks_nobody(cloud):
    data = cloud.put("big", noise(9 * MiB + 7)) + cloud.put("small", noise(100))
    urls = [cloud.url("big", "gs://"), cloud.url("small", "gs://")]
    assert run("cat", *urls).stdout_bytes == data
    assert "media" in cloud.asked()
    forget()
    assert run("cat", *urls).stdout_bytes == data
    assert cloud.asked() == []


def test_cat_ranges_are_slices_and_a_small_one_is_one_request(cloud):
    data = cloud.put("key", noise(9 * MiB))
    run("cat", "--range", "9000000:9000010", cloud.url("key", "gs://"))
    assert cloud.asked() == ["media"]
    for text in ("0:10", "-10:", "5:", ":", "2000000:2000010", ":-5", "3:1", "9999999:", "100:9000000"):
        start, stop = (int(part) if part else None for part in text.split(":"))
        assert run("cat", "--range", text, cloud.url("key", "gs://")).stdout_bytes == data[start:stop]


def test_a_slash_at_the_end_is_part_of_the_name_of_an_object_and_not_of_a_folder(cloud):
    cloud.put("d/", b"bytes")
    cloud.put("d/x", b"1")
    url = f"gs://{cloud.path('d/')}"
    assert run("cat", url).stdout == "bytes"
    assert run("ls", url).stdout == run("ls", cloud.url("d", "gs://")).stdout == f"{url}\n{url}x\n"
    assert json.loads(run("prefetch", "--json", url).stdout)["files"] == 2


def test_cat_of_a_pattern_is_all_of_them_by_name(cloud):
    for key in ("a.txt", "b.txt", "c.bin"):
        cloud.put(key, key.encode())
    assert run("cat", cloud.url("*.txt", "gs://")).stdout == "a.txtb.txt"
    assert "nothing has such a name" in run("cat", cloud.url("*.tif", "gs://"), status=1).stderr


def test_cat_into_a_file_shows_how_far_it_is_and_leaves_only_bytes(cloud, tmp_path):
    data = cloud.put("big", noise(9 * MiB))
    url = cloud.url("big", "gs://")
    for option, is_shown in ([], True), (["--json"], False):
        with open(tmp_path / "copy", "w") as copy:
            seen = in_terminal("cat", *option, url, stdout=copy, TERM="xterm")
        assert ("/9.4 MB" in seen) == is_shown
        assert (tmp_path / "copy").read_bytes() == data


def test_cat_ends_quietly_when_its_reader_does(cloud):
    cloud.put("key", noise(12 * MiB))
    process = start(cloud, "cat", cloud.url("key", "gs://"))
    assert len(process.stdout.read(10)) == 10
    process.stdout.close()
    assert process.wait(120) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
