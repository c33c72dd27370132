"""One account's Drive: signed in at the first need."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from cachedfs.common.executor import Workers
from cachedfs.common.optional_imports import importing, preload
from cachedfs.origins.drive.connection import Connection, judge
from cachedfs.origins.drive.creates import Creates
from cachedfs.origins.drive.options import DriveOptions
from cachedfs.origins.hedge import Hedge
from cachedfs.origins.inner import Once
from cachedfs.origins.pacing import Pacer
from cachedfs.origins.retry import Policy, Tries
from cachedfs.origins.slots import Slots

if TYPE_CHECKING:
    from ssl import SSLContext

    from cachedfs.origins.drive.auth import DriveAuth

__all__ = ["Account"]

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
