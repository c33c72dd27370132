"""Change feeds of Drive: the requests they save, and that every change is seen after `max_age`."""

import dataclasses
import math
import time

import fsspec
import pytest

from cachedfs.sim import Fault
from tests.support import Drive, forget, noise


@pytest.fixture
def fs(drive):
    return fsspec.filesystem("cdrive")


def new_session():
    """Return a filesystem as a new process would have it, with nothing in memory."""
    forget()
    return fsspec.filesystem("cdrive")


@pytest.fixture
def tree(drive):
    """12 folders with 48 files, and their contents."""
    return {
        (path := f"{a}/{b}/{i}.txt"): drive.put(path, noise(300, seed=i))
        for a in "ab"
        for b in ("x", "y", "z/z", "")
        for i in range(6)
        if b
    } | {f"{a}/{i}.txt": drive.put(f"{a}/{i}.txt", noise(100, seed=i)) for a in "ab" for i in range(6)}


def id_of(drive, key):
    return drive.server.find(f"{drive.name}/{key}".rstrip("/"))[0]["id"]


FOLDER = "application/vnd.google-apps.folder"


# Cost in requests.
def test_a_second_session_costs_one_request_when_nothing_changed(drive, fs, tree, clock):
    data = {drive.path(key): content for key, content in tree.items()}
    names = fs.find(drive.path())
    assert names == sorted(data)
    assert fs.cat(names) == data
    drive.asked()
    for _ in range(2):
        clock(3600)
        again = new_session()
        assert again.find(drive.path()) == names
        assert again.cat(names) == data
        assert len(again.ls(drive.path("a"))) == 9
        assert [again.exists(drive.path(key)) for key in ("a/x", "a/none", "none")] == [True, False, False]
        with again.open(drive.path("b/z/z/3.txt")) as file:
            assert file.read() == tree["b/z/z/3.txt"]
        assert drive.asked() == ["change"]


def test_a_shared_drive_has_its_own_feed(drive, fs, clock):
    team = drive.server.share_drive(name := f"team of {drive.name}")
    for i in range(3):
        drive.server.put(f"folder/{i}.txt", b"%d" % i, parent=team)
    names = fs.find(f"shared:{name}")
    assert sorted(fs.cat(names).values()) == [b"0", b"1", b"2"]
    drive.asked()
    clock(3600)
    assert len(new_session().cat(names)) == 3
    assert drive.asked() == ["change"]
    clock(61)
    drive.server.edit(drive.server.find("folder/1.txt", parent=team)[0]["id"], parents=["root"])
    assert new_session().find(f"shared:{name}") == [names[0], names[2]]
    assert drive.asked() == ["change", "list"]


def test_files_that_were_never_listed_cost_one_request_from_the_third_session_on(drive, fs, clock):
    data = {drive.path(f"d/{i}.txt"): drive.put(f"d/{i}.txt", noise(100, seed=i)) for i in range(5)}
    for expected in (
        # The folders and a name, another name, and the rest by a listing.
        [*["list"] * 3, *["media"] * 5],
        # The feed begins; My Drive, two folders, and a listing.
        ["change", "get", *["list"] * 3],
        ["change"],
        ["change"],
    ):
        session = new_session()
        for name, content in data.items():
            assert session.cat_file(name) == content
        assert drive.asked() == sorted(expected)
        clock(3600)


def test_the_feed_is_polled_at_most_once_in_max_age(drive, fs, tree, clock):
    fs.find(drive.path())
    clock(61)
    fs.ls(drive.path("a"))
    drive.asked()
    for _ in range(5):
        clock(10)
        assert len(fs.find(drive.path())) == len(tree)
        assert not fs.exists(drive.path("a/none"))
    assert drive.asked() == []


@pytest.mark.parametrize("options", [{"max_age": "immutable"}, {"max_age": 0}, {"offline": True}])
def test_no_poll_with_immutable_zero_max_age_or_offline(drive, fs, tree, clock, options):
    fs.find(drive.path())
    clock(3600)
    drive.asked()
    other = fsspec.filesystem("cdrive", **options)
    assert len(other.ls(drive.path("a"))) == 9
    assert "change" not in drive.asked()


def cat_below(path, options):
    """Return how many files are below `path`, 2000 s later and in a process of its own."""
    real = time.time
    time.time = lambda: real() + 2000
    fs = fsspec.filesystem("cdrive", max_age=1000, **options)
    return len(fs.cat(fs.find(path)))


def test_processes_share_one_poll(drive, fork_server, fs, tree):
    """The metadata of the first process is at most 2 s old for the second, so its poll serves both."""
    fs.cat(fs.find(drive.path()))
    options = {"cache_dir": str(drive.cache_dir), "keep_free": 0, **drive.options}
    drive.asked()
    forget()
    pids = [
        fork_server.start("tests.core.test_change_feed:cat_below", drive.path(), options) for _ in range(2)
    ]
    assert [fork_server.wait(pid).result for pid in pids] == [len(tree)] * 2
    assert drive.asked() == ["change"]


def test_find_lists_only_the_folders_that_changed(drive, fs, tree, clock):
    fs.find(drive.path())
    clock(61)
    drive.put("b/y/new.txt", b"x")
    drive.asked()
    assert new_session().find(drive.path()) == sorted([*map(drive.path, tree), drive.path("b/y/new.txt")])
    assert drive.asked() == ["change", "list"]


def test_one_name_in_a_huge_folder_costs_one_request(drive, fs):
    folder = drive.server.folder("huge")
    try:
        drive.server.fill(folder, 4000)
        drive.server.reset()
        assert fs.info("My Drive/huge/f003456")["size"] == 16
        assert drive.asked() == ["list"]
        assert fs.cat_file("My Drive/huge/f003457") == b"f003457\nf003457\n"
        assert drive.asked() == ["list", "media"]
    finally:
        drive.server.remove(folder)


def test_a_long_listing_is_not_repeated_for_one_changed_name(drive, fs, clock):
    drive.server.fill(drive.server.folder(f"{drive.name}/long"), 2500)
    drive.server.reset()
    names = fs.ls(drive.path("long"), detail=False)
    assert len(names) == 2500
    assert drive.asked() == ["change", "get", *["list"] * (1 + 3)]  # the folders, and three pages
    clock(3600)
    drive.server.put(f"{drive.name}/long/f000007", b"changed")
    again = new_session()
    assert again.info(names[8])["size"] == 16
    assert again.cat_file(names[7]) == b"changed"
    assert drive.asked() == ["change", "list", "media"]  # one lookup by name, and no page of the listing


# Failures.
def test_a_rejected_token_causes_one_new_listing_and_a_new_token(drive, fs, tree, clock):
    names = fs.find(drive.path())
    drive.server.expire_changes()
    clock(3600)
    drive.put("a/x/0.txt", b"meanwhile")
    drive.asked()
    again = new_session()
    assert again.find(drive.path()) == names
    assert again.cat_file(drive.path("a/x/0.txt")) == b"meanwhile"
    # The rejected token and the new one; then the requests of a first session, and the file.
    assert drive.asked() == ["change", "change", "get", *["list"] * 12, "media"]
    clock(3600)
    assert new_session().find(drive.path()) == names
    assert drive.asked() == ["change"]


def test_a_failing_feed_is_not_polled_for_a_while_and_paths_are_looked_up(drive, fs, tree, clock):
    names = fs.find(drive.path())
    clock(61)
    drive.put("a/x/0.txt", b"meanwhile")
    drive.server.fail(Fault(kind="change", status=403, reason="insufficientPermissions", times=99))
    drive.asked()
    assert fs.find(drive.path()) == names
    assert fs.cat_file(drive.path("a/x/0.txt")) == b"meanwhile"
    assert drive.asked() == ["change", *["list"] * 12, "media"]
    clock(61)
    assert fs.find(drive.path()) == names
    assert "change" not in drive.asked()


def test_a_change_that_the_feed_reports_late_is_seen_then(drive, fs, tree, clock):
    """Drive does not say how late its feed is: metadata may be as old as `max_age` plus that delay."""
    fs.cat(fs.find(drive.path()))
    drive.server.delay_changes(math.inf)
    try:
        drive.put("a/x/0.txt", b"meanwhile")
        clock(61)
        assert fs.cat_file(drive.path("a/x/0.txt")) == tree["a/x/0.txt"]
    finally:
        drive.server.delay_changes(0)
    clock(61)
    assert fs.cat_file(drive.path("a/x/0.txt")) == b"meanwhile"


def test_paths_that_no_feed_covers_are_looked_up(drive, fs, clock):
    drive.put("folder/x.txt", b"x")
    shared = drive.server.shared_with_me(f"{drive.name}.txt", b"y")
    top = f"id:{id_of(drive, 'folder')}"
    for _ in range(2):
        assert fs.ls(top, detail=False) == [f"{top}/x.txt"]
        assert f"Shared with me/{drive.name}.txt" in fs.ls("Shared with me", detail=False)
        assert drive.asked() == ["get", "list", "list"]
        clock(61)
    drive.server.remove(shared)


# Correctness.
def trash_and_back(at):
    at.server.trash(at.id("d/one"))
    at.server.trash(at.id("d/one"), False)


@dataclasses.dataclass
class Folder:
    """A folder at the simulated Drive, with files in it."""

    drive: Drive
    name: str

    def __post_init__(self):
        self.server = self.drive.server
        for key in ("d/one", "d/sub/x", "e/y", "same/two"):
            self.put(key, key.encode())
        self.put("same/two", b"the newer one", new=True)

    def path(self, key=""):
        return self.drive.path(f"{self.name}/{key}").rstrip("/")

    def put(self, key, data, **options):
        self.drive.put(f"{self.name}/{key}", data, **options)

    def id(self, key):
        return id_of(self.drive, f"{self.name}/{key}".rstrip("/"))


EDITS = {
    "content": lambda at: at.put("d/one", b"other"),
    "a name": lambda at: at.server.edit(at.id("d/one"), name="three"),
    "a name that was known to be free": lambda at: at.server.edit(at.id("d/one"), name="free"),
    "a new file": lambda at: at.put("d/free", b"new"),
    "a place": lambda at: at.server.edit(at.id("d/one"), parents=[at.id("e")]),
    "a second place": lambda at: at.server.edit(at.id("d/one"), parents=[at.id("d"), at.id("e")]),
    "the trash": lambda at: at.server.trash(at.id("d/one")),
    "back out of it": trash_and_back,
    "gone": lambda at: at.drive.delete(f"{at.name}/d/one"),
    "gone, with an older one of the name": lambda at: at.server.remove(at.id("same/two")),
    "older than another of the name": lambda at: at.server.edit(
        at.id("same/two"), modifiedTime="2000-01-01T00:00:00.000Z"
    ),
    "an older one of the name gone": lambda at: at.server.edit(
        at.server.find(f"{at.drive.name}/{at.name}/same/two")[1]["id"], name="three"
    ),
    "a newer one of the name": lambda at: at.put("d/one", b"newer", new=True),
    "a place that goes": lambda at: (
        at.server.edit(at.id("d/one"), parents=[at.id("e")]),
        at.server.remove(at.id("e")),
    ),
    "a folder's name": lambda at: at.server.edit(at.id("d"), name="f"),
    "a folder's place": lambda at: at.server.edit(at.id("d"), parents=[at.id("e")]),
    "a folder in the trash": lambda at: at.server.trash(at.id("d")),
    "a folder gone": lambda at: at.server.remove(at.id("d")),
    "a newer folder of the name": lambda at: at.server.put(
        "one", b"in the newer", parent=at.server.add("d", b"", parent=at.id(""), mimeType=FOLDER)
    ),
    "another drive": lambda at: at.server.edit(
        at.id("d"), parents=[at.server.share_drive(f"to {at.drive.name}")]
    ),
}


@pytest.mark.parametrize("by", ["listing", pytest.param("name", marks=pytest.mark.stress)])
def test_every_kind_of_change_is_seen_after_max_age(drive, own_cache, clock, by):
    """One change after another, each in its own folder and reported by its own poll."""
    truth = fsspec.filesystem("cdrive", max_age=0, cache_dir=f"{own_cache}-truth")
    fs = fsspec.filesystem("cdrive")
    folders = {what: Folder(drive, f"case {number}") for number, what in enumerate(EDITS)}
    names = ("d/one", "same/two", "d/free", "d/sub/x", "e/one", "e/d/one", "f/one", "d", "e")

    def look(fs, folder):
        if by == "listing":
            return seen(fs, [folder.path()], [])
        return seen(fs, [], [folder.path(name) for name in names])

    before = {what: look(fs, folder) for what, folder in folders.items()}
    for what, edit in EDITS.items():
        clock(61)
        assert look(fs, folders[what]) == before[what], what
        edit(folders[what])
        clock(61)
        after = look(truth, folders[what])
        assert look(fs, folders[what]) == after, what
        assert (after == before[what]) == (what == "back out of it"), what


def test_items_behind_a_shortcut_are_looked_up(drive, fs, clock):
    drive.put("target/x", b"before")
    drive.put("file", b"before")
    drive.server.shortcut(f"{drive.name}/link", id_of(drive, "target"))
    drive.server.shortcut(f"{drive.name}/d/link", id_of(drive, "file"))
    for name in ("link", "d", "link/x", "d/link"):
        fs.ls(drive.path(name))
        fs.info(drive.path(name))
    drive.server.delay_changes(math.inf)
    try:
        for key in ("target/x", "file"):
            drive.put(key, b"and after")
        clock(61)
        fs.info(drive.path("link"))
        assert [info["size"] for name in ("link", "d") for info in fs.ls(drive.path(name))] == [9, 9]
        assert fs.info(drive.path("link/x"))["size"] == fs.info(drive.path("d/link"))["size"] == 9
    finally:
        drive.server.delay_changes(0)


def seen(fs, tops, paths):
    """Return all that a reader can see: listings level by level, find, and each path alone."""
    found = {}
    for top in tops:
        for here, folders, files in fs.walk(top, detail=True):
            found[f"{here}/"] = {**folders, **files}
        found[f"find {top}"] = fs.find(top, withdirs=True, detail=True)
    for path in paths:
        try:
            found[path] = fs.info(path)
        except FileNotFoundError:
            found[path] = None
    return found
