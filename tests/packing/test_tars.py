"""Tar files whose names or order give other samples than one may expect: the result says so."""

import pytest

pytest.importorskip("pyarrow")

from cachedfs.datasets import pack
from tests.packing import packs


def packed(folder, names):
    (folder / "x.tar").write_bytes(packs.tar([(name, name.encode()) for name in names]))
    return pack(str(folder / "x.tar"), str(folder / "out.zarr"))


def test_members_that_follow_one_another_need_no_note(tmp_path):
    done = packed(tmp_path, ["a.jpg", "a.cls", "b.jpg", "b.cls"])
    assert (done.samples, done.notes) == (2, [])


def test_a_dot_before_the_ending_is_part_of_it(tmp_path):
    done = packed(tmp_path, ["a.v2.jpg", "a.cls", "b.v2.jpg", "b.cls"])
    assert done.samples == 2
    assert packs.stored(str(tmp_path / "out.zarr"), "names", text=True) == ["a", "b"]
    assert done.notes == [
        "endings with a dot: v2.jpg; the name of a sample ends at the first dot, as in WebDataset"
    ]


def test_parts_of_a_sample_that_stand_apart_are_several_samples(tmp_path, caplog):
    done = packed(tmp_path, ["a.jpg", "b.jpg", "c.jpg", "a.cls", "b.cls", "c.txt"])
    assert done.samples == 6
    (note,) = done.notes
    assert "x.tar: 'a' and 2 more became several samples, as their members do not follow one another" in note
    assert note in caplog.text
