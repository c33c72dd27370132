"""Reader of event log files. Incomplete and unknown lines are skipped and counted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cachedfs.common.event_log import FORMAT

__all__ = ["COUNTS", "EventRecords", "RequestEvent", "SampleEvent", "WaitEvent", "parsed", "read"]

MOST = 1e18  # limit for seconds and bytes: beyond any real value, and sums cannot overflow
COUNTS = ("hits", "misses", "requests", "bytes_fetched", "bytes_served", "evictions")


NUMBER = (int, float)
_TIMES: dict[str, tuple[type, ...]] = {"at": NUMBER, "took_s": NUMBER}
FIELDS: dict[str, dict[str, tuple[type, ...]]] = {  # of each kind of event, with their types
    "process": {"format": (int,)},
    "request": _TIMES
    | {"wait_s": NUMBER, "bytes": NUMBER, "status": (int, str), "ahead": (bool,), "refused": (bool,)},
    "wait": _TIMES | {"path": (str,)},
    "sums": {"of": (int,)} | dict.fromkeys(("at", "over_s", *COUNTS), NUMBER),
}


class RequestEvent(NamedTuple):
    """One request, sent at the Unix time `at`.

    `wait_s`: seconds until the response headers arrived. `took_s`: seconds until the last byte arrived. `status`: the
    HTTP status, "ok", or the name of the error. `bytes`: received. `ahead`: it was speculative. `refused`: for a rate
    limit or a quota.
    """

    at: float
    status: int | str
    bytes: int
    wait_s: float
    took_s: float
    ahead: bool
    refused: bool

    @property
    def is_good(self) -> bool:
        """True if the request succeeded: status "ok" or HTTP 200 to 399."""
        return self.status == "ok" or (isinstance(self.status, int) and 200 <= self.status < 400)


class WaitEvent(NamedTuple):
    """A caller waited for bytes or metadata of an object, `took_s` seconds from the Unix time `at`."""

    at: float
    path: str
    took_s: float


class SampleEvent(NamedTuple):
    """The change of one process's counters since its previous sample.

    It covers the `over_s` seconds before `at`.
    """

    at: float
    over_s: float
    counts: Mapping[str, int]


class EventRecords(NamedTuple):
    """All events of a run.

    `bytes_per_s`: the highest network rate measured by any process; None without a measurement. `n_cut`: lines that
    could not be read. `n_full`: processes whose log file reached its maximum size.
    """

    requests: tuple[RequestEvent, ...] = ()
    waits: tuple[WaitEvent, ...] = ()
    samples: tuple[SampleEvent, ...] = ()
    bytes_per_s: int | None = None
    n_processes: int = 0
    n_cut: int = 0
    n_full: int = 0


def read(folder: str | Path) -> EventRecords:
    """Return the events that all processes wrote to `folder`.

    Raises FileNotFoundError if the folder contains no event log, and ValueError for one of another format version.
    """
    paths = sorted(Path(folder).glob("events-*.jsonl"))
    if not paths:
        raise FileNotFoundError(
            f"{folder}: no events in it; processes write them if CACHEDFS_EVENTS={folder} is in their environment"
        )
    found = []
    for path in paths:
        with path.open(encoding="utf-8", errors="replace") as lines:
            found.append(parsed(lines))
    return EventRecords(
        requests=tuple(r for each in found for r in each.requests),
        waits=tuple(w for each in found for w in each.waits),
        samples=tuple(s for each in found for s in each.samples),
        bytes_per_s=max((each.bytes_per_s for each in found if each.bytes_per_s), default=None),
        n_processes=len(found),
        n_cut=sum(each.n_cut for each in found),
        n_full=sum(each.n_full for each in found),
    )


def parsed(lines: Iterable[str]) -> EventRecords:
    """Return the events in the log lines of one process.

    Raises ValueError for another format version.
    """
    requests, waits, samples = [], [], []
    last: dict[int, Mapping[str, Any]] = {}
    n_cut = n_full = 0
    for line in lines:
        event = _event_of(line)
        kind = event.get("kind")
        n_cut, n_full = n_cut + (kind is None), n_full + (kind == "full")
        if kind == "process" and event["format"] != FORMAT:
            raise ValueError(
                f"events of format {event['format']}; this release of cachedfs reads format {FORMAT}"
            )
        if kind == "request":
            requests.append(RequestEvent(*(event[name] for name in RequestEvent._fields)))
        elif kind == "wait":
            waits.append(WaitEvent(*(event[name] for name in WaitEvent._fields)))
        elif kind == "sums":
            before, last[event["of"]] = last.get(event["of"]), event
            if before is not None:  # the first sample only sets the start values
                counts = {name: event[name] - before[name] for name in COUNTS}
                samples.append(SampleEvent(event["at"], event["over_s"], counts))
    rates = [int(event["bytes_per_s"]) for event in last.values() if _is(event.get("bytes_per_s"), NUMBER)]
    most = max(rates, default=None)
    return EventRecords(tuple(requests), tuple(waits), tuple(samples), most, 1, n_cut, n_full)


def _event_of(line: str) -> dict[str, Any]:
    """Return the event of a log line; empty if it lacks a field or has one of another type."""
    try:
        event = json.loads(line)
        is_sound = all(_is(event[name], types) for name, types in FIELDS.get(event["kind"], {}).items())
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return event if is_sound else {}


def _is(value: Any, types: tuple[type, ...]) -> bool:
    """Return whether a value has one of the types; a number is also finite and below `MOST` in magnitude."""
    return type(value) in types and (isinstance(value, (bool, str)) or -MOST < value < MOST)
