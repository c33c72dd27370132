"""The network between a client and a simulated cloud: latency, and bandwidth that streams share.

Decisions are pure: `Profile.first_byte` says how long a request waits, `Link` says when how many
bytes of which stream may be through. `Network` alone has a clock and a generator, both given to it.
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
from typing import Any

from cachedfs.sim.quota import QUOTAS, Quota

__all__ = ["PROFILES", "Delay", "Link", "Network", "Profile", "Stream", "Verdict"]

_P95 = 1.6448536269514722  # the standard normal value that 95 % of draws stay below
_SLACK = 2 << 20  # bytes a stream may catch up after its client paused: about one TCP window


@dataclass(frozen=True, slots=True)
class Delay:
    """A lognormal waiting time in seconds."""

    median_s: float = 0.0
    """Half of the waits are shorter."""
    sigma: float = 0.0
    """Of the logarithm; 0: always the same."""

    @classmethod
    def from_p95(cls, median_s: float, p95_s: float) -> Delay:
        """Return the lognormal with this median and this 95th percentile."""
        return cls(median_s, math.log(p95_s / median_s) / _P95)

    def draw(self, rng: random.Random) -> float:
        """Return one waiting time; always takes exactly one number from the generator."""
        return self.median_s * math.exp(self.sigma * rng.normalvariate(0.0, 1.0))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What chance decided for one request."""

    wait_s: float
    failed: bool
    stalled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How a network behaves; rates in bytes per second, the default is no network at all."""

    name: str = "custom"
    """What it is called where it is shown."""
    metadata: Delay = Delay()
    """To the answer about an object."""
    media: Delay = Delay()
    """To the first byte of an object."""
    listing: Delay = Delay()
    """To a page of a listing,"""
    list_item_s: float = 0.0
    """and more for each item in it."""
    stream_rate: float = math.inf
    """Of one body,"""
    total_rate: float = math.inf
    """and of all together, which share it."""
    connection_s: float = 0.0
    """More to wait on a new connection."""
    error_rate: float = 0.0
    """The share of requests that end in an error of the service."""
    stall_rate: float = 0.0
    """The share of bodies whose first byte comes `stall_s` later."""
    stall_s: float = 30.0
    """How much later."""
    quota: Quota = field(default_factory=Quota)
    """What may be asked for."""

    @property
    def is_paced(self) -> bool:
        """True where bodies take time."""
        return min(self.stream_rate, self.total_rate) < math.inf

    def first_byte(self, kind: str, *, new_connection: bool, rng: random.Random) -> Verdict:
        """Return the wait before the first byte, items of a listing not counted, and whether it is an error."""
        delay = {"media": self.media, "list": self.listing}.get(kind, self.metadata)
        # Three draws for every request: a profile's numbers do not shift another's.
        wait_s = delay.draw(rng)
        stalled, failed = rng.random() < self.stall_rate, rng.random() < self.error_rate
        stalled = stalled and kind == "media"
        wait_s += self.stall_s if stalled else 0.0
        return Verdict(wait_s + (self.connection_s if new_connection else 0.0), failed, stalled)

    def to_json(self) -> str:
        """Return the text that `resolve` reads back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def resolve(cls, profile: Profile | str) -> Profile:
        """Return a profile from itself, its name, or the text of `to_json`. Raises ValueError for an unknown name."""
        if isinstance(profile, Profile):
            return profile
        if profile in PROFILES:
            return PROFILES[profile]
        if not profile.startswith("{"):
            raise ValueError(f"unknown profile {profile!r}; known: {', '.join(PROFILES)}")
        values: dict[str, Any] = json.loads(profile)
        values |= {n: Delay(**values[n]) for n in ("metadata", "media", "listing")}
        return cls(**{**values, "quota": Quota(**values.get("quota", {}))})


# Published data points; listings are assumed to spread as metadata does.
_PUBLISHED = {  # median and 95th percentile of metadata and of media; listing, item; rates; rest as named
    "gcs-region": ((0.02, 0.06), (0.04, 0.1), (0.08, 1e-4), (200e6, 400e6), (0.01, 2e-4, 0.0)),
    "drive-typical": ((0.12, 0.35), (0.18, 0.5), (0.5, 1e-3), (60e6, 200e6), (0.06, 2e-3, 2e-4)),
    "drive-bad": ((0.4, 1.5), (0.45, 1.5), (1.0, 5e-3), (25e6, 60e6), (0.2, 2e-2, 5e-3)),
}


def _profiles() -> dict[str, Profile]:
    """Return all named profiles: none, the design's section 9, and the published ones."""
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
"""By name: "off", no delays; "table", as in the benchmarks; "gcs-region", "drive-typical" and "drive-bad", after what was published."""


@dataclass(slots=True, eq=False)
class Stream:
    """One body on the link, from mark `start` to mark `end` of the link's served count."""

    start: float
    end: float


class Link:
    """Bandwidth shared fairly by all open streams, as an exact fluid model.

    `_served` counts the bytes that one always open stream would have got until `_now`. A stream
    opened at mark m has got `_served - m`, whatever came and went meanwhile, so nothing adds up.
    """

    def __init__(self, stream_rate: float, total_rate: float) -> None:
        self._stream_rate, self._total_rate = stream_rate, total_rate
        self._now = self._served = 0.0
        self._ends: list[float] = []  # Invariant: sorted; one mark per stream that is not through

    @property
    def n_active(self) -> int:
        return len(self._ends)

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
        """Return a new stream of that many bytes; infinite when the size is not known."""
        self._advance(now)
        stream = Stream(self._served, self._served + size)
        insort(self._ends, stream.end)
        return stream

    def due(self, stream: Stream, n_bytes: float, now: float) -> float:
        """Return when the first n bytes are through, if nothing is opened or closed until then."""
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
        """Forget what the stream could have sent while its client did not read."""
        self._advance(now)
        late = self._served - stream.start - n_bytes - _SLACK
        if late > 0 and stream.end > stream.start + n_bytes:
            self._drop(stream)
            stream.start, stream.end = stream.start + late, stream.end + late
            if stream.end > self._served:
                insort(self._ends, stream.end)

    def close(self, stream: Stream, now: float) -> None:
        """Give the stream's share to the others; harmless when it is through."""
        self._advance(now)
        self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        at = bisect_left(self._ends, stream.end)
        if at < len(self._ends) and self._ends[at] == stream.end > self._served:
            del self._ends[at]


class Network:
    """A profile with its clock, its generator and its link; counts in simulated seconds."""

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
        self.link = Link(profile.stream_rate, profile.total_rate)
        self._clock, self._start = clock, clock()
        real_rate = min(profile.stream_rate, profile.total_rate) * time_scale
        # About 2 ms of one stream at a time: smooth for the client, few enough wake-ups for us.
        self.piece = int(min(max(real_rate * 0.002, 64 << 10), 1 << 20))

    def now(self) -> float:
        """Return simulated seconds since the network was made."""
        return (self._clock() - self._start) * self.time_scale

    async def sleep_until(self, at: float) -> None:
        """Return when the simulated clock shows that time."""
        if (left := at - self.now()) > 0:
            await asyncio.sleep(left / self.time_scale)

    async def through(self, stream: Stream, n_bytes: float) -> None:
        """Return when the first n bytes of the stream are through the link."""
        while (at := self.link.due(stream, n_bytes, now := self.now())) > now:
            await self.sleep_until(at)
