"""Loader reports: the time of each part, the text, and real epochs. What limits a run: tests/report/test_analysis.py."""

import json

import pytest

torch = pytest.importorskip("torch")

from cachedfs.common.text import bars, columns, counted, seconds, size  # noqa: E402
from cachedfs.datasets import FileDataset, Loader  # noqa: E402
from cachedfs.datasets.epoch_report import BatchTiming, EpochTimings, report_of  # noqa: E402
from cachedfs.report.analysis import FetchCounts  # noqa: E402
from tests.support import noise  # noqa: E402

COUNTS = {"n_at_once": 32, "may_hold": 150_000_000}


def report(fetched, *, n=100, wait_s=0.08, load_s=0.3, compute_s=0.02, read_s=0.29):
    """Return the report on `n` batches of ten samples with these times, loaded by four threads."""
    timings = EpochTimings(3)
    for _ in range(n):
        timings.add(BatchTiming(wait_s, load_s, compute_s, 40_000, 10, read_s))
    return report_of(timings, fetched, n=1000, n_threads=4)


def test_a_report_has_numbers_and_a_text():
    fetched = FetchCounts(bytes_read=4_000_000, **COUNTS)
    found = report(fetched, compute_s=0.1, wait_s=0.001, load_s=0.2, read_s=0.12)
    assert (found.elapsed_s, found.bound_s, found.of_bound) == pytest.approx((10.1, 10.0, 10 / 10.1))
    assert (found.hit_ratio, found.hit_bound, found.unknown) == (1.0, 1.0, ())
    assert str(found).splitlines()[:4] == [
        "Epoch 3: 100 batches, 1,000 samples in 10.1 s",
        "Reading does not limit: the program waited 100 ms of 10.1 s (1.0 %) for data.",
        "  bound      10.0 s, 99.0 % of it reached",
        "  compute    10.0 s, 99.0 % of the time",
    ]
    values = found.as_dict()
    assert json.loads(json.dumps(values)) == values


ALL_HITS = {"bytes_read": 4_000_000}
LINK = {"requests": 100, "bytes_fetched": 580_000_000, "bytes_read": 600_000_000, "latency_s": 0.05}


@pytest.mark.parametrize(
    ("fetched", "parts", "unknown"),
    [
        (ALL_HITS, {"link": 0.0, "latency": 0.0, "load": 7.5}, []),
        # Without `load`: it includes waiting for the link.
        (LINK | {"bytes_per_s": 60e6}, {"link": 580 / 60, "latency": 100 * 0.05 / 32}, []),
        # A link that brought more than was measured is as fast.
        (LINK | {"bytes_per_s": 50e6}, {"link": 10.0, "latency": 100 * 0.05 / 32}, []),
        # No longer than the epoch.
        (LINK | {"requests": 10_000}, {"latency": 10.0}, ["the link's bandwidth"]),
        (
            LINK | {"latency_s": None, "requests_per_s": 50.0},
            {"quota": 2.0},
            ["the link's bandwidth", "how late answers are"],
        ),
        (None, {"load": 7.5}, ["what is fetched, from where and how fast"]),
    ],
)
def test_the_time_that_each_part_takes_alone(fetched, parts, unknown):
    found = report(fetched and FetchCounts(**fetched, **COUNTS))
    assert found.by_itself == pytest.approx({"compute": 2.0, "decode": 0.25} | parts)
    assert [what.partition(":")[0] for what in found.unknown] == unknown


def test_an_epoch_without_batches_is_no_error():
    found = report(FetchCounts(n_at_once=32), n=0)
    assert (found.sentence, found.limit, found.of_bound) == ("Nothing was read yet.", None, 1.0)
    assert repr(found) == str(found)


def test_formatted_numbers():
    assert [seconds(value) for value in (0, 0.0123, 1.234, 61.04, 3725)] == [
        *("0 s", "12.3 ms", "1.23 s", "61.0 s"),
        "62 min 5 s",
    ]
    assert [size(value) for value in (999, 12_345, 58e6, 2e15)] == ["999 B", "12.3 kB", "58 MB", "2,000 TB"]
    assert [counted(n, "batch", "batches") for n in (1, 1200)] == ["1 batch", "1,200 batches"]
    assert (columns([1.0, 3.0, 5.0, 6.0, 7.0], 2), columns([], 5)) == ([2.0, 6.0], [])
    assert (bars([0.0, 1.0, 8.0], 60), bars([0.0, 0.0], 60)) == ("▁▂█", "")


# Reports of real epochs.


def files(cloud, n=48, size=1000):
    for number in range(n):
        cloud.put(f"d/{number:03}", noise(size, number))
    return FileDataset(cloud.url("d"), decode=len)


def test_the_first_epoch_is_fetched_and_the_second_is_read_from_the_cache(cloud):
    with Loader(files(cloud), batch_size=8, shuffle=True) as loader:
        with pytest.raises(RuntimeError, match="iterate over some batches"):
            loader.report()
        for epoch in range(2):
            list(loader)
            found = loader.report()
            assert (found.epoch, found.n_batches, found.n_samples) == (epoch, 6, 48)
            assert (found.read_per_sample, found.hit_ratio) == (1000, epoch)
            assert (found.requests_per_sample, found.fetched_per_sample) == (1 - epoch, 1000 * (1 - epoch))
            assert found.hit_bound == 1.0
            assert found.by_itself["decode"] > 0
            assert ("load" in found.by_itself) == (epoch == 1)
            assert (found.latency_s is None) == (epoch == 1)


def in_a_child(loader):
    assert (loader.report().n_batches, loader.report().bytes_fetched) == (1, None)


def test_a_report_is_about_the_last_loop_in_this_process(cloud, forking):
    loader = Loader(files(cloud), batch_size=8)
    list(loader)
    before = loader.report().as_dict()
    loader.dataset.fs.cat_file(cloud.path("d/000"))
    assert loader.report().as_dict() == before
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    assert (loader.report().epoch, loader.report().n_batches) == (1, 1)
    child = forking.Process(target=in_a_child, args=(loader,))
    child.start()
    child.join(600)
    assert child.exitcode == 0
    iterator.close()


def test_without_cachedfs_there_is_no_link_and_decoding_only_of_our_datasets(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    for dataset, parts in (
        ([torch.zeros(2)] * 8, {"compute", "load"}),
        (FileDataset(str(tmp_path), decode=len), {"compute", "decode", "load"}),
    ):
        loader = Loader(dataset)
        list(loader)
        assert loader.report().by_itself.keys() == parts
