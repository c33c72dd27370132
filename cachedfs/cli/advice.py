"""Advice from the measurements of `doctor`: what limits reading, and which options to change. Pure."""

from __future__ import annotations

import dataclasses
import math

from rich.filesize import decimal

from cachedfs.common.text import counted as number_of
from cachedfs.common.text import per_cent
from cachedfs.common.types import Counted

__all__ = ["MANY", "Seen", "bounds", "settings", "use"]

MANY = 1000  # number of files from which on packing is worthwhile, if they are small
SMALL = 256 << 10  # bytes: files of at most this average size are small
FULL = 0.9  # share of the allowance from which on the cache counts as full
MOST_AT_ONCE = 256  # concurrent requests: beyond this, services throttle and throughput does not grow


@dataclasses.dataclass(frozen=True)
class Seen:
    """Measurements of the access to the data, and the current configuration.

    Sizes are in bytes, rates in bytes per second. `first_s` is the time to the first byte of a request.
    `one_per_s` is the rate of one request, None if the object is too small to measure. `all_per_s` is the
    combined rate of `n_at_once` concurrent requests.

    `n_files` is the number of files in the folder and `wanted` their total size; None if unknown. The cache
    may hold `may_hold` bytes now, and `could_hold` bytes without a `cache_size` limit.
    """

    first_s: float
    concurrency: int
    one_per_s: float | None = None
    all_per_s: float | None = None
    n_at_once: int = 0
    n_files: int | None = None
    wanted: int | None = None
    may_hold: int | None = None
    could_hold: int | None = None
    is_drive: bool = False
    is_immutable: bool = False  # `max_age="immutable"` is set

    @property
    def n_to_fill(self) -> int | None:
        """Number of concurrent requests that fill the link; None if too few were tried or none was timed."""
        if self.one_per_s is None or self.all_per_s is None:
            return None
        n = self.all_per_s / self.one_per_s
        return None if n > 0.8 * self.n_at_once else max(1, math.ceil(n))

    @property
    def share_held(self) -> float | None:
        """Share of the folder that fits in the cache: the best possible hit ratio. None if unknown."""
        if not self.wanted or self.may_hold is None:
            return None
        return min(1.0, self.may_hold / self.wanted)


def bounds(seen: Seen) -> str:
    """Return what limits reading, as sentences."""
    n = seen.concurrency
    at_once = f"as a list by fs.cat, {n} in flight: up to {n / seen.first_s:,.0f} a second."
    told = [f"Small objects one by one: {1 / seen.first_s:,.0f} a second; {at_once}"]
    if seen.one_per_s is not None and seen.n_to_fill is not None and seen.all_per_s is not None:
        told.append(
            f"The link gives {decimal(int(seen.all_per_s))}/s: concurrency={seen.n_to_fill} fills it (now {n})."
        )
    elif seen.one_per_s is not None:
        needed = max(1, math.ceil(125e6 / seen.one_per_s))
        told.append(f"concurrency={needed} fills a link of 1 Gbit/s, {10 * needed} one of 10 (now {n}).")
    if seen.wanted is not None and seen.share_held is not None and seen.n_files != 1:
        told.append(
            f"Of {decimal(seen.wanted)} here the cache holds {per_cent(seen.share_held)}: "
            + (
                "from the second time on all of it is hits."
                if seen.share_held == 1
                else "that share of each further epoch is hits."
            )
        )
    if seen.is_drive:
        told.append(
            "Drive serves an account about 200 downloads a second, and 27 if its project was made since May 2026."
        )
    return " ".join(told)


def settings(seen: Seen) -> list[str]:
    """Return the recommended changes, each with its reason; an empty list if the configuration fits."""
    told = []
    if seen.n_to_fill is not None and seen.n_to_fill > seen.concurrency:
        told.append(f"concurrency={min(seen.n_to_fill, MOST_AT_ONCE)}: fewer do not fill the link")
    if seen.wanted is not None and seen.share_held is not None and seen.share_held < 1:
        what = "object" if seen.n_files == 1 else "folder"
        if seen.could_hold is not None and seen.could_hold >= seen.wanted * 1.05:
            told.append(f'cache_size="{math.ceil(seen.wanted * 1.05 / 1e9)}GB": then all of the {what} stays')
        else:
            told.append(f"cache_dir= on a larger disk: the {what} does not fit this one")
    if seen.n_files and seen.n_files >= MANY and (seen.wanted or 0) <= SMALL * seen.n_files:
        told.append(
            f"cachedfs pack: {seen.n_files:,} files of {decimal((seen.wanted or 0) // seen.n_files)} become tens of objects"
        )
    if seen.is_drive and not seen.is_immutable:
        told.append(
            'max_age="immutable", if the data does not change: then known files cost no request at all'
        )
    return told


def saved_by(counted: Counted) -> str:
    """Return the bytes and requests that the cache saved so far, as text.

    Bytes that were fetched before they were read, as by a prefetch, are saved only when they are read again.
    """
    requests = f"about {number_of(counted.requests_saved, 'request')}" if counted.requests_saved else ""
    size = decimal(counted.bytes_saved) if counted.bytes_saved else ""
    return ", ".join(filter(None, [size, requests])) or "nothing yet"


def use(counted: Counted, held: int, may_hold: int | None) -> tuple[str, str]:
    """Return how well all processes use the cache, and what to change (empty if nothing), both as text.

    `held` is the cached size and `may_hold` the allowance, in bytes.
    """
    ratio = counted.hit_ratio
    if ratio is None:
        return "no block was read yet", ""
    found = (
        f"{per_cent(ratio)} of {number_of(counted.hits + counted.misses, 'block')} were hits; "
        f"saved {saved_by(counted)}; {number_of(counted.evictions, 'block')} evicted"
    )
    is_full = may_hold is not None and held >= FULL * may_hold
    if is_full and counted.evictions > counted.misses / 2:
        return (
            found,
            "It is full, and blocks go nearly as fast as they come: raise cache_size, or lower keep_free",
        )
    return found, ""
