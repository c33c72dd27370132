"""Summary of a run from its events: totals, activity, wait times and the bottleneck."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cachedfs.common.event_log import COUNTS
from cachedfs.report.analysis import Analysis, RunFigures, analyse
from cachedfs.report.event_reader import EventRecords

if TYPE_CHECKING:
    from cachedfs.cache.index.block_rows import CachedPath

N_BINS = 40  # as many bars fit on a phone
N_LONGEST = 10  # how many of the objects with the longest waits to list

Span = tuple[float, float]


@dataclass(frozen=True)
class TimeBins:
    """The run divided into bins of `width_s` seconds. All lists have one value per bin.

    `counts`: counter increments. `asking`: mean number of requests without a response yet. `coming`: mean number of
    requests receiving bytes. `waited`: fraction of the bin in which a caller waited.
    """

    width_s: float
    counts: dict[str, list[float]]
    asking: list[float]
    coming: list[float]
    waited: list[float]


@dataclass(frozen=True, kw_only=True)
class RunSummary(Analysis):
    """The figures of a run, and what limited it. Times are in seconds, sizes in bytes.

    `counts`: counters of all processes, named as in `fs.stats()`. `n_requests`: requests in the event log. `n_ahead`:
    speculative ones. `answer_s`: mean time to the response headers. `bound_per_s`: network rate, as measured or the
    highest of any bin; None without data. `longest`: (path, waits, seconds) per object.
    `waited`: seconds in which a caller waited while a response was received (`for_bytes_s`), while requests had no
    response yet (`for_answers_s`), and while no request was active (`for_others_s`).
    """

    elapsed_s: float
    n_processes: int
    counts: dict[str, int]
    n_requests: int
    n_failed: int
    n_ahead: int
    bytes_answered: int
    answer_s: float
    waited: dict[str, float]
    longest: tuple[tuple[str, int, float], ...]
    bound_per_s: float | None
    bins: TimeBins
    n_cut: int = 0
    n_full: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as a dictionary of JSON values."""
        return {**asdict(self), "sentence": self.sentence}


def summary_of(records: EventRecords, *, n_bins: int = N_BINS) -> RunSummary:
    """Return the summary of a run's events, with `n_bins` time bins."""
    begin, end = _ends(records)
    asking = [(r.at, r.at + r.wait_s) for r in records.requests]
    coming = [(r.at + r.wait_s, r.at + r.took_s) for r in records.requests if r.bytes]
    waits = merged((w.at, w.at + w.took_s) for w in records.waits)
    for_bytes_s, for_answers_s, for_others_s = split(waits, coming, asking)
    waited = {"for_bytes_s": for_bytes_s, "for_answers_s": for_answers_s, "for_others_s": for_others_s}
    bins = _bins(records, waits, begin, end, n_bins)
    most = max(bins.counts["bytes_fetched"], default=0.0) / bins.width_s if bins.width_s else 0.0
    bound = max(records.bytes_per_s or 0.0, most) or None
    counts = {name: sum(sample.counts[name] for sample in records.samples) for name in COUNTS}
    n_requests = len(records.requests)
    answer_s = sum(r.wait_s for r in records.requests) / n_requests if n_requests else 0.0
    found = analyse(
        RunFigures(
            elapsed_s=end - begin,
            wait_s=sum(waited.values()),
            times={"link": for_bytes_s, "latency": for_answers_s, "other": for_others_s},
            requests=n_requests,
            refused=sum(r.refused for r in records.requests),
            latency_s=answer_s,
            bytes_fetched=counts["bytes_fetched"],
            bytes_per_s=bound,
        )
    )
    return RunSummary(
        **vars(found),
        elapsed_s=end - begin,
        n_processes=records.n_processes,
        counts=counts,
        n_requests=n_requests,
        n_failed=sum(not r.is_good for r in records.requests),
        n_ahead=sum(r.ahead for r in records.requests),
        bytes_answered=sum(r.bytes for r in records.requests),
        answer_s=answer_s,
        waited=waited,
        longest=_longest(records),
        bound_per_s=bound,
        bins=bins,
        n_cut=records.n_cut,
        n_full=records.n_full,
    )


def _ends(records: EventRecords) -> Span:
    spans = [(r.at, r.at + r.took_s) for r in records.requests]
    spans += [(w.at, w.at + w.took_s) for w in records.waits]
    spans += [(s.at - s.over_s, s.at) for s in records.samples if any(s.counts.values())]
    return min((a for a, _ in spans), default=0.0), max((b for _, b in spans), default=0.0)


def _bins(records: EventRecords, waits: Sequence[Span], begin: float, end: float, n: int) -> TimeBins:
    width_s = (end - begin) / n
    counts = {name: [0.0] * n for name in COUNTS}
    asking, coming, waited = [0.0] * n, [0.0] * n, [0.0] * n
    if width_s > 0:
        for sample in records.samples:
            for name, value in sample.counts.items():
                span = sample.at - sample.over_s - begin, sample.at - begin
                if value:
                    _spread(counts[name], span, value, width_s)
        for r in records.requests:
            sent, answered, over = r.at - begin, r.at + r.wait_s - begin, r.at + r.took_s - begin
            _spread(asking, (sent, answered), r.wait_s / width_s, width_s)
            _spread(coming, (answered, over), (r.took_s - r.wait_s) / width_s, width_s)
        for a, b in waits:
            _spread(waited, (a - begin, b - begin), (b - a) / width_s, width_s)
    return TimeBins(width_s, counts, asking, coming, waited)


def _spread(bins: list[float], span: Span, amount: float, width_s: float) -> None:
    """Distribute `amount` over the bins that `span` overlaps, in proportion to the overlap."""
    start, stop = max(0.0, span[0]), min(span[1], width_s * len(bins))
    first = min(int(start / width_s), len(bins) - 1)
    if stop - start <= 0:
        bins[first] += amount
        return
    for at in range(first, min(int(stop / width_s) + 1, len(bins))):
        part_s = min(stop, (at + 1) * width_s) - max(start, at * width_s)
        bins[at] += amount * max(0.0, part_s) / (stop - start)


def _longest(records: EventRecords) -> tuple[tuple[str, int, float], ...]:
    """Return the objects with the longest total wait, longest first.

    Each as (path, number of waits, seconds).
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for wait in records.waits:
        sums[wait.path][0] += 1
        sums[wait.path][1] += wait.took_s
    found = sorted(sums.items(), key=lambda each: (-each[1][1], each[0]))[:N_LONGEST]
    return tuple((path, int(n), took_s) for path, (n, took_s) in found)


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the union of `spans`, which may overlap and be unsorted."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        elif stop > start:
            found.append((start, stop))
    return found


def split(waits: Iterable[Span], first: Iterable[Span], second: Iterable[Span]) -> tuple[float, float, float]:
    """Divide the time of `waits` into that in spans of `first`, that in spans of `second` alone, and the rest."""
    kinds = enumerate((waits, first, second))
    edges = [
        (at, kind, step)
        for kind, spans in kinds
        for span in spans
        for at, step in zip(span, (1, -1), strict=True)
    ]
    lengths, active, last = [0.0, 0.0, 0.0], [0, 0, 0], 0.0
    for at, kind, step in sorted(edges):
        if active[0]:
            lengths[0 if active[1] else 1 if active[2] else 2] += at - last
        active[kind] += step
        last = at
    return lengths[0], lengths[1], lengths[2]


# Cache contents


def by_folder(held: Iterable[CachedPath], most: int = 8) -> list[tuple[str, list[CachedPath]]]:
    """Return what is cached by folder, as pairs of folder and contents, the largest first.

    Paths are grouped by the deepest folder level with at most `most` folders. If even the top level has more, the last
    pair sums up the others.
    """
    named = [(each.path.split("/")[:-1] or [each.path], each) for each in held]
    best: dict[str, list[CachedPath]] = {}
    for depth in range(1, max((len(folders) for folders, _ in named), default=0) + 1):
        found = defaultdict(list)
        for folders, each in named:
            found["/".join(folders[:depth])].append(each)
        if best and len(found) > most:
            break
        best = found
    pairs = sorted(best.items(), key=lambda pair: (-size_of(pair[1]), pair[0]))
    rest = pairs[most - 1 :] if len(pairs) > most else []
    others = (f"{len(rest):,} others", [each for _, some in rest for each in some])
    return [*pairs[: most - 1], others] if rest else pairs


def size_of(held: Iterable[CachedPath]) -> int:
    """Return how many bytes are cached."""
    return sum(each.size for each in held)
