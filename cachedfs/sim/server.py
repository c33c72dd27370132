"""A simulated cloud that runs: in a thread or in a child process, with a handle for who tests against it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import http.client
import inspect
import json
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

from cachedfs.sim.faults import Door, Fault
from cachedfs.sim.messages import Request
from cachedfs.sim.network import Network, Profile
from cachedfs.sim.service import CONTROL, Service

__all__ = ["SimServer", "command", "new_loop", "serve"]


class _PreciseSelector(selectors.DefaultSelector):
    """Wakes within 0.1 ms of a deadline, where epoll rounds up to whole milliseconds."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        is_coarse = hasattr(select, "epoll")  # the other systems' selectors are precise by themselves
        if is_coarse and timeout is not None and timeout > 0 and (fd := self.fileno()) < 1024:
            select.select([fd], [], [], timeout)
            timeout = 0
        return super().select(timeout)


def new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop whose timers are precise."""
    return asyncio.SelectorEventLoop(_PreciseSelector())


async def serve(service: Service, sock: socket.socket, stop: asyncio.Event) -> None:
    """Return when stopped and all connections are closed."""
    # handler_cancellation: a client that goes away gives its share of the link to the others.
    # auto_decompress off: an object uploaded with Content-Encoding: gzip is stored as it came.
    server = web.Server(
        service.handle,
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
        read_bufsize=1 << 20,
        max_line_size=32 << 10,
        max_field_size=1 << 20,
    )
    service.door = door = Door(server, sock)
    door.unlock()
    try:
        await stop.wait()
    finally:
        door.close()
        await server.shutdown(0.05)


class _Thread:
    """A service in a daemon thread of this process."""

    def __init__(self, service: Service, port: int) -> None:
        self._service, self._loop, self._stop = service, new_loop(), asyncio.Event()
        sock = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, args=(sock,), name="sim", daemon=True)
        self._thread.start()

    def _run(self, sock: socket.socket) -> None:
        with sock:
            self._loop.run_until_complete(serve(self._service, sock, self._stop))

    def command(self, name: str, arguments: dict[str, Any]) -> Any:
        async def on_the_loop() -> Any:
            return self._service.command(name, arguments)

        return asyncio.run_coroutine_threadsafe(on_the_loop(), self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()


class _Child:
    """A service in a process of its own, which ends when our end of its stdin is closed."""

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

    def command(self, name: str, arguments: dict[str, Any]) -> Any:
        data = arguments.pop("data", None)
        head = json.dumps({"arguments": arguments, "has_data": data is not None}).encode()
        with self._lock:
            self._connection.request("POST", CONTROL + name, head + b"\n" + (data or b""))
            reply = self._connection.getresponse()
            text = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"simulated server: {name} failed: {text.decode()}")
        return json.loads(text) if reply.headers["Content-Type"].startswith("application/json") else text

    def close(self) -> None:
        if hasattr(self, "_connection"):
            self._connection.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.terminate()  # forked children of ours may hold the other end of the pipe
        self._process.wait()


P = ParamSpec("P")
R = TypeVar("R")


def command(do: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return the method of a handle that has its service do this, wherever it runs; `do_` comes before its name."""
    signature = inspect.signature(do)
    more = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]

    @functools.wraps(do)
    def ask(handle: SimServer, /, *args: P.args, **kwargs: P.kwargs) -> R:
        given = dict(signature.bind(handle, *args, **kwargs).arguments)
        del given["self"]
        for name in more:
            given |= given.pop(name, {})
        answer: R = handle._do(do.__name__.removeprefix("do_"), **given)
        return answer

    return ask


class SimServer:
    """A simulated cloud on a loopback port, from `start` (or `with`) until `close`."""

    room: ClassVar[str]
    service: ClassVar[type[Any]]  # made of a network, and a folder or None

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
        """Return this server, listening."""
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
        """Stop serving; harmless when stopped."""
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

    def _do(self, name: str, /, **arguments: Any) -> Any:
        return self._running.command(name, arguments)

    @property
    def _running(self) -> _Thread | _Child:
        if self._runner is None:
            raise RuntimeError("the simulated server is not running")
        return self._runner

    @property
    def endpoint_url(self) -> str:
        """`http://127.0.0.1:PORT`, without a slash at the end."""
        return self._running.url

    @property
    def requests(self) -> list[Request]:
        """Copies of all requests since the last reset, in order of arrival."""
        return [Request(**row) for row in self._do("log")]

    @property
    def peak_concurrency(self) -> int:
        """The largest number of requests that were being served at one moment."""
        return int(self._do("peak"))

    def fail(self, fault: Fault) -> None:
        """Let requests go wrong from now on as the fault says."""
        self._do("fail", fault={**dataclasses.asdict(fault), "headers": dict(fault.headers)})

    def refuse(self, refused: bool = True) -> None:
        """Drop all connections and refuse new ones, or no longer; for a server in this process."""
        if not self._in_process:
            raise RuntimeError("a server that refuses connections could not be told to stop it")
        self._do("refuse", refused=refused)

    def require_token(self, *tokens: str) -> None:
        """Answer 401 to everything that does not carry one of these; without any, to all."""
        self._do("tokens", tokens=tokens)

    def require_no_token(self) -> None:
        """Serve everybody again."""
        self._do("tokens", tokens=None)

    count = command(Service.do_count)
    bytes_sent = command(Service.do_bytes_sent)
    reset = command(Service.do_reset)
    heal = command(Service.do_heal)
    forbid = command(Service.do_forbid)
