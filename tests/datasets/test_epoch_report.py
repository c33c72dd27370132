"""Loader reports: the limiting part, the text, and real epochs."""

import json

import pytest

torch = pytest.importorskip("torch")

from cachedfs.common.text import bars, columns, counted, per_cent, seconds, size  # noqa: E402
from cachedfs.datasets import FileDataset, Loader  # noqa: E402
from cachedfs.datasets.epoch_report import (  # noqa: E402
    BatchTiming,
    EpochTimings,
    report_of,
)
from cachedfs.report.analysis import FetchCounts  # noqa: E402
from tests.support import noise  # noqa: E402

WARM = FetchCounts(0, 0, 4_000_000, None, None, 32, 10**10)


def timings(n=100, *, wait_s=0.0, load_s=0.0, compute_s=0.0, read_s=0.0, first_wait_s=None):
    """Return the timings of `n` batches of ten samples with equal times, except for the first."""
    sums = EpochTimings(3)
    for number in range(n):
        waited = first_wait_s if number == 0 and first_wait_s is not None else wait_s
        sums.add(BatchTiming(waited, load_s, compute_s, 40_000, 10, read_s))
    return sums


def report(sums, fetched=WARM, *, n=1000, n_threads=4):
    return report_of(sums, fetched, n=n, n_threads=n_threads)


# The limiting part.


def test_compute_is_the_limit_when_it_takes_all_the_time():
    found = report(timings(compute_s=0.1, wait_s=0.001, load_s=0.2, read_s=0.12))
    assert found.limit == "compute"
    assert (found.elapsed_s, found.bound_s) == pytest.approx((10.1, 10.0))
    assert found.of_bound == pytest.approx(10 / 10.1)
    assert found.by_itself == pytest.approx(
        {"compute": 10.0, "link": 0.0, "latency": 0.0, "decode": 2.0, "load": 5.0}
    )
    assert (found.hit_ratio, found.hit_bound) == (1.0, 1.0)
    assert found.unknown == ()
    assert str(found).splitlines()[:4] == [
        "Epoch 3: 100 batches, 1,000 samples in 10.1 s",
        "Reading does not limit: the program waited 100 ms of 10.1 s (1.0 %) for data.",
        "  bound      10.0 s, 99.0 % of it reached",
        "  compute    10.0 s, 99.0 % of the time",
    ]
    values = found.as_dict()
    assert json.loads(json.dumps(values)) == values
    assert (values["of_bound"], values["stalls"][0]["compute_s"]) == pytest.approx((10 / 10.1, 0.1))


def test_the_quota_is_the_limit_when_its_rate_takes_all_the_time():
    sums = timings(compute_s=0.02, wait_s=0.08, load_s=0.3, read_s=0.29)
    found = report(
        sums, FetchCounts(1800, 3_600_000, 3_600_000, 0.2, None, 256, 10_000_000, requests_per_s=190.0)
    )
    assert (found.limit, found.by_itself["quota"]) == ("quota", pytest.approx(1800 / 190))


def test_the_link_is_the_limit_when_missing_bytes_take_all_the_time():
    sums = timings(compute_s=0.02, wait_s=0.08, load_s=0.3, read_s=0.29)
    found = report(sums, FetchCounts(100, 580_000_000, 600_000_000, 0.05, 60e6, 32, 150_000_000))
    assert found.limit == "link"
    assert found.by_itself["link"] == pytest.approx(580 / 60)
    assert found.by_itself["latency"] == pytest.approx(100 * 0.05 / 32)
    assert found.by_itself["decode"] == pytest.approx(0.25)
    assert "load" not in found.by_itself  # it includes waiting for the link
    assert found.hit_ratio == pytest.approx(20 / 600)
    assert found.hit_bound == pytest.approx(0.25)
    assert found.fetched_per_sample == 580_000
    assert found.shares["link"] == pytest.approx(580 / 60 / 10)
    assert (
        "at 58 MB/s of 60 MB/s. To do: raise cache_size: the cache holds 25.0 % of the data" in found.sentence
    )


def test_a_link_that_brought_more_than_was_measured_is_as_fast():
    found = report(timings(wait_s=0.1), FetchCounts(9, 600_000_000, 600_000_000, 0.05, 50e6, 32, 10**10))
    assert (found.by_itself["link"], found.bytes_per_s, found.of_bound) == pytest.approx((10.0, 60e6, 1.0))


@pytest.mark.parametrize(("requests", "latency_s"), [(1000, 12.5), (2000, 13.0)])  # no longer than the epoch
def test_latency_is_the_limit_of_many_small_files(requests, latency_s):
    found = report(
        timings(wait_s=0.13, load_s=0.1, read_s=0.1),
        FetchCounts(requests, 2_000_000, 2_000_000, 0.4, None, 32, 10**10),
    )
    assert (found.limit, found.by_itself["latency"]) == ("latency", pytest.approx(latency_s))
    assert found.of_bound == pytest.approx(latency_s / 13)
    assert found.unknown == ("the link's bandwidth: nothing of a MiB or more was fetched ahead",)
    assert f"{requests:,} requests of 400 ms each, 32 at a time" in found.sentence
    found = report(timings(wait_s=0.1), FetchCounts(5, 1000, 1000, None, None, 32, None))
    assert "how late answers are: nothing was fetched ahead" in found.unknown
    assert not {"link", "latency"} & found.by_itself.keys()


def test_a_dataset_that_does_not_use_cachedfs_has_unknown_parts():
    found = report(timings(wait_s=0.1, load_s=0.4), None)
    assert found.limit == "load"
    assert found.by_itself == pytest.approx({"compute": 0.0, "load": 10.0})
    assert [found.latency_s, found.bytes_per_s, found.bytes_fetched, found.hit_ratio, found.hit_bound] == [
        None
    ] * 5
    assert [found.requests_per_sample, found.fetched_per_sample, found.read_per_sample] == [None] * 3
    assert found.advice == ("raise n_threads if cores are free, else use a dataset of cachedfs.datasets",)
    assert [what.partition(":")[0] for what in found.unknown] == [
        "what is fetched, from where and how fast",
        "how much of loading is decoding",
    ]


def test_an_epoch_without_batches_is_no_error():
    found = report(timings(0), FetchCounts(0, 0, 0, None, None, 32, None))
    assert (found.sentence, found.limit, found.of_bound) == ("Nothing was read yet.", None, 1.0)
    assert repr(found) == str(found)
    assert str(found).startswith("Epoch 3: 0 batches, 0 samples in 0 s\nNothing was read yet.\n")


# Text and values.


def test_formatted_numbers():
    assert [seconds(value) for value in (0, 0.0123, 1.234, 61.04, 3725)] == [
        *("0 s", "12.3 ms", "1.23 s", "61.0 s"),
        "62 min 5 s",
    ]
    assert [size(value) for value in (0, 999, 12_345, 58e6, 4e9, 2e15)] == [
        *("0 B", "999 B", "12.3 kB", "58 MB", "4 GB"),
        "2,000 TB",
    ]
    assert (per_cent(0.9731), counted(1, "thread"), counted(1200, "batch", "batches")) == (
        *("97.3 %", "1 thread"),
        "1,200 batches",
    )
    assert columns([1.0, 3.0, 5.0, 6.0, 7.0], 2) == [2.0, 6.0]
    assert columns([], 5) == []
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
