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

from cachedfs.sim.stored_objects import Body

DROP = 4 << 10  # bytes between the pauses of a trickling body


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


def spoilt(body: Body, fault: Fault) -> bytes:
    """Return a body as it is after it was corrupted in transit."""
    data = bytearray(body[:]) + b"?" * fault.long_by
    if fault.flip is not None and fault.flip < len(data):
        data[fault.flip] ^= 0x20
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
