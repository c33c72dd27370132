"""The cost of events: the same reads with and without them, each in a new process, in pairs.

python -m tests.benchmarks.events [pairs]

The simulated cloud has no latency, so that a request costs little and the share of its event is as large as possible.
A third run of each pair counts the CPU seconds inside the log, which do not depend on how busy the machine is.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

from cachedfs.sim import GCSServer

WORKER = """
import json, sys, threading, time
from cachedfs.common.event_log import EventLog
from cachedfs.filesystem import CachedGCSFileSystem
from cachedfs.core import engines

directory, endpoint, is_counted = sys.argv[1:]
inside, here = [0.0], threading.local()

def counting(method):
    def counted(*args, **fields):
        if getattr(here, "is_counted", False):  # what looks at the sums also notes them
            return method(*args, **fields)
        here.is_counted, cpu = True, time.thread_time()
        method(*args, **fields)
        here.is_counted = False
        inside[0] += time.thread_time() - cpu
    return counted

if is_counted:
    EventLog.note, EventLog.write, EventLog.sample_all = map(counting, (EventLog.note, EventLog.write, EventLog.sample_all))
fs = CachedGCSFileSystem(cache_dir=directory, keep_free=0, gs={"token": "anon", "endpoint_url": endpoint})
fs.cat_file("b/begin")  # imports and connections
took = {}

def timed(name, work):
    inside[0] = 0.0
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    took[name] = time.perf_counter() - wall, time.process_time() - cpu, inside[0]

def in_sequence():
    with fs.open("b/big") as file:
        while file.read(1 << 18):
            pass

def here_and_there():
    for i in range(200_000):
        file.seek(i % 1000 * 1000)
        file.read(100)

timed("600 small objects, one request each", lambda: [fs.cat_file(f"b/{i}") for i in range(600)])
timed("128 MiB in sequence", in_sequence)
engines.engine_for(fs.config).drain()
timed("30,000 reads of cached objects", lambda: [fs.cat_file(f"b/{i % 600}") for i in range(30_000)])
with fs.open("b/big") as file:
    timed("200,000 reads of the current block", here_and_there)
print(json.dumps(took))
"""


def measured(endpoint: str, *, events: bool, counted: bool = False) -> dict[str, tuple[float, float, float]]:
    """Return the seconds of each kind of reading in a new process with a new cache: wall, CPU, and CPU inside the log."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "CACHEDFS_EVENTS": f"{folder}/events" if events else ""}
        command = [sys.executable, "-c", WORKER, f"{folder}/cache", endpoint, "counted" if counted else ""]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        return {name: tuple(took) for name, took in json.loads(done.stdout).items()}


def main(pairs: int) -> None:
    with GCSServer(profile="off") as server:
        server.make_bucket("b")
        server.put("b", "begin", b"x")
        server.put("b", "big", os.urandom(128 << 20))
        for i in range(600):
            server.put("b", str(i), os.urandom(2000))
        runs = [
            {is_on: measured(server.endpoint_url, events=is_on) for is_on in order}
            for order in [(False, True), (True, False)] * (-(-pairs // 2))
        ]
        counted = [measured(server.endpoint_url, events=True, counted=True) for _ in runs]
    print(f"{'':40} {'without':>10} {'with':>10}  ratio: of the least; median of the pairs, and all of them")
    for name in runs[0][True]:
        for at, kind in enumerate(("wall", "cpu")):
            off, on = ([run[is_on][name][at] for run in runs] for is_on in (False, True))
            ratios = sorted(b / a for a, b in zip(off, on, strict=True))
            spread = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
            least = min(off), min(on)  # other work of the machine only adds to it
            print(
                f"{name:34} {kind:5} {least[0]:8.3f} s {least[1]:8.3f} s  {least[1] / least[0]:.3f}; {spread}"
            )
        shares = sorted(100 * inside / (cpu - inside) for _, cpu, inside in (run[name] for run in counted))
        print(
            f"{'':34} {'inside':5} {statistics.median(shares):7.2f} % of CPU ({shares[0]:.2f} to {shares[-1]:.2f})"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
