"""A shared cache at a URL, behind a local cache: in a bucket, or on another fsspec filesystem."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from cachedfs.common.event_loop import EventLoopThread
from cachedfs.common.types import ObjectInfo
from cachedfs.origins.base import Origin
from cachedfs.origins.registry import open_origin, strip
from cachedfs.shared.origin_store import OriginStore, time_of
from cachedfs.shared.piece import LARGE
from cachedfs.shared.shared_store import KeptFile, SharedPlace

CLOSES_S = 0.5  # longest wait for connections to end
OPENS_S = 20.0  # longest time until the origin can be used
THREADS = 8  # for checksums, and for filesystems without async methods
CLOCK_S = 600.0  # between two times that the store is asked for its time


class SharedBucket(OriginStore, SharedPlace):
    """The shared cache at a URL. The options of its filesystem are those in fsspec's configuration.

    It has an event loop of its own, since it is still used while that of the engine ends.
    """

    times_itself = lists_all = True
    chunk = 8 << 20
    pauses_s = (0.5, 1.0)
    options: Mapping[str, Any] = {}

    def __init__(self, url: str, *, is_read_only: bool) -> None:
        self._protocol = url.partition("://")[0]
        SharedPlace.__init__(self, url, is_read_only=is_read_only)
        root = strip("cachedfs", self._protocol, url)
        self._io = EventLoopThread("cachedfs-share", n_workers=THREADS)
        OriginStore.__init__(self, self._opened, root, run=self._io.run, answers_s=self.answers_s)
        self._opening = threading.Lock()
        self._opened_origin: Origin | None = None
        self._clock = (0.0, 0.0)  # a time of the store, and when it was that at the earliest (monotonic)
        self.is_ready = False
        self._id = os.urandom(8).hex()

    def _opened(self) -> Origin:
        with self._opening:
            if self._opened_origin is None:
                self._opened_origin = open_origin(
                    self._protocol, self.options, loop=self._io.loop, on_request=lambda: None
                )
            return self._opened_origin

    def close(self) -> None:
        """End the event loop."""

        async def close() -> None:
            if self._opened_origin is not None:
                await self._opened_origin.aclose()

        self._io.end_loop(close, within_s=CLOSES_S)

    def check(self) -> None:
        """Import what the origin needs, and sign in: that may take longer than an answer."""
        if not self.is_ready:
            self._io.run(asyncio.wait_for(self._opened().filesystem(), OPENS_S))
            self.is_ready = True

    def leftovers(self) -> Iterator[KeptFile]:
        """Yield leases, and what tells the time."""
        self.listed("")
        for name, info in self._infos.items():
            if name.startswith(("leases/", "tmp/")):
                yield KeptFile(name, info.size or 0, time_of(info), time_of(info))

    # Time, by the clock of the store.

    def now(self) -> float | None:
        """Return the time of the store, not too early; None if it is unknown.

        It is in the answers of some origins. At others, it is that of a file that is written now.
        """
        if (stated := self._opened().server_time()) is not None:
            return stated
        at, asked_at = self._clock
        if not at or time.monotonic() - asked_at > CLOCK_S:
            asked_at = time.monotonic()
            try:
                name = f"tmp/{self._id}"
                at = time_of(self._touched(name)) or self.modified_at(name) or 0.0
            except OSError:
                return None
            self._clock = at, asked_at
        return at + time.monotonic() - asked_at if at else None

    def _touched(self, name: str) -> ObjectInfo:
        return self._io.run(self._timely(self._write(self.path_of(name), b"")))

    def modified_at(self, name: str) -> float | None:
        """Return the time of a file, as the store has it now; None without one."""
        info = self._lookup(name)
        return None if info is None else time_of(info)

    # Leases.

    def has_leases(self, size: int) -> bool:
        """Return whether nodes wait for each other: for a small object, a lease costs more than what it may save."""
        return size >= LARGE

    def make_empty(self, name: str) -> bool:
        """Create an empty file; return False if it exists."""
        with contextlib.suppress(FileExistsError):
            self._io.run(self._timely(self._write(self.path_of(name), b"", exclusive=True)))
            return True
        return False

    def renew(self, name: str) -> None:
        """Give a file the time of now."""
        self._touched(name)

    def wait_for_others(self) -> float | None:
        """Return the time of the store. Large parts have leases, and are put there at once: nobody needs to know."""
        return self.now()

    def waited_at(self) -> float:
        return 0.0
