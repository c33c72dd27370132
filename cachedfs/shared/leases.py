"""Leases: while a node fetches something, a file makes other nodes wait for it.

A lease is a file that only one node can create. It is removed once what was fetched is in the shared cache, and ignored
when it is EXPIRES_S old by the clock of the store: its node may be gone. At worst something is fetched twice.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence

from cachedfs.common.executor import each_in_threads
from cachedfs.shared.gatherer import FILE
from cachedfs.shared.shared_bucket import SharedBucket
from cachedfs.shared.shared_folder import SharedFolder

EXPIRES_S = 30.0


def lease_of(key: str, position: int) -> str:
    """Return the lease on the part of an object version that has the byte at `position`."""
    return f"leases/{key}-{position // FILE:x}"


class Leases:
    """The leases of one process in a folder; `held` are its own.

    All methods block. Errors of the folder are not raised.
    """

    def __init__(self, folder: SharedFolder | SharedBucket) -> None:
        self._folder = folder
        self.held: set[str] = set()
        self.reads = Counter[str]()  # of this process that are under way, by lease
        self._waiting_at = 0.0  # what `waited_at` returned last

    def take(self, names: Sequence[str]) -> set[str]:
        """Take leases; return those that this node may use. Nodes that hold the others are asked to hurry."""
        if self._folder.times_itself and names:  # at a URL, each takes a request
            found: Iterable[bool] = each_in_threads(self._take, names, at_once=len(names))
        else:
            found = map(self._take, names)
        return {name for name, is_ours in zip(names, found, strict=True) if is_ours}

    def _take(self, name: str) -> bool:
        if name in self.held:  # of another read, which need not bring what this one wants
            return True
        try:
            if not self._folder.make_empty(name):
                now = self._folder.wait_for_others()
                modified_at = self._folder.modified_at(name)
                if modified_at is not None and now is not None and now - modified_at < EXPIRES_S:
                    return False
                self._folder.remove(name)  # another one may do this too: then both fetch it
                self._folder.make_empty(name)
            self.held.add(name)
        except TimeoutError:
            self._folder.did_not_answer()
        except OSError:  # it can only be read, or is full: fetch without a lease
            pass
        return True

    def release(self, name: str) -> None:
        if name in self.held:
            self.held.discard(name)
            with contextlib.suppress(OSError):
                self._folder.remove(name)

    def release_all(self) -> None:
        for name in list(self.held):
            self.release(name)

    def renew(self, names: Iterable[str]) -> None:
        """Let leases of this process count from now."""
        for name in names:
            with contextlib.suppress(OSError):
                self._folder.renew(name)

    def is_awaited(self) -> bool:
        """Return whether a node has begun to wait for another one since the last call, and perhaps for this one."""
        if not self.held:
            return False
        with contextlib.suppress(OSError):
            at = self._folder.waited_at()
            is_new, self._waiting_at = at != self._waiting_at, at
            return is_new
        return False
