"""The command `get`."""

import json
import re

import pytest

from cachedfs.cli import get
from cachedfs.sim import Fault
from tests.cli.helpers import in_terminal, interrupted, json_of, run
from tests.support import MiB, files_below, noise


def test_get_copies_objects_and_folders(cloud, tmp_path):
    files = {"a/one": noise(10), "a/b/two": noise(5 * MiB), "three": b""}  # not all at a time
    for key, data in files.items():
        cloud.put(key, data)
    result = run("get", "-r", cloud.url(prefix="gs://"), str(tmp_path / "new" / "copy"))
    assert re.match(r"3 files, 5\.2 MB in .*; 0 bytes of them from the cache", result.stderr)
    assert files_below(tmp_path / "new") == {f"copy/{key}": data for key, data in files.items()}


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
    wanted = {"here/two", "here/a/one", "other", "both/a/one", "both/two", "matched/two"}
    assert {name for name in files_below(tmp_path) if not name.startswith("cache/")} == wanted


def test_get_copies_once_what_several_urls_name(cloud, tmp_path):
    for key in ("a/x", "a/y", "b/a/z"):
        cloud.put(key, key.encode())
    urls = [cloud.url("a/*", "gs://"), cloud.url("a/x", "cgs://"), cloud.url("a*/*", "gs://")]
    assert json_of("get", *urls, str(tmp_path / "to"))["files"] == 2
    folders = [cloud.url(name, "gs://") for name in ("a", "b/a")]
    # Of one name, they come together.
    assert json_of("get", "-r", *folders, str(tmp_path / "to"))["files"] == 3
    assert files_below(tmp_path / "to").keys() == {"x", "y", "a/x", "a/y", "a/z"}


def test_get_copies_the_others_where_one_file_has_no_bytes_or_one_url_names_nothing(drive, tmp_path):
    drive.put("f/a.txt", b"one")
    drive.server.document(f"{drive.name}/f/report", "words")
    drive.put("f/z.txt", b"two!")
    arguments = ("-r", drive.url("f"), drive.url("none"), str(tmp_path / "copy"))
    told = run("get", *arguments, status=1)
    assert files_below(tmp_path / "copy") == {"f/a.txt": b"one", "f/z.txt": b"two!"}
    first, second, third = told.stderr.splitlines()
    assert re.match(r"cachedfs: .*/none.*no such", first)
    assert re.match(r"cachedfs: .*/f/report.*document of Google's own", second)
    assert re.match(r"2 files, 7 bytes in .*; 2 files not copied$", third)
    done = json.loads(run("get", "--json", *arguments, status=1).stdout)
    assert (done["files"], done["bytes"], done["from_cache"]) == (2, 7, 7)
    assert [(each["url"], each["type"]) for each in done["failed"]] == [
        (drive.url("none"), "ObjectNotFound"),
        (drive.url("f/report"), "NotDownloadable"),
    ]
    alone = run("get", drive.url("f/report"), str(tmp_path / "one"), status=1)
    assert alone.stderr.startswith("cachedfs: ")


def test_get_writes_only_below_its_target_and_names_what_cannot_be_local(cloud, tmp_path):
    nul, long = "d/a\0b", f"d/{'n' * 300}"
    bad = ("d/../../escaped", nul, long, f"d/{'m' * 300}/x", "d/e/")
    for key in ("d/a", "d/e/b", *bad):
        cloud.put(key, b"1")
    result = run("get", "-r", cloud.url("d", "gs://"), str(tmp_path / "to"), status=1)
    *failed, done = result.stderr.splitlines()
    for key in bad:
        assert any(f"gs://{cloud.path(key)} cannot be a local file: " in line for line in failed), key
    assert done.startswith("2 files, 2 bytes in ")
    assert files_below(tmp_path / "to").keys() == {"a", "e/b"}
    assert not list(tmp_path.rglob("escaped"))
    for key in (nul, long):
        alone = run("get", cloud.url(key, "gs://"), str(tmp_path) + "/", status=1).stderr
        assert alone.startswith(f"cachedfs: {cloud.url(key, 'gs://')} cannot be a local file: ")


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
    # The temporary one beside it is of no use.
    assert run("get", one, "/proc/x", status=1).stderr == "cachedfs: /proc/x: No such file or directory\n"
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


def test_a_copy_whose_name_was_not_typed_is_named_and_replaces_nothing_unasked(drive, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drive.put("f/notes.txt", b"of Drive")
    (item,) = drive.server.find(f"{drive.name}/f/notes.txt")
    link, local = f"https://drive.google.com/file/d/{item['id']}/view", tmp_path / "notes.txt"
    assert run("get", link).stdout == "notes.txt\n"
    local.write_bytes(b"mine")
    assert "notes.txt would be replaced: add --force" in run("get", link, status=1).stderr
    assert "Replace notes.txt?" in in_terminal("get", link, typed="n\n")
    assert local.read_bytes() == b"mine"
    in_terminal("get", link, typed="y\n")
    assert local.read_bytes() == b"of Drive"
    assert json_of("get", "--force", link)["written"] == ["notes.txt"]
    assert run("get", link, "notes.txt").stdout == "", "a typed name, as with cp"
    folder = f"https://drive.google.com/drive/folders/{drive.server.folder(f'{drive.name}/f')}"
    assert run("get", folder).stdout == "f\n"
    assert "f/notes.txt would be replaced" in run("get", folder, status=1).stderr


@pytest.mark.parametrize(("size", "n"), [(1, 128), (5 << 20, 64), (1 << 40, 8), (None, 8)])
def test_get_bounds_files_and_memory(size, n):
    assert get.Copy(None, "key", "key", size).n_at_once() == n


def test_ctrl_c_in_the_middle_of_a_copy(cloud, tmp_path):
    cloud.put("key", noise(20 * MiB))
    cloud.server.fail(Fault(kind="media", nth=2, times=None, stall_s=3600))
    target = tmp_path / "copy" / "key"
    assert (
        interrupted(lambda: list(tmp_path.glob("copy/*.part")), "get", cloud.url("key", "gs://"), str(target))
        == ""
    )
    assert list(tmp_path.glob("copy/*")) == []
