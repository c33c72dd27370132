"""Reader of event log files. Lines that cannot be read are skipped and counted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cachedfs.common.event_log import FORMAT


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
    """The change of one process's counters in the `over_s` seconds before `at`."""

    at: float
    over_s: float
    counts: Mapping[str, int]


@dataclass
class EventRecords:
    """All events of a run.

    `bytes_per_s`: the highest network rate measured by any process; None without a measurement. `n_cut`: lines that
    could not be read. `n_full`: processes whose log file reached its maximum size. `cache_dirs`: the directories that
    they cached in.
    """

    requests: list[RequestEvent] = field(default_factory=list)
    waits: list[WaitEvent] = field(default_factory=list)
    samples: list[SampleEvent] = field(default_factory=list)
    bytes_per_s: int | None = None
    n_processes: int = 0
    n_cut: int = 0
    n_full: int = 0
    cache_dirs: list[str] = field(default_factory=list)

    def add_process(self, lines: Iterable[str]) -> None:
        """Add the events in the log of one process. Raises ValueError for another format version."""
        self.n_processes += 1
        rate = None
        for line in lines:
            try:
                event = json.loads(line)
                self._add(event)
                rate = event.get("bytes_per_s") or rate
            except (json.JSONDecodeError, KeyError, TypeError):  # a killed process leaves a part of a line
                self.n_cut += 1
        self.bytes_per_s = max(filter(None, (rate, self.bytes_per_s)), default=None)

    def _add(self, event: Mapping[str, Any]) -> None:
        kind = event["kind"]
        if kind == "process" and event["format"] != FORMAT:
            raise ValueError(
                f"events of format {event['format']}; this release of cachedfs reads format {FORMAT}"
            )
        self.n_full += kind == "full"
        if kind == "cache" and event["directory"] not in self.cache_dirs:
            self.cache_dirs.append(event["directory"])
        if kind == "request":
            self.requests.append(RequestEvent(*(event[name] for name in RequestEvent._fields)))
        elif kind == "wait":
            self.waits.append(WaitEvent(*(event[name] for name in WaitEvent._fields)))
        elif kind == "counts":
            self.samples.append(SampleEvent(*(event[name] for name in SampleEvent._fields)))


def read(folder: str | Path) -> EventRecords:
    """Return the events that all processes wrote to `folder`.

    Raises FileNotFoundError if the folder contains no event log, and ValueError for one of another format version.
    """
    records = EventRecords()
    for path in sorted(Path(folder).glob("events-*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as lines:
            records.add_process(lines)
    if not records.n_processes:
        raise FileNotFoundError(
            f"{folder}: no events in it; processes write them if CACHEDFS_EVENTS={folder} is in their environment"
        )
    return records
