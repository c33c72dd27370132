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


class RequestEvent(NamedTuple):
    """One request, sent at the Unix time `at`.

    `wait_s`: seconds until the response headers arrived. `took_s`: seconds until the last byte arrived. `status`: the
    HTTP status, "ok", or the name of the error. `bytes`: received. `ahead`: it was speculative. `refused`: for a rate
    limit or a quota.
    """

    at: float
    method: str
    url: str
    range: str
    status: int | str
    bytes: int
    wait_s: float
    took_s: float
    ahead: bool
    refused: bool = False

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
    """Return the events that all processes wrote to `folder`, sorted by time.

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
    """Return the events in the log lines of one process.

    Raises ValueError for another format version.
    """
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
                event.setdefault("refused", event["status"] == 429)  # logs of older releases lack it
                if type(event["ahead"]) is not bool or type(event["refused"]) is not bool:
                    raise TypeError("a value that must be a bool is not")
                requests.append(RequestEvent(*(event[name] for name in RequestEvent._fields)))
            elif kind == "wait":
                numbers_in(event, "at", "took_s")
                if type(event["path"]) is not str:
                    raise TypeError("a value that must be a name is not")
                waits.append(WaitEvent(*(event[name] for name in WaitEvent._fields)))
            elif kind == "sums":
                numbers_in(event, "at", "over_s", *COUNTS)
                before, last[event["of"]] = last.get(event["of"]), event
                if before is not None:  # the first sample only sets the start values
                    counts = {name: event[name] - before[name] for name in COUNTS}
                    samples.append(SampleEvent(event["at"], event["over_s"], counts))
            n_full += kind == "full"
        except _OtherFormat as error:
            raise ValueError(
                f"events of format {error}; this release of cachedfs reads format {FORMAT}"
            ) from None
        except (ValueError, KeyError, TypeError, RecursionError):
            n_cut += 1
    told = [event.get("bytes_per_s") for event in last.values()]
    rates = [int(rate) for rate in told if rate is not None and is_number(rate)]
    return EventRecords(
        tuple(requests), tuple(waits), tuple(samples), max(rates, default=None), 1, n_cut, n_full
    )


def numbers_in(event: Mapping[str, Any], *names: str) -> None:
    """Raise TypeError unless all of the fields `names` are numbers in the plausible range."""
    if not all(is_number(event[name]) for name in names):
        raise TypeError("a value that must be a number is not")


def is_number(value: object) -> bool:
    """Return whether a value is a finite number below `MOST` in magnitude, and not a bool."""
    return type(value) in (int, float) and -MOST < value < MOST  # type: ignore[operator]  # not so of NaN


class _OtherFormat(Exception):
    pass
