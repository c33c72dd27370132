"""How long a plan goes on while what it asks for fails, and when it asks again. Pure."""

from __future__ import annotations

__all__ = ["AWAY_S", "Patience"]

AWAY_S = 60.0  # how long an origin may be away before its plan ends
PAUSE_S = 1.0, 15.0  # shortest and longest wait before an origin that is away is asked again
MOST_IN_A_ROW = 16  # failures that are not one object's, and then the plan ends


class Patience:
    """What failed since something came last."""

    def __init__(self) -> None:
        self._n_in_a_row = 0
        self._away_since: float | None = None
        self._again_at, self._pause_s = 0.0, PAUSE_S[0]

    @property
    def is_away(self) -> bool:
        """Whether the origin was away when it was asked last."""
        return self._away_since is not None

    def is_pausing(self, now: float) -> bool:
        """Return whether nothing is to be asked for now."""
        return now < self._again_at

    def came(self) -> None:
        """Something came: what waits for the end of a pause need not."""
        self._n_in_a_row, self._away_since = 0, None
        self._again_at, self._pause_s = 0.0, PAUSE_S[0]

    def failed(self) -> bool:
        """It failed for what is not one object's; return whether that was once too often."""
        self._n_in_a_row += 1
        return self._n_in_a_row >= MOST_IN_A_ROW

    def away(self, now: float) -> bool:
        """The origin is away: ask no more for a while; return whether it was away for too long."""
        if self._away_since is None:
            self._away_since = now
        if not self.is_pausing(now):  # requests that were sent together fail together: one pause
            self._again_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_S[1])
        return now - self._away_since > AWAY_S
