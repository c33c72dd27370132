"""A process that measures on request: requests and answers are lines of JSON.

Its arguments are modules to import first.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.abused import act
from tests.benchmarks.services import TIME_SCALE
from tests.benchmarks.trained import train
from tests.benchmarks.workloads import FLOORS, WORKLOADS, Place, Run, fetch_rounds


def check(value: Any) -> int:
    """Return a number that depends on what was read."""
    total = 0
    for piece in value if isinstance(value, list) else [value]:
        data = piece if isinstance(piece, bytes) or hasattr(piece, "dtype") else str(piece).encode()
        total = zlib.crc32(data, total)
    return total


def shorten_minute(time_scale: float) -> None:
    """Make the minute of our rate limits as much shorter as that of the service is."""
    from cachedfs.origins.drive import quota

    for name in ("REQUESTS", "CREATES"):
        ladder = getattr(quota, name)
        setattr(quota, name, tuple(limit._replace(window_s=limit.window_s / time_scale) for limit in ladder))
    quota._PAUSE_S /= time_scale
    quota._DOUBLES_S /= time_scale


def prepare(row: str, base: str, n: int) -> Run:
    """Prepare without timing, and return the function to be timed."""
    workload = WORKLOADS[row]
    for module in workload.modules:
        importlib.import_module(module)
    return workload.prepare(Place(base), n)


def measure(run: Run) -> dict[str, Any]:
    """Return the seconds of one pass over a workload, and a check of what it read."""
    gc.collect()
    start, cpu = time.perf_counter(), time.process_time()
    value = run()
    seconds = time.perf_counter() - start
    settle()
    return {"seconds": seconds, "cpu": time.process_time() - cpu, "check": check(value)}


def measure_waits(run: Run) -> dict[str, Any]:
    """Return the result of `measure`, and the share of the time in which one of our reads waited, from the event log."""
    engines = sys.modules.get("cachedfs.core.engines")
    if engines is None or not engines._engines:  # a peer has no event log
        return measure(run)
    import cachedfs
    from cachedfs.report.event_reader import read
    from cachedfs.report.summary import merged

    with tempfile.TemporaryDirectory() as folder:
        cachedfs.log_events(folder)
        answer = measure(run)
        cachedfs.log_events(None)
        waits = merged((wait.at, wait.at + wait.took_s) for wait in read(folder).waits)
    return {**answer, "waited": sum(stop - start for start, stop in waits) / answer["seconds"]}


def settle() -> None:
    """Wait until the received blocks are on disk: this CPU time belongs to the pass that fetched them."""
    engines = sys.modules.get("cachedfs.core.engines")
    for each in list(engines._engines.values()) if engines else ():
        each.drain(60.0)


def measure_floor(row: str, endpoint: str, bucket: str, folder: str | None = None) -> dict[str, Any]:
    """Return the seconds in which a raw client fetches the data of a workload, and writes it to `folder` if given."""
    importlib.import_module("aiohttp")
    gc.collect()
    start, cpu = time.perf_counter(), time.process_time()
    asyncio.run(fetch_rounds(endpoint, bucket, FLOORS[row], folder and Path(folder)))
    return {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}


def main() -> None:
    """Answer requests until there are no more."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for module in sys.argv[1:]:
        importlib.import_module(module)
    if (time_scale := float(os.environ.get(TIME_SCALE, "1"))) != 1:
        shorten_minute(time_scale)
    run: Run = tuple
    how: Callable[[Run], dict[str, Any]] = measure
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if "do" in order:
                answer = act(**order)
            elif "train" in order:
                answer = train(order.pop("train"), **order)
            elif "endpoint" in order:
                answer = measure_floor(**order)
            elif "run" in order:
                answer = how(run)
                run = tuple  # its open files are closed before the next one is prepared
            else:
                how = measure_waits if order["row"] == "steps" else measure
                run, answer = prepare(**order), {}
        except Exception as error:  # an error of a contender is a result
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
