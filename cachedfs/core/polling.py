"""Wait for other processes: they cannot notify this one, so check again after growing pauses."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import TypeVar

# After this wait for another process, do its work here too: it may be stopped (SIGSTOP, Ctrl-Z).
OVERDUE_S = 30.0
_SHORTEST_S, _LONGEST_S = 0.002, 0.05  # pauses between two checks

T = TypeVar("T")


async def poll(check: Callable[[], T], *, within_s: float = math.inf) -> T:
    """Call `check` until its result is true; after `within_s` seconds, return a false result."""
    pause, deadline = _SHORTEST_S, time.monotonic() + within_s
    while not (result := check()) and time.monotonic() < deadline:
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_S)
    return result
