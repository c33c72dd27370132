"""Measure how warm a second session starts with a shared cache on Drive: `python -m tests.benchmarks.sessions`.

Each session is a process with an empty local cache, which reads all files of a folder once. The sign-in and Python's start
are not counted.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable

from cachedfs.sim import DriveServer

N = 2000  # files of 4 to 12 kB
MOST_TIME, MOST_REQUESTS = 0.25, 0.05  # of the second session, as a part of the first
READ = """
import json, sys, time
import fsspec
options = json.loads(sys.argv[1])
fs = fsspec.filesystem("cachedfs", target_protocol="drive", **options)
start = time.perf_counter()
found = fs.cat(fs.find("My Drive/data"))
print(json.dumps([len(found), time.perf_counter() - start]))
"""


def session(server: DriveServer, disk: str) -> tuple[float, int]:
    """Read all files once; return the seconds, and the requests until all is put there."""
    account = {"token": "anon", "endpoint_url": server.endpoint_url}
    options = {"cache_dir": disk, "shared_cache": "drive://My Drive/.cachedfs", "drive": account}
    server.reset()
    environ = {**os.environ, "FSSPEC_DRIVE_TOKEN": "anon", "FSSPEC_DRIVE_ENDPOINT_URL": server.endpoint_url}
    done = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(options)], env=environ, stdout=subprocess.PIPE, check=True
    )
    n, took_s = json.loads(done.stdout)
    assert n == N
    return took_s, len(server.requests)


def main(said: Callable[[str], object] = print) -> int:
    """Return the exit status."""
    rng = random.Random(0)
    with (
        DriveServer(profile="drive-typical") as server,
        tempfile.TemporaryDirectory(prefix="cachedfs-bench-") as folder,
    ):
        for i in range(N):
            server.put(f"data/{i:04}", rng.randbytes(rng.randint(4_000, 12_000)))
        found = [session(server, f"{folder}/{i}") for i in range(2)]
    for name, (took_s, n) in zip(("first", "second"), found, strict=True):
        said(f"{name} session: {N} files in {took_s:.1f} s, {n} requests")
    time, requests = (second / first for first, second in zip(*found, strict=True))
    said(f"the second in {time:.2f} of the time (at most {MOST_TIME}), {requests:.3f} of the requests")
    return int(time > MOST_TIME or requests > MOST_REQUESTS)


if __name__ == "__main__":
    sys.exit(main())
