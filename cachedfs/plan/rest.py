"""When the rest of an object that is read here and there is worth fetching. Pure.

The cost model. A read that misses waits for one request; the rest costs requests of full size, at the speed of the whole
link. It is worth it once going on as before would cost more requests, and more time. How long a reader goes on nobody
knows; we assume GOES_ON times as long as it has. In simulation (readers of every length, each length tenfold as likely as one ten times
as long; objects of 25, 192 and 1,000 blocks) that leaves 0.77, 0.68 and 0.68 of the time, and 0.89, 0.96 and 0.81 of the
requests. Once as long leaves more time (0.74 of it at 192 blocks), three times as long takes more requests (1.03).

Who stops just then has cost a window: no more than that is unread at first, and one request more with every further read.
"""

from __future__ import annotations

from cachedfs.plan.link import Link

__all__ = ["GOES_ON", "LEAST", "is_rest_worth_it"]

GOES_ON = 2
LEAST = 6  # reads that waited: a table's footer and a few of its columns are fewer


def is_rest_worth_it(
    n_misses: int, n_missing: int, *, block_size: int, blocks_per_request: int, link: Link
) -> bool:
    """Return whether to fetch the `n_missing` blocks of an object in which `n_misses` reads had to wait.

    `link` is taken as it mostly is: figures of the moment would make it chance what is fetched.
    Where they are one request or less, the second read that waits is enough: it takes them along.
    """
    if n_misses < 2 or not n_missing:
        return False
    n_requests = -(-n_missing // blocks_per_request)
    if n_requests == 1:
        return True
    n_more = GOES_ON * n_misses
    going_on_s = n_more * (link.wait_s + block_size / link.best_per_s)
    rest_s = link.wait_s + n_missing * block_size / link.total_per_s
    return n_misses >= LEAST and n_more >= n_requests and going_on_s >= rest_s
