"""What goes wrong at a simulated cloud, as values, and what that takes at the level of connections."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web

from cachedfs.sim.objects import Body

__all__ = ["DROP", "Door", "Fault", "SpoiltBody", "hang_up"]

DROP = 4 << 10  # bytes that a body trickles in
_SEND_BUFFER = 64 << 10
_BACKLOG = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong, and with which requests: from the nth that matches, this many times."""

    kind: str | None = None
    """Requests of this kind, as `Request.kind` has it; None: of all."""
    key: str | None = None
    """Requests about the object of this exact name; None: about all."""
    nth: int = 1
    """The first of those that match that goes wrong."""
    times: int | None = 1
    """How many go wrong; None: all from there on."""
    status: int | None = None
    """Answer with this error instead of doing what was asked."""
    body: str | None = None
    """The body of that error; None: Google's JSON."""
    reason: str | None = None
    """The reason in Google's JSON; None: the usual one for the status."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers in place of those that the answer has."""
    html: bool = False
    """Answer with a load balancer's page."""
    redirect: str | None = None
    """Answer with a 302, or `status`, to this path; "" is the one asked for."""
    close_before: bool = False
    """Drop the connection instead of doing what was asked."""
    lose: bool = False
    """Do it, but drop the connection instead of answering."""
    close_after: int | None = None
    """Do it, but drop the connection after n bytes of the body."""
    reset: bool = False
    """A connection that is dropped ends in RST and not in FIN."""
    short_by: int = 0
    """A complete reply whose body lacks its last n bytes."""
    long_by: int = 0
    """A complete reply whose body has n bytes more."""
    spill: int = 0
    """A reply that is followed by n bytes that nobody announced."""
    flip: int | None = None
    """The byte at this offset comes changed; the headers stay those of what was stored."""
    total: int | None = None
    """A partial answer tells this size of the object."""
    ignores_range: bool = False
    """Answer with all bytes where a range was asked for."""
    stall_s: float = 0.0
    """Hang for so many simulated seconds, before the first byte."""
    stall_after: int | None = None
    """Hang after n bytes of the body, and not before the first."""
    trickle_s: float = 0.0
    """Hang for so many simulated seconds after every 4 KiB of the body."""


class SpoiltBody:
    """A body that something on the way changed."""

    def __init__(self, body: Body, fault: Fault) -> None:
        self._body, self._flip = body, fault.flip
        self.size = body.size + fault.long_by

    def read(self, start: int, stop: int) -> bytes:
        true = self._body.read(min(start, self._body.size), min(stop, self._body.size))
        data = bytearray(true) + b"?" * (stop - start - len(true))
        if self._flip is not None and start <= self._flip < stop:
            data[self._flip - start] ^= 0x20
        return bytes(data)

    def close(self) -> None:
        self._body.close()


async def hang_up(transport: asyncio.Transport, fault: Fault) -> None:
    """Drop a connection, after what was written to it has arrived."""
    if not fault.reset:
        transport.close()  # what is buffered still goes out
        return
    sock = transport.get_extra_info("socket")
    # A reset takes what is not through with it.
    while not transport.is_closing() and (transport.get_write_buffer_size() or _n_unsent(sock)):  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.001)
    if not transport.is_closing():  # the client may have gone meanwhile
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


def _n_unsent(sock: socket.socket) -> int:
    with contextlib.suppress(OSError):  # gone, or a system that does not tell
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0])
    return 0


class Door:
    """The listening socket of a server; locked, it keeps its port and refuses connections."""

    def __init__(self, server: web.Server, sock: socket.socket) -> None:
        self._server, self._sock = server, sock
        self._opening: asyncio.Task[None] | None = None  # Invariant: None while it is locked
        self._listener: asyncio.Server | None = None

    def unlock(self) -> None:
        """Accept connections, from now on; harmless when it does."""
        if self._opening is None:
            # For every connection: what was sent has nearly left. Else megabytes of a body that nobody reads count as sent.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            self._sock.listen(_BACKLOG)  # who comes before the loop does waits
            self._opening = asyncio.ensure_future(self._open())

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._server, sock=self._sock, backlog=_BACKLOG)

    def lock(self) -> None:
        """Refuse connections; harmless when it does."""
        if self._opening is not None:
            address = self._sock.getsockname()
            self.close()
            self._sock = socket.socket(self._sock.family, socket.SOCK_STREAM)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind(address)  # bound and not listening: refused

    def close(self) -> None:
        """Give the port back."""
        if self._opening is not None:
            self._opening.cancel()
        if self._listener is not None:
            self._listener.close()
        self._sock.close()
        self._opening = self._listener = None
