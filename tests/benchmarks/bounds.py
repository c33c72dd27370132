"""The numbers that are promised: "ours, at most" of the design's section 9, and since when they count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.benchmarks.harness import Result

__all__ = ["BOUNDS", "LATER", "Bound", "Verdict", "judge"]


@dataclass(frozen=True, slots=True)
class Bound:
    """One number of ours and the most that it may be."""

    row: str
    what: str
    at_most: float
    value: Callable[[Result], float]
    unit: str = "s"
    is_due: bool = True  # False: comes with a later issue, and fails nothing yet


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one bound fared."""

    row: str
    what: str
    unit: str
    at_most: float
    value: float | None  # None: it failed
    verdict: str  # met, MISSED, later


def median(name: str) -> Callable[[Result], float]:
    return lambda result: result.figures[name].median


def times_local(result: Result) -> float:
    """Return our second pass over the builtin's, measured in turn in one process."""
    return result.figures["second"].median / result.figures["beside"].median


def per_file(name: str) -> Callable[[Result], float]:
    return lambda result: result.requests[name] / 300


def per_call_us(result: Result) -> float:
    return result.figures["second"].median / 5000 * 1e6


_COLD, _SECOND, _NEW = median("cold"), median("second"), median("new")
BOUNDS = [
    Bound("sequential", "cold", 1.25, _COLD, is_due=False),
    Bound("sequential", "second pass", 0.02, _SECOND),
    Bound("sequential", "new process", 0.06, _NEW),
    Bound("whole", "cold", 1.4, _COLD),
    Bound("random", "cold", 2.0, _COLD, is_due=False),
    Bound("random", "second pass", 0.01, _SECOND),
    Bound("one_by_one", "cold", 16.0, _COLD),
    Bound("one_by_one", "second pass", 0.03, _SECOND),
    Bound("one_by_one", "requests a file, cold", 1.0, per_file("cold"), ""),
    Bound("one_by_one", "requests a file, second pass", 0.0, per_file("second"), ""),
    Bound("one_by_one", "requests a file, new process", 0.0, per_file("new"), ""),
    Bound("batched", "cold", 1.9, _COLD),
    Bound("batched", "second pass", 0.015, _SECOND),
    Bound("dense", "cold", 1.0, _COLD, is_due=False),
    Bound("dense", "second pass over local", 1.2, times_local, "x"),
    Bound("samples", "cold", 1.6, _COLD, is_due=False),
    Bound("samples", "second pass over local", 1.0, times_local, "x"),
    Bound("seek_small", "cached", 0.015, _SECOND),
    Bound("seek_big", "cached", 0.025, _SECOND),
    Bound("cat_4k", "a call", 12.0, per_call_us, "us"),
    Bound("text_lines", "over the builtin", 1.7, times_local, "x"),
    Bound("binary_lines", "over the builtin", 1.2, times_local, "x"),
    Bound("import", "time", 15.0, median("ms"), "ms"),
    Bound("import", "memory", 5.0, median("MB"), "MB"),
    Bound("memory", "growth from the first half to the second", 16.0, median("MB"), "MB"),
]
LATER = [  # promised by the design, and not measured yet
    "300 small JSON files one by one, with `prefetch` first: 1.5 s",
    "the same, 16 a batch, with `prefetch` first: 1.2 s",
    "abuse: 8 processes read one object: 8/8 right, at most 1.02 times its bytes",
    "abuse: an object replaced at the origin: new bytes after `max_age`",
    "abuse: replaced while being read: one version, or `ObjectChanged`",
    "abuse: bytes flipped on disk: right, fetched again",
    "abuse: 64 MiB disk, 192 MiB object: right",
]


def judge(results: list[Result]) -> list[Verdict]:
    """Return the verdict on every bound whose row was measured whole."""
    ours = {result.row: result for result in results if result.contender == "cachedfs"}
    verdicts = []
    for bound in BOUNDS:
        result = ours.get(bound.row)
        if result is None or (result.sample and not result.error):
            continue
        value = None if result.error else round(bound.value(result), 4)
        if value is None or (value > bound.at_most and bound.is_due):
            verdict = "MISSED"
        else:
            verdict = "met" if value <= bound.at_most else "later"
        verdicts.append(Verdict(bound.row, bound.what, bound.unit, bound.at_most, value, verdict))
    return verdicts
