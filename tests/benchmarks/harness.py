"""How measurements are made: processes, passes, medians."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.benchmarks.services import BUCKET, Server, Service, ideal_s
from tests.benchmarks.workloads import STORED, Workload

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Figure:
    """Several measurements of one thing: their median, and their spread."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float], scale: float = 1) -> Self:
        scaled = [value * scale for value in values]
        return cls(statistics.median(scaled), min(scaled), max(scaled))


@dataclass(slots=True)
class Result:
    """The result of one contender for one workload: seconds and requests of the whole, scaled if sampled."""

    row: str
    contender: str
    # cold, second, new; beside: local, alternating with the second; over_ideal: cold over the ideal schedule;
    # cpu: seconds of all cores in the cold pass; floor_cpu: of a raw client that writes the same bytes to new files;
    # refused_late: requests refused as too many, later than 30 simulated seconds after the first
    figures: dict[str, Figure] = field(default_factory=dict)
    requests: dict[str, float] = field(default_factory=dict)
    prepared: dict[str, float] = field(default_factory=dict)  # requests of the preparation: not scaled
    sample: str = ""  # "20 of 300": the results are scaled from it
    error: str = ""
    outcome: str = ""  # the result of an accident, as text
    when: str = ""  # the day of the measurement

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Result:
        figures = {name: Figure(**figure) for name, figure in values["figures"].items()}
        return cls(**{**values, "figures": figures})


def clean_environment() -> dict[str, str]:
    """Return an environment without user settings, in which modules are compiled once, as where installed."""
    own = ("FSSPEC_", "GCSFS_", "STORAGE_EMULATOR", "PYTHONDONTWRITEBYTECODE")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    compiled = Path(tempfile.gettempdir()) / f"cachedfs-benchmarks-{os.getuid()}"
    return environ | {
        "FSSPEC_CONFIG_DIR": os.devnull,
        "PYTHONPATH": str(ROOT),
        "PYTHONPYCACHEPREFIX": str(compiled),
    }


def run_python(*arguments: str, environ: Mapping[str, str] = {}) -> Any:
    """Run a new Python, such as `-c CODE`; return the JSON that it prints. Raises RuntimeError with its error."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=clean_environment() | environ,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


class ContenderError(Exception):
    """The contender cannot do the workload."""


class Session:
    """A process in which one contender works, with one cache directory."""

    def __init__(
        self,
        service: Service,
        server: Server,
        contender: str,
        cache_dir: Path,
        *,
        command: Sequence[str] = (),  # that runs the process
        python: str = sys.executable,
        more: Mapping[str, str] = {},  # of its environment
    ) -> None:
        self._server = server
        environ = clean_environment() | service.environment(server)
        if contender == "cachedfs":
            environ |= {"FSSPEC_CACHEDFS_CACHE_DIR": str(cache_dir), "FSSPEC_CACHEDFS_KEEP_FREE": "0"}
        else:
            environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
            environ |= {
                f"FSSPEC_{name}_CACHE_STORAGE": str(cache_dir)
                for name in ("BLOCKCACHE", "FILECACHE", "SIMPLECACHE")
            }
        environ |= more
        modules = service.modules if python == sys.executable else ()  # the other one has only what it needs
        self._process = subprocess.Popen(
            [*command, python, "-m", "tests.benchmarks.worker", *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ, cwd=ROOT,
        )  # fmt: skip

    def once(self, **workload: Any) -> dict[str, Any]:
        """Return the answer to one pass over a workload, with the requests of its preparation."""
        prepared = self.order(**workload)["requests"]
        return {**self.order(run=True), "prepared": prepared}

    def order(self, **order: Any) -> dict[str, Any]:
        """Return the worker's answer, with the requests and media bytes that the server counted."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._server.reset()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process died"}
        if "error" in answer:
            raise ContenderError(answer["error"])
        return {**answer, "requests": self._server.count(), "sent": self._server.bytes_sent()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind:
            self._process.kill()
        self._process.communicate()


@dataclass(frozen=True, slots=True)
class Plan:
    """How often and on how many items one contender does one workload."""

    workload: Workload
    contender: str
    n: int  # items that it does
    n_cold: int
    n_second: int
    n_new: int


def measure(service: Service, server: Server, folder: Path, plan: Plan) -> Result:
    """Return all results of one contender for one workload; an error of the contender is a result, too."""
    whole = plan.workload.n
    sample = "" if plan.n == whole else f"{plan.n} of {whole}"
    result = Result(plan.workload.name, plan.contender, sample=sample)
    try:
        if plan.contender == "floor":
            _measure_floor(service, server, folder, plan, result)
        else:
            _measure_passes(service, server, folder, plan, result)
    except ContenderError as error:
        result.error = str(error)
    return result


def _measure_floor(service: Service, server: Server, folder: Path, plan: Plan, result: Result) -> None:
    with Session(service, server, "floor", folder) as session:
        order = {"row": plan.workload.name, "endpoint": server.endpoint_url, "bucket": BUCKET}
        _keep(result, "cold", [session.order(**order) for _ in range(plan.n_cold)], 1)


def _measure_passes(service: Service, server: Server, folder: Path, plan: Plan, result: Result) -> None:
    local, workload, ours = str(service.local(folder)), plan.workload, plan.contender == "cachedfs"
    order = {"row": workload.name, "base": service.base(plan.contender, folder), "n": plan.n}
    cold, second, new, beside, floor = [], [], [], [], []
    over_ideal, refused_late = [], []
    for number in range(plan.n_cold):
        with tempfile.TemporaryDirectory(dir=folder, prefix=f"{plan.contender}-") as cache:
            with Session(service, server, plan.contender, Path(cache)) as session:
                cold.append(session.once(**order))
                if ours and workload.in_flight and server.count("media"):
                    over_ideal.append(cold[-1]["seconds"] / _ideal_s(server, workload.in_flight))
                refused_late.append(_n_refused(server, after_s=30.0))
                if number == 0:
                    for _ in range(plan.n_second):
                        second.append(session.once(**order))
                        if ours:
                            beside.append(session.once(**{**order, "base": local}))
            if ours and workload.name in STORED:  # a raw client writes the same bytes to new files
                with Session(service, server, "floor", folder) as session:
                    raw = {"row": workload.name, "endpoint": server.endpoint_url, "bucket": BUCKET}
                    stored = tempfile.mkdtemp(dir=cache)
                    floor.append(session.order(**raw, folder=stored))
            for _ in range(plan.n_new if number == 0 else 0):
                with Session(service, server, plan.contender, Path(cache)) as session:
                    new.append(session.once(**order))
    scale = workload.n / plan.n
    if not workload.is_warm:
        _keep(result, "cold", cold, scale)
        result.figures["cpu"] = Figure.of([answer["cpu"] for answer in cold], scale)
        _keep(result, "new", new, scale)
        if any("waited" in answer for answer in cold):
            result.figures["waited"] = Figure.of([answer["waited"] for answer in cold])
    _keep(result, "second", second, scale)
    _keep(result, "beside", beside[1:], scale)  # local, each after one pass of ours in the same process
    if not workload.is_warm:
        result.figures["refused_late"] = Figure.of(refused_late)
    if floor:
        result.figures["floor_cpu"] = Figure.of([answer["cpu"] for answer in floor], scale)
    if over_ideal:
        result.figures["over_ideal"] = Figure.of(over_ideal)
    if beside and any(answer["check"] != beside[0]["check"] for answer in cold + second + new):
        result.error = "WRONG BYTES"


def _ideal_s(server: Server, in_flight: int) -> float:
    """Return the shortest time for the files that the server just sent, with the latencies it used."""
    media = [entry for entry in server.requests if entry.kind == "media"]
    return ideal_s([e.ended_s - e.started_s for e in media if e.ended_s is not None], in_flight)


def _n_refused(server: Server, *, after_s: float) -> float:
    """Return how many requests of the last pass were refused as too many, later than `after_s` after its first."""
    found = server.requests
    began_s = min((entry.started_s for entry in found), default=0.0)
    return float(sum(e.status in (403, 429) and e.started_s > began_s + after_s for e in found))


def _keep(result: Result, name: str, answers: list[dict[str, Any]], scale: float) -> None:
    if answers:
        result.figures[name] = Figure.of([answer["seconds"] for answer in answers], scale)
        result.requests[name] = statistics.median(answer["requests"] for answer in answers) * scale
        result.prepared[name] = statistics.median(answer.get("prepared", 0) for answer in answers)
