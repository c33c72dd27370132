"""The promised bounds on our results, and since when they count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cachedfs.config import FIRST_AT_ONCE
from cachedfs.sim import Profile
from tests.benchmarks import services, training
from tests.benchmarks.data import BIG_SIZE, GIGABYTE_SIZE, LONG_SIZE, MANY, MANY_SIZE, MiB
from tests.benchmarks.harness import Result
from tests.benchmarks.workloads import WORKLOADS


@dataclass(frozen=True, slots=True)
class Bound:
    """One number of ours, and its upper bound.

    `local_s`: the time of the builtin file on the machine of the promise. On a slower machine, the bound is larger by the
    difference: the promise is about how close a pass without requests comes to a local file.
    """

    row: str
    what: str
    at_most: float
    value: Callable[[Result], float]
    unit: str = "s"
    is_due: bool = True  # False: does not count yet
    local_s: float | None = None

    def allowed(self, result: Result) -> float:
        """Return the bound on the machine of `result`."""
        local = result.figures.get("beside")
        if self.local_s is None or local is None:
            return self.at_most
        return self.at_most * max(1.0, local.median / self.local_s)


class Verdict(NamedTuple):
    """The verdict on one bound."""

    bound: Bound
    value: float | None  # None: it failed
    allowed: float  # more than `at_most` if local files are slower than on the machine of the promise
    verdict: str  # met, MISSED, later


def median(name: str) -> Callable[[Result], float]:
    return lambda result: result.figures[name].median


def times_local(result: Result) -> float:
    """Return our second pass, or a later epoch, divided by that from the local disk, measured in turn in one process."""
    return result.figures["second"].median / result.figures["beside"].median


def per_file(name: str) -> Callable[[Result], float]:
    """Return the requests per file; once it is cached, preparing the pass must not send any either."""

    def count(result: Result) -> float:
        prepared = 0.0 if name == "cold" else result.prepared.get(name, 0.0)
        return (result.requests[name] + prepared) / WORKLOADS[result.row].n

    return count


def listed_aside(result: Result) -> float:
    """Return the requests per file, without the one that lists their folder."""
    return (result.requests["cold"] - 1) / WORKLOADS[result.row].n


def drive_many_s(profile: Profile) -> float:
    """Return the least time of 1,000 files, 16 at a time at the mean latency, without errors and stalls."""
    waits_s = len(MANY) * services.mean(profile.media).median_s / 16
    return max(waits_s, len(MANY) * MANY_SIZE / profile.total_rate)


def over_minutes(profile: Profile) -> Callable[[Result], float]:
    """Return our cold pass divided by that of a client that sends each minute's downloads at once.

    It has as many requests in flight as we begin with.
    """

    def times(result: Result) -> float:
        a_minute = profile.quota.units_per_user // 200
        minutes, rest = divmod(WORKLOADS[result.row].n - 1, a_minute)
        waits_s = (rest + 1) * services.mean(profile.media).median_s / FIRST_AT_ONCE
        return _COLD(result) / (60 * minutes + waits_s)

    return times


def over_second(result: Result) -> float:
    """Return the share of a cold pass that a second one saves: waiting, and the CPU work of fetching."""
    return 1 - result.figures["second"].median / result.figures["cold"].median


def over_floor(result: Result) -> float:
    """Return our CPU time of a cold pass divided by that of a raw client that writes the bytes to new files."""
    return result.figures["cpu"].median / result.figures["floor_cpu"].median


def _requests(row: str) -> list[Bound]:
    return [
        Bound(row, "requests a file, cold", 1.0, per_file("cold"), ""),
        Bound(row, "requests a file, second pass", 0.0, per_file("second"), ""),
        Bound(row, "requests a file, new process", 0.0, per_file("new"), ""),
    ]


def _images(row: str) -> list[Bound]:
    # Blocks and pauses are not scaled, so the time before the first batch is not a tenth of that at Drive.
    first = Bound(row, "first epoch over its bound", 1.03, median("over_all"), "x", is_due=False)
    return [first, Bound(row, "a later epoch over the local disk", 1.01, times_local, "x")]


def _capped(row: str) -> list[Bound]:
    return [
        Bound(row, "hit ratio less than the share that fits", 0.02, median("missing"), ""),
        Bound(row, "bytes over the least", 1.03, median("remote"), "x"),
    ]


_COLD, _SECOND, _NEW, _WRONG = median("cold"), median("second"), median("new"), median("wrong")
_BIG_GB = BIG_SIZE / 1e9
_ONE_S = services.EVEN.media.median_s  # one request of the rows with even latency
_BLOCK_S = _ONE_S + MiB / services.EVEN.stream_rate  # one block alone on the link
_GIGABYTE_S = GIGABYTE_SIZE / services.EVEN.total_rate  # methods that come close to it cannot differ much
# 64 files of 2 KB, 16 at a time; the ten pages of a listing; 200 MB after one latency.
_DRIVE_BATCH_S = 64 * services.DRIVE_EVEN.media.median_s / 16
_DRIVE_LIST_S = 10 * (services.DRIVE_EVEN.listing.median_s + 1000 * services.DRIVE_EVEN.list_item_s)
_DRIVE_LONG_S = services.mean(services.DRIVE_CALM.media).median_s + LONG_SIZE / services.DRIVE_CALM.total_rate


def over(name: str, least: float) -> Callable[[Result], float]:
    """Return a figure divided by the least that is possible."""
    return lambda result: result.figures[name].median / least


BOUNDS = [
    Bound("sequential", "cold", 1.25, _COLD),
    Bound("sequential", "second pass", 0.02, _SECOND, local_s=0.01),
    Bound("sequential", "new process", 0.06, _NEW, local_s=0.01),
    Bound("fill", "cold, a GB", 1.0, over("cold", _BIG_GB)),
    Bound("fill", "CPU of its process, a GB", 0.8, over("cpu", _BIG_GB)),
    Bound("fill", "CPU over a raw client that writes new files", 1.3, over_floor, "x", is_due=False),
    Bound("whole", "cold", 1.4, _COLD),
    Bound("random", "cold", 2.0, _COLD),
    Bound("random", "second pass", 0.01, _SECOND, local_s=0.002),
    Bound("one_by_one", "cold", 16.0, _COLD),
    Bound("one_by_one", "second pass", 0.03, _SECOND, local_s=0.009),
    *_requests("one_by_one"),
    Bound("batched", "cold", 1.9, _COLD),
    Bound("batched", "second pass", 0.015, _SECOND, local_s=0.01),
    Bound("one_by_one_ahead", "cold", 1.5, _COLD),
    Bound("one_by_one_ahead", "requests a file, cold, the listing aside", 1.0, listed_aside, ""),
    Bound("batched_ahead", "cold", 1.2, _COLD),
    Bound("whole_ahead", "cold", 1.25, _COLD),
    Bound("dense", "cold", 1.0, _COLD),
    Bound("dense", "CPU over a raw client that writes new files", 2.0, over_floor, "x", is_due=False),
    Bound("dense", "requests a chunk, cold", round(363 / 360, 4), per_file("cold"), ""),
    Bound("dense", "second pass over local", 1.2, times_local, "x"),
    Bound("samples", "cold", 1.6, _COLD),
    Bound("samples", "second pass over local", 1.0, times_local, "x"),
    Bound("seek_small", "cached", 0.015, _SECOND, local_s=0.01),
    Bound("seek_big", "cached", 0.025, _SECOND, local_s=0.008),
    Bound("cat_4k", "a call", 12.0, over("second", 5000 / 1e6), "us"),
    Bound("text_lines", "over the builtin", 1.7, times_local, "x"),
    Bound("binary_lines", "over the builtin", 1.2, times_local, "x"),
    Bound("drive_batch", "cold", round(1.3 * _DRIVE_BATCH_S, 3), _COLD),
    Bound("drive_batch", "second pass", 0.015, _SECOND),
    *_requests("drive_batch"),
    Bound("drive_batch_typical", "cold over the ideal schedule", 1.1, median("over_ideal"), "x"),
    Bound("drive_many", "cold", round(1.3 * drive_many_s(services.DRIVE_OLD), 2), _COLD),
    Bound("drive_many_known", "cold", round(1.2 * drive_many_s(services.DRIVE_OLD), 2), _COLD),
    Bound("drive_many_bad", "cold", round(1.3 * drive_many_s(services.DRIVE_BAD), 2), _COLD),
    *(
        Bound(row, "cold over a client that knows the quota", 1.1, over_minutes(profile), "x")
        for row, profile in (
            ("drive_minute", services.DRIVE_UNITS),
            ("drive_minute_fixed", services.DRIVE_FIXED),
            ("drive_minute_half", services.DRIVE_HALF),
        )
    ),
    Bound("drive_minute", "refused after 30 seconds", 0.0, median("refused_late"), ""),
    Bound("drive_day", "requests a file, cold", 1.1, per_file("cold"), ""),
    Bound("drive_list", "cold over its pages", 1.2, over("cold", _DRIVE_LIST_S), "x"),
    *_requests("drive_one_by_one"),
    Bound("drive_one_by_one", "second pass", 0.01, _SECOND),
    Bound("drive_big", "second pass", 0.02, _SECOND),
    Bound("shared", "processes with wrong bytes or none", 0.0, _WRONG, ""),
    Bound("shared", "bytes downloaded over its size", 1.02, median("downloaded"), "x"),
    Bound("replaced", "stale after max_age", 0.0, _WRONG, ""),
    Bound("mixed", "two versions in one read", 0.0, _WRONG, ""),
    Bound("flipped", "wrong bytes", 0.0, _WRONG, ""),
    Bound("full", "wrong bytes", 0.0, _WRONG, ""),
    Bound("import", "time", 15.0, median("ms"), "ms"),
    Bound("import", "memory", 5.0, median("MB"), "MB"),
    Bound("steps_small", "cold", 1.25, _COLD),
    Bound("steps_large", "cold", 1.25, _COLD),
    Bound("steps_lines", "cold", 0.8, _COLD),
    *(
        Bound(f"gigabyte_{how}", "cold over the link", 1.1, over("cold", _GIGABYTE_S), "x")
        for how in ("small", "large", "lines")
    ),
    Bound("first_byte", "cold over one request each", 1.1, over("cold", 2 * _ONE_S), "x"),
    Bound("beside_small", "cold over one request each", 1.2, over("cold", 10 * _ONE_S), "x"),
    Bound("beside_block", "cold over a block each", 1.2, over("cold", 5 * _BLOCK_S), "x"),
    Bound("drive_long", "cold", round(_DRIVE_LONG_S / 0.95, 2), _COLD, is_due=False),
    Bound("memory", "growth from the first half to the second", 16.0, median("MB"), "MB"),
    Bound("train_small", "from the fourth batch on, over computing", round(1 / 0.97, 3), median("over"), "x"),
    Bound("train_steps", "all of it", 10.3, median("seconds")),
    Bound("train_ratio", "an iteration over the longer of loading and computing", 1.03, median("over"), "x"),
    *_images("train_images_slow"),
    *_images("train_images"),
    Bound("train_images", "from the fourth batch on, over computing", 1.03, median("over"), "x"),
    Bound("train_samples", "a sample, over a bare loop", 1.25, median("over"), "x", is_due=False),
    Bound("train_whole", "CPU seconds for a decoded GB", 0.5, median("cpu_s_a_gb")),
    *(bound for name in training.ROWS if name.startswith("train_c") for bound in _capped(name)),
    Bound(
        "train_two",
        "share that the process with fewer hits fetches later",
        0.8,
        lambda result: 1 - median("hits")(result),
        "",
    ),
    Bound("pack_link", "all of it, over the longest of its parts", 1.25, median("over"), "x"),
    Bound("pack_codec", "all of it, over the longest of its parts", 1.25, median("over"), "x"),
    Bound("train_resume", "slowest of the places", 0.2, median("worst")),
    Bound("train_resume", "slowest less the fastest", 0.05, median("spread")),
    Bound("steps", "cold, share of the time in which a read waits", 0.05, median("waited"), ""),
    Bound("miss_cpu", "CPU over a bare caching filesystem", 1.35, median("lean cpu_s"), "x"),
    Bound("miss_cpu", "seconds over gcsfs", 1.1, median("gcsfs s"), "x"),
    Bound("many_files", "seconds over gcsfs", 1.1, median("gcsfs s"), "x"),
    Bound("many_files", "CPU over gcsfs", 1.9, median("gcsfs cpu_s"), "x"),
    Bound("many_files", "`pack` over `fs.cat`", 1.3, median("pack s"), "x", is_due=False),
    Bound("many_files", "`FileDataset` over `fs.cat`, first epoch", 1.2, median("dataset s"), "x"),
    Bound("many_files", "`FileDataset` over `fs.cat`, second epoch", 1.2, median("dataset second s"), "x"),
    Bound("steps", "cold, share of the time that a second pass does not take", 0.05, over_second, ""),
]


def judge(results: list[Result]) -> list[Verdict]:
    """Return the verdict on every bound whose row was measured completely."""
    ours = {result.row: result for result in results if result.contender == "cachedfs"}
    verdicts = []
    for bound in BOUNDS:
        result = ours.get(bound.row)
        if result is None or (result.sample and not result.error):
            continue
        try:
            value = None if result.error else round(bound.value(result), 4)
        except KeyError:  # compared with a peer that was left out (`--ours`)
            continue
        allowed = bound.at_most if result.error else round(bound.allowed(result), 4)
        if value is None or (value > allowed and bound.is_due):
            verdict = "MISSED"
        else:
            verdict = "met" if value <= allowed else "later"
        verdicts.append(Verdict(bound, value, allowed, verdict))
    return verdicts
