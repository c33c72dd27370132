"""What is known of the way to an origin, and how many bodies may be on it before somebody has to wait for them. Pure.

Streams share a link fairly, so a read that somebody waits for is as slow as there are other bodies on it. What is sent
ahead takes so many that a read of one block takes COURTESY times as long as without them, at most; and never fewer than
FEWEST, which fill the links that are published. A request that still waits for its first byte takes nothing of the
link, so where answers are late more of them may be under way.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COURTESY", "FEWEST", "Link", "Timed"]

COURTESY = 1.2
FEWEST = 4
_BLOCK = 1 << 20  # what somebody may wait for; and less says little of how fast the link is
_WEIGHT = 1 / 8  # of the newest request in an average
_ROUNDS = 2  # of as many bodies as there may be, between two changes of that


class Link(NamedTuple):
    """Seconds to the first byte, and bytes a second: of a body at best, and as they come now, `n_bodies` at a time.

    The default is between the published figures of Google Drive and of GCS in its region.
    """

    wait_s: float = 0.05
    best_per_s: float = 60e6
    per_s: float = 50e6
    n_bodies: int = FEWEST
    n_since: int = 0  # bodies that came since that changed

    @property
    def total_per_s(self) -> float:
        return self.n_bodies * self.per_s

    def after(self, *, wait_s: float, size: int, took_s: float, n_others: int, most: int) -> Link:
        """Return what is known after a request whose body of `size` bytes took `took_s` after its first byte.

        `n_others`: the requests that were in flight with it; `most`: how many bodies there may be at all.
        """
        link = self._replace(wait_s=self.wait_s + (wait_s - self.wait_s) * _WEIGHT)
        if size < _BLOCK or took_s <= 0:
            return link
        per_s = self.per_s + (size / took_s - self.per_s) * _WEIGHT
        link = link._replace(per_s=per_s, best_per_s=max(per_s, self.best_per_s), n_since=self.n_since + 1)
        if n_others + 1 < self.n_bodies or link.n_since < _ROUNDS * self.n_bodies:
            return link  # it says nothing of so many
        step = (link._courteous() > self.n_bodies) - (link._courteous() < self.n_bodies)
        n_bodies = max(FEWEST, min(most, self.n_bodies + step))
        return link if n_bodies == self.n_bodies else link._replace(n_bodies=n_bodies, n_since=0)

    def _courteous(self) -> int:
        """Return how many bodies leave a block its share, if the link is full now; else there will be more."""
        alone_s = self.wait_s + _BLOCK / self.best_per_s
        least_per_s = _BLOCK / (COURTESY * alone_s - self.wait_s)
        return int(self.total_per_s / least_per_s) - 1

    def load(self, size: int) -> float:
        """Return how many bodies a request for `size` bytes is, on average over its life."""
        body_s = size / self.per_s
        return body_s / (self.wait_s + body_s)


class Timed(NamedTuple):
    """What was measured of it, in sums; nothing is assumed, as a `Link` does that saw little yet."""

    n: int = 0
    wait_s: float = 0.0
    came: float = (
        0.0  # bytes, while bodies came whose rate says something, in all of those that shared the link
    )
    took_s: float = 0.0  # of each of these bodies

    @property
    def per_s(self) -> float | None:
        """Bytes a second of the link as it was shared; None: no body came that says it."""
        return self.came / self.took_s if self.took_s else None

    def after(self, *, wait_s: float, size: int, took_s: float, n_others: int) -> Timed:
        """Return the sums with one more request, as `Link.after` is told of it."""
        timed = self._replace(n=self.n + 1, wait_s=self.wait_s + wait_s)
        if size < _BLOCK or took_s <= 0:
            return timed
        n_bodies = 1 + n_others * took_s / (wait_s + took_s)  # the others wait for their first bytes as long
        return timed._replace(came=self.came + size * n_bodies, took_s=self.took_s + took_s)
