"""The files of a folder of events as values; a line that was cut off, or is not ours, is passed over and counted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cachedfs.common.event_log import FORMAT

__all__ = ["COUNTS", "EventRecords", "RequestEvent", "SampleEvent", "WaitEvent", "parsed", "read"]

MOST = 1e18  # seconds or bytes: more than there are, and sums of such numbers still are numbers
COUNTS = ("hits", "misses", "requests", "bytes_fetched", "bytes_served", "evictions")


class RequestEvent(NamedTuple):
    """One request, whose headers came `wait_s` after it was sent at `at`, and the last of its bytes after `took_s`."""

    at: float
    method: str
    url: str
    range: str
    status: int | str
    bytes: int
    wait_s: float
    took_s: float
    ahead: bool

    @property
    def is_good(self) -> bool:
        return self.status == "ok" or (isinstance(self.status, int) and 200 <= self.status < 400)


class WaitEvent(NamedTuple):
    """Somebody waited for bytes of an object, or for what it is."""

    at: float
    path: str
    took_s: float


class SampleEvent(NamedTuple):
    """What one process counted since the sample before, in the `over_s` seconds until `at`."""

    at: float
    over_s: float
    counts: Mapping[str, int]


class EventRecords(NamedTuple):
    """All events of a run. `bytes_per_s`: the most that was measured of a link; None: nothing was.

    `n_cut`: lines that could not be read. `n_full`: processes that had more to tell than a file takes.
    """

    requests: tuple[RequestEvent, ...] = ()
    waits: tuple[WaitEvent, ...] = ()
    samples: tuple[SampleEvent, ...] = ()
    bytes_per_s: int | None = None
    n_processes: int = 0
    n_cut: int = 0
    n_full: int = 0


def read(folder: str | Path) -> EventRecords:
    """Return what all processes wrote into `folder`. Raises FileNotFoundError where there is nothing of the kind."""
    paths = sorted(Path(folder).glob("events-*.jsonl"))
    if not paths:
        raise FileNotFoundError(
            f"{folder}: no events are in it; they are written by what runs with CACHEDFS_EVENTS={folder} in its environment"
        )
    found = []
    for path in paths:
        with path.open(encoding="utf-8", errors="replace") as lines:
            found.append(parsed(lines))
    measured = [each.bytes_per_s for each in found if each.bytes_per_s]
    return EventRecords(
        requests=tuple(sorted((r for each in found for r in each.requests), key=lambda r: r.at)),
        waits=tuple(sorted((w for each in found for w in each.waits), key=lambda w: w.at)),
        samples=tuple(sorted((s for each in found for s in each.samples), key=lambda s: s.at)),
        bytes_per_s=max(measured, default=None),
        n_processes=len(found),
        n_cut=sum(each.n_cut for each in found),
        n_full=sum(each.n_full for each in found),
    )


def parsed(lines: Iterable[str]) -> EventRecords:
    """Return the events of one process. Raises ValueError for a format that is not known."""
    requests, waits, samples = [], [], []
    last: dict[int, Mapping[str, Any]] = {}
    n_cut = n_full = 0
    for line in lines:
        try:
            event = json.loads(line)
            kind = event["kind"]
            if kind == "process" and event["format"] != FORMAT:
                raise _OtherFormat(event["format"])
            if kind == "request":
                numbers_in(event, "at", "bytes", "wait_s", "took_s")
                if type(event["ahead"]) is not bool:
                    raise TypeError("neither ahead nor not")
                requests.append(RequestEvent(*(event[name] for name in RequestEvent._fields)))
            elif kind == "wait":
                numbers_in(event, "at", "took_s")
                if type(event["path"]) is not str:
                    raise TypeError("what should be a name is none")
                waits.append(WaitEvent(*(event[name] for name in WaitEvent._fields)))
            elif kind == "sums":
                numbers_in(event, "at", "over_s", *COUNTS)
                before, last[event["of"]] = last.get(event["of"]), event
                if before is not None:  # the first says from where on is counted
                    counts = {name: event[name] - before[name] for name in COUNTS}
                    samples.append(SampleEvent(event["at"], event["over_s"], counts))
            n_full += kind == "full"
        except _OtherFormat as error:
            raise ValueError(
                f"events of format {error}, and only {FORMAT} is known: they are another cachedfs's"
            ) from None
        except (ValueError, KeyError, TypeError, RecursionError):
            n_cut += 1
    told = [event.get("bytes_per_s") for event in last.values()]
    rates = [int(rate) for rate in told if rate is not None and is_number(rate)]
    return EventRecords(
        tuple(requests), tuple(waits), tuple(samples), max(rates, default=None), 1, n_cut, n_full
    )


def numbers_in(event: Mapping[str, Any], *names: str) -> None:
    """Raise TypeError where what should be a number is none, or one that no clock and no counter shows."""
    if not all(is_number(event[name]) for name in names):
        raise TypeError("what should be a number is none")


def is_number(value: object) -> bool:
    return type(value) in (int, float) and -MOST < value < MOST  # type: ignore[operator]  # not so of NaN


class _OtherFormat(Exception):
    pass
