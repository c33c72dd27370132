"""Clock for the age of metadata: counts suspended time, and does not go back with the wall clock."""

from __future__ import annotations

import functools
import hashlib
import math
import time

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
# Seconds since the start of the machine, with suspended time. On macOS, CLOCK_MONOTONIC counts that too.
_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock:
    """Seconds since the epoch that advance at least as much as the wall clock, and as the time since boot.

    `offset` is the largest difference of the two so far. A process that learns it from another (`advance`) does not
    take an old answer for a new one after the wall clock was set back.
    """

    def __init__(self) -> None:
        self.offset = -math.inf

    def now(self) -> float:
        """Return the time."""
        wall, since_boot = time.time(), time.clock_gettime(_SINCE_BOOT)
        if wall - since_boot > self.offset:
            self.offset = wall - since_boot
        return since_boot + self.offset

    def advance(self, offset: float) -> None:
        """Learn an offset of this boot of the machine."""
        if offset > self.offset:
            self.offset = offset


clock = Clock()


@functools.cache
def boot_number() -> int | None:
    """Return a number that this boot of the machine does not share with another; None where the system has none."""
    try:
        with open(_BOOT_ID, encoding="utf-8") as file:
            text = file.read()
    except (OSError, ValueError):
        return None
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
