"""Decide what limited a run and what to do about it, for `Loader.report()`, `cachedfs report` and `doctor`.

Pure functions. A run is limited by computing if the program hardly waited for data. Otherwise it is limited by the part
that fills nearly all of the time, or at least half of the waiting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from cachedfs.common.text import counted, per_cent, seconds, size

LITTLE = 0.15  # share of the time: less waiting than this is not worth optimizing
NEAR = 0.9  # share of the time that a part must fill to limit for certain
REFUSED = 0.01  # share of requests refused for a rate limit or a quota from which on they are named
# Packing is worthwhile from this number of files on, of at most this average size.
MANY, SMALL = (1000, 256 << 10)
MOST_AT_ONCE = 256  # concurrent requests: beyond this, services throttle and throughput does not grow
SUBJECTS = {
    "compute": "Reading does not limit",
    "start": "Only the beginning was waited for",
    "link": "The link limits",
    "latency": "Waiting for answers limits",
    "quota": "The origin's quota limits",
    "decode": "Decoding limits",
    "load": "Loading limits",
    "other": "Neither link nor answers limit",
    None: "Waiting for data limits",
}
EARLIER = "prefetch before the loop begins"
LOCAL = ("decode", "load")  # these limit only if their threads are busy all the time


@dataclass(frozen=True)
class FetchCounts:
    """Requests and bytes of a run, and properties of link and cache; None is unknown.

    `bytes_read`: of all reads, from the cache or not. `latency_s`: mean time of a request until an answer begins.
    `bytes_per_s`: bandwidth of the link. `n_at_once`: concurrent requests allowed. `may_hold`: bytes that the cache can
    hold; None if nothing can be stored. `requests_per_s`: reads per second that the origin's limits allow.
    """

    requests: int = 0
    bytes_fetched: int = 0
    bytes_read: int = 0
    latency_s: float | None = None
    bytes_per_s: float | None = None
    n_at_once: int | None = None
    may_hold: int | None = None
    requests_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunFigures(FetchCounts):
    """Measurements of a run, or of what a run would meet. Times are in seconds, sizes in bytes; None is unknown.

    `wait_s`: time in which the program waited for data; None if nothing ran and `elapsed_s` is a forecast.
    `first_wait_s`: part of it before the first batch. `times`: the time that each part took by itself: "compute",
    "link", "latency", "quota", "decode", "load" (reading the cache and decoding) and "other".

    `refused`: requests refused for a rate limit or a quota. `n_to_fill`: concurrent requests that fill the link.
    `n_threads`: batch threads of a Loader; None without one. `read_share`: share of loading that is reading. `held`:
    share of the data that the cache can hold. `could_hold`: bytes that it could hold without `cache_size`. `size`,
    `n_files`: of all data.
    """

    elapsed_s: float
    wait_s: float | None = None
    first_wait_s: float = 0.0
    times: Mapping[str, float] = field(default_factory=dict)
    refused: int = 0
    n_to_fill: int | None = None
    n_threads: int | None = None
    read_share: float | None = None
    can_store: bool = True
    held: float | None = None
    could_hold: int | None = None
    n_files: int | None = None
    size: int | None = None
    is_drive: bool = False
    is_immutable: bool = False  # `max_age="immutable"` is set


@dataclass(frozen=True)
class Analysis:
    """The result of `analyse`: what limited a run, the share of each part in its time, and what to do.

    `limit`: the name of a part, "start" (only the first batch was waited for), or None if no part explains the waiting.
    `shares`: the time of each part as a share of the run; they overlap. `verdict`: what limited it, as a sentence.
    """

    limit: str | None
    shares: dict[str, float]
    verdict: str
    advice: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """The verdict and the advice."""
        return f"{self.verdict} To do: {'; '.join(self.advice)}." if self.advice else self.verdict


def analyse(run: RunFigures) -> Analysis:
    """Return what limited a run, and what to do about it."""
    if not run.elapsed_s:
        return Analysis(None, {}, "Nothing was read yet.", tuple(_settings(run)))
    shares = {name: took_s / run.elapsed_s for name, took_s in run.times.items()}
    limit = _limit(run)
    evidence = "; ".join(filter(None, [_waited(run), _evidence(run, limit, shares), _refusals(run)]))
    return Analysis(limit, shares, f"{SUBJECTS[limit]}: {evidence}.", tuple(_advice(run, limit)))


def _limit(run: RunFigures) -> str | None:
    wait_s = run.elapsed_s if run.wait_s is None else run.wait_s
    if wait_s <= LITTLE * run.elapsed_s:
        return "compute"
    later_s = run.elapsed_s - run.first_wait_s
    if wait_s <= run.elapsed_s / 2 and run.first_wait_s and wait_s - run.first_wait_s <= LITTLE * later_s:
        return "start"
    parts = {name: took_s for name, took_s in run.times.items() if name != "compute"}
    limiting = [
        name
        for name, took_s in parts.items()
        if took_s >= NEAR * run.elapsed_s or (name not in LOCAL and took_s >= wait_s / 2)
    ]
    # "load" includes reading, so it is named only if nothing else limits.
    found = max(limiting, key=lambda name: (name != "load", parts[name]), default=None)
    return "quota" if found == "other" and _refusals(run) else found


def _refusals(run: RunFigures) -> str:
    if run.refused < max(1, REFUSED * run.requests):
        return ""
    return f"the origin refused {run.refused:,} of {counted(run.requests, 'request')} (rate limit or quota)"


def _waited(run: RunFigures) -> str:
    if run.wait_s is None:
        return f"reading all of it takes about {seconds(run.elapsed_s)}"
    first = (
        f", {seconds(run.first_wait_s)} of it at the beginning" if run.first_wait_s > run.wait_s / 2 else ""
    )
    share = per_cent(run.wait_s / run.elapsed_s)
    return f"the program waited {seconds(run.wait_s)} of {seconds(run.elapsed_s)} ({share}) for data{first}"


def _evidence(run: RunFigures, limit: str | None, shares: Mapping[str, float]) -> str:
    share = per_cent(shares.get(limit or "", 0.0))
    if limit == "link" and run.wait_s is None:
        return f"{size(run.bytes_fetched)} at {size(run.bytes_per_s or 0.0)}/s"
    if limit == "link":
        rate = f"{size(run.bytes_fetched / run.elapsed_s)}/s of {size(run.bytes_per_s or 0.0)}/s"
        return f"{share} of the time bytes were on their way, at {rate}"
    if limit == "latency":
        at_once = f", {run.n_at_once} at a time" if run.n_at_once else ""
        asked = f"{counted(run.requests, 'request')} of {seconds(run.latency_s or 0.0)} each{at_once}"
        return asked if run.wait_s is None else f"{share} of the time no answer had begun: {asked}"
    if limit == "quota" and run.requests_per_s:
        return f"{counted(run.requests, 'request')} at the {run.requests_per_s:.0f} per second that the origin allows"
    if limit == "other":
        return f"{share} of the time no request was active: another process, the disk, or a rate limit"
    if limit in LOCAL and run.n_threads:
        reading = f", and {per_cent(run.read_share)} of it is reading" if run.read_share is not None else ""
        busy = f"{counted(run.n_threads, 'thread is', 'threads are')} busy {share} of the time"
        return busy + (reading if limit == "load" else "")
    if limit is None and shares:
        parts = ", ".join(f"{name} {per_cent(part)}" for name, part in shares.items() if name != "compute")
        return f"no part fills this time ({parts})"
    return ""


# Advice.


def _advice(run: RunFigures, limit: str | None) -> list[str]:
    if run.wait_s is None:
        return _settings(run)
    has_loader = run.n_threads is not None
    if limit == "compute":
        return []
    if limit == "start":
        return [f"{EARLIER}; in a longer run it does not matter"]
    if limit == "link":
        return _cache_advice(run, has_loader=has_loader)
    if limit in ("latency", "quota"):
        sooner = "raise concurrency" if has_loader else "prefetch, or read many objects at once (fs.cat)"
        return ["cachedfs pack: fewer and larger objects", *([sooner] if limit == "latency" else [])]
    if limit == "decode":
        return ["raise n_threads if cores are free, else use a lighter codec or transform"]
    if limit == "load":
        known = "a faster disk" if run.read_share is not None else "a dataset of cachedfs.datasets"
        return [f"raise n_threads if cores are free, else use {known}"]
    if limit is None:
        more = "raise n_threads or n_prefetch" if has_loader else "prefetch in the order of the reads"
        return [EARLIER, more] if run.first_wait_s > (run.wait_s or 0.0) / 2 else [more]
    return []


def _cache_advice(run: RunFigures, *, has_loader: bool) -> list[str]:
    twice = ["use batches twice (echo=2)"] if has_loader else []
    if not run.can_store:
        return ["let the cache store what comes: fs.stats() says why it cannot", *twice]
    if run.held is None:
        return ["prefetch before it is needed"]
    if run.held < 1:
        return [f"raise cache_size: the cache holds {per_cent(run.held)} of the data", *twice]
    return ["nothing: the cache holds all of it, so the next pass needs no link"]


def _settings(run: RunFigures) -> list[str]:
    """Return the options to change before a run, each with its reason."""
    texts, n_files, total = [], run.n_files or 0, run.size or 0
    if run.n_to_fill is not None and run.n_at_once is not None and run.n_to_fill > run.n_at_once:
        texts.append(f"concurrency={min(run.n_to_fill, MOST_AT_ONCE)}: fewer do not fill the link")
    if run.held is not None and run.held < 1:
        what = "object" if n_files == 1 else "folder"
        if run.could_hold is not None and run.could_hold >= total * 1.05:
            texts.append(f'cache_size="{math.ceil(total * 1.05 / 1e9)}GB": then all of the {what} stays')
        else:
            texts.append(f"cache_dir= on a larger disk: the {what} does not fit this one")
    if n_files >= MANY and total <= SMALL * n_files:
        average = size(total / n_files)
        texts.append(f"cachedfs pack: {n_files:,} files of {average} become tens of objects")
    if run.is_drive and not run.is_immutable:
        texts.append(
            'max_age="immutable", if the data does not change: then known files cost no request at all'
        )
    return texts
