"""Faults of a simulated cloud, and their effect on connections."""

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

from cachedfs.sim.stored_objects import Body

DROP = 4 << 10  # bytes between the pauses of a trickling body
_SEND_BUFFER = 64 << 10
_BACKLOG = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault, and the requests it affects: `times` matching requests, starting with the `nth`.

    For example, `Fault(kind="media", status=503, times=2)` fails the next two reads.
    """

    kind: str | None = None
    """Affect only requests of this kind (see `Request.kind`); None: of all kinds."""
    key: str | None = None
    """Affect only requests about the object of this exact name; None: about all objects."""
    nth: int = 1
    """Number of the first matching request to fail, from 1."""
    times: int | None = 1
    """Number of requests that fail; None: all from the first on."""
    status: int | None = None
    """Answer with this error status instead of executing the request."""
    body: str | None = None
    """Body of that error; None: Google's JSON."""
    reason: str | None = None
    """Reason in Google's JSON; None: the usual one for the status."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers to add to the reply, overriding its own."""
    html: bool = False
    """Answer with the HTML page of a load balancer."""
    redirect: str | None = None
    """Answer with a redirect to this path; "" is the requested one. The status is `status`, by default 302."""
    close_before: bool = False
    """Drop the connection instead of executing the request."""
    lose: bool = False
    """Execute the request, but drop the connection instead of answering."""
    close_after: int | None = None
    """Execute the request, but drop the connection after this many bytes of the body."""
    reset: bool = False
    """Drop the connection with RST instead of FIN."""
    short_by: int = 0
    """Send a consistent reply whose body lacks the last n bytes."""
    long_by: int = 0
    """Send a consistent reply whose body has n extra bytes."""
    spill: int = 0
    """Send n unannounced bytes after the reply."""
    flip: int | None = None
    """Corrupt the byte at this offset of the body; headers and checksums stay those of the stored object."""
    total: int | None = None
    """Report this size of the object in the Content-Range header."""
    ignores_range: bool = False
    """Answer a range request with the whole object."""
    stall_s: float = 0.0
    """Pause for this many simulated seconds before the first byte."""
    stall_after: int | None = None
    """Pause after n bytes of the body instead of before the first byte."""
    trickle_s: float = 0.0
    """Pause for this many simulated seconds after every 4 KiB of the body."""


class SpoiltBody:
    """A body corrupted in transit."""

    def __init__(self, body: Body, fault: Fault) -> None:
        self._body, self._flip = body, fault.flip
        self.size = body.size + fault.long_by

    def read(self, start: int, stop: int) -> bytes:
        true = self._body.read(min(start, self._body.size), min(stop, self._body.size))
        data = bytearray(true) + b"?" * (stop - start - len(true))
        if self._flip is not None and start <= self._flip < stop:
            data[self._flip - start] ^= 0x20
        return bytes(data)


async def hang_up(transport: asyncio.Transport, fault: Fault) -> None:
    """Drop a connection once the bytes already written have left."""
    if not fault.reset:
        transport.close()  # buffered bytes are still sent
        return
    sock = transport.get_extra_info("socket")
    # A reset discards unsent bytes, so wait until all are sent.
    while not transport.is_closing() and (transport.get_write_buffer_size() or _n_unsent(sock)):  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.001)
    if not transport.is_closing():  # the client may have disconnected meanwhile
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


def _n_unsent(sock: socket.socket) -> int:
    with contextlib.suppress(OSError):  # closed, or not supported by the system
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0])
    return 0


class Door:
    """The listening socket of a server. While locked, it keeps its port and refuses connections."""

    def __init__(self, server: web.Server, sock: socket.socket) -> None:
        self._server, self._sock = server, sock
        self._opening: asyncio.Task[None] | None = None  # Invariant: None while locked
        self._listener: asyncio.Server | None = None

    def unlock(self) -> None:
        if self._opening is None:
            # Inherited by every connection. A small send buffer keeps unread bytes of a body from counting as sent.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            self._sock.listen(_BACKLOG)  # connections made before the loop accepts wait in the backlog
            self._opening = asyncio.ensure_future(self._open())

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._server, sock=self._sock, backlog=_BACKLOG)

    def lock(self) -> None:
        if self._opening is not None:
            address = self._sock.getsockname()
            self.close()
            self._sock = socket.socket(self._sock.family, socket.SOCK_STREAM)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind(address)  # bound but not listening: connections are refused

    def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        if self._listener is not None:
            self._listener.close()
        self._sock.close()
        self._opening = self._listener = None
