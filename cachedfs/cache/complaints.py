"""What is said aloud of a cache in trouble: a disk that fails does so at every call, and one warning is enough."""

from __future__ import annotations

import logging

__all__ = ["Complaints"]

log = logging.getLogger("cachedfs.cache")

_NOTHING, _SLOWER, _NOT_STORED = range(3)


class Complaints:
    """Warns of the first trouble of one cache, and once more when it gets worse."""

    def __init__(self) -> None:
        self._said = _NOTHING  # the worst so far

    def slower(self, trouble: str | None) -> None:
        """Warn of what makes us slower and no more, unless that or worse was said before; None: there is no trouble."""
        if trouble is not None:
            self._say(_SLOWER, trouble)

    def not_stored(self, trouble: str) -> None:
        """Warn that blocks are not cached, unless that was said before."""
        self._say(_NOT_STORED, f"blocks are not cached: {trouble}")

    def _say(self, how_bad: int, trouble: str) -> None:
        if self._said < how_bad:
            self._said = how_bad
            log.warning("%s", trouble)
