"""Run a simulated cloud in a thread or a child process, and control it from a test."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import http.client
import inspect
import os
import select
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar
from urllib.parse import urlsplit

from aiohttp import web

from cachedfs.sim.faults import Fault
from cachedfs.sim.messages import Request
from cachedfs.sim.network import Network, Profile
from cachedfs.sim.service import CONTROL, Service, pack, unpack

_SEND_BUFFER = 64 << 10
_BACKLOG = 1024


class _PreciseSelector(selectors.DefaultSelector):
    """Selector that wakes up within 0.1 ms of a deadline; epoll rounds up to whole milliseconds."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        is_coarse = hasattr(select, "epoll")  # the selectors of other systems are precise
        if is_coarse and timeout is not None and timeout > 0 and (fd := self.fileno()) < 1024:
            select.select([fd], [], [], timeout)
            timeout = 0
        return super().select(timeout)


def new_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(_PreciseSelector())


def bound(host: str, port: int) -> socket.socket:
    """Return a socket at this port, which refuses connections until it listens. Raises OSError."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Inherited by every connection. A small send buffer keeps unread bytes of a body from counting as sent.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{error.strerror}: {host}:{port}") from None
    return sock


async def serve(service: Service, sock: socket.socket, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then close all connections and the socket."""
    # handler_cancellation: if a client disconnects, its share of the link goes to the others.
    # auto_decompress off: an object uploaded with Content-Encoding: gzip is stored as sent.
    server = web.Server(
        service.handle,
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
        read_bufsize=1 << 20,
        max_line_size=32 << 10,
        max_field_size=1 << 20,
    )
    listener = await asyncio.get_running_loop().create_server(server, sock=sock, backlog=_BACKLOG)
    try:
        await stop.wait()
    finally:
        listener.close()
        service.drop_connections()
        await server.shutdown(0.05)


class _Thread:
    """A service running in a daemon thread of this process."""

    def __init__(self, service: Service, port: int) -> None:
        self._service, self._sock = service, bound("127.0.0.1", port)
        self._lock = threading.RLock()  # held by each call: the loop of one must not end meanwhile
        self._port = self._sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._start()

    def _start(self) -> None:
        self._sock.listen(_BACKLOG)  # connections made before the loop accepts wait in the backlog
        self._loop, self._stop = new_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="sim", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_until_complete(serve(self._service, self._sock, self._stop))

    def refuse(self, refused: bool) -> None:
        """Drop all connections and refuse new ones, or serve again."""
        with self._lock:
            if not refused and not self._thread.is_alive():
                self._start()
            elif refused and self._thread.is_alive():
                self.close()
                self._sock = bound("127.0.0.1", self._port)

    def command(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        async def on_the_loop() -> Any:
            return self._service.command(name, *args, **kwargs)

        with self._lock:
            if not self._thread.is_alive():
                return self._service.command(name, *args, **kwargs)
            return asyncio.run_coroutine_threadsafe(on_the_loop(), self._loop).result()

    def close(self) -> None:
        with self._lock:
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._stop.set)
                self._thread.join()
                self._loop.close()
            self._sock.close()


class _Child:
    """A service running in a child process, which ends when this process closes the child's stdin."""

    def __init__(self, room: str, options: list[str]) -> None:
        root = str(Path(__file__).parents[2])
        paths = [root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cachedfs.sim", room, "--watch-stdin", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        if not self.url:
            self.close()
            raise RuntimeError(f"the simulated server ended with {self._process.returncode}")
        self._lock = threading.Lock()
        self._connection = http.client.HTTPConnection(urlsplit(self.url).netloc)

    def command(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self._connection.request("POST", CONTROL + name, pack([args, kwargs]))
            reply = self._connection.getresponse()
            text = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"simulated server: {name} failed: {text.decode()}")
        return unpack(text)

    def close(self) -> None:
        if hasattr(self, "_connection"):
            self._connection.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.terminate()  # needed because forked children of this process may keep the pipe open
        self._process.wait()


P = ParamSpec("P")
R = TypeVar("R")


def command(do: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a SimServer method that runs the service method `do_<name>`, wherever the service runs."""
    signature = inspect.signature(do)

    @functools.wraps(do)
    def ask(handle: SimServer, /, *args: P.args, **kwargs: P.kwargs) -> R:
        signature.bind(handle, *args, **kwargs)  # raises TypeError here, and not in the child process
        answer: R = handle._do(do.__name__.removeprefix("do_"), *args, **kwargs)
        return answer

    return ask


class SimServer:
    """A simulated cloud on a port of 127.0.0.1, running from `start` (or `with`) until `close`.

    Use GCSServer or DriveServer:

        with GCSServer("table") as server:
            server.put("bucket", "key", b"data")
            fs = fsspec.filesystem("gs", token="anon", endpoint_url=server.endpoint_url)

    `profile` is a Profile or a name in `PROFILES`. `seed` makes delays and errors repeatable. `time_scale`
    divides all waits. `folder` serves the files of a local folder instead of memory. `process` runs the
    server in a child process instead of a thread, and `port` 0 takes a free port.
    """

    room: ClassVar[str]
    service: ClassVar[type[Any]]  # called with a Network, and a folder or None

    def __init__(
        self,
        profile: Profile | str = "off",
        *,
        seed: int = 0,
        time_scale: float = 1.0,
        folder: str | os.PathLike[str] | None = None,
        process: bool = False,
        port: int = 0,
    ) -> None:
        self.profile, self.seed, self.time_scale = Profile.resolve(profile), seed, time_scale
        self._folder = None if folder is None else Path(folder)
        self._in_process, self._port = not process, port
        self._runner: _Thread | _Child | None = None

    def start(self) -> Self:
        """Start listening; return this server."""
        if self._in_process:
            network = Network(self.profile, self.seed, self.time_scale)
            self._runner = _Thread(type(self).service(network, self._folder), self._port)
        else:
            options = [f"--profile={self.profile.to_json()}", f"--seed={self.seed}"]
            options += [f"--time-scale={self.time_scale}", f"--port={self._port}"]
            options += [f"--folder={self._folder}"] if self._folder else []
            self._runner = _Child(self.room, options)
        return self

    def close(self) -> None:
        """Stop the server. Has no effect if it is stopped."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        url = self._runner.url if self._runner else "stopped"
        name = f"profile={self.profile.name!r}, seed={self.seed}, time_scale={self.time_scale}"
        return f"<{type(self).__name__} {url} {name}>"

    def _do(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        return self._running.command(name, *args, **kwargs)

    @property
    def _running(self) -> _Thread | _Child:
        if self._runner is None:
            raise RuntimeError("the simulated server is not running")
        return self._runner

    @property
    def endpoint_url(self) -> str:
        """URL of the server, `http://127.0.0.1:PORT` without a trailing slash."""
        return self._running.url

    @property
    def requests(self) -> list[Request]:
        """Copies of all requests since the last `reset`, in order of arrival."""
        return [Request(**row) for row in self._do("log")]

    @property
    def peak_concurrency(self) -> int:
        """Largest number of requests that were in progress at the same time since the last `reset`."""
        return int(self._do("peak"))

    def fail(self, fault: Fault) -> None:
        """Make matching requests fail from now on, as described by the fault. Undo it with `heal`."""
        self._do("fail", {**dataclasses.asdict(fault), "headers": dict(fault.headers)})

    def refuse(self, refused: bool = True) -> None:
        """Drop all connections and refuse new ones, or accept them again with `refused=False`.

        Raises RuntimeError with `process=True`: a child process that refuses connections could not be
        controlled.
        """
        if isinstance(self._running, _Child):
            raise RuntimeError("a server that refuses connections could not be told to stop it")
        self._running.refuse(refused)

    def heal(self) -> None:
        """Remove all faults and accept connections again."""
        self._do("heal")
        if self._in_process:
            self.refuse(False)

    def require_token(self, *tokens: str) -> None:
        """Answer 401 to every request without one of these bearer tokens; to all requests if none is given."""
        self._do("tokens", tokens)

    def require_no_token(self) -> None:
        """Accept requests without a token again."""
        self._do("tokens", None)

    count = command(Service.do_count)
    bytes_sent = command(Service.do_bytes_sent)
    reset = command(Service.do_reset)
    forbid = command(Service.do_forbid)
