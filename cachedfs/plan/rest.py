"""When the rest of an object that is read here and there is worth fetching. Pure.

The cost model. A read that misses waits for one request; the rest costs requests of full size, at the speed of the whole
link. It is worth it once going on as before would cost more requests, and more time. How long a reader goes on nobody
knows; we assume GOES_ON times as long as it has. In simulation (readers of every length, each length tenfold as likely
as one ten times as long; objects of 25 to 1,000 blocks) that saves a third of the time at no more requests: 0.61 to 0.68
of the time at 0.81 to 0.99 of the requests. Once as long saves less time (0.66 to 0.74); three times as long (0.55 to 0.65)
costs up to 1.4 times the requests.

Who stops just then has cost a window: no more than that is unread at first, and one request more with every further read.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GOES_ON", "LEAST", "Link", "is_worth_it"]

GOES_ON = 2
LEAST = 6  # reads that waited: a table's footer and a few of its columns are fewer


class Link(NamedTuple):
    """What a request to an origin costs, in seconds to its first byte and bytes a second of one stream, and of all.

    The default is between the published figures of Google Drive and of GCS within its region.
    """

    wait_s: float = 0.05
    stream_per_s: float = 60e6
    total_per_s: float = 200e6


def is_worth_it(
    n_misses: int, n_missing: int, *, block_size: int, blocks_per_request: int, link: Link
) -> bool:
    """Return whether to fetch the `n_missing` blocks of an object in which `n_misses` reads had to wait.

    Where they are one request or less, the second read that waits is enough: it takes them along.
    """
    if n_misses < 2 or not n_missing:
        return False
    n_requests = -(-n_missing // blocks_per_request)
    if n_requests == 1:
        return True
    n_more = GOES_ON * n_misses
    going_on_s = n_more * (link.wait_s + block_size / link.stream_per_s)
    rest_s = link.wait_s + n_missing * block_size / link.total_per_s
    return n_misses >= LEAST and n_more >= n_requests and going_on_s >= rest_s
