"""New items on their way to Drive: so many at once, counted, and told of while many wait. How fast, `Pacer` says."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from cachedfs.common.executor import Workers
from cachedfs.common.optional_imports import importing, preload
from cachedfs.origins.drive.connection import Connection, judge
from cachedfs.origins.drive.options import DriveOptions
from cachedfs.origins.hedging import Hedge
from cachedfs.origins.inner_filesystem import Once
from cachedfs.origins.rate_limit import Pacer
from cachedfs.origins.request_slots import Slots
from cachedfs.origins.retry import Policy, Tries

if TYPE_CHECKING:
    from ssl import SSLContext

    from cachedfs.origins.drive.auth import DriveAuth

__all__ = ["Account", "Creates"]


logger = logging.getLogger("cachedfs.origins")

_AT_ONCE = 8  # sent, or waiting for their pace, and not answered: at a third of a second each 24 a second
_MANY = 16  # wait: a minute's quarter at the pace that Drive has
_SAY_EVERY_S = 10.0


class Creates:
    """The turns of what makes new items: files, folders, copies. On one loop."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self.n_made = 0
        self._clock = clock
        self._slots, self._n_waiting = asyncio.Semaphore(_AT_ONCE), 0
        self._said_at: float | None = None  # when it was last said how many wait,
        self._n_said = 0  # and how many had been made

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Enter when the next item may be sent, and leave when it was answered; first come, first served."""
        self._n_waiting += 1
        self._warn()
        try:
            await self._slots.acquire()
        finally:
            self._n_waiting -= 1
        try:
            yield
        finally:
            self._slots.release()

    def made(self) -> None:
        """Note that an item was made."""
        self.n_made += 1
        now = self._clock()
        if not self._n_waiting or self._said_at is None or now < self._said_at + _SAY_EVERY_S:
            return
        per_s = (self.n_made - self._n_said) / (now - self._said_at)
        self._said_at, self._n_said = now, self.n_made
        logger.info(
            "Google Drive: %d new items made, %d wait, %.1f a second", self.n_made, self._n_waiting, per_s
        )

    def _warn(self) -> None:
        if self._said_at is None and self._n_waiting >= _MANY:
            self._said_at, self._n_said = self._clock(), self.n_made
            logger.warning(
                "Google Drive makes some 2 to 3 new files a second for a user, and many wait for their turn. One large "
                "file is made as fast as a small one: pack (a sharded Zarr, a tar, parquet)"
            )


_MOST_THREADS = 16  # of metadata requests that are waited for: Drive gives one user some 50 listings a second


class Account:
    """Whose Drive it is, and how it is asked. Cheap to make; signs in at the first `connection`."""

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        loop: asyncio.AbstractEventLoop,
        on_request: Callable[[], None],
        concurrency: int = 16,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        """Send at the pace of `pacer`; without one, at a pace of its own."""
        self.options = DriveOptions.of(options)
        self.on_request = on_request
        self.loop = loop
        self.pacer = pacer or Pacer("")
        self.concurrency, self._policy = concurrency, policy or Policy()
        self._new_tries = partial(Tries, self._policy, clock=clock, rng=rng or random.Random())
        self.creates = Creates(clock=clock)
        self._slots = Slots(concurrency)  # of media
        self.turns = Slots(min(concurrency, _MOST_THREADS))  # of the rest
        self._connection = Once(self._connect)

    async def connection(self) -> Connection:
        """Return what sends requests; raises AccessDenied or ValueError where there is no way to sign in."""
        return await self._connection.get()

    async def _connect(self) -> Connection:
        with importing():
            import aiohttp

            from cachedfs.origins.http import Client, timeout_of

        policy = self._policy
        auth, proxy, tls = await asyncio.to_thread(_signed_in, self.options, policy)
        # Our slots are the limit.
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=tls), proxy=proxy)
        client_of = partial(
            Client,
            session,
            auth,
            judge,
            slots=self._slots,
            on_request=self.count,
            new_tries=self._new_tries,
            pacer=self.pacer,
        )
        client = client_of(timeout=timeout_of(policy), hedge=self.new_hedge())
        # A second request would be a second conversion, and its wait says nothing of the service.
        exports = client_of(timeout=timeout_of(dataclasses.replace(policy, stall_s=policy.export_s)))
        threads = Workers(self.turns.most, "cachedfs-drive")
        return Connection(self.options, auth, session, client, exports, threads, self)

    def new_hedge(self) -> Hedge:
        """Return what sends requests of one kind a second time when they are late."""
        return Hedge(self._policy)

    def count(self) -> None:
        """A request is being sent."""
        self.on_request()  # whoever it is by now

    async def aclose(self) -> None:
        """Close the connections; the next request would make new ones."""
        if (connection := self._connection.take()) is not None:
            await connection.aclose()

    def drop(self) -> None:
        """Close the connections when there is no loop to do it on any more."""
        if (connection := self._connection.take()) is not None:
            connection.drop()


def _signed_in(options: DriveOptions, policy: Policy) -> tuple[DriveAuth, str | None, SSLContext | bool]:
    """Return who asks, by which proxy, and who is trusted; blocks on files, on imports, and maybe on a metadata server."""
    try:
        with importing():
            from cachedfs.origins.drive.auth import DriveAuth, sign_in
            from cachedfs.origins.drive.transport import proxy_of, trusted
        preload(["encodings.idna"])  # which looking for a host needs
    except ImportError as error:
        raise ImportError(
            f'drive:// needs PyDrive2, which cannot be imported ({error}): pip install "cachedfs[drive]"'
        ) from error
    proxy = proxy_of(options.endpoint_url)
    auth = DriveAuth(sign_in(options.sign_in, connect_s=policy.connect_s, stall_s=policy.stall_s))
    return auth, proxy, trusted() if options.endpoint_url.startswith("https:") else True
