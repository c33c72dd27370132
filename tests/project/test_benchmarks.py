"""The benchmark harness: which measurements it keeps, and what it prints."""

from __future__ import annotations

from tests.benchmarks.harness import Figure, Result
from tests.benchmarks.report import disturbed, least_disturbed, summary


def _run(stolen: float, *measured: tuple[str, str]) -> list[Result]:
    return [Result(row, contender, stolen=stolen) for row, contender in measured]


def test_a_row_is_as_disturbed_as_its_worst_contender():
    results = _run(0.01, ("dense", "gcsfs"), ("steps", "gcsfs")) + _run(0.3, ("steps", "cachedfs"))
    assert disturbed(results) == {"steps": 0.3}


def test_of_two_runs_the_less_disturbed_row_is_kept():
    both = (("dense", "gcsfs"), ("dense", "cachedfs"))
    first = _run(0.4, ("steps", "gcsfs"), *both, ("memory", "cachedfs"))
    quieter, noisier = _run(0.1, *both), _run(0.5, *both)
    assert least_disturbed(first, quieter) == [first[0], *quieter, first[3]]
    assert least_disturbed(first, noisier) == first
    assert least_disturbed([], first) == first


def test_an_incomplete_row_replaces_nothing():
    first = _run(0.4, ("dense", "gcsfs"), ("dense", "cachedfs"))
    assert least_disturbed(first, _run(0.0, ("dense", "gcsfs"))) == first


def test_the_summary_compares_cachedfs_with_the_measured_peers():
    def took(contender: str, *seconds: float, sample: str = "") -> Result:
        names = ("cold", "second", "new")
        figures = {name: Figure.of([s]) for name, s in zip(names, seconds, strict=False)}
        return Result("sequential", contender, figures, sample=sample)

    lines = summary(
        [took("gcsfs", 2.7, 2.8, sample="1 of 2"), took("cachedfs", 1.2, 0.03, 0.08)]
    ).splitlines()
    assert lines[2:] == ["| 192 MiB in sequence | gcsfs 2.70 / 2.80* |  | **1.20 / 0.030** |"]
