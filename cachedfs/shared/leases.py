"""Leases: while a node fetches something, a file makes other nodes wait for it.

A lease is a file that only one node can create. It is removed once what was fetched is in the shared cache, and ignored
when it is EXPIRES_S old by the clock of the store: its node may be gone. At worst something is fetched twice.

A node that is alone takes no leases on small objects, which cost more than what they may save. One node at most has a file
that says so. Whoever finds it lets that node know, as if it waited for a lease.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from cachedfs.common.executor import each_in_threads
from cachedfs.shared.gatherer import FILE
from cachedfs.shared.shared_bucket import SharedBucket
from cachedfs.shared.shared_folder import ALONE, SharedFolder

EXPIRES_S = 30.0
RENEW_ALONE_S = 10.0


def lease_of(key: str, position: int) -> str:
    """Return the lease on the part of an object version that has the byte at `position`."""
    return f"leases/{key}-{position // FILE:x}"


class Leases:
    """The leases of one process at a place; `held` are its own.

    `node` returns the name of this one, which all processes with the same local cache have. All methods block, and raise
    no errors of the place.
    """

    def __init__(self, place: SharedFolder | SharedBucket, node: Callable[[], str]) -> None:
        self._place, self._node = place, node
        self.alone_at = -math.inf  # when it last looked for other nodes, if it found none
        self._met_at = self._renewed_at = -math.inf  # when it last found one, and said that there is none
        self._looking = threading.Lock()  # guards these, and the next one
        self._seen_waiting: float | None = None  # what `waited_at` returned when it last looked around
        self.held: set[str] = set()
        self.reads = Counter[str]()  # of this process that are under way, by lease
        self._waiting_at = 0.0  # what `waited_at` returned last

    def is_alone(self) -> bool:
        """Return whether no other node fetches small objects now. One that begins later lets this one know."""
        if not isinstance(self._place, SharedFolder):
            return False
        with self._looking:
            now, is_alone = time.monotonic(), False
            with contextlib.suppress(OSError):  # it can only be read, is full, or has no links
                is_alone = self._look_around(self._place, now)
            self.alone_at = now if is_alone else -math.inf
            return is_alone

    def _look_around(self, folder: SharedFolder, now: float) -> bool:
        """Find out whether this node is alone.

        Of nodes that begin together at most one is, and it learns of the others at its next look.
        """
        found, ours, waited_at = folder.node_alone(), self._node(), folder.waited_at()
        is_new, self._seen_waiting = self._seen_waiting not in (None, waited_at), waited_at
        if is_new:
            self._met_at = now
        if found is not None and found[0] == ours:
            if is_new:
                folder.remove(ALONE)
            elif now - self._renewed_at >= RENEW_ALONE_S:
                folder.renew(ALONE)
                self._renewed_at = now
            return not is_new
        if found is not None:
            now_there = self._seen_waiting = folder.wait_for_others()
            if now_there is not None and now_there - found[1] >= EXPIRES_S:
                folder.remove(ALONE)
            else:
                self._met_at = now
        if now - self._met_at < EXPIRES_S:
            return False
        self._renewed_at = now
        return folder.set_node_alone(ours)

    def take(self, names: Sequence[str]) -> set[str]:
        """Take leases; return those that this node may use. Nodes that hold the others are asked to hurry."""
        if self._place.times_itself and names:  # at a URL, each takes a request
            found: Iterable[bool] = each_in_threads(self._take, names, at_once=len(names))
        else:
            found = map(self._take, names)
        return {name for name, is_ours in zip(names, found, strict=True) if is_ours}

    def _take(self, name: str) -> bool:
        if name in self.held:  # of another read, which need not bring what this one wants
            return True
        try:
            if not self._place.make_empty(name):
                now = self._place.wait_for_others()
                modified_at = self._place.modified_at(name)
                if modified_at is not None and now is not None and now - modified_at < EXPIRES_S:
                    return False
                self._place.remove(name)  # another one may do this too: then both fetch it
                self._place.make_empty(name)
            self.held.add(name)
        except TimeoutError:
            self._place.did_not_answer()
        except OSError:  # it can only be read, or is full: fetch without a lease
            pass
        return True

    def release(self, name: str) -> None:
        if name in self.held:
            self.held.discard(name)
            with contextlib.suppress(OSError):
                self._place.remove(name)

    @property
    def are_held(self) -> bool:
        """True if the place has a lease of this process, or says that its node is alone."""
        return self.alone_at > -math.inf or bool(self.held)

    def release_all(self) -> None:
        if self.alone_at > -math.inf and isinstance(self._place, SharedFolder):
            with contextlib.suppress(OSError):
                if (found := self._place.node_alone()) is not None and found[0] == self._node():
                    self._place.remove(ALONE)
        for name in list(self.held):
            self.release(name)

    def renew(self, names: Iterable[str]) -> None:
        """Let leases of this process count from now."""
        for name in names:
            with contextlib.suppress(OSError):
                self._place.renew(name)

    def is_awaited(self) -> bool:
        """Return whether a node has begun to wait for another one since the last call, and perhaps for this one."""
        if not self.are_held:
            return False
        with contextlib.suppress(OSError):
            at = self._place.waited_at()
            is_new, self._waiting_at = at != self._waiting_at, at
            return is_new
        return False
