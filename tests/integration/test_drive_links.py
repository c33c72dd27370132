"""Links to Google Drive, opened through the cache and by the command line."""

import fsspec
import pytest

from cachedfs.cli import urls
from tests.cli.helpers import run
from tests.support import files_below, forget

SITE = "https://drive.google.com"
ID = "1sTWaJ_j7PkjzaBWtNc3IzovK5hQf21FbOw9yLeeLPNQ"


@pytest.fixture
def file_id(drive):
    drive.put("sub/a.csv", b"1,2\n3,4\n")
    return drive.server.find(f"{drive.name}/sub/a.csv")[0]["id"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def folder_id(drive, file_id):
    return drive.server.find(f"{drive.name}/sub")[0]["id"]


def test_every_form_of_a_file_is_one_file_of_the_cache(drive, file_id):
    for n, url in enumerate(
        (
            f"cachedfs::{SITE}/file/d/{file_id}/view?usp=sharing",
            f"cachedfs::drive://{SITE}/open?id={file_id}",
            f"cdrive://{file_id}",
        )
    ):
        drive.asked()
        with fsspec.open(url) as file:
            assert file.read() == b"1,2\n3,4\n"
        assert bool(drive.asked()) is (n == 0)
        (same,) = fsspec.open_files([url])  # as dask and pandas do
        fs, path = fsspec.url_to_fs(url)
        assert fs.info(path)["name"] == fs.info(same.path)["name"] == f"id:{file_id}"
        assert fs.unstrip_protocol(path).endswith(f"drive://id:{file_id}")
        forget()


def test_a_link_to_a_folder_is_a_folder(drive, folder_id):
    link = f"cachedfs::{SITE}/drive/folders/{folder_id}"
    fs, path = fsspec.url_to_fs(f"{link}?usp=sharing")
    assert fs.ls(path, detail=False) == fs.find(path) == [f"id:{folder_id}/a.csv"]
    assert fs.glob(f"{SITE}/drive/folders/{folder_id}/*.csv") == [f"id:{folder_id}/a.csv"]
    for url in (f"{link}/a.csv", f"{link}?usp=sharing/a.csv"):
        with fsspec.open(url, "rt") as file:
            assert file.readline() == "1,2\n"


def test_plain_web_addresses_have_a_filesystem_of_their_own(drive, file_id):
    """fsspec would take an existing one for a link, as only their URLs differ."""
    for _ in range(2):
        assert fsspec.url_to_fs("cachedfs::https://example.org/x")[0].target_protocol == "https"
        assert fsspec.url_to_fs(f"cachedfs::{SITE}/open?id={file_id}")[0].target_protocol == "drive"


def test_what_a_link_or_an_id_names_is_copied_under_its_own_name(drive, file_id, folder_id, here):
    run("get", file_id)
    run("get", f"drive://id:{file_id}", ID)  # after a URL it is the name of the copy
    assert {path.name for path in here.iterdir()} == {"a.csv", ID}
    assert "TARGET" in run("get", ID, status=2).output  # and so is what exists
    drive.server.put("deep/b.txt", b"deep", parent=folder_id)
    drive.server.edit(file_id, name="a/../b.csv")
    run("get", f"{SITE}/drive/folders/{folder_id}", f"{SITE}/open?id={file_id}", "-o", "max_age=0")
    assert files_below(here).keys() == {"a.csv", ID, "a／..／b.csv", "sub/a／..／b.csv", "sub/deep/b.txt"}
    drive.server.edit(file_id, name="..")
    assert "leads out of" in run("get", f"{SITE}/open?id={file_id}", "-o", "max_age=0", status=1).output


def test_commands_take_links_and_paths_of_colab(drive, file_id, folder_id):
    colab = f"/content/drive/MyDrive/{drive.name}/sub"
    for url in (f"{SITE}/drive/folders/{folder_id}?usp=sharing", f"drive://{folder_id}", colab):
        assert run("ls", "-o", "max_age=60", url).stdout.split("/")[-1] == "a.csv\n"
    for url in (f"cdrive://{SITE}/open?id={file_id}", f"{colab}/a.csv"):
        assert run("cat", "-o", "token=anon", url).stdout == "1,2\n3,4\n"
    assert "file/d/ID" in run("cat", f"{SITE}/drive/recent", status=1).output


def test_a_mounted_drive_is_a_local_folder(monkeypatch):
    path = "/content/drive/MyDrive/a"
    assert urls.cached_url(path) == "cachedfs::drive://My Drive/a"
    monkeypatch.setattr("os.path.lexists", lambda path: path == "/content/drive")
    assert urls.cached_url(path) == f"cachedfs::file://{path}"


@pytest.mark.parametrize(
    "text", [ID, f"drive.google.com/open?id={ID};", f" {SITE}/open?id={ID}", f"cachedfs::{ID}"]
)
def test_a_link_or_an_id_needs_no_protocol_where_no_local_file_has_its_name(text, monkeypatch):
    assert urls.cached_url(text) == f"cachedfs::drive://id:{ID}"
    monkeypatch.setattr("os.path.lexists", lambda path: path == ID)
    assert (urls.drive_url(text) is None) == (text.endswith(f"::{ID}") or text == ID)
