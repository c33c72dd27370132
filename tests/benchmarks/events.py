"""The cost of events: the CPU seconds inside the event log, as a share of those of the reads beside it.

python -m tests.benchmarks.events [runs]

The simulated cloud has no latency, so that a request costs little and the share of its event is as large as possible.
Seconds inside the log do not depend on how busy the machine is, as the difference of two runs would.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile

from cachedfs.sim import GCSServer
from tests.benchmarks.harness import run_python

WORKER = """
import json, sys, threading, time
from cachedfs.common.event_log import EventLog
from cachedfs.filesystem import CachedGCSFileSystem
from cachedfs.core import engines

directory, endpoint = sys.argv[1:]
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

EventLog.note, EventLog.write, EventLog.sample_all = map(counting, (EventLog.note, EventLog.write, EventLog.sample_all))
fs = CachedGCSFileSystem(cache_dir=directory, keep_free=0, gs={"token": "anon", "endpoint_url": endpoint})
fs.cat_file("b/begin")  # imports and connections
shares = {}

def measure(name, work):
    inside[0], cpu = 0.0, time.process_time()
    work()
    shares[name] = inside[0] / (time.process_time() - cpu - inside[0])

def in_sequence():
    with fs.open("b/big") as file:
        while file.read(1 << 18):
            pass

def here_and_there():
    for i in range(200_000):
        file.seek(i % 1000 * 1000)
        file.read(100)

measure("600 small objects, one request each", lambda: [fs.cat_file(f"b/{i}") for i in range(600)])
measure("128 MiB in sequence", in_sequence)
engines.engine_for(fs.config).drain()
measure("30,000 reads of cached objects", lambda: [fs.cat_file(f"b/{i % 600}") for i in range(30_000)])
with fs.open("b/big") as file:
    measure("200,000 reads of the current block", here_and_there)
print(json.dumps(shares))
"""


def shares(endpoint: str) -> dict[str, float]:
    """Return the share of each kind of reading, in a new process with a new cache."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {"CACHEDFS_EVENTS": f"{folder}/events"}
        found: dict[str, float] = run_python("-c", WORKER, f"{folder}/cache", endpoint, environ=environ)
    return found


def main(runs: int) -> None:
    with GCSServer(profile="off") as server:
        server.make_bucket("b")
        server.put("b", "begin", b"x")
        server.put("b", "big", os.urandom(128 << 20))
        for i in range(600):
            server.put("b", str(i), os.urandom(2000))
        found = [shares(server.endpoint_url) for _ in range(runs)]
    for name in found[0]:
        each = sorted(100 * run[name] for run in found)
        print(f"{name:36} {statistics.median(each):5.2f} % of CPU ({each[0]:.2f} to {each[-1]:.2f})")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
