"""Links and other ways to write a Drive path, and the canonical path of each."""

import pytest

from cachedfs.origins.drive_links import canonical_path, is_bare_link, is_drive_link
from cachedfs.origins.registry import strip

ID = "1sTWaJ_j7PkjzaBWtNc3IzovK5hQf21FbOw9yLeeLPNQ"
KEY = "0-a8Xq1ZkPq2mC5hJ3wKfL0A"
DRIVE = "0AFpK3Xx8AmgsUk9PVA"
LINKS = {
    f"https://drive.google.com/file/d/{ID}/view?usp=sharing": f"id:{ID}",
    f"https://drive.google.com/file/d/{ID}": f"id:{ID}",
    f"https://drive.google.com/file/u/1/d/{ID}/edit": f"id:{ID}",
    f"https://drive.google.com/a/example.org/file/d/{ID}/view": f"id:{ID}",
    f"https://drive.google.com/file/d/{ID}/view?usp=drive_link&resourcekey={KEY}": f"id:{ID},resourcekey={KEY}",
    f"https://drive.google.com/open?id={ID}": f"id:{ID}",
    f"https://drive.google.com/uc?id={ID}&export=download": f"id:{ID}",
    f"https://drive.usercontent.google.com/download?id={ID}&confirm=t&uuid=1-2": f"id:{ID}",
    f"https://drive.google.com/drive/folders/{ID}": f"id:{ID}",
    f"https://drive.google.com/drive/u/0/folders/{ID}/": f"id:{ID}",
    f"https://drive.google.com/drive/folders/{ID}/sub/a b?.csv": f"id:{ID}/sub/a b?.csv",
    f"https://drive.google.com/drive/folders/{ID}?resourcekey={KEY}&usp=sharing/sub/a.csv": (
        f"id:{ID},resourcekey={KEY}/sub/a.csv"
    ),
    f"https://drive.google.com/drive/u/0/mobile/folders/{ID}?usp=sharing": f"id:{ID}",
    f"https://drive.google.com/thumbnail?id={ID}&sz=w1000": f"id:{ID}",
    f"https://www.googleapis.com/drive/v3/files/{ID}?alt=media&key=AIza": f"id:{ID}",
    f"HTTPS://Drive.Google.COM/file/d/{ID}/view": f"id:{ID}",
    f"<https://drive.google.com/file/d/{ID}/view>": f"id:{ID}",
    f"https://drive.google.com/file/d/{ID}/view?usp=sharing;": f"id:{ID}",
    f"https://drive.google.com/uc\\?id\\={ID}\\&export\\=download": f"id:{ID}",
    f"https://drive.google.com/drive/folders/{ID}\\?resourcekey\\={KEY}/a\\b;": f"id:{ID},resourcekey={KEY}/a\\b;",
    f"https://drive.google.com/drive/folders/{ID.replace('_', chr(92) + '_')}": f"id:{ID}",
    "https://drive.google.com/drive/u/0/my-drive?ths=true": "My Drive",
    "https://drive.google.com/drive/shared-with-me": "Shared with me",
    f"https://docs.google.com/document/d/{ID}/edit?tab=t.0#heading=h.x": f"id:{ID}",
    f"https://drive.google.com/open?id={ID}&q=a/b#c/d": f"id:{ID}",
}
OTHER_PATHS = {
    f"drive.google.com/open?id={ID}": f"id:{ID}",
    f" Drive.google.com/drive/folders/{ID}/a;": f"id:{ID}/a;",
    ID: f"id:{ID}",
    DRIVE: f"id:{DRIVE}",
    "/content/drive/MyDrive/a/b": "My Drive/a/b",
    "/content/drive/My Drive/a b": "My Drive/a b",
    "/content/drive/Shareddrives/Team A/x": "shared:Team A/x",
    "/content/gdrive/Shared drives/Team A": "shared:Team A",
    "MyDrive/a": "My Drive/a",
    "Shareddrives/Team A/x": "shared:Team A/x",
}
CANONICAL = ["", "My Drive", "My Drive/MyDrive/a", "Shared with me/x", "shared:Team A", f"id:{ID}/{ID}"]
NO_PATHS = [
    "a/b",
    "training_data_for_experiments",
    "results.2024.run-A.final.csv",
    f"{ID}/a",
    "MyDriveX",
    "*",
]
PLAIN_URLS = [
    "https://example.org/file/d/" + ID,
    "https://drive.google.com.example.org/open?id=" + ID,
    "https://example.org/?u=https://drive.google.com/open?id=" + ID,
    # What link names is an export of a public document, or a published page: HTTP gives it without an account.
    f"https://docs.google.com/spreadsheets/d/{ID}/export?format=csv",
    "https://docs.google.com/spreadsheets/d/e/2PACX-1vQx0/pub?output=csv",
    f"https://www.googleapis.com/drive/v3/files/{ID}/export?mimeType=text/csv",
]
ELSEWHERE = [f"https://www.googleapis.com/storage/v1/b/{ID}/o/a", "https://www.googleapis.com/"]
PAGES = [
    "https://drive.google.com",
    "https://drive.google.com/drive/recent",
    "https://drive.google.com/open?usp=sharing",
    f"https://drive.google.com/file/d/{ID}/unknown",
    f"https://drive.google.com/open?id={ID}/a",
]


@pytest.mark.parametrize(("given", "canonical"), [*LINKS.items(), *OTHER_PATHS.items()])
def test_each_form_has_one_canonical_path(given, canonical):
    assert canonical_path(given) == canonical
    assert canonical_path(canonical) == canonical
    for url in (given, f"drive://{given}", f"cdrive://{given}", f"cachedfs::drive://{given}"):
        assert strip("cdrive", "drive", url) == canonical


@pytest.mark.parametrize("path", CANONICAL + NO_PATHS)
def test_any_other_path_stays_as_it_is(path):
    assert canonical_path(path) == path


@pytest.mark.parametrize("link", LINKS)
def test_a_link_needs_no_protocol_of_drive(link):
    assert is_drive_link(link)
    assert strip("cachedfs", None, f"cachedfs::{link}") == LINKS[link]


@pytest.mark.parametrize("url", PLAIN_URLS + ELSEWHERE)
def test_any_other_address_is_a_plain_url(url):
    assert not is_drive_link(url)
    assert strip("cachedfs", "https", f"cachedfs::{url}") == strip("cachedfs", None, url) == url


@pytest.mark.parametrize(
    ("text", "is_bare"),
    [(ID, True), (f"drive.google.com/open?id={ID}", True), (f"https://drive.google.com/open?id={ID}", False)]
    + [(path, False) for path in CANONICAL + NO_PATHS],
)
def test_a_link_without_https_and_an_id_may_be_local_paths_too(text, is_bare):
    assert is_bare_link(text) == is_bare


@pytest.mark.parametrize("link", PAGES + PLAIN_URLS[-3:])
def test_a_link_that_names_no_file_is_an_error_that_lists_those_that_do(link):
    with pytest.raises(ValueError, match=r"file/d/ID.*open\?id=ID.*drive/folders/ID.*export"):
        canonical_path(link)
