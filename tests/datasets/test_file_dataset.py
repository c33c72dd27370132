"""FileDataset: listing, samples, requests, workers and errors."""

import json
import pickle
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from cachedfs.datasets.file_dataset import FileDataset  # noqa: E402
from cachedfs.datasets.file_list import CompactStrings, natural_key  # noqa: E402
from cachedfs.datasets.loader import Loader  # noqa: E402
from cachedfs.errors import ObjectNotFound, OriginUnreachable  # noqa: E402


def number_of(sample):
    return sample["i"]


def folder_of(path):
    return path.split("/")[-2]


def put(cloud, n, folder="train"):
    for i in range(n):
        cloud.put(f"{folder}/img{i}.json", json.dumps({"i": i}).encode())


# Selection of files.


def test_a_pattern_names_files_in_natural_order(cloud):
    put(cloud, 12)
    cloud.put("train/notes.txt", b"")
    files = FileDataset(cloud.url("train/*.json"), decode=json.loads, transform=number_of, label=folder_of)
    assert files.paths == [cloud.path(f"train/img{i}.json") for i in range(12)]
    assert [*files] == [(i, "train") for i in range(12)]
    assert repr(files) == f"FileDataset({cloud.url('train/*.json')!r}, 12 files)"


def test_a_folder_is_everything_below_it(cloud):
    for name in ("b10/1", "b2/x/1", "b2/a", "a"):
        cloud.put(f"d/{name}", name.encode())
    files = FileDataset(cloud.url("d"))
    assert [files[i] for i in range(4)] == [b"a", b"b2/a", b"b2/x/1", b"b10/1"]
    assert FileDataset(cloud.url("d/**/1")).paths == [cloud.path("d/b2/x/1"), cloud.path("d/b10/1")]


@pytest.mark.parametrize("pattern", ["d", "d/*", "d/**"])
def test_hidden_files_are_left_out_unless_the_url_spells_them(cloud, caplog, pattern):
    for name in ("a", ".DS_Store", "Thumbs.db", ".cache/b"):
        cloud.put(f"d/{name}", name.encode())
    assert FileDataset(cloud.url(pattern)).paths == [cloud.path("d/a")]
    assert "left out" in caplog.text
    assert FileDataset(cloud.url("d/.cache")).paths == [cloud.path("d/.cache/b")]
    assert FileDataset(cloud.url("d/.D*")).paths == [cloud.path("d/.DS_Store")]
    assert FileDataset([cloud.url("d/Thumbs.db")])[0] == b"Thumbs.db"


def test_a_list_is_used_as_it_is_without_a_request(cloud):
    put(cloud, 3)
    urls = [cloud.url(f"train/img{i}.json") for i in (2, 0, 2)]
    files = FileDataset(urls, decode=json.loads, transform=number_of)
    assert cloud.asked() == []
    assert files.__getitems__([0, 1, 2]) == [2, 0, 2]
    assert cloud.asked() == ["media", "media"]


def test_names_that_look_like_patterns(cloud):
    for name in ("d [v2]/img[1].jpg", "d [v2]/img1.jpg", "d v/img1.jpg"):
        cloud.put(name, name.encode())
    files = FileDataset(cloud.url("d [v2]"))
    assert files.__getitems__([0, 1]) == [b"d [v2]/img1.jpg", b"d [v2]/img[1].jpg"]
    with files.fs.prefetch(files.items([1, 0])) as prefetch:
        assert prefetch.wait().items == 2
    alone = FileDataset([cloud.url("d [v2]/img[1].jpg")])
    assert alone[0] == b"d [v2]/img[1].jpg"


@given(st.lists(st.tuples(st.text("ab/-._", max_size=4), st.integers(0, 10**30), st.text("ab/", max_size=3))))
def test_natural_order_compares_numbers_in_names(names):
    for before, number, after in names:
        low, high = f"{before}{number}{after}", f"{before}{number + 1}{after}"
        assert natural_key(low) < natural_key(high)


# Derived classes.


class One(FileDataset):
    def __getitem__(self, index):
        return f"one {super().__getitem__(index)}"


class Many(FileDataset):
    def __getitems__(self, indexes):
        return [f"many {sample}" for sample in super().__getitems__(indexes)]


@pytest.mark.parametrize(("kind", "marks"), [(One, "one"), (Many, "many")])
def test_every_access_uses_the_methods_of_a_derived_class(cloud, kind, marks):
    for i in range(3):
        cloud.put(f"d/{i}", b"%d" % i)
    files = kind(cloud.url("d"), decode=bytes.decode)
    expected = [f"{marks} {i}" for i in range(3)]
    assert [*files] == files.__getitems__(range(3)) == expected
    assert [sample for batch in DataLoader(files, batch_size=2) for sample in batch] == expected


# Workers and pickles.


def test_110_000_names_take_about_their_bytes_in_memory():
    names = [f"bucket/train/{i % 40:02}/record-{i:07}.json" for i in range(110_000)]
    held = CompactStrings(names)
    assert len(pickle.dumps(held)) < sum(map(len, names)) + 9 * len(names)
    assert held == names


@given(st.lists(st.text(st.characters(codec=None), max_size=5)))
def test_names_round_trip(names):
    held = CompactStrings(names)
    assert held == names
    assert list(held) == [held[i] for i in range(len(held))] == held[:] == names
    assert pickle.loads(pickle.dumps(held)) == held


# Not with `gs://`, for which gcsfs starts threads of gRPC: later tests fork.
@pytest.mark.parametrize("prefix", ["drive://", "cachedfs::drive://", "cdrive://"])
def test_a_url_without_the_cache_is_read_with_a_warning(drive, prefix, caplog):
    drive.put("a", b"1")
    assert FileDataset(drive.url("a", prefix))[0] == b"1"
    warned = [each.getMessage() for each in caplog.records if each.name == "cachedfs.datasets"]
    uncached, cached = drive.url("a", "drive://"), drive.url("a", "cachedfs::drive://")
    without = f"{uncached} is read without the cache, in every epoch; with it: {cached}"
    assert warned == ([without] if prefix == "drive://" else [])


# Errors.


def test_an_empty_selection_is_an_error_that_names_it(cloud, tmp_path):
    cloud.put("train/a.json", b"")
    cloud.put("train/b/c/d.json", b"")
    with pytest.raises(ObjectNotFound, match=r"train/\*\.jpg: no file matches this pattern"):
        FileDataset(cloud.url("train/*.jpg"))
    with pytest.raises(ObjectNotFound, match=r"test: no such file or folder"):
        FileDataset(cloud.url("test"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ObjectNotFound, match="empty: there is no file in this folder"):
        FileDataset(f"file://{tmp_path}/empty")
    with pytest.raises(ObjectNotFound, match=r"taken as a local path.*cachedfs::drive://My Drive/pics"):
        FileDataset("My Drive/pics")
    with pytest.raises(ObjectNotFound, match=r"train/b/\*: this pattern matches folders only"):
        FileDataset(cloud.url("train/b/*"))


@pytest.mark.parametrize(
    ("given_url", "error", "match"),
    [
        ([], ValueError, "the list is empty"),
        (["b/a", "gs://b/a"], ValueError, "of one filesystem"),
        (b"gs://b/a", TypeError, "not bytes"),
    ],
)
def test_a_path_that_is_no_url_is_refused(given_url, error, match):
    with pytest.raises(error, match=match):
        FileDataset(given_url)


def test_a_replaced_file_is_read_as_it_is_now_and_a_missing_one_is_named(cloud):
    put(cloud, 4)
    files = FileDataset(cloud.url("train"))
    cloud.put("train/img3.json", b"new")
    assert files[3] == b"new"
    cloud.delete("train/img2.json")
    with pytest.raises(ObjectNotFound, match=r"img2\.json") as caught:
        files.__getitems__([0, 2])
    assert caught.value.__notes__ == [f"in sample 2 of {files!r}: {cloud.url('train/img2.json')}"]
    assert len(files.__getitems__([0, 1, 3])) == 3


def test_skip_leaves_out_what_cannot_be_read_or_decoded(cloud, caplog):
    put(cloud, 5)
    files = FileDataset(cloud.url("train"), decode=json.loads, transform=number_of, on_error="skip")
    cloud.delete("train/img2.json")
    cloud.put("train/img3.json", b'{"i": ')
    assert files.__getitems__([0, 3, 2, 4]) == files.__getitems__([0, 3, 2, 4]) == [0, 4]
    assert {path: type(error) for path, error in files.skipped.items()} == {
        cloud.path("train/img2.json"): ObjectNotFound,
        cloud.path("train/img3.json"): json.JSONDecodeError,
    }
    # A frame keeps a batch of bytes.
    assert {error.__traceback__ for error in files.skipped.values()} == {None}
    assert caplog.text.count("img3.json: skipped: JSONDecodeError") == 1
    with pytest.raises(ObjectNotFound, match=r"img2\.json"):
        files[2]
    assert files.__getitems__([3, 2]) == files.__getitems__([3]) == [4]  # the next good one
    with pytest.raises(ValueError, match='on_error=None: expected "raise" or "skip"'):
        FileDataset(cloud.url("train"), on_error=None)


def fail_oddly(data):
    if json.loads(data)["i"] % 2:
        raise type("Odd", (Exception,), {"__module__": "nowhere"})("cannot be pickled")
    if json.loads(data)["i"] == 2:
        raise NotImplementedError("no even prime")
    return 0


@pytest.mark.parametrize(("method", "n_workers"), [("fork", 2), ("spawn", 1)])  # a spawned one imports torch
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_files_that_workers_skip_are_listed_in_the_parent(
    cloud, spawned_options, method, n_workers, tmp_path, monkeypatch
):
    put(cloud, 6)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = FileDataset(
        cloud.url("train"), decode=fail_oddly, on_error="skip", storage_options=spawned_options
    )
    loader = DataLoader(files, batch_size=1, num_workers=n_workers, multiprocessing_context=method)
    for _ in range(n_workers):
        assert [len(batch) for batch in loader] == [1] * 6
    names = [cloud.path(f"train/img{i}.json") for i in (1, 2, 3, 5)]
    assert sorted(files.skipped) == names
    assert {str(files.skipped[name]) for name in names} == {
        "NotImplementedError: no even prime",
        "Odd: cannot be pickled",
    }
    assert pickle.loads(pickle.dumps(files)).skipped == {}
    del files, loader
    assert list(tmp_path.glob("cachedfs-skipped-*")) == []


def test_a_batch_of_bad_files_gets_the_next_good_one_and_raises_without_any(cloud):
    for i in range(3):
        cloud.put(f"bad/{i}.json", b"{")
    files = FileDataset(cloud.url("bad"), decode=json.loads, on_error="skip")
    for _ in range(2):
        with pytest.raises(json.JSONDecodeError):
            files.__getitems__([1])
    assert len(files.skipped) == 3
    for i, data in enumerate([b"7", b"{", b"{"]):
        cloud.put(f"one/{i}.json", data)
    files = FileDataset(cloud.url("one"), decode=json.loads, on_error="skip")
    assert [batch.tolist() for batch in Loader(files, batch_size=1)] == [[7]] * 3


def test_a_batch_raises_when_the_origin_cannot_be_reached(cloud, monkeypatch):
    put(cloud, 6)
    files, asked = FileDataset(cloud.url("train"), on_error="skip"), []

    def unreachable(paths, *args, **options):
        asked.extend(paths)
        return [OriginUnreachable("away") for _ in paths]

    monkeypatch.setattr(files.fs, "cat_ranges", unreachable)
    with pytest.raises(OriginUnreachable):
        files.__getitems__([1, 2])
    assert len(asked) == 2  # no other file is waited for


@pytest.mark.parametrize("where", ["decode", "transform", "label"])
def test_stop_iteration_in_a_sample_is_an_error_and_not_the_end(cloud, where):
    put(cloud, 8)

    def stop(given):
        is_five = given.endswith("img5.json") if where == "label" else json.loads(given)["i"] == 5
        return next(iter(() if is_five else [0]))

    files = FileDataset(cloud.url("train"), **{where: stop})
    for batches in (files, DataLoader(files, batch_size=2), Loader(files, batch_size=2)):
        with pytest.raises(RuntimeError, match=r"^StopIteration in sample 5 of .*img5\.json") as caught:
            list(batches)
        assert isinstance(caught.value.__context__, StopIteration)


def test_an_index_error_in_a_sample_is_an_error_and_not_the_end(cloud):
    put(cloud, 8)
    files = FileDataset(cloud.url("train"), decode=lambda data: list(range(5))[json.loads(data)["i"]])
    with pytest.raises(IndexError, match="list index out of range") as caught:
        list(files)
    assert "in sample 5 of" in caught.value.__notes__[0]
