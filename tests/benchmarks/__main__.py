"""Measure cachedfs against its bounds and its peers: `python -m tests.benchmarks --json bench.json`.

Exits with 1 when a bound that counts now is missed.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.benchmarks import abuse, bounds, misses, process, report, training
from tests.benchmarks.harness import Figure, Plan, Result, measure
from tests.benchmarks.services import SERVICES
from tests.benchmarks.workloads import FLOORS, WORKLOADS, Workload

IMPORTS = 9


def plan(workload: Workload, contender: str, options: argparse.Namespace) -> Plan:
    """Return how often and on how many items a contender does a workload."""
    n = workload.peers.get(contender) or workload.n
    if options.quick and workload.name == "one_by_one":
        n = min(n, 30)
    ours, local = contender == "cachedfs", contender == "local"
    n_cold = workload.n_cold if ours and not workload.is_warm else 3 if contender == "floor" else 1
    n_second = 9 if ours else 5 if local or workload.is_warm else 1
    if options.quick or (contender == "floor" and workload.name == "one_by_one"):
        n_cold, n_second = 1, min(n_second, 3)
    n_new = 5 if ours and not workload.is_warm else 0
    return Plan(workload, contender, n, n_cold, n_second, n_new)


def contenders(workload: Workload, options: argparse.Namespace) -> list[str]:
    """Return the contenders of a workload."""
    if options.ours:
        return ["cachedfs"]
    floor = ["floor"] if workload.name in FLOORS else []
    return ["local", *workload.peers, *floor, "cachedfs"]


def run(options: argparse.Namespace, folder: Path, said: Callable[[list[Result]], object]) -> list[Result]:
    """Return all results and print each; `said` is called with the results so far."""
    results: list[Result] = []
    for result in measured(options, folder):
        result.when = datetime.datetime.now(datetime.UTC).date().isoformat()
        results.append(result)
        print_result(result)
        said(results)
    return results


def measured(options: argparse.Namespace, folder: Path) -> Iterator[Result]:
    """Yield the results of all rows, or of those of `--only`."""

    def wanted(rows: Iterable[str]) -> list[str]:
        return [name for name in rows if not options.only or name in options.only]

    workloads = [WORKLOADS[name] for name in wanted(WORKLOADS)]
    for name in {workload.service: None for workload in workloads}:
        SERVICES[name].make(SERVICES[name].local(folder))
    for workload in workloads:
        service = SERVICES[workload.service]
        for contender in contenders(workload, options):
            # A new server for each, so that all have the same latencies.
            where = folder / service.folder
            with service.server(
                workload.profile, folder=where, process=True, time_scale=workload.time_scale
            ) as server:
                yield measure(service, server, folder, plan(workload, contender, options))
    if accidents := wanted(abuse.ROWS):
        for contender in ["cachedfs"] if options.ours else abuse.CONTENDERS:
            yield from abuse.measure_abuse(accidents, contender, folder)
    for row in map(training.ROWS.__getitem__, wanted(training.ROWS)):
        for contender in training.contenders(row, ours=options.ours):
            yield training.measure_training(row, contender, folder)
    for name in wanted(misses.ROWS):
        yield from misses.measure_misses(name, ours=options.ours)
    for name in wanted(OF_PROCESS):
        yield OF_PROCESS[name](folder, options)


def import_result(folder: Path, options: argparse.Namespace) -> Result:
    took, size = process.import_cost(IMPORTS)
    return Result("import", "cachedfs", {"ms": Figure.of(took, 1e3), "MB": Figure.of(size, 1e-6)})


def memory_result(folder: Path, options: argparse.Namespace) -> Result:
    size = 2 if options.quick else 10
    took, growth = process.memory_growth(folder, size * 10**9)
    result = Result("memory", "cachedfs", {"s": Figure.of([took]), "MB": Figure.of([growth], 1e-6)})
    result.sample = f"{size} of 10" if size < 10 else ""
    return result


OF_PROCESS = {"import": import_result, "memory": memory_result}


def print_result(result: Result) -> None:
    figures = ", ".join(
        f"{name} {figure.median:.4g} ({figure.low:.4g}-{figure.high:.4g})"
        for name, figure in result.figures.items()
    )
    asked = ", ".join(f"{name} {count:.0f}" for name, count in result.requests.items())
    sample = f" [{result.sample}{'' if result.outcome else ', scaled'}]" if result.sample else ""
    figures = f"{result.outcome} {figures}" if result.outcome else figures
    print(
        f"{result.row:19} {result.contender:11} {result.error or figures}{sample}; requests: {asked}",
        file=sys.stderr,
        flush=True,
    )


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    names = [*WORKLOADS, *abuse.ROWS, *training.ROWS, *misses.ROWS, *OF_PROCESS]
    parser.add_argument(
        "--json", type=Path, help="write all figures to this file; with --only, the other rows in it stay"
    )
    parser.add_argument(
        "--tables", type=Path, metavar="JSON", help="print the tables of an earlier run, measure nothing"
    )
    parser.add_argument(
        "--only", action="append", choices=names, metavar="ROW", help=f"one of {', '.join(names)}; repeatable"
    )
    parser.add_argument("--ours", action="store_true", help="without peers, floor and local files")
    parser.add_argument(
        "--quick", action="store_true", help="fewer repetitions; the slowest of ours on a sample"
    )
    options = parser.parse_args()
    if options.tables:
        print(report.tables(*report.load(options.tables)), end="")
        return 0
    earlier: list[Result] = []
    if options.only and options.json and options.json.exists():
        earlier = [result for result in report.load(options.json)[1] if result.row not in options.only]
    with tempfile.TemporaryDirectory(prefix="cachedfs-bench-") as name:
        path = options.json or Path(name) / "bench.json"

        def keep(results: list[Result]) -> None:  # each time, because an interrupted run took long, too
            report.save(path, [*earlier, *results])

        run(options, Path(name), keep)
        about, results = report.load(path)
        print(report.tables(about, results), end="")
    missed = [verdict for verdict in bounds.judge(results) if verdict.verdict == "MISSED"]
    for bound, value, allowed, _ in missed:
        print(
            f"MISSED: {bound.row}, {bound.what}: {value} {bound.unit}, at most {allowed:g}", file=sys.stderr
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
