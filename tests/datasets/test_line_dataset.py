"""LineDataset: spans, ranks and workers, compressed files, resuming, requests and errors."""

import bz2
import codecs
import gzip
import io
import json
import lzma
import pickle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from cachedfs.datasets.line_dataset import LineDataset  # noqa: E402
from cachedfs.datasets.text_streams import END, lines_in, spans_of  # noqa: E402
from cachedfs.errors import ObjectChanged, ObjectNotFound  # noqa: E402
from tests.support import KiB, MiB, noise  # noqa: E402

N = 3000


# Functions of workers, at module level so that spawn finds them.


def number_of(sample):
    return sample["i"]


def fail_on_seven(line):
    if json.loads(line)["i"] == 7:
        raise ZeroDivisionError("mine")
    return 0


def stop_on_seven(line):
    if json.loads(line)["i"] == 7:
        raise StopIteration
    return 0


def line(i):
    """Return a line of a distinct length, of 20 to 320 bytes."""
    return json.dumps({"i": i, "text": "é" * (i * 7919 % 50)}, ensure_ascii=i % 3 == 0).encode()


def put(cloud, n=N, n_files=3, suffix="", pack=bytes):
    """Write numbered lines into files; return their URL."""
    for f in range(n_files):
        numbers = range(n * f // n_files, n * (f + 1) // n_files)
        cloud.put(f"d/{f}.jsonl{suffix}", pack(b"".join(line(i) + b"\n" for i in numbers)))
    return cloud.url("d")


def numbers(dataset):
    return [sample["i"] for sample in dataset]


# Division into parts.

lines_of_bytes = st.lists(
    st.binary(max_size=12).map(lambda data: data.replace(b"\n", b"").replace(b"\r", b"")), max_size=12
)


@st.composite
def files(draw):
    """Files of any lines, with or without a line break at the end."""
    content = b"\n".join(draw(lines_of_bytes))
    return content + draw(st.sampled_from([b"", b"\n"]))


def lines_of(content):
    """Return the lines of a file in the simplest way. A byte order mark alone is none."""
    found = [] if content in (b"", codecs.BOM_UTF8) else content.split(b"\n")
    return found[:-1] if found[-1:] == [b""] else found


def read(contents, part, n_parts, buffer_size):
    found = []
    sizes = [len(content) for content in contents]
    for span in spans_of(sizes, [False] * len(sizes), part, n_parts):
        with io.BufferedReader(io.BytesIO(contents[span.file]), buffer_size) as file:
            for offset, each in lines_in(file, span.start, span.stop):
                assert contents[span.file].startswith(each, offset)
                found.append(each.removesuffix(b"\n"))
    return found


@example([codecs.BOM_UTF8, codecs.BOM_UTF8 + b"\n"], 2, 3)
@given(st.lists(files(), max_size=4), st.integers(1, 9), st.integers(1, 40))
def test_the_parts_together_are_all_lines_in_order(contents, n_parts, buffer_size):
    parts = [read(contents, part, n_parts, buffer_size) for part in range(n_parts)]
    assert [each for part in parts for each in part] == [each for c in contents for each in lines_of(c)]


@example([(0, True)], 2)
@example([(5, False), (0, True)], 3)
@given(st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=8), st.integers(1, 9))
def test_parts_have_equal_shares_of_the_bytes_and_a_file_that_cannot_be_split_is_in_one(files, n_parts):
    sizes, whole = [size for size, _ in files], [is_whole for _, is_whole in files]
    parts = [spans_of(sizes, whole, part, n_parts) for part in range(n_parts)]
    found = [span for part in parts for span in part]
    assert sorted(span.file for span in found if whole[span.file]) == [i for i, w in enumerate(whole) if w]
    assert all((span.start, span.stop) == (0, END) for span in found if whole[span.file])
    split = [span for span in found if not whole[span.file]]
    assert all(0 <= span.start < span.stop <= sizes[span.file] for span in split)
    shares = [sum(span.stop - span.start for span in part if not whole[span.file]) for part in parts]
    assert sum(shares) == sum(size for size, is_whole in files if not is_whole)
    assert any(whole) or max(shares) - min(shares) <= 1


# Definition of a line.


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b"", []),
        (b"a", ["a"]),
        (b"a\nb\n", ["a", "b"]),
        (b"a\r\n\r\nb\r\n", ["a", "", "b"]),
        (b"\n\na\n\n", ["", "", "a", ""]),
        (b"a \n \t\r\nb\n", ["a ", " \t", "b"]),
        (b"\xef\xbb\xbfa\nb", ["a", "b"]),
        (b"a\rb\r\r\n", ["a\rb\r"]),
        ("é\u2028\x85\x0b\n".encode(), ["é\u2028\x85\x0b"]),
    ],
)
def test_what_a_line_is(cloud, content, kept):
    cloud.put("a.txt", content)
    url = cloud.url("a.txt", prefix="cgs://")
    assert list(LineDataset(url, keep_empty=True)) == kept
    kept = [each for each in kept if each.strip(" \t")]
    assert list(LineDataset(url)) == kept
    assert list(LineDataset(url, encoding=None)) == [each.encode() for each in kept]
    assert list(LineDataset(url, decode=len, transform=float)) == [float(len(k.encode())) for k in kept]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_lines_that_end_with_a_carriage_return_alone_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"a\rb\r") if name.endswith("gz") else b"a\rb\r")
    with pytest.raises(ValueError, match=r"end with \\r alone") as caught:
        list(LineDataset(tmp_path))
    assert name in caught.value.__notes__[0]


def test_other_encodings(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("é\nö\n", "latin-1")
    assert list(LineDataset([path, path], encoding="latin-1")) == ["é", "ö"] * 2
    with pytest.raises(ValueError, match="utf-16"):
        LineDataset(path, encoding="utf-16")
    with pytest.raises(ValueError, match="give both"):
        LineDataset(path, rank=1)
    with pytest.raises(UnicodeDecodeError) as caught:
        list(LineDataset(path))
    assert "in the line at byte 0 of" in caught.value.__notes__[0]


# Every line exactly once.


def test_ranks_with_workers_get_every_line_once_in_each_epoch(cloud):
    url = put(cloud, 600)
    found = []
    for rank in range(2):
        dataset = LineDataset(url, decode=json.loads, transform=number_of, rank=rank, world_size=2)
        loader = DataLoader(
            dataset, batch_size=32, num_workers=2, multiprocessing_context="fork", persistent_workers=True
        )
        found += [sorted(torch.cat(list(loader)).tolist()) for _ in range(2)]
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert sorted(found[0] + found[2]) == list(range(600))


def use_rank(meeting, rank, dataset, results):
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    try:
        found = [list(dataset)]
        if rank == 1:
            loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")
            found.append(list(loader))
        results.put((rank, found))
    finally:
        torch.distributed.destroy_process_group()


def test_the_rank_is_that_of_torch_distributed_also_in_spawned_workers(
    cloud, spawned_options, forking, tmp_path
):
    dataset = LineDataset(
        put(cloud, 100), decode=json.loads, transform=number_of, storage_options=spawned_options
    )
    results = forking.Queue()
    ranks = [
        forking.Process(target=use_rank, args=(tmp_path / "meet", r, dataset, results)) for r in range(2)
    ]
    for rank in ranks:
        rank.start()
    found = dict(results.get(timeout=600) for _ in ranks)
    for rank in ranks:
        rank.join()
    assert found[0][0] + found[1][0] == list(range(100))
    assert found[1][1] == found[1][0]


# Compressed files.


def zst(data):
    """Return several frames, as in a file that was written in pieces."""
    zstandard = pytest.importorskip("zstandard")
    middle = len(data) // 2
    return b"".join(zstandard.compress(part) for part in (data[:middle], b"", data[middle:]))


def gz(data):
    middle = len(data) // 2
    return gzip.compress(data[:middle]) + gzip.compress(data[middle:])


PACKS = {".gz": gz, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zst}


@pytest.mark.parametrize("suffix", PACKS)
def test_a_compressed_file_is_read_by_one_reader(cloud, suffix):
    url = put(cloud, 900, n_files=4, suffix=suffix, pack=PACKS[suffix])
    ranks = [LineDataset(url, decode=json.loads, rank=r, world_size=2) for r in range(2)]
    found = [numbers(rank) for rank in ranks]
    assert found[0] + found[1] == list(range(900))
    assert min(map(len, found)) > 400


@pytest.mark.parametrize("suffix", PACKS)
def test_a_truncated_compressed_file_is_an_error(cloud, suffix):
    data = PACKS[suffix](noise(300 * KiB).hex().encode())
    cloud.put(f"a.txt{suffix}", data[:-1000])
    with pytest.raises(EOFError) as caught:
        list(LineDataset(cloud.url(f"a.txt{suffix}")))
    assert any(f"a.txt{suffix}" in note for note in caught.value.__notes__)


def test_a_missing_zstandard_package_is_named(cloud, monkeypatch):
    cloud.put("a.zst", b"")
    monkeypatch.setattr("cachedfs.datasets.text_streams.import_module", _missing)
    with pytest.raises(ImportError, match="pip install zstandard"):
        list(LineDataset(cloud.url("a.zst")))


def _missing(name):
    raise ImportError(name)


# Resuming.


def resumed(dataset, state):
    copy = pickle.loads(pickle.dumps(dataset))
    copy.load_state_dict(json.loads(json.dumps(state)))
    return copy


@pytest.mark.parametrize(
    ("suffix", "ending"), [("", b"\n"), ("", b"\r\n\r\n"), (".gz", b"\r\n\r\n"), (".zst", b"\n")]
)
def test_an_iterator_resumes_from_the_state_of_another(cloud, suffix, ending):
    pack = PACKS.get(suffix, bytes)
    url = put(cloud, 60, suffix=suffix, pack=lambda data: pack(data.replace(b"\n", ending)))
    dataset = LineDataset(url, decode=json.loads, rank=1, world_size=2)
    everything = numbers(dataset)
    for n in range(len(everything) + 1):
        iterator = iter(dataset)
        assert [next(iterator)["i"] for _ in range(n)] == everything[:n]
        copy = resumed(dataset, dataset.state_dict())
        assert copy.state_dict() == dataset.state_dict()
        assert numbers(copy) == everything[n:]
        assert numbers(resumed(dataset, copy.state_dict())) == []
        assert numbers(copy) == everything  # and then from the start


def test_resuming_reads_nothing_before_the_position(cloud):
    cloud.put("a.jsonl", b"".join(line(i) + b"\n" for i in range(50_000)))
    given_options = {"cachedfs": {"read_ahead": 0}}
    dataset = LineDataset(cloud.url("*.jsonl"), decode=json.loads, storage_options=given_options)
    iterator = iter(dataset)
    for _ in range(49_000):
        next(iterator)
    state = dataset.state_dict()
    del iterator
    dataset.fs._objects.engine.drain(120)  # a block that is stored later would not be evicted
    dataset.fs.evict(cloud.path("a.jsonl"))
    cloud.asked()
    assert numbers(resumed(dataset, state)) == list(range(49_000, 50_000))
    assert cloud.asked() == ["media"]
    ((start, _),) = dataset.fs.cached_extent(cloud.path("a.jsonl"))
    assert start == state["offset"] // MiB * MiB > 3 * MiB


def test_a_state_that_does_not_fit_is_an_error_that_says_why(cloud):
    url = put(cloud, 30)
    dataset = LineDataset(url)
    iterator = iter(dataset)
    next(iterator)
    state = dataset.state_dict()
    with pytest.raises(
        ValueError, match="part 0 of 1, but this is part 1 of 2: resume with the same numbers"
    ):
        iter(resumed(LineDataset(url, rank=1, world_size=2), state))
    with pytest.raises(ValueError, match=r"it has no .*offset"):
        dataset.load_state_dict({"file": None})
    cloud.put("d/0.jsonl", bytes(dataset._sizes[0] - 1) + b"\n")
    dataset.fs.invalidate_cache()
    with pytest.raises(ObjectChanged, match=r"0\.jsonl: the file was replaced since the state was saved"):
        iter(resumed(LineDataset(url), state))
    cloud.put("d/0.jsonl", b"shorter")
    dataset.fs.invalidate_cache()
    with pytest.raises(ObjectChanged, match="their sizes differ"):
        iter(resumed(LineDataset(url), state))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # called by torchdata
@pytest.mark.parametrize("n_workers", [0, 2])
def test_torchdata_resumes_in_the_middle_of_an_epoch(cloud, n_workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader():
        dataset = LineDataset(put(cloud, 200), decode=json.loads, transform=number_of)
        return stateful.StatefulDataLoader(dataset, batch_size=8, num_workers=n_workers)

    first = loader()
    batches, states = [], []
    for batch in first:
        batches.append(batch.tolist())
        states.append(first.state_dict())
    assert sorted(i for batch in batches for i in batch) == list(range(200))
    for n in (1, len(batches) - 1):
        second = loader()
        second.load_state_dict(states[n - 1])
        assert [batch.tolist() for batch in second] == batches[n:]
        assert sorted(torch.cat(list(second)).tolist()) == list(range(200))  # the next epoch is complete


# Cost in requests, and errors.


def test_the_part_of_a_rank_is_fetched_once_also_ahead(cloud):
    url = put(cloud, 300)
    for rank in range(2):
        dataset = LineDataset(url, rank=rank, world_size=2)
        cloud.asked()
        if rank == 0:
            dataset.fs.prefetch(dataset.items()).wait()
            assert cloud.asked() == ["media"] * 2
        assert len(list(dataset)) > 100
        assert cloud.asked() == (["media"] if rank else [])
        assert len(list(dataset)) > 100
        assert cloud.asked() == []


def test_a_missing_or_replaced_file_is_an_error_that_names_it(cloud):
    with pytest.raises(ObjectNotFound, match=r"no\.txt"):
        LineDataset([cloud.url("no.txt")])
    url = put(cloud, 30)
    dataset = LineDataset(url)
    cloud.put("d/1.jsonl", b"other\n")
    with pytest.raises(ObjectChanged, match=r"1\.jsonl"):
        list(dataset)
    dataset.fs.invalidate_cache()
    with pytest.raises(
        ObjectChanged, match=r"1\.jsonl: the file was replaced since LineDataset\(.*create it again"
    ):
        list(dataset)
    cloud.delete("d/0.jsonl")
    dataset.fs.evict()
    dataset.fs.invalidate_cache()
    with pytest.raises(ObjectNotFound, match=r"0\.jsonl"):
        list(dataset)


@pytest.mark.parametrize("max_age", [0, 60])
def test_construction_costs_one_listing_or_one_lookup_per_listed_file(cloud, max_age):
    given = {"storage_options": {"cachedfs": {"max_age": max_age}}}
    folder = put(cloud, 30, n_files=12)
    cloud.asked()
    listed = LineDataset(folder, **given)
    assert len(cloud.asked()) == 1
    asked = LineDataset([cloud.url(f"d/{i}.jsonl") for i in range(12)], **given)
    assert len(cloud.asked()) == (0 if max_age else 12)
    assert listed._versions == asked._versions == [listed.fs.ukey(path) for path in listed.paths]
    cloud.put("d/1.jsonl", b"other\n")
    listed.fs.invalidate_cache()
    again = LineDataset(folder, **given)
    assert [i for i in range(12) if again._versions[i] != listed._versions[i]] == [1]
    assert len(list(again)) == 30 - 2


def test_an_error_of_decode_keeps_its_type_and_names_the_line(cloud):
    cloud.put("a.jsonl", b"\n".join(line(i) for i in range(10)))
    at = sum(len(line(i)) + 1 for i in range(7))
    dataset = LineDataset(cloud.url("a.jsonl"), decode=fail_on_seven)
    with pytest.raises(ZeroDivisionError, match=r"^mine\n") as caught:
        list(dataset)
    assert caught.value.__notes__ == [f"in the line at byte {at:,} of {cloud.url('a.jsonl')}, in {dataset!r}"]
    assert caught.traceback[-1].name == "fail_on_seven"
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(LineDataset(cloud.url("a.jsonl"), decode=stop_on_seven))
