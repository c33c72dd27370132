"""Simulated network: latency of requests, and bandwidth shared by concurrent streams.

`Profile.first_byte` computes the wait of a request and `Link` the time at which bytes of a stream have
passed, both without a clock of their own. Only `Network` has a clock and a random generator.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cachedfs.sim.quota import QUOTAS, Quota

_P95 = 1.6448536269514722  # 95th percentile of the standard normal distribution
_SLACK = 2 << 20  # bytes a stream may catch up after its client paused: about one TCP window


@dataclass(frozen=True, slots=True)
class Delay:
    """A lognormal waiting time. See also `Delay.from_p95`."""

    median_s: float = 0.0
    """Median in seconds."""
    sigma: float = 0.0
    """Standard deviation of the logarithm; 0 makes all waits equal."""

    @classmethod
    def from_p95(cls, median_s: float, p95_s: float) -> Delay:
        """Return the delay with this median and this 95th percentile, both in seconds."""
        return cls(median_s, math.log(p95_s / median_s) / _P95)

    def draw(self, rng: random.Random) -> float:
        """Return a random waiting time in seconds. Takes exactly one number from the generator."""
        return self.median_s * math.exp(self.sigma * rng.normalvariate(0.0, 1.0))


class Verdict(NamedTuple):
    """Random outcome for one request."""

    wait_s: float
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Behavior of a network: latency, bandwidth, error rates and quota.

    Rates are in bytes per second. The default has no delays, no limits and no errors.
    """

    name: str = "custom"
    """Name for display."""
    metadata: Delay = Delay()
    """Wait before the answer to a metadata request."""
    media: Delay = Delay()
    """Wait before the first byte of an object."""
    listing: Delay = Delay()
    """Wait before a page of a listing."""
    list_item_s: float = 0.0
    """Additional seconds for each item of a listing."""
    stream_rate: float = math.inf
    """Maximum rate of one body."""
    total_rate: float = math.inf
    """Maximum rate of all bodies together, shared fairly."""
    connection_s: float = 0.0
    """Additional seconds for the first request of a connection."""
    error_rate: float = 0.0
    """Share of requests that end in an error of the service."""
    stall_rate: float = 0.0
    """Share of bodies whose first byte is delayed by `stall_s`."""
    stall_s: float = 30.0
    """Length of such a delay, in seconds."""
    quota: Quota = field(default_factory=Quota)
    """Request quota; by default unlimited."""

    @property
    def is_paced(self) -> bool:
        """True if the bandwidth is limited."""
        return min(self.stream_rate, self.total_rate) < math.inf

    def first_byte(self, kind: str, *, new_connection: bool, rng: random.Random) -> Verdict:
        """Return the random wait before the first byte, and whether the request fails.

        The wait excludes `list_item_s`. `kind` is "media", "list" or any other kind, which counts as
        metadata.
        """
        delay = {"media": self.media, "list": self.listing}.get(kind, self.metadata)
        # Always three draws, so that the same seed gives comparable numbers under different profiles.
        wait_s = delay.draw(rng)
        stalled, failed = rng.random() < self.stall_rate, rng.random() < self.error_rate
        wait_s += self.stall_s if stalled and kind == "media" else 0.0
        return Verdict(wait_s + (self.connection_s if new_connection else 0.0), failed)

    def to_json(self) -> str:
        """Return the profile as JSON, readable by `resolve`."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def resolve(cls, profile: Profile | str) -> Profile:
        """Return a profile given as a Profile, a name in `PROFILES`, or the JSON of `to_json`.

        Raises ValueError for an unknown name.
        """
        if isinstance(profile, Profile):
            return profile
        if profile in PROFILES:
            return PROFILES[profile]
        if not profile.startswith("{"):
            raise ValueError(f"unknown profile {profile!r}; known: {', '.join(PROFILES)}")
        values: dict[str, Any] = json.loads(profile)
        values |= {n: Delay(**values[n]) for n in ("metadata", "media", "listing")}
        return cls(**{**values, "quota": Quota(**values.get("quota", {}))})


# From published measurements. Listings are assumed to vary as much as metadata.
_PUBLISHED = {  # (median, p95) of metadata and media; (listing, item); rates; (connection, errors, stalls)
    "gcs-region": ((0.02, 0.06), (0.04, 0.1), (0.08, 1e-4), (200e6, 400e6), (0.01, 2e-4, 0.0)),
    "drive-typical": ((0.12, 0.35), (0.18, 0.5), (0.5, 1e-3), (60e6, 200e6), (0.06, 2e-3, 2e-4)),
    "drive-bad": ((0.4, 1.5), (0.45, 1.5), (1.0, 5e-3), (25e6, 60e6), (0.2, 2e-2, 5e-3)),
}


def _profiles() -> dict[str, Profile]:
    """Return all named profiles: "off", "table" and those from published measurements."""
    same = Delay(0.045, 0.35)
    table = Profile(name="table", metadata=same, media=same, listing=same, list_item_s=1e-5)
    out = [Profile(name="off"), dataclasses.replace(table, stream_rate=60e6, total_rate=200e6)]
    for name, (meta, media, (listing_s, item_s), (stream_rate, total_rate), chances) in _PUBLISHED.items():
        metadata = Delay.from_p95(*meta)
        profile = Profile(
            name=name,
            metadata=metadata,
            media=Delay.from_p95(*media),
            listing=Delay(listing_s, metadata.sigma),
            list_item_s=item_s,
            stream_rate=stream_rate,
            total_rate=total_rate,
            connection_s=chances[0],
            error_rate=chances[1],
            stall_rate=chances[2],
            quota=QUOTAS[_QUOTAS.get(name, "none")],
        )
        out.append(profile)
    return {profile.name: profile for profile in out}


_QUOTAS = {"drive-typical": "requests", "drive-bad": "units"}
PROFILES = _profiles()
"""Network profiles by name.

"off" has no delays and "table" is the profile of the benchmarks. "gcs-region", "drive-typical" and
"drive-bad" follow published measurements.
"""


@dataclass(slots=True, eq=False)
class Stream:
    """One body on the link, as the interval from `start` to `end` of the link's counter `_served`."""

    start: float
    end: float


class Link:
    """Bandwidth shared fairly by all open streams, as an exact fluid model.

    `_served` counts the bytes that one stream would have received by `_now` if it had always been open. A
    stream opened at counter value `m` has received `_served - m` bytes. So no per-stream sums accumulate
    rounding errors.
    """

    def __init__(self, stream_rate: float, total_rate: float) -> None:
        self._stream_rate, self._total_rate = stream_rate, total_rate
        self._now = self._served = 0.0
        self._ends: list[float] = []  # Invariant: sorted; one end per unfinished stream

    def _rate(self, n_streams: int) -> float:
        return min(self._stream_rate, self._total_rate / n_streams)

    def _advance(self, now: float) -> None:
        while self._ends and self._now < now:
            rate = self._rate(len(self._ends))
            through_at = self._now + (self._ends[0] - self._served) / rate
            if through_at > now:
                self._served += rate * (now - self._now)
                break
            self._served, self._now = self._ends.pop(0), through_at
        self._now = max(self._now, now)

    def open(self, size: float, now: float) -> Stream:
        """Return a new stream of `size` bytes; infinite if the size is unknown."""
        self._advance(now)
        stream = Stream(self._served, self._served + size)
        insort(self._ends, stream.end)
        return stream

    def due(self, stream: Stream, n_bytes: float, now: float) -> float:
        """Return when the first `n_bytes` have passed, assuming that no stream opens or closes until then."""
        self._advance(now)
        at, served, target = self._now, self._served, stream.start + n_bytes
        for i, end in enumerate(self._ends):
            if served >= target:
                break
            mark = min(end, target)
            at += (mark - served) / self._rate(len(self._ends) - i)
            served = mark
        return at

    def slip(self, stream: Stream, n_bytes: float, now: float) -> None:
        """Delay the stream by the bytes it could have sent while its client was not reading."""
        self._advance(now)
        late = self._served - stream.start - n_bytes - _SLACK
        if late > 0 and stream.end > stream.start + n_bytes:
            self._drop(stream)
            stream.start, stream.end = stream.start + late, stream.end + late
            if stream.end > self._served:
                insort(self._ends, stream.end)

    def close(self, stream: Stream, now: float) -> None:
        """Give the stream's bandwidth to the others. Has no effect on a finished stream."""
        self._advance(now)
        self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        at = bisect_left(self._ends, stream.end)
        if at < len(self._ends) and self._ends[at] == stream.end > self._served:
            del self._ends[at]


class Network:
    """A profile with a clock, a seeded random generator and a link each way. Times are in simulated seconds.

    `time_scale` is the number of simulated seconds per real second.
    """

    def __init__(
        self,
        profile: Profile,
        seed: int = 0,
        time_scale: float = 1.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.profile, self.seed, self.time_scale = profile, seed, time_scale
        self.rng = random.Random(seed)
        self.link, self.uplink = (Link(profile.stream_rate, profile.total_rate) for _ in range(2))
        self._clock, self._start = clock, clock()
        real_rate = min(profile.stream_rate, profile.total_rate) * time_scale
        # About 2 ms of one stream at a time: smooth for the client, with few wake-ups of the server.
        self.piece = int(min(max(real_rate * 0.002, 64 << 10), 1 << 20))

    def now(self) -> float:
        """Return the simulated seconds since the network was created."""
        return (self._clock() - self._start) * self.time_scale

    async def sleep_until(self, at: float) -> None:
        if (left := at - self.now()) > 0:
            await asyncio.sleep(left / self.time_scale)

    async def through(self, link: Link, stream: Stream, n_bytes: float) -> None:
        """Wait until the first `n_bytes` of the stream have passed the link."""
        while (at := link.due(stream, n_bytes, now := self.now())) > now:
            await self.sleep_until(at)
