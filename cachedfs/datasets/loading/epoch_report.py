"""Report on one epoch: its timings, its shortest possible duration, and what limited it.

If everything overlapped perfectly, an epoch would take as long as the longest of its parts: computing, transferring
the missing bytes, waiting for responses with a given concurrency, and decoding in a given number of threads. A part
that was not measured is not estimated.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from cachedfs.common.text import bars, counted, per_cent, seconds, size
from cachedfs.common.types import LinkStats, Stats
from cachedfs.datasets.loading.epoch_chart import page
from cachedfs.datasets.loading.metrics import BatchTiming, EpochTimings
from cachedfs.filesystem import CachedFileSystem
from cachedfs.report.analysis import RunFigures, analyse

__all__ = ["EpochMeasurement", "EpochReport", "FetchCounts", "FetchMeter", "report_of"]


N_BARS = 60


@dataclass(frozen=True)
class FetchCounts:
    """Requests and bytes of this process since the loop began, and properties of link and cache.

    The counts include all readers of this process. `latency_s`: mean time to the first byte. `bytes_per_s`: bandwidth
    of the whole link. Both are None if they were not measured. `n_at_once`: maximum number of concurrent prefetch
    requests. `may_hold`: bytes that the cache can hold; None if nothing can be stored.
    """

    requests: int
    bytes_fetched: int
    bytes_read: int
    latency_s: float | None
    bytes_per_s: float | None
    n_at_once: int
    may_hold: int | None


@dataclass(frozen=True)
class EpochMeasurement:
    """Measurements of one epoch over `n` samples with `n_threads` batch threads.

    `tells_reading`: whether the threads' waits for bytes were measured; the rest of their time is decoding.
    `fetched`: None if the dataset does not read through cachedfs, or does not say so.
    """

    epoch: int
    n: int
    n_threads: int
    timings: EpochTimings
    tells_reading: bool
    fetched: FetchCounts | None


@dataclass(frozen=True)
class EpochReport:
    """Report on one epoch: its duration, its best possible duration, and what limits it.

    Times are in seconds, sizes in bytes. `by_itself`: the time that each part would take alone: "compute", "link",
    "latency", "decode" and "load". "load" is all work of the batch threads; it is there if nothing was fetched, or if
    fetching and decoding cannot be told apart. `bound_s`: the longest of these times. `limit`: what limits: one of these
    names, "start" (only the first batch was waited for), or None if no part explains the waiting. `shares`: the times as
    shares of `elapsed_s`. `sentence` says it, with `advice`: what to do.

    `hit_ratio`: the share of the bytes read that was not fetched. `hit_bound`: the share of the data that the cache
    can hold, which is the highest possible hit ratio from the second epoch on. `unknown`: what could not be measured,
    and why. `stalls`: the timings of the last batches.
    """

    epoch: int
    n_batches: int
    n_samples: int
    elapsed_s: float
    wait_s: float
    first_wait_s: float
    by_itself: dict[str, float]
    bound_s: float
    limit: str | None
    shares: dict[str, float]
    latency_s: float | None
    bytes_per_s: float | None
    bytes_fetched: int | None
    hit_ratio: float | None
    hit_bound: float | None
    requests_per_sample: float | None
    fetched_per_sample: float | None
    read_per_sample: float | None
    sentence: str
    advice: tuple[str, ...]
    unknown: tuple[str, ...]
    stalls: tuple[BatchTiming, ...]
    n_threads: int

    @property
    def of_bound(self) -> float:
        """`bound_s / elapsed_s`, the share of the best possible speed: 1.0 could not have been faster."""
        return self.bound_s / self.elapsed_s if self.elapsed_s else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict of JSON-compatible values."""
        stalls = [timing._asdict() for timing in self.stalls]
        texts = {"advice": list(self.advice), "unknown": list(self.unknown)}
        return {**asdict(self), **texts, "of_bound": self.of_bound, "stalls": stalls}

    def facts(self) -> list[tuple[str, str]]:
        """Return the lines of the report as pairs of a name and a text."""
        first = f", {seconds(self.first_wait_s)} of it for the first" if self.first_wait_s else ""
        lines = [
            ("bound", f"{seconds(self.bound_s)}, {per_cent(self.of_bound)} of it reached"),
            *((name, self._time_of(name)) for name, took_s in self.by_itself.items() if took_s),
            ("waited", f"{seconds(self.wait_s)} for batches{first}"),
            ("by time", bars([timing.wait_s for timing in self.stalls], N_BARS)),
        ]
        if self.hit_ratio is not None:
            bound = (
                f" of at most {self.hit_bound:.2f} after the first epoch"
                if self.hit_bound is not None
                else ""
            )
            lines.append(("hit ratio", f"{self.hit_ratio:.2f}{bound}"))
        if self.fetched_per_sample is not None and self.read_per_sample is not None:
            each = f"{self.requests_per_sample:.3g} requests, {size(self.fetched_per_sample)} fetched"
            lines.append(("a sample", f"{each}, {size(self.read_per_sample)} read"))
        return [*lines, *(("not known", what) for what in self.unknown)]

    def _time_of(self, name: str) -> str:
        took_s = self.by_itself[name]
        share = per_cent(took_s / self.elapsed_s if self.elapsed_s else 0.0)
        detail = {
            "link": self.bytes_per_s and f"{size(self.bytes_fetched or 0)} at {size(self.bytes_per_s)}/s",
            "latency": self.latency_s and f"{seconds(self.latency_s)} until an answer begins",
            "decode": f"in {counted(self.n_threads, 'thread')}",
            "load": f"in {counted(self.n_threads, 'thread')}",
        }.get(name)
        return f"{seconds(took_s)}, {share} of the time{f': {detail}' if detail else ''}"

    @property
    def title(self) -> str:
        """A one-line summary: the epoch, its batches and samples, and its duration."""
        counts = f"{counted(self.n_batches, 'batch', 'batches')}, {counted(self.n_samples, 'sample')}"
        return f"Epoch {self.epoch}: {counts} in {seconds(self.elapsed_s)}"

    def __str__(self) -> str:
        lines = "\n".join(f"  {name:<10} {value}" for name, value in self.facts() if value)
        return f"{self.title}\n{self.sentence}\n{lines}"

    def _repr_html_(self) -> str:
        return page(self.title, self.sentence, self.facts(), self.stalls, self.n_threads)


def report_of(measured: EpochMeasurement) -> EpochReport:
    """Return the report on one epoch."""
    timings, fetched = measured.timings, measured.fetched
    elapsed_s = timings.wait_s + timings.compute_s
    by_itself, unknown = _part_times(measured, elapsed_s)
    hit_ratio, hit_bound = _hits(measured)
    rate = _rate(fetched, elapsed_s) if fetched else None
    tells_loading = fetched is not None and measured.tells_reading and timings.load_s
    found = analyse(
        RunFigures(
            elapsed_s=elapsed_s,
            wait_s=timings.wait_s,
            first_wait_s=timings.first_wait_s,
            times=by_itself,
            requests=fetched.requests if fetched else 0,
            latency_s=fetched.latency_s if fetched else None,
            bytes_fetched=fetched.bytes_fetched if fetched else 0,
            bytes_per_s=rate,
            n_at_once=fetched.n_at_once if fetched else None,
            n_threads=measured.n_threads,
            read_share=timings.read_s / timings.load_s if tells_loading else None,
            can_store=fetched is None or fetched.may_hold is not None,
            held=hit_bound,
        )
    )

    def per_sample(of: Callable[[FetchCounts], int]) -> float | None:
        return of(fetched) / timings.n_samples if fetched and timings.n_samples else None

    return EpochReport(
        epoch=measured.epoch,
        n_batches=timings.n_batches,
        n_samples=timings.n_samples,
        elapsed_s=elapsed_s,
        wait_s=timings.wait_s,
        first_wait_s=timings.first_wait_s,
        by_itself=by_itself,
        bound_s=max(by_itself.values()),
        limit=found.limit,
        shares=found.shares,
        latency_s=fetched.latency_s if fetched else None,
        bytes_per_s=rate,
        bytes_fetched=fetched.bytes_fetched if fetched else None,
        hit_ratio=hit_ratio,
        hit_bound=hit_bound,
        requests_per_sample=per_sample(lambda fetched: fetched.requests),
        fetched_per_sample=per_sample(lambda fetched: fetched.bytes_fetched),
        read_per_sample=per_sample(lambda fetched: fetched.bytes_read),
        sentence=found.sentence,
        advice=found.advice,
        unknown=tuple(unknown),
        stalls=tuple(timings.recent),
        n_threads=measured.n_threads,
    )


# The lower bound.


def _part_times(measured: EpochMeasurement, elapsed_s: float) -> tuple[dict[str, float], list[str]]:
    """Return the time that each part would take alone, and texts on what is unknown."""
    timings, fetched, unknown = measured.timings, measured.fetched, []
    found = {"compute": timings.compute_s}
    if fetched is None:
        unknown.append(
            "what is fetched, from where and how fast: the dataset does not read through cachedfs, or manages its own reads"
        )
    else:
        rate = _rate(fetched, elapsed_s)
        if fetched.bytes_fetched == 0 or rate:
            found["link"] = fetched.bytes_fetched / rate if rate else 0.0
        else:
            unknown.append("the link's bandwidth: nothing of a MiB or more was fetched ahead")
        if fetched.requests == 0 or fetched.latency_s is not None:
            # At most `elapsed_s`: `n_at_once` does not limit requests that a reader waits for.
            waits_s = fetched.requests * (fetched.latency_s or 0.0) / fetched.n_at_once
            found["latency"] = min(elapsed_s, waits_s)
        else:
            unknown.append("how late answers are: nothing was fetched ahead")
    if measured.tells_reading:
        found["decode"] = (timings.load_s - timings.read_s) / measured.n_threads
    else:
        unknown.append(
            "how much of loading is decoding: the dataset does not report how long it waits for bytes"
        )
    if fetched is None or not measured.tells_reading or fetched.bytes_fetched == 0:
        found["load"] = timings.load_s / measured.n_threads
    return found, unknown


def _rate(fetched: FetchCounts, elapsed_s: float) -> float | None:
    """Return the bandwidth of the link in bytes/s.

    It is the measured one, but at least the rate of the fetched bytes.
    """
    if fetched.bytes_per_s is None or not elapsed_s:
        return fetched.bytes_per_s
    return max(fetched.bytes_per_s, fetched.bytes_fetched / elapsed_s)


def _data_size(measured: EpochMeasurement) -> float | None:
    """Return the bytes of all samples, extrapolated from those that were read; None if none were."""
    timings, fetched = measured.timings, measured.fetched
    if fetched is None or not timings.n_samples or not fetched.bytes_read:
        return None
    return fetched.bytes_read / timings.n_samples * measured.n


def _hits(measured: EpochMeasurement) -> tuple[float | None, float | None]:
    """Return the hit ratio (by bytes), and its upper bound if an epoch reads each sample once."""
    fetched, data_size = measured.fetched, _data_size(measured)
    if fetched is None or data_size is None:
        return None, None
    ratio = max(0.0, 1 - fetched.bytes_fetched / fetched.bytes_read)
    return ratio, None if fetched.may_hold is None else min(1.0, fetched.may_hold / data_size)


class _Counts(NamedTuple):
    stats: Stats
    link: LinkStats


class FetchMeter:
    """Measure what a cachedfs filesystem fetches, from its creation until `stop`.

    It measures nothing if `fs` is None.
    """

    def __init__(self, fs: CachedFileSystem | None) -> None:
        self._pid = os.getpid()
        self._before = None if fs is None else _Counts(fs.stats(), fs.link_stats())
        self._after: _Counts | None = None

    def stop(self, fs: CachedFileSystem | None) -> None:
        """Stop counting: later fetches belong to the next loop."""
        self._after = self._now(fs)

    def fetched(self, fs: CachedFileSystem | None) -> FetchCounts | None:
        """Return the counts; None if they cannot be known."""
        before, after = self._before, self._after or self._now(fs)
        if fs is None or before is None or after is None:
            return None
        n_timed = after.link.n_timed - before.link.n_timed
        waited_s = after.link.wait_s - before.link.wait_s
        return FetchCounts(
            requests=after.stats.requests - before.stats.requests,
            bytes_fetched=after.stats.bytes_fetched - before.stats.bytes_fetched,
            bytes_read=after.stats.bytes_served - before.stats.bytes_served,
            latency_s=waited_s / n_timed if n_timed else None,
            bytes_per_s=after.link.bytes_per_s,
            n_at_once=after.link.n_at_once,
            may_hold=fs.may_hold(),
        )

    def _now(self, fs: CachedFileSystem | None) -> _Counts | None:
        if fs is None or self._pid != os.getpid():  # a forked child has its own counters
            return None
        return _Counts(fs.stats(), fs.link_stats())
