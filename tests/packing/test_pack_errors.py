"""Files that cannot be packed: they are named, or left out, and a pack goes on after they were removed."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("PIL")

import pyarrow as pa
import zarr

from cachedfs.datasets import pack
from cachedfs.packing.sources import file_samples, sample_source
from cachedfs.packing.sources.file_samples import ImageSource
from tests.packing import packs

SMALL = {"chunk_bytes": "1KiB", "shard_bytes": "2KiB", "codec": "none", "n_workers": 1}


def image(i):
    return np.full((16, 16, 3), i, "u1")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Images 0 to 59, of which each second one from 10 on is bad, read four at a time."""
    monkeypatch.setattr(sample_source, "PER_PART", 4)
    folder = tmp_path / "src"
    folder.mkdir()
    for i in range(60):
        data = packs.png(image(i))
        if i in BAD:
            data = data[:60] if i % 4 else b"no image"
        (folder / f"{i:02}.png").write_bytes(data)
    return folder


BAD = range(10, 60, 2)
GOOD = [i for i in range(60) if i not in BAD]


def right(target):
    names = packs.stored(target, "names", text=True)
    assert names == [f"{i:02}.png" for i in GOOD]
    np.testing.assert_array_equal(zarr.open_group(target, mode="r")["image"][:], [image(i) for i in GOOD])


def test_bad_files_are_left_out_and_listed(folder, tmp_path):
    target = str(tmp_path / "out.zarr")
    done = pack(str(folder), target, decode="image", on_error="skip", **SMALL)
    right(target)
    assert done.samples == len(GOOD)
    assert "; 25 files left out;" in str(done)
    for line, i in zip(done.skipped, BAD, strict=True):
        assert line.startswith(f"file://{folder}/{i:02}.png: Pillow cannot decode the image: ")
    listed = json.loads((tmp_path / "out.zarr" / "skipped.json").read_text())
    assert [f"{name}: {reason}" for name, reason in listed.items()] == done.skipped
    assert zarr.open_group(target, mode="r").attrs["cachedfs_pack"]["skipped"] == 25


def test_an_error_names_twenty_bad_files_and_a_pack_goes_on_after_they_were_removed(
    folder, tmp_path, monkeypatch
):
    target, read = str(tmp_path / "out.zarr"), []
    images = ImageSource._images

    def noted(self, numbers, bad):
        read.extend(numbers if len(numbers) > 1 else ())  # not those that are looked at
        return images(self, numbers, bad)

    monkeypatch.setattr(ImageSource, "_images", noted)
    for n_named, least in ((20, "at least 21 files"), (5, "5 files")):
        with pytest.raises(ValueError, match=f"{least} cannot be packed") as caught:
            pack(str(folder), target, decode="image", **SMALL)
        found = str(caught.value).splitlines()[1:]
        named = [line.partition(": ")[0].removeprefix("file://") for line in found]
        assert len(named) == n_named
        for name in named:
            (folder / name).unlink()
    shards = {path: path.stat().st_mtime_ns for path in (tmp_path / "out.zarr" / "image").glob("c*")}
    n_read = len(read)
    assert n_read < 70  # two runs read each file once, and those of unfinished shards again
    done = pack(str(folder), target, decode="image", **SMALL)
    right(target)
    assert len(read) == n_read
    assert done.skipped == []
    assert {path: path.stat().st_mtime_ns for path in shards} == shards
    assert done.resumed == len(shards) + 2  # names, and their offsets


def test_workers_of_an_executor_stop_after_twenty_bad_files_too(folder, tmp_path):
    target, options = str(tmp_path / "out.zarr"), {"decode": "image", **SMALL, "n_workers": 2}
    with ThreadPoolExecutor(2) as workers:
        with pytest.raises(ValueError, match="at least 21 files cannot be packed"):
            pack(str(folder), target, client=workers, **options)
        for i in BAD:
            (folder / f"{i:02}.png").unlink()
        pack(str(folder), target, client=workers, **options)
    right(target)


def test_a_pack_does_not_go_on_after_a_good_file_was_removed(folder, tmp_path):
    with pytest.raises(ValueError, match="at least 21 files cannot be packed"):
        pack(str(folder), str(tmp_path / "out.zarr"), decode="image", **SMALL)
    (folder / "01.png").unlink()
    with pytest.raises(FileExistsError, match="an incomplete pack of another source"):
        pack(str(folder), str(tmp_path / "out.zarr"), decode="image", **SMALL)
    pack(str(folder), str(tmp_path / "out.zarr"), decode="image", on_error="skip", overwrite=True, **SMALL)
    names = packs.stored(str(tmp_path / "out.zarr"), "names", text=True)
    assert names == [f"{i:02}.png" for i in GOOD if i != 1]


def test_if_no_image_can_be_decoded_one_is_named(folder, tmp_path):
    for path in folder.iterdir():
        path.write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"00\.png: Pillow cannot decode the image"):
        pack(str(folder), str(tmp_path / "out.zarr"), decode="image", on_error="skip")


def test_an_image_of_another_type_than_those_looked_at_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(file_samples, "IMAGES", 1)
    files = {f"{i}.png": packs.png(image(i)) for i in range(4)}
    files["3.png"] = packs.png(np.full((16, 16), 1000, "u2"))
    with pytest.raises(ValueError, match=r"3\.png: an image of uint16 \(16, 16\), where .* uint8.*: pack it"):
        packs.packed(tmp_path, files, decode="image")
    found = packs.packed(tmp_path, files, decode="image", on_error="skip")
    assert found["image"] == [image(i).tolist() for i in range(3)]


MADE = {
    "parquet": lambda i: packs.parquet(pa.table({"x": [i], "y": [str(i)]})),
    "h5": lambda i: packs.hdf5(x=[i], y=[str(i)]),
    "tar": lambda i: packs.tar([(f"{i}.x", str(i).encode()), (f"{i}.y", str(i).encode())]),
}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("parquet", "Arrow cannot read it as Parquet"),
        ("h5", "h5py cannot read it as HDF5"),
        ("tar", "cannot be read as a tar"),
    ],
)
def test_bad_files_of_each_kind_are_left_out(tmp_path, kind, reason, number):
    files = {f"{i}.{kind}": MADE[kind](i) for i in range(3)}
    name = f"{number}.{kind}"
    files[name] = files[name][:600]
    with pytest.raises(ValueError, match=rf"1 file cannot be packed.*\n.*{name}: {reason}"):
        packs.packed(tmp_path, files)
    assert not (tmp_path / "out.zarr" / "zarr.json").exists()
    with pytest.raises(ValueError, match=rf"{name}: {reason}"):
        packs.packed(tmp_path, {name: files[name]})
    found = packs.packed(tmp_path, files, on_error="skip")
    del files[name]
    assert found == packs.packed(tmp_path, files)
    assert [int(x) for x in found["x"]] == [i for i in range(3) if i != number]
