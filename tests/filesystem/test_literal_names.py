"""Names with wildcard characters: an existing object is taken by its name, anything else is a pattern."""

import asyncio

import fsspec
import pytest

from tests.support import files_below

ODD = ["report [1].txt", "a*b", "x?y"]
OTHERS = ["report 1.txt", "aab", "xyy"]  # that the odd names match as patterns
DATA = {name: name.encode() for name in ODD + OTHERS}


class Folder:
    """A folder `d` in a simulated cloud that holds DATA."""

    def __init__(self, machine, protocol):
        self.machine = machine
        self.fs = fsspec.filesystem(protocol)
        for name, data in DATA.items():
            machine.put(f"d/{name}", data)

    def path(self, name):
        return self.machine.path(f"d/{name}")

    def names(self, folder="d"):
        """Return what the service holds, as somebody else sees it."""
        self.fs.invalidate_cache()
        top = self.machine.path(folder)
        return [path.removeprefix(f"{top}/") for path in self.fs.find(top)]

    def listed(self):
        """Return the filesystem, which knows the folder."""
        self.fs.find(self.machine.path("d"))
        self.machine.asked()
        return self.fs


@pytest.fixture(params=["cgs", "cdrive"])
def folder(request):
    return Folder(request.getfixturevalue("cloud" if request.param == "cgs" else "drive"), request.param)


def test_cat_of_what_was_found_has_all_of_it(folder):
    fs = folder.listed()
    paths = fs.find(folder.machine.path("d"))
    assert fs.cat(paths) == asyncio.run(fs._cat(paths)) == {folder.path(name): DATA[name] for name in DATA}
    for name in ODD:
        assert fs.cat(folder.path(name)) == asyncio.run(fs._cat(folder.path(name))) == DATA[name]
    assert folder.machine.asked() == ["media"] * len(DATA)


@pytest.mark.parametrize(("name", "lookup"), [("report [1].txt", "metadata"), ("a*b", "list")])
def test_an_unknown_name_costs_one_request_more(cloud, name, lookup):
    folder = Folder(cloud, "cgs")
    cloud.asked()
    assert folder.fs.cat(folder.path(name)) == DATA[name]
    assert cloud.asked() == sorted(["media", lookup])


def test_what_names_nothing_is_a_pattern(folder):
    fs = folder.listed()
    expected = {folder.path("aab"): b"aab", folder.path("a*b"): b"a*b"}
    assert fs.cat(folder.path("a[*a]b")) == asyncio.run(fs._cat(folder.path("a[*a]b"))) == expected
    assert fs.cat(folder.path("?a?")) == {folder.path("aab"): b"aab"}
    patterns = [folder.path("a?[b]"), folder.path("x?y")]
    assert fs.expand_path(patterns) == [*map(folder.path, ["a*b", "aab", "x?y"])]
    assert folder.machine.asked() == ["media"] * 2
    with pytest.raises(FileNotFoundError):
        fs.cat(folder.path("[nothing]"))
    assert folder.machine.asked() == []


def test_get_copies_the_object_of_this_name(folder, tmp_path, monkeypatch):
    (tmp_path / "copies/into").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "copies")
    fs = folder.listed()
    fs.get(folder.path("a*b"), "new")
    fs.get(folder.path("report [1].txt"), "into")
    fs.get(folder.path("x?y"), f"{tmp_path}/copies/made/")
    fs.get([*map(folder.path, ODD)], f"{tmp_path}/copies/list/")
    fs.get(folder.machine.path("d"), f"{tmp_path}/copies/tree", recursive=True)
    assert files_below(tmp_path / "copies") == {
        "new": b"a*b",
        "into/report [1].txt": b"report [1].txt",
        "made/x?y": b"x?y",
        **{f"list/{name}": DATA[name] for name in ODD},
        **{f"tree/{name}": DATA[name] for name in DATA},
    }
    assert folder.machine.asked() == ["media"] * len(DATA)


def test_copy_copies_the_object_of_this_name(folder):
    fs = folder.listed()
    fs.copy(folder.path("a*b"), folder.machine.path("e/new"))
    fs.copy(folder.path("report [1].txt"), folder.machine.path("e"))
    fs.copy([folder.path("x?y")], folder.machine.path("e") + "/")
    assert folder.names("e") == ["new", "report [1].txt", "x?y"]
    assert fs.cat_file(folder.machine.path("e/new")) == b"a*b"


@pytest.mark.parametrize("name", ["report [1].txt", "a*b"])
def test_rm_removes_the_object_of_this_name(folder, name):
    asked = []
    for each in ("aab", "xyy", name):  # the first one finds the folder at Drive
        fs, path = folder.listed(), folder.path(each)
        fs.rm(path)
        asked.append(folder.machine.asked())
    assert asked[2] == (["delete"] if fs.protocol == "cgs" else asked[1])
    assert folder.names() == sorted(DATA.keys() - {"aab", "xyy", name})


def test_rm_of_a_pattern_sees_what_was_written_since_it_was_listed(folder):
    fs = folder.listed()
    folder.machine.put("d/acb", b"new")
    fs.rm(folder.path("a?b"))
    assert folder.names() == sorted(DATA.keys() - {"aab", "a*b"})
    with pytest.raises(FileNotFoundError):
        fs.rm(folder.path("a?b"))


@pytest.mark.parametrize("name", ["report [1].txt", "a*b"])
def test_mv_moves_the_object_of_this_name(folder, name):
    fs = folder.listed()
    fs.mv(folder.path(name), folder.machine.path("e/new"))
    assert folder.names() == sorted(DATA.keys() - {name})
    assert folder.names("e") == ["new"]
    fs.mv([folder.machine.path("e/new")], folder.machine.path("d/"))
    fs.mv(folder.path("new"), folder.path(name))
    assert folder.names() == sorted(DATA)
    assert fs.cat_file(folder.path(name)) == DATA[name]


def test_folders_are_taken_by_their_names_too(folder, tmp_path):
    fs, put, path = folder.fs, folder.machine.put, folder.machine.path
    for name in ("run[1]/a", "run[1]/b/c*", "run1/a"):
        put(name, name.encode())
    fs.get(path("run[1]"), str(tmp_path / "new"), recursive=True)
    fs.get(path("run[1]"), str(tmp_path), recursive=True)
    for top in ("new", "run[1]"):
        assert (tmp_path / top / "b/c*").read_bytes() == b"run[1]/b/c*"
    assert not (tmp_path / "run1").exists()
    fs.copy(path("run[1]"), path("new"), recursive=True)
    assert folder.names("new") == ["a", "b/c*"]
    fs.copy(path("run[1]"), path("new"))  # not recursive: no folder is copied, as in fsspec
    fs.mv(path("run[1]"), path("run[2]"), recursive=True)
    assert folder.names("run[2]") == ["a", "b/c*"]
    fs.rm(path("run[2]"), recursive=True)
    assert not fs.exists(path("run[2]"))
    assert folder.names("run1") == ["a"]
    fs.rm(path("run*"), recursive=True)
    assert not fs.exists(path("run1"))


def test_drive_itself_takes_names_literally_too(drive, tmp_path):
    for name, data in DATA.items():
        drive.put(f"d/{name}", data)
    fs = fsspec.filesystem("drive")
    for name in ODD:
        path, moved = drive.path(f"d/{name}"), drive.path("d/moved")
        assert fs.cat(path) == DATA[name]
        fs.get(path, str(tmp_path / "got"))
        assert (tmp_path / "got").read_bytes() == DATA[name]
        fs.mv(path, moved)
        assert fs.cat_file(moved) == DATA[name]
        fs.mv(moved, path)
        fs.rm([path])
    assert fs.find(drive.path("d")) == [drive.path(f"d/{name}") for name in sorted(OTHERS)]
