"""How fast a service lets us ask: what may be sent when, and what its answers say of that. Pure.

A limit is not told, so it is learnt: from a ladder of limits that are known to exist, the highest first. A bulk of
refusals means that this rung is not ours; below the last one the share of it that is taken is halved, and grows again
with time. A refusal now and then says nothing: services refuse some requests of everybody.

Times are seconds of one clock that all processes of the machine share; it may jump.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["CREATES", "LEARNT_S", "REQUESTS", "Limit", "Pace", "answered", "per_s", "spare_s", "taken"]

# So long a lower rung is believed: a wrong one costs an hour, and asking again some 20 refusals.
LEARNT_S = 3600.0
_MARGIN = 0.95  # of a limit: what is counted here and at the service differs by what is on its way
_BURST_S = 0.5  # of the rate; the service's own bucket is taken to hold at least twice as much
_WEIGHT = 1 / 32  # of the newest answer in the average; six refusals in a row are a bulk,
_BULK = 0.15  # and so is one in seven for a while. One in seventy, on the worst of days, never is
_LEAST = 1 / 32  # of a limit is always taken
_GROWTH = 0.005  # of the limit, a second: from a half to all of it in 100 s


class Limit(NamedTuple):
    """What a service takes in a second: requests, or units, where `costs` says what each kind of them costs."""

    per_s: float
    costs: Mapping[str, float] = {}

    def cost(self, kind: str) -> float:
        return self.costs.get(kind, self.costs.get("other", 1.0))

    def dearest(self) -> float:
        return max([self.cost("other"), *self.costs.values()])


# Google Drive, for one user of one project: 12,000 requests a minute, or for projects made since May 2026 (or long
# unused) 325,000 units. What counts as a download is not said of `alt=media`: the dearer reading is taken.
_UNITS = {"other": 5.0, "list": 100.0, "download": 200.0, "edit": 50.0, "create": 50.0}
REQUESTS = (Limit(12_000 / 60), Limit(325_000 / 60, _UNITS))
CREATES = (Limit(3.0), Limit(2.0))  # new items: not documented, and the same for all who write much


class Pace(NamedTuple):
    """What is known of one limit, and how far it is used. Any numbers at all are a state: see `_sane`."""

    rung: float = 0.0
    share: float = 1.0  # of the rung's limit that was taken at `cut_at`
    refused: float = 0.0  # part of the latest answers that said "too many", as a moving average
    free_at: float = 0.0  # when all that was sent is paid for
    cut_at: float = 0.0  # the last time that less was taken; answers to what was sent before count no more


def taken(pace: Pace, ladder: Sequence[Limit], kind: str, now: float) -> tuple[Pace, float]:
    """Return the state after a request that is sent now, and 0; or, where it has to wait, for how many seconds."""
    pace = _sane(pace, ladder, now)
    if pace.free_at > now:
        return pace, pace.free_at - now
    cost_s = ladder[int(pace.rung)].cost(kind) / per_s(pace, ladder, now)
    return pace._replace(free_at=max(pace.free_at, now - _BURST_S) + cost_s), 0.0


def answered(pace: Pace, ladder: Sequence[Limit], *, sent_at: float, refused: bool, now: float) -> Pace:
    """Return the state after an answer; `refused`: it said that there were too many requests."""
    pace = _sane(pace, ladder, now)
    if sent_at < pace.cut_at:
        return pace
    part = pace.refused + (refused - pace.refused) * _WEIGHT
    if not refused or part < _BULK:
        return pace._replace(refused=part)
    last = len(ladder) - 1
    if pace.rung < last:
        return Pace(pace.rung + 1, free_at=now, cut_at=now)
    return Pace(pace.rung, max(_share(pace, now) / 2, _LEAST), free_at=now, cut_at=now)


def spare_s(pace: Pace, ladder: Sequence[Limit], now: float) -> float:
    """Return in how many seconds half of what may be sent at once is there: the other half is for who waits."""
    return max(0.0, _sane(pace, ladder, now).free_at - (now - _BURST_S / 2))


def per_s(pace: Pace, ladder: Sequence[Limit], now: float) -> float:
    """Return what is taken in a second."""
    return ladder[int(pace.rung)].per_s * _MARGIN * _share(pace, now)


def _share(pace: Pace, now: float) -> float:
    return min(1.0, pace.share + _GROWTH * max(0.0, now - pace.cut_at))


def _sane(pace: Pace, ladder: Sequence[Limit], now: float) -> Pace:
    """Return the state as far as it can be true now; one of no numbers is forgotten.

    Where the clock was set back, its times are ahead: what was learnt is kept, and nobody waits for the old time.
    """
    is_sound = (
        all(map(math.isfinite, pace))
        and 0 <= pace.rung < len(ladder)
        and _LEAST <= pace.share <= 1
        and 0 <= pace.refused <= 1
        and pace.cut_at >= 0
    )
    if not is_sound:
        return Pace(free_at=now - _BURST_S, cut_at=0.0)
    if pace.rung and now > pace.cut_at + LEARNT_S:
        pace = Pace(free_at=pace.free_at)
    limit = ladder[int(pace.rung)]
    # Nothing is sent before the last is paid for. The share is that of the cut: it was no less when this was sent.
    most_s = limit.dearest() / (limit.per_s * _MARGIN * pace.share)
    return pace._replace(free_at=min(pace.free_at, now + most_s), cut_at=min(pace.cut_at, now))
