"""Output: bench.json, and the markdown tables made from it."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cachedfs.sim import PROFILES, Profile
from tests.benchmarks import misses, training
from tests.benchmarks.abuse import CONTENDERS, ROWS
from tests.benchmarks.bounds import Verdict, judge
from tests.benchmarks.harness import Result
from tests.benchmarks.mount import COLD_RATE, CROWD, CROWD_S, FIRST_BYTE_S, WARM_RATE
from tests.benchmarks.services import DRIVE_EVEN, DRIVE_TYPICAL, SERVICES
from tests.benchmarks.workloads import WORKLOADS

TITLES = {name: row.title for name, row in misses.ROWS.items()} | {
    "import": "import over fsspec and aiohttp",
    "memory": "10 GB through one handle",
}
TITLES |= {row.name: row.title for row in ROWS.values()}
TITLES |= {row.name: row.title for row in training.ROWS.values()}
TITLES |= {workload.name: workload.title for workload in WORKLOADS.values()}


def save(path: Path, results: list[Result]) -> None:
    """Write everything that `tables` needs."""
    packages = ("cachedfs", "fsspec", "gcsfs", "PyDrive2", "zarr", "aiohttp", "numpy")
    about = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "packages": {name: version(name) for name in packages},
    }
    rows = {"about": about, "results": [asdict(result) for result in results]}
    path.write_text(json.dumps(rows, indent=1) + "\n")


def load(path: Path) -> tuple[dict[str, Any], list[Result]]:
    """Return what `save` wrote: about the machine, and the results."""
    saved = json.loads(path.read_text())
    return saved["about"], [Result.from_json(values) for values in saved["results"]]


def tables(about: dict[str, Any], results: list[Result]) -> str:
    """Return all the markdown: a summary, the comparison, our numbers with their bounds, and the setup."""
    measured = {WORKLOADS[result.row].service for result in results if result.row in WORKLOADS}
    parts = [summary(results)] if measured else []
    parts += [_comparison(results, "gcs")] if "gcs" in measured else []
    parts += [_about(about, results)]
    if "drive" in measured:
        parts += [_comparison(results, "drive"), _about_drive()]
    if any(result.row in ROWS for result in results):
        parts.append(_abuse(results))
    if any(result.row in training.ROWS for result in results):
        parts.append(_trainings(results))
    if any(result.row in misses.ROWS for result in results):
        parts.append(_first_reads(results))
    parts += [_bounds(judge(results)), _definitions(results)]
    return "\n\n".join(parts) + "\n"


def summary(results: list[Result]) -> str:
    """Return a few rows of the comparison: ours, one without a cache, and the fastest with one."""
    found = {(result.row, result.contender): result for result in results}
    rows = []
    for row, others in _SUMMARY.items():
        if (row, "cachedfs") in found:
            cells = [
                f"{_HEADS.get(by, by)} {_cell(found[row, by])}" if (row, by) in found else "" for by in others
            ]
            ours = _cell(found[row, "cachedfs"]).partition(" (")[0]
            rows.append([WORKLOADS[row].title, *cells, ours])
    return table(["seconds: first / second pass", "without a cache", "another tool", "**cachedfs**"], rows)


_SUMMARY = {
    "sequential": ("gcsfs", "simplecache"),
    "one_by_one": ("gcsfs", "simplecache"),
    "one_by_one_ahead": ("", ""),
    "dense": ("gcsfs", "tensorstore"),
    "samples": ("gcsfs", "tensorstore"),
    "drive_batch": ("pydrive2", "gdrive"),
    "drive_many": ("pydrive2", "gdrive"),
}


def _abuse(results: list[Result]) -> str:
    found = {(result.row, result.contender): result.outcome for result in results}
    contenders = [name for name in CONTENDERS if any((row, name) in found for row in ROWS)]
    rows = []
    for name, row in ROWS.items():
        cells = [found.get((name, contender), "") for contender in contenders]
        if any(cells):
            cells = [f"**{c}**" if by == "cachedfs" else c for c, by in zip(cells, contenders, strict=True)]
            rows.append([row.title, *cells])
    return table(["abuse", *map(_head, contenders)], rows)


def _trainings(results: list[Result]) -> str:
    """Return a line for each training and contender: its time, and the lower bound."""
    rows = []
    for result in results:
        if result.row not in training.ROWS:
            continue
        row, is_ours = training.ROWS[result.row], result.contender == "cachedfs"
        said = result.error or result.outcome
        bound = "" if row.bound_s is None else f"{row.bound_s:.2f} s"
        by = training.NAMES.get(result.contender, result.contender)
        rows.append([row.title, f"**{by}**" if is_ours else by, f"**{said}**" if is_ours else said, bound])
    return table(["training", "by", "measured", "bound"], rows)


def _first_reads(results: list[Result]) -> str:
    rows = [
        [misses.ROWS[result.row].title, misses.NAMES.get(result.contender, result.contender)]
        + [
            f"{result.figures[k].median:.3g}" if k in result.figures else ""
            for k in ("s", "cpu_s", "second s")
        ]
        for result in results
        if result.row in misses.ROWS
    ]
    return table(["first reads", "by", "seconds", "CPU seconds", "second pass"], rows)


def _comparison(results: list[Result], service: str) -> str:
    workloads = {name: workload for name, workload in WORKLOADS.items() if workload.service == service}
    found = {(result.row, result.contender): result for result in results if result.row in workloads}
    contenders = [name for name in SERVICES[service].contenders if any(name == by for _, by in found)]
    rows = []
    for name, workload in workloads.items():
        cells = [_cell(found.get((name, contender))) for contender in contenders]
        if any(cells):
            rows.append([workload.title, *cells])
        if name in _COUNTED and any(cells):
            cells = [_requests(found.get((name, contender))) for contender in contenders]
            rows.append(["requests a file", *cells])
    return table(["seconds: first / second pass", *map(_head, contenders)], rows)


def _head(contender: str) -> str:
    return _HEADS.get(contender, contender)


_HEADS = {"local": "local file", "blockcache": "fsspec blockcache", "floor": "floor (raw client)"}
_HEADS |= {
    "cachedfs": "**cachedfs**",
    "mount": "a mount (model)",
    "pydrive2": "PyDrive2",
    "gdrive": "gdrive-fsspec",
    "drive": "`drive://`",
}
_COUNTED = ("one_by_one", "drive_batch", "drive_one_by_one")  # rows that also show requests


def _cell(result: Result | None) -> str:
    if result is None:
        return ""
    if result.error:
        return f"error ({result.error.split(':')[0]})"
    shown = " / ".join(seconds(result.figures[k].median) for k in ("cold", "second") if k in result.figures)
    if result.contender == "cachedfs":
        new = result.figures.get("new")
        shown = f"**{shown}**" + (f" (new process {seconds(new.median)})" if new else "")
    return shown + ("*" if result.sample else "")


def _requests(result: Result | None) -> str:
    if result is None or result.error or result.contender in ("local", "floor"):
        return ""
    return " / ".join(f"{result.requests[name] / WORKLOADS[result.row].n:.1f}" for name in ("cold", "second"))


def _bounds(verdicts: list[Verdict]) -> str:
    rows = []
    for bound, value, allowed, verdict in verdicts:
        measured = "failed" if value is None else f"{value:.4g} {bound.unit}".strip()
        at_most = f"{bound.at_most:.4g} {bound.unit}".strip()
        if allowed > bound.at_most:
            at_most += f", here {allowed:.2g}: local files take {allowed / bound.at_most:.1f} x as long"
        rows.append([f"{TITLES[bound.row]}: {bound.what}", measured, at_most, verdict])
    return table(["ours", "measured", "at most", ""], rows)


def _about(about: dict[str, Any], results: list[Result]) -> str:
    packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items())
    days = sorted({result.when for result in results})
    cloud = PROFILES["table"]
    return (
        f"The cloud is a simulated Google Cloud Storage: {cloud.media.median_s * 1e3:.0f} ms to the first byte (lognormal, sigma "
        f"{cloud.media.sigma}), {_rates(cloud)}. Medians; `*`: measured on a sample and scaled. "
        f"{' to '.join(dict.fromkeys([days[0], days[-1]]))}, {about['system']}, Python {about['python']}, {packages}."
    )


def _about_drive() -> str:
    drive = DRIVE_TYPICAL
    return (
        f"The Drive is a simulated Google Drive: {drive.media.median_s * 1e3:.0f} ms to the first byte (lognormal, sigma "
        f"{drive.media.sigma:.2f}; or {DRIVE_EVEN.media.median_s * 1e3:.0f} ms always, which is the mean, where a row says so), "
        f"{drive.connection_s * 1e3:.0f} ms more on a new connection, {drive.error_rate:.1%} errors, no stalls, {_rates(drive)}. "
        "All its files are listed before. The mount is a model of what was published of mounted Drives, over local files: "
        f"{FIRST_BYTE_S * 1e3:.0f} ms to the first byte of a file that was not read before, then {COLD_RATE / 1e6:.0f} MB/s, "
        f"{WARM_RATE / 1e6:.0f} MB/s the second time, one file at a time; {CROWD_S:.0f} s for the first listing of {CROWD} files "
        "or more."
    )


def _rates(profile: Profile) -> str:
    return (
        f"{profile.stream_rate / 1e6:.0f} MB/s a stream, {profile.total_rate / 1e6:.0f} MB/s in all, seed 0"
    )


def _definitions(results: list[Result]) -> str:
    measured = {result.row for result in results}
    lines = ["What each row does, by the same code for all; Python's start and imports are not counted:", ""]
    lines += [f"- {w.title}: {w.definition}." for name, w in WORKLOADS.items() if name in measured]
    others = [*ROWS.values(), *training.ROWS.values()]
    lines += [f"- {row.title}: {row.definition}." for row in others if row.name in measured]
    samples = [f"{TITLES[r.row]} by {r.contender}: {r.sample}" for r in results if r.sample]
    return "\n".join(lines + ([f"- Samples: {'; '.join(samples)}."] if samples else []))


def seconds(value: float) -> str:
    """Return a time with two or three digits."""
    digits = 1 if value >= 10 else 2 if value >= 0.1 else 3 if value >= 0.01 else 4
    return f"{value:.{digits}f}"


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
