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
    fs.get([*map(folder.path, ODD)], f"{tmp_path}/copies/list/")
    fs.get(folder.machine.path("d"), f"{tmp_path}/copies/tree", recursive=True)
    assert files_below(tmp_path / "copies") == {
        "new": b"a*b",
        "into/report [1].txt": b"report [1].txt",
        **{f"list/{name}": DATA[name] for name in ODD},
        **{f"tree/{name}": DATA[name] for name in DATA},
    }
    assert folder.machine.asked() == ["media"] * len(DATA)


@pytest.mark.parametrize("name", ["report [1].txt", "a*b"])
def test_copy_mv_and_rm_take_the_object_of_this_name(folder, name):
    fs, there = folder.listed(), folder.machine.path("e")
    fs.copy(folder.path(name), f"{there}/")
    fs.mv(folder.path(name), f"{there}/new")
    assert folder.names() == sorted(DATA.keys() - {name})
    assert folder.names("e") == sorted(["new", name])
    assert fs.cat_file(f"{there}/new") == DATA[name]
    fs.mv(f"{there}/new", folder.path(name))
    assert folder.names() == sorted(DATA)
    folder.listed().rm(folder.path(name))
    if fs.protocol == "cgs":
        assert folder.machine.asked() == ["delete"]
    assert folder.names() == sorted(DATA.keys() - {name})


def test_rm_of_a_pattern_sees_what_was_written_since_it_was_listed(folder):
    fs = folder.listed()
    folder.machine.put("d/acb", b"new")
    fs.rm(folder.path("a?b"))
    assert folder.names() == sorted(DATA.keys() - {"aab", "a*b"})
    with pytest.raises(FileNotFoundError):
        fs.rm(folder.path("a?b"))


def test_folders_are_taken_by_their_names_too(folder, tmp_path):
    fs, path = folder.fs, folder.machine.path
    for name in ("run[1]/a", "run[1]/b/c*", "run1/a"):
        folder.machine.put(name, name.encode())
    fs.get(path("run[1]"), str(tmp_path), recursive=True)
    assert files_below(tmp_path / "run[1]") == {"a": b"run[1]/a", "b/c*": b"run[1]/b/c*"}
    fs.copy(path("run[1]"), path("new"), recursive=True)
    assert folder.names("new") == ["a", "b/c*"]
    fs.mv(path("run[1]"), path("run[2]"), recursive=True)
    assert folder.names("run[2]") == ["a", "b/c*"]
    fs.rm(path("run[2]"), recursive=True)
    assert not fs.exists(path("run[2]"))
    assert folder.names("run1") == ["a"]
    fs.rm(path("run*"), recursive=True)
    assert not fs.exists(path("run1"))
