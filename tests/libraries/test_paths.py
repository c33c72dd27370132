"""NumPy and universal_pathlib: arrays in one file, memory-mapped arrays, remote paths."""

import pickle

import fsspec
import numpy as np
import pytest


def test_numpy_writes_reads_and_maps_a_file(place):
    url, array = place.url("a.npy"), np.arange(1000)
    with fsspec.open(url, "wb") as file:
        np.save(file, array)
    with fsspec.open(place.url("a.npz"), "wb") as file:
        np.savez_compressed(file, a=array, b=np.ones(3))
    for _ in place.twice(fetches=2):
        with fsspec.open(place.url("a.npz")) as file, np.load(file) as arrays:
            assert arrays["a"].sum() == 499500
        with fsspec.open(url) as file:
            assert np.load(file).tolist() == list(range(1000))
        fs = place.fs
        with fs.local_path(url) as path:
            array = np.load(path, mmap_mode="r")
            assert isinstance(array, np.memmap)
            assert array[10:20].tolist() == list(range(10, 20))


def test_numpy_cannot_read_raw_numbers_from_a_file(place):
    url = place.url("a.bin")
    place.put("a.bin", np.arange(10).tobytes())
    with fsspec.open(url) as file, pytest.raises(OSError, match="fileno"):
        np.fromfile(file)
    assert np.frombuffer(place.fs.cat_file(url), dtype=np.arange(1).dtype).sum() == 45


def test_universal_pathlib(place):
    upath = pytest.importorskip("upath")
    url = place.url("texts")
    folder = upath.UPath(url)
    (folder / "a.txt").write_text("first")
    (folder / "deep/b.txt").write_bytes(b"second")
    for _ in place.twice(fetches=1):
        folder = upath.UPath(url)
        assert (folder / "a.txt").read_text() == "first"
        assert sorted(each.name for each in folder.iterdir()) == ["a.txt", "deep"]
        assert [each.name for each in folder.glob("**/*.txt")] == ["a.txt", "b.txt"]
        assert (folder / "deep/b.txt").stat().st_size == 6
        assert pickle.loads(pickle.dumps(folder)) == folder == (folder / "a.txt").parent
        assert (str(folder), str(folder / "a.txt")) == (url, f"{url}/a.txt")
    with fsspec.open(str(folder / "a.txt"), "rt") as file:
        assert file.read() == "first"
    (folder / "a.txt").rename(folder / "c.txt")
    assert not (folder / "a.txt").exists()
    (folder / "c.txt").unlink()
    assert [each.name for each in folder.iterdir()] == ["deep"]
