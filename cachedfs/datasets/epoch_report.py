"""Report on one epoch: its timings, its shortest possible duration, and what limited it.

If everything overlapped perfectly, an epoch would take as long as the longest of its parts: computing, transferring
the missing bytes, waiting for responses with a given concurrency, and decoding in a given number of threads. A part
that was not measured is not estimated.
"""

from __future__ import annotations

import operator
import os
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from cachedfs.common.text import bars, counted, per_cent, seconds, size
from cachedfs.core.statistics import LinkStats, Stats
from cachedfs.filesystem import CachedFileSystem
from cachedfs.report.analysis import Analysis, FetchCounts, RunFigures, analyse

KEPT = 1000  # recent batches whose timings are kept individually
N_BARS = 60  # of the chart of the waits


class BatchTiming(NamedTuple):
    """Seconds of one batch: the loop's wait for it, the time to make it, and the loop's use of it."""

    wait_s: float
    load_s: float
    compute_s: float
    size: int  # bytes
    n_samples: int
    read_s: float  # part of `load_s` spent waiting for bytes; 0 if the dataset does not measure it


class EpochTimings:
    """Timings of the batches of an epoch since its loop began: their sum, the last 1000, and the wait for the first.

    With echo, the times of a batch cover all its repetitions. A batch counts once the next one is asked for.
    """

    def __init__(self, epoch: int = 0) -> None:
        self.epoch, self.n_batches = epoch, 0
        self.sum = BatchTiming(0.0, 0.0, 0.0, 0, 0, 0.0)
        self.first_wait_s = 0.0  # also part of the sum
        self.recent: deque[BatchTiming] = deque(maxlen=KEPT)

    def add(self, timing: BatchTiming) -> None:
        if not self.n_batches:
            self.first_wait_s = timing.wait_s
        self.n_batches += 1
        self.sum = BatchTiming(*map(operator.add, self.sum, timing))
        self.recent.append(timing)


@dataclass(frozen=True, repr=False, kw_only=True)
class EpochReport(Analysis):
    """Report on one epoch: its duration, its best possible duration, and what limits it.

    Times are in seconds, sizes in bytes. `by_itself`: the time that each part would take alone: "compute", "link",
    "latency", "quota" (the requests at the rate that the origin allows), "decode" and "load". "load" is all work of the
    batch threads; it is there if nothing was fetched, or if fetching and decoding cannot be told apart. `bound_s`: the
    longest of these times. `limit`: what limits: one of these names, "start" (only the first batch was waited for), or
    None if no part explains the waiting. `shares`: the times as shares of `elapsed_s`. `sentence` says it (`verdict`)
    and what to do (`advice`).

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
    latency_s: float | None
    bytes_per_s: float | None
    bytes_fetched: int | None
    hit_ratio: float | None
    hit_bound: float | None
    requests_per_sample: float | None
    fetched_per_sample: float | None
    read_per_sample: float | None
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
        texts = {"sentence": self.sentence, "advice": list(self.advice), "unknown": list(self.unknown)}
        return {**asdict(self), **texts, "of_bound": self.of_bound, "stalls": stalls}

    def _facts(self) -> list[tuple[str, str]]:
        first = f", {seconds(self.first_wait_s)} of it for the first" if self.first_wait_s else ""
        lines = [
            ("bound", f"{seconds(self.bound_s)}, {per_cent(self.of_bound)} of it reached"),
            *((name, self._time_of(name)) for name, took_s in self.by_itself.items() if took_s),
            ("waited", f"{seconds(self.wait_s)} for batches{first}"),
            ("by time", bars([timing.wait_s for timing in self.stalls], N_BARS)),
        ]
        if self.hit_ratio is not None:
            bound = (
                "" if self.hit_bound is None else f" of at most {self.hit_bound:.2f} after the first epoch"
            )
            lines.append(("hit ratio", f"{self.hit_ratio:.2f}{bound}"))
        if self.fetched_per_sample is not None and self.read_per_sample is not None:
            n = f"{self.requests_per_sample:.3g}"
            each = f"{n} request{'' if n == '1' else 's'}, {size(self.fetched_per_sample)} fetched"
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

    def __str__(self) -> str:
        counts = f"{counted(self.n_batches, 'batch', 'batches')}, {counted(self.n_samples, 'sample')}"
        lines = "\n".join(f"  {name:<10} {value}" for name, value in self._facts() if value)
        return f"Epoch {self.epoch}: {counts} in {seconds(self.elapsed_s)}\n{self.sentence}\n{lines}"

    __repr__ = __str__  # what a notebook shows


def report_of(timings: EpochTimings, fetched: FetchCounts | None, *, n: int, n_threads: int) -> EpochReport:
    """Return the report on one epoch over `n` samples with `n_threads` batch threads.

    `fetched`: None if the dataset does not read through cachedfs, or does not say so.
    """
    total = timings.sum
    elapsed_s = total.wait_s + total.compute_s
    if fetched is not None and fetched.bytes_per_s is not None and elapsed_s:
        # The measured bandwidth, but at least the rate of the fetched bytes.
        fetched = replace(fetched, bytes_per_s=max(fetched.bytes_per_s, fetched.bytes_fetched / elapsed_s))
    counts = fetched or FetchCounts()
    by_itself, unknown = _part_times(total, fetched, n_threads)
    hit_ratio = hit_bound = None
    if counts.bytes_read and total.n_samples:
        hit_ratio = max(0.0, 1 - counts.bytes_fetched / counts.bytes_read)
        data_size = counts.bytes_read / total.n_samples * n  # extrapolated from the samples that were read
        hit_bound = None if counts.may_hold is None else min(1.0, counts.may_hold / data_size)
    found = analyse(
        RunFigures(
            **vars(counts),
            elapsed_s=elapsed_s,
            wait_s=total.wait_s,
            first_wait_s=timings.first_wait_s,
            times=by_itself,
            n_threads=n_threads,
            read_share=total.read_s / total.load_s if fetched and total.read_s else None,
            can_store=fetched is None or fetched.may_hold is not None,
            held=hit_bound,
        )
    )
    n_counted = total.n_samples if fetched else 0
    return EpochReport(
        **vars(found),
        epoch=timings.epoch,
        n_batches=timings.n_batches,
        n_samples=total.n_samples,
        elapsed_s=elapsed_s,
        wait_s=total.wait_s,
        first_wait_s=timings.first_wait_s,
        by_itself=by_itself,
        bound_s=max(by_itself.values()),
        latency_s=counts.latency_s,
        bytes_per_s=counts.bytes_per_s,
        bytes_fetched=fetched.bytes_fetched if fetched else None,
        hit_ratio=hit_ratio,
        hit_bound=hit_bound,
        requests_per_sample=counts.requests / n_counted if n_counted else None,
        fetched_per_sample=counts.bytes_fetched / n_counted if n_counted else None,
        read_per_sample=counts.bytes_read / n_counted if n_counted else None,
        unknown=tuple(unknown),
        stalls=tuple(timings.recent),
        n_threads=n_threads,
    )


def _part_times(
    total: BatchTiming, fetched: FetchCounts | None, n_threads: int
) -> tuple[dict[str, float], list[str]]:
    """Return the time that each part would take alone, and texts on what is unknown."""
    found, unknown = {"compute": total.compute_s}, []
    if fetched is None:
        unknown.append(
            "what is fetched, from where and how fast: the dataset does not read through cachedfs, or manages its own reads"
        )
    else:
        if fetched.bytes_fetched == 0 or fetched.bytes_per_s:
            found["link"] = fetched.bytes_fetched / (fetched.bytes_per_s or 1.0)
        else:
            unknown.append("the link's bandwidth: nothing of a MiB or more was fetched ahead")
        if fetched.requests == 0 or fetched.latency_s is not None:
            # At most the whole time: `n_at_once` does not limit requests that a reader waits for.
            waits_s = fetched.requests * (fetched.latency_s or 0.0) / (fetched.n_at_once or 1)
            found["latency"] = min(total.wait_s + total.compute_s, waits_s)
        else:
            unknown.append("how late answers are: nothing was fetched ahead")
        if fetched.requests_per_s:
            found["quota"] = min(total.wait_s + total.compute_s, fetched.requests / fetched.requests_per_s)
    if total.read_s:  # the threads' waits for bytes were measured: the rest of their time is decoding
        found["decode"] = (total.load_s - total.read_s) / n_threads
    else:
        unknown.append(
            "how much of loading is decoding: the dataset does not report how long it waits for bytes"
        )
    if fetched is None or not total.read_s or fetched.bytes_fetched == 0:
        found["load"] = total.load_s / n_threads
    return found, unknown


class FetchMeter:
    """Measure what a cachedfs filesystem fetches, from its creation until `stop`; nothing if `fs` is None."""

    def __init__(self, fs: CachedFileSystem | None) -> None:
        self._fs, self._pid = fs, os.getpid()
        self._before = self._now()
        self._after: tuple[Stats, LinkStats] | None = None

    def stop(self) -> None:
        """Stop counting: later fetches belong to the next loop."""
        self._after = self._now()

    def fetched(self) -> FetchCounts | None:
        """Return the counts; None if they cannot be known."""
        before, after = self._before, self._after or self._now()
        if self._fs is None or before is None or after is None:
            return None
        (stats, link), (stats_before, link_before) = after, before
        n_timed = link.n_timed - link_before.n_timed
        return FetchCounts(
            requests=stats.requests - stats_before.requests,
            bytes_fetched=stats.bytes_fetched - stats_before.bytes_fetched,
            bytes_read=stats.bytes_served - stats_before.bytes_served,
            latency_s=(link.wait_s - link_before.wait_s) / n_timed if n_timed else None,
            bytes_per_s=link.bytes_per_s,
            n_at_once=link.n_at_once,
            requests_per_s=link.requests_per_s,
            may_hold=self._fs.may_hold(),
        )

    def _now(self) -> tuple[Stats, LinkStats] | None:
        if self._fs is None or self._pid != os.getpid():  # a forked child has its own counters
            return None
        return self._fs.stats(), self._fs.link_stats()
