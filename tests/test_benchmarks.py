"""Which measurements are kept where other machines of the host take processor time."""

from __future__ import annotations

from tests.benchmarks.harness import Result
from tests.benchmarks.report import disturbed, least_disturbed


def _run(stolen: float, *measured: tuple[str, str]) -> list[Result]:
    return [Result(row, contender, stolen=stolen) for row, contender in measured]


def test_a_row_is_disturbed_as_much_as_the_worst_of_who_did_it():
    results = _run(0.01, ("dense", "gcsfs"), ("steps", "gcsfs")) + _run(0.3, ("steps", "cachedfs"))
    assert disturbed(results) == {"steps": 0.3}


def test_of_two_runs_the_less_disturbed_is_kept_row_by_row():
    both = (("dense", "gcsfs"), ("dense", "cachedfs"))
    first = _run(0.4, ("steps", "gcsfs"), *both, ("memory", "cachedfs"))
    quieter, noisier = _run(0.1, *both), _run(0.5, *both)
    assert least_disturbed(first, quieter) == [first[0], *quieter, first[3]]
    assert least_disturbed(first, noisier) == first
    assert least_disturbed([], first) == first


def test_a_row_that_was_not_measured_whole_replaces_nothing():
    first = _run(0.4, ("dense", "gcsfs"), ("dense", "cachedfs"))
    assert least_disturbed(first, _run(0.0, ("dense", "gcsfs"))) == first
