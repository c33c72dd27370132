"""Measure how fast reads past the cache are, and say what a read of all the data would meet."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.filesize import decimal

from cachedfs.cli.output import rate
from cachedfs.cli.stats import contents
from cachedfs.cli.urls import Location
from cachedfs.common.executor import DaemonThreadPool
from cachedfs.common.text import counted, per_cent
from cachedfs.report.analysis import RunFigures

LARGE, LEAST = 8 << 20, 1 << 20  # bytes of one request, and of the smallest object whose transfer is timed
AT_ONCE, HALF_S = 8, 0.5  # concurrent requests, and seconds each may take at the speed of a single one


def timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def median_of_3(function: Callable[[], object]) -> float:
    """Return the median duration of three calls, in seconds."""
    return statistics.median(timed(function) for _ in range(3))


class Speeds(NamedTuple):
    """Measured reads of an object past the cache, in seconds and bytes.

    `first_s`: until its first byte. `whole_s`: `size` bytes in one request. `took_s`: `at_once` bytes in `n` requests at the
    same time; 0 for an object too small to tell.
    """

    first_s: float
    size: int
    whole_s: float
    n: int
    at_once: int = 0
    took_s: float = 0.0

    @property
    def per_s(self) -> float | None:
        """The rate of several requests, in bytes per second."""
        return self.at_once / self.took_s if self.took_s else None

    @property
    def n_to_fill(self) -> int | None:
        """The number of requests that fill the link; None if there were too few to see it."""
        n = (self.per_s or 0.0) * self.whole_s / self.size
        return None if not n or n > 0.8 * self.n else math.ceil(n)


def measure(origin: Any, path: str, of: int, n: int) -> Speeds:
    """Read an object of `of` bytes past the cache: one byte, more bytes, and `n` parts at the same time."""
    size = min(LARGE, of)
    with origin.open(path, "rb", cache_type="none") as file:  # opened once: that takes requests too

        def read(length: int) -> None:
            file.seek(0)
            file.read(length)

        speeds = Speeds(median_of_3(lambda: read(1)), size, timed(lambda: read(size)), n)
    if size < LEAST:
        return speeds
    part = min(size, max(LEAST, int(size / speeds.whole_s * HALF_S)))
    return speeds._replace(at_once=n * part, took_s=timed(lambda: read_at_once(origin, path, n, part, of)))


def read_at_once(origin: Any, path: str, n: int, size: int, of: int) -> None:
    """Read `n` parts of an object of `of` bytes concurrently, one request of `size` bytes each."""
    starts = [(i * size) % (of - size + 1) for i in range(n)]
    threads = DaemonThreadPool(n, "cachedfs-doctor")  # daemon threads: Ctrl-C does not wait for them
    try:
        # By name: the second parameter of s3fs is a version.
        for done in [threads.submit(origin.cat_file, path, start=at, end=at + size) for at in starts]:
            done.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def forecast(
    speeds: Speeds, location: Location, found: list[dict[str, Any]], *, is_immutable: bool
) -> RunFigures:
    """Return the expected figures of a read of all entries.

    They have no times where more requests would be faster, or the size is unknown.
    """
    fs, data, times = location.fs, dict[str, Any](), dict[str, float]()
    if all(each["type"] == "file" and each["size"] is not None for each in found):
        size, cache = sum(int(each["size"]) for each in found), contents(location.cache, fs.config)
        data = {"n_files": len(found), "size": size, "requests": len(found), "bytes_fetched": size}
        if cache["may_hold"] is not None:
            data["held"] = min(1.0, cache["may_hold"] / size)
        if cache["directory"] is not None:
            data["could_hold"] = cache["bytes"] + max(0, cache["disk_free"] - cache["keep_free"])
        if not speeds.per_s or speeds.n_to_fill is not None:
            times["latency"] = len(found) * speeds.first_s / fs.config.first_concurrency
            times |= {"link": size / speeds.per_s} if speeds.per_s else {}
    return RunFigures(
        elapsed_s=max(times.values(), default=0.0),
        times=times,
        latency_s=speeds.first_s,
        bytes_per_s=speeds.per_s,
        n_at_once=fs.config.first_concurrency,
        n_to_fill=speeds.n_to_fill,
        is_drive=fs.target_protocol == "drive",
        is_immutable=is_immutable,
        **data,
    )


def facts(run: RunFigures, one_per_s: float) -> str:
    """Return how fast reads can be, as sentences; `one_per_s` is the rate of one request."""
    first_s, n = run.latency_s or 0.0, run.n_at_once or 1
    at_once = f"as a list by fs.cat, {n} in flight: up to {n / first_s:,.0f} a second."
    texts = [f"Small objects one by one: {1 / first_s:,.0f} a second; {at_once}"]
    if run.n_to_fill is not None:
        fill = f"{counted(run.n_to_fill, 'request')} at a time fill it."
        texts.append(f"The link gives {rate(run.bytes_per_s or 0.0, 1)}; {fill}")
    elif run.bytes_per_s:
        needed = max(1, math.ceil(125e6 / one_per_s))
        texts.append(f"{needed} requests at a time would fill a link of 1 Gbit/s, {10 * needed} one of 10.")
    if run.size and run.held is not None and run.n_files != 1:
        then = "that share of each further epoch" if run.held < 1 else "from the second time on all of it"
        texts.append(f"Of {decimal(run.size)} here the cache holds {per_cent(run.held)}: {then} is hits.")
    if run.is_drive:
        texts.append(
            "Drive serves an account about 200 downloads a second, and 27 if its project was made since May 2026."
        )
    return " ".join(texts)
