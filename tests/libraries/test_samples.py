"""WebDataset tars, Hugging Face datasets, and images in folders."""

import importlib.util
import io
import sys
import tarfile

import fsspec
import pytest

from tests import import_torchvision
from tests.libraries.data import ROWS, forking

# WebDataset.


def tar(wds):
    buffer = io.BytesIO()
    with wds.TarWriter(buffer) as samples:
        for i in range(10):
            samples.write({"__key__": f"{i:03}", "cls": i, "txt": f"text {i}"})
    return buffer.getvalue()


def opened(url, mode="rb", bufsize=8192, **options):
    return fsspec.open(url, mode).open()


def created(url):
    return fsspec.open(url, "wb").open()


@pytest.fixture
def wds(monkeypatch):
    wds = pytest.importorskip("webdataset")
    gopen = sys.modules["webdataset.gopen"]
    monkeypatch.setattr(gopen, "gopen_schemes", {**gopen.gopen_schemes})
    return wds


@pytest.mark.parametrize("place", ["cgs://", "cdrive://"], indirect=True)
@forking
def test_tars_by_url(place, wds):
    url, schemes = place.url("tars/{0..1}.tar"), sys.modules["webdataset.gopen"].gopen_schemes
    schemes["cgs"] = schemes["cdrive"] = opened
    for i in range(2):
        place.put(f"tars/{i}.tar", tar(wds))
    for _ in place.twice(fetches=2):
        samples = wds.WebDataset(url, shardshuffle=False).decode().to_tuple("cls", "txt")
        expected = [(i, f"text {i}") for i in range(10)]
        assert [*map(tuple, samples)] == expected * 2
        workers = wds.WebLoader(samples, num_workers=2, batch_size=None)
        assert sorted(map(tuple, workers)) == sorted(expected * 2)


def test_tars_are_written(place, wds):
    pattern = place.url("tars/%d.tar")
    with wds.ShardWriter(pattern, opener=created, maxcount=5, verbose=0) as tars:
        for i in range(10):
            tars.write({"__key__": f"{i:03}", "cls": i})
    for _ in place.twice(fetches=2):
        for i in range(2):
            with fsspec.open(pattern % i) as file, tarfile.open(fileobj=file) as found:
                assert found.getnames() == [f"{j:03}.cls" for j in range(5 * i, 5 * i + 5)]


@pytest.mark.parametrize("place", ["cachedfs::gs://", "cachedfs::drive://"], indirect=True)
def test_webdataset_does_not_accept_a_chained_url(place, wds):
    url = place.url("a.tar")
    place.put("a.tar", tar(wds))
    with pytest.raises(OSError, match="cachedfs"):
        list(wds.WebDataset(url, shardshuffle=False))


# Hugging Face.


@pytest.mark.parametrize("place", ["cgs://", "cdrive://"], indirect=True)
def test_a_dataset_is_made_of_files(place, tmp_path):
    datasets = pytest.importorskip("datasets")
    url = place.url("a.parquet")
    ROWS.to_parquet(url)
    for turn in place.twice(fetches=1):
        cache_dir = tmp_path / str(turn)  # its own copy of the data
        rows = datasets.load_dataset("parquet", data_files=url, split="train", cache_dir=cache_dir)
        assert rows["n"][:] == ROWS["n"].tolist()


@pytest.mark.parametrize("place", ["cgs://", "cdrive://"], indirect=True)
def test_a_dataset_is_streamed(place):
    datasets = pytest.importorskip("datasets")
    url = place.url("parts/*.jsonl")
    for i in range(2):
        ROWS[i * 500 : i * 500 + 500].to_json(place.url(f"parts/{i}.jsonl"), orient="records", lines=True)
    for _ in place.twice(fetches=2):
        rows = datasets.load_dataset("json", data_files=url, split="train", streaming=True)
        assert [row["n"] for row in rows] == ROWS["n"].tolist()


def test_a_dataset_is_saved_and_loaded(place):
    datasets = pytest.importorskip("datasets")
    url = place.url("saved")
    rows = datasets.Dataset.from_pandas(ROWS)
    rows.save_to_disk(url)
    for _ in place.twice(fetches=3):
        rows = datasets.load_from_disk(url)
        assert rows["name"][999] == "row 999"


@pytest.mark.parametrize("place", ["cachedfs::gs://", "cachedfs::drive://"], indirect=True)
def test_a_dataset_cannot_be_streamed_from_a_chained_url(place):
    datasets = pytest.importorskip("datasets")
    url = place.url("a.jsonl")
    ROWS.to_json(url, orient="records", lines=True)
    with pytest.raises((FileNotFoundError, ValueError)):
        list(datasets.load_dataset("json", data_files=url, split="train", streaming=True))


# LitData.


def litdata_files(folder):
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_size=5, follow_tensor_dimension=False)
    for i in range(10):
        writer[i] = {"n": i}
    writer.done()
    writer.merge()
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".bin", ".json")}


def test_chunks_of_litdata_are_read(place, tmp_path, monkeypatch):
    litdata = pytest.importorskip("litdata")
    from litdata.streaming import downloader
    from litdata.streaming.resolver import Dir

    class Downloaded(downloader.Downloader):
        def download_file(self, remote_filepath, local_filepath):
            fs, path = fsspec.url_to_fs(remote_filepath)
            fs.get_file(path, local_filepath)

    monkeypatch.setattr(downloader, "_DOWNLOADERS", {})
    (tmp_path / "made").mkdir()
    for name, data in litdata_files(tmp_path / "made").items():
        place.put(f"chunks/{name}", data)
    url, prefix = place.url("chunks"), place.prefix
    downloader.register_downloader(prefix, Downloaded)
    for turn in place.twice(fetches=3):
        cache_dir = str(tmp_path / str(turn))  # its own copy of the data
        rows = litdata.StreamingDataset(Dir(url=url), cache_dir=cache_dir)
        assert [row["n"] for row in rows] == list(range(10))


# Images.


def picture(shade, size=8):
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.new("RGB", (size, size), (shade, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def test_an_image(place):
    Image = pytest.importorskip("PIL.Image")
    url, image = place.url("a.png"), Image.new("RGB", (8, 8), (7, 0, 0))
    with fsspec.open(url, "wb") as file:
        image.save(file, "PNG")
    for _ in place.twice(fetches=1):
        with fsspec.open(url) as file:
            assert Image.open(file).getpixel((3, 3)) == (7, 0, 0)


def two_classes(place):
    for i in range(3):
        place.put(f"images/cat/{i}.png", picture(i))
        place.put(f"images/dog/{i}.png", picture(100 + i))
    return place.url("images")


def shade(data):
    image = pytest.importorskip("PIL.Image")
    return image.open(io.BytesIO(data)).getpixel((3, 3))[0]


def name_of_folder(path):
    return path.split("/")[-2]


@forking
def test_a_folder_of_images_for_each_class(place):
    pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    from cachedfs.datasets import FileDataset

    folder = two_classes(place)
    for _ in place.twice(fetches=6):
        images = FileDataset(folder, decode=shade, label=name_of_folder)
        (shades, names), (more, others) = DataLoader(images, batch_size=3, num_workers=2)
        assert (shades.tolist(), [*names]) == ([0, 1, 2], ["cat"] * 3)
        assert (more.tolist(), [*others]) == ([100, 101, 102], ["dog"] * 3)


@pytest.fixture
def torchvision():
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    return import_torchvision.torchvision()


@forking
def test_an_image_folder_can_list_by_fsspec(place, torchvision):
    from torch.utils.data import DataLoader
    from torchvision.transforms.functional import to_tensor

    from tests.libraries.folders import Images, image

    folder = two_classes(place)
    place.put("images/dog/readme.txt", b"no image")
    for _ in place.twice(fetches=6):
        images = Images(folder, transform=to_tensor, loader=image)
        assert images.classes == ["cat", "dog"]
        (shades, labels), (more, others) = DataLoader(images, batch_size=3, num_workers=2)
        assert (shades[:, 0, 0, 0] * 255).tolist() == [0, 1, 2]
        assert (more[:, 0, 0, 0] * 255).round().tolist() == [100, 101, 102]
        assert (labels.tolist(), others.tolist()) == ([0] * 3, [1] * 3)


def test_an_image_folder_cannot_list_a_url(place, torchvision):
    datasets, folder = torchvision.datasets, two_classes(place)
    with pytest.raises(FileNotFoundError):
        datasets.ImageFolder(folder)
