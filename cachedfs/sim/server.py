"""What every simulated cloud shares: the request log, faults, pacing, threads and processes.

A `Service` answers requests inside one event loop; a cloud is a subclass that routes and answers.
A `SimServer` runs a service in a thread or in a child process, and gives tests a handle on it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import os
import select
import selectors
import socket
import subprocess
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import parse_qsl, urlsplit

from aiohttp import web

from cachedfs.sim.faults import DROP, Door, Fault, SpoiltBody, hang_up
from cachedfs.sim.network import Network, Profile
from cachedfs.sim.objects import NO_BODY, Body, DataBody

__all__ = ["Answer", "Call", "Fault", "Refusal", "Request", "Route", "Service", "SimServer"]
__all__ += ["new_loop", "serve"]

_CONTROL = "/_sim/"  # requests below it are ours: neither logged nor delayed
_REASONS = {400: "invalid", 401: "authError", 403: "forbidden", 404: "notFound", 409: "conflict"}
_REASONS |= {410: "gone", 412: "conditionNotMet", 416: "requestedRangeNotSatisfiable"}
_REASONS |= {429: "rateLimitExceeded", 501: "notImplemented"}
_OF_USAGE = {"userRateLimitExceeded", "rateLimitExceeded", "dailyLimitExceeded"}


@dataclass(slots=True)
class Request:
    """One request as the server saw it; header names in lower case, times in simulated seconds."""

    method: str
    path: str  # as sent, percent-encoded, without the query
    query: dict[str, str]
    headers: dict[str, str]
    status: int = 0  # 0: no reply was begun
    bytes_sent: int = 0
    bytes_received: int = 0
    kind: str = "other"
    key: str = ""
    bucket: str = ""
    units: int = 0  # of Drive's quota
    started_s: float = 0.0
    ended_s: float | None = None  # None: still running


class Refusal(Exception):
    """An error that the service answers with."""

    def __init__(
        self,
        status: int,
        message: str,
        reason: str = "",
        *,
        headers: Mapping[str, str] = {},
        location: str = "",  # the parameter that is to blame
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers)
        self.location = location
        self.reason = reason or _REASONS.get(status, "backendError")

    def to_json(self, **more: str) -> str:
        """Return Google's JSON for this error."""
        at = {"locationType": "parameter", "location": self.location} if self.location else {}
        domain = "usageLimits" if self.reason in _OF_USAGE else "global"
        item = {"message": self.message, "domain": domain, "reason": self.reason, **at, **more}
        error = {"code": self.status, "message": self.message, "errors": [item]}
        return json.dumps({"error": error}, indent=1)


@dataclass(slots=True)
class Call:
    """A request as a cloud's own code sees it; header names in lower case."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes = b""
    units: int = 0  # of a quota, that it has cost

    @property
    def host(self) -> str:
        return self.headers.get("host", "127.0.0.1")


@dataclass(slots=True)
class Answer:
    """A reply before it meets the network."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: Body = NO_BODY
    n_items: int = 0  # of a listing, for its latency
    is_chunked: bool = False  # no Content-Length


@dataclass(frozen=True, slots=True)
class Route:
    """What a request is about, and how to do it once its body is here."""

    kind: str
    act: Callable[[Call], Answer]
    bucket: str = ""
    key: str = ""
    style: str = "json"  # how errors are worded: json, text or xml
    units: int | None = None  # of a quota; None: what its kind costs


@dataclass(slots=True)
class _Rule:
    fault: Fault
    seen: int = 0

    def hits(self, entry: Request) -> bool:
        """Return whether the fault strikes this request; counts it when it matches."""
        fault = self.fault
        if fault.kind not in (None, entry.kind) or fault.key not in (None, entry.key):
            return False
        self.seen += 1
        end = None if fault.times is None else fault.nth + fault.times
        return self.seen >= fault.nth and (end is None or self.seen < end)


class Service(ABC):
    """Answers requests over a simulated network, inside one event loop and touched only there."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.log: list[Request] = []
        self._rules: list[_Rule] = []
        self._tokens: set[str] | None = None
        self._forbidden: set[str] = set()
        self._known: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()
        self.door: Door | None = None  # while it is served
        self._n_active = self._peak = 0

    @abstractmethod
    def route(self, call: Call) -> Route:
        """Return what the request is about; raises Refusal for an unknown address."""

    @abstractmethod
    def render(self, style: str, refusal: Refusal) -> Answer:
        """Return an error in the words of this cloud."""

    def failure(self) -> tuple[int, str]:
        """Return status and reason of the error that a profile's error rate strikes with."""
        return 503, "backendError"

    # Commands: what a test does behind the API's back. JSON in, JSON out; data is a raw body.
    def command(self, name: str, arguments: dict[str, Any], data: bytes) -> Any:
        """Return the result of the command `do_<name>`."""
        if data or name == "put":
            arguments["data"] = data
        return getattr(self, f"do_{name}")(**arguments)

    def do_log(self) -> list[dict[str, Any]]:
        names = [f.name for f in dataclasses.fields(Request)]
        return [{name: getattr(entry, name) for name in names} for entry in self.log]

    def do_count(self, kind: str | None, key: str | None) -> int:
        return sum(kind in (None, e.kind) and key in (None, e.key) for e in self.log)

    def do_bytes_sent(self) -> int:
        return sum(entry.bytes_sent for entry in self.log if entry.kind == "media")

    def do_peak(self) -> int:
        return self._peak

    def do_reset(self) -> None:
        self.log, self._peak = [], self._n_active

    def do_fail(self, fault: dict[str, Any]) -> None:
        self._rules.append(_Rule(Fault(**fault)))

    def do_heal(self) -> None:
        self._rules.clear()
        self.do_refuse(False)

    def do_refuse(self, refused: bool) -> None:
        if self.door is not None:
            self.door.lock() if refused else self.door.unlock()
        for transport in list(self._known) if refused else ():
            if not transport.is_closing():
                transport.abort()

    def do_tokens(self, tokens: list[str] | None) -> None:
        self._tokens = None if tokens is None else set(tokens)

    def do_forbid(self, bucket: str, forbidden: bool) -> None:
        (self._forbidden.add if forbidden else self._forbidden.discard)(bucket)

    # Serving
    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Return the reply; the request is in the log from its first byte, finished or not."""
        if request.raw_path.startswith(_CONTROL):
            name, arguments = request.raw_path.removeprefix(_CONTROL), json.loads(request.headers["x-sim"])
            return web.json_response(self.command(name, arguments, await request.content.read()))
        path, _, query = request.raw_path.partition("?")
        headers = {k.lower(): v for k, v in request.headers.items()}
        call = Call(request.method, path, dict(parse_qsl(query, True)), headers)
        entry = Request(call.method, path, dict(call.query), dict(headers), started_s=self.network.now())
        self.log.append(entry)
        self._n_active += 1
        self._peak = max(self._peak, self._n_active)
        try:
            return await self._serve(request, call, entry)
        except ConnectionError:
            return web.Response()  # the client is gone: nothing of it will be sent
        finally:
            self._finish(entry)

    def _finish(self, entry: Request) -> None:
        if entry.ended_s is None:
            entry.ended_s = self.network.now()
            self._n_active -= 1

    async def _serve(self, request: web.BaseRequest, call: Call, entry: Request) -> web.StreamResponse:
        assert request.transport is not None
        is_new = request.transport not in self._known
        self._known.add(request.transport)
        if "100-continue" in call.headers.get("expect", "").lower():
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        call.body = await self._receive(request, entry)
        arrived_s = self.network.now()
        route = self._route(call)
        entry.kind, entry.key, entry.bucket = route.kind, route.key, route.bucket
        struck = [rule.fault for rule in self._rules if rule.hits(entry)]
        fault = struck[0] if struck else Fault()
        network, profile = self.network, self.network.profile
        verdict = profile.first_byte(route.kind, new_connection=is_new, rng=network.rng)
        if verdict.failed and fault.status is None:
            status, reason = self.failure()
            fault = dataclasses.replace(fault, status=status, reason=reason)
        if fault.redirect is not None:
            headers = {**fault.headers, "Location": fault.redirect or request.raw_path}
            fault = dataclasses.replace(fault, status=fault.status or 302, headers=headers)
        if fault.ignores_range:
            call.headers.pop("range", None)
        answer = self._answer(call, route, fault)
        entry.units = call.units
        wait_s = verdict.wait_s + profile.list_item_s * answer.n_items
        stall_s = fault.stall_s if fault.stall_after is None else 0.0
        await network.sleep_until(arrived_s + wait_s + stall_s)
        if fault.close_before:
            await hang_up(request.transport, fault)
            return web.Response()
        return await self._send(request, entry, answer, fault)

    def _route(self, call: Call) -> Route:
        """Return the route of a call, or one that answers with the error in it."""
        try:
            return self.route(call)
        except Refusal as refusal:
            answer = self.render("json", refusal)
        except (ValueError, LookupError) as error:
            answer = self.render("json", Refusal(400, f"Invalid request: {error!r}"))
        return Route("other", lambda call: answer)

    def _answer(self, call: Call, route: Route, fault: Fault) -> Answer:
        """Return the reply to a call; nothing was done where it is a fault's."""
        if fault.close_before:
            return Answer()
        if fault.status is not None or fault.html:
            return _fault_answer(fault)
        answer = self.answer(call, route)
        answer.headers = {**answer.headers, **fault.headers}
        if fault.total is not None and (span := answer.headers.get("Content-Range")):
            answer.headers["Content-Range"] = f"{span.partition('/')[0]}/{fault.total}"
        return answer

    def answer(self, call: Call, route: Route) -> Answer:
        """Return what the cloud says to a call."""
        try:
            self._admit(call, route)
            return route.act(call)
        except Refusal as refusal:
            return self.render(route.style, refusal)
        except (ValueError, LookupError) as error:  # what a request's own text can break
            return self.render(route.style, Refusal(400, f"Invalid request: {error!r}"))

    def _admit(self, call: Call, route: Route) -> None:
        """Raise Refusal unless the caller may do this."""
        if self._tokens is not None:
            given = call.headers.get("authorization", "").removeprefix("Bearer ")
            if given not in self._tokens:
                text = "Invalid Credentials" if given else "Anonymous caller does not have access."
                realm = {"WWW-Authenticate": 'Bearer realm="https://accounts.google.com/"'}
                raise Refusal(401, text, "authError" if given else "required", headers=realm)
        if route.bucket in self._forbidden:
            raise Refusal(
                403,
                "The caller does not have storage.objects access to the Google Cloud Storage "
                "object. Permission denied on resource (or it may not exist).",
            )

    async def _receive(self, request: web.BaseRequest, entry: Request) -> bytes:
        """Return the body of the request, taken in no faster than the link."""
        if not request.body_exists:
            return b""
        entry.kind = "upload"  # until the route is known, which may take the body
        link, received = self.network.link, bytearray()
        size = float("inf") if request.content_length is None else request.content_length
        stream = link.open(size, self.network.now()) if self.network.profile.is_paced else None
        try:
            async for data in request.content.iter_any():
                received += data
                entry.bytes_received = len(received)
                if stream:
                    await self.network.through(stream, len(received))
                    link.slip(stream, len(received), self.network.now())
        finally:
            if stream:
                link.close(stream, self.network.now())
        return bytes(received)

    async def _send(
        self, request: web.BaseRequest, entry: Request, answer: Answer, fault: Fault
    ) -> web.StreamResponse:
        entry.status = answer.status
        body: Body = (
            SpoiltBody(answer.body, fault) if fault.long_by or fault.flip is not None else answer.body
        )
        has_body = request.method != "HEAD" and answer.status not in (204, 304)
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        declared = max(body.size - fault.short_by, 0)
        if not answer.is_chunked and answer.status != 204:
            response.content_length = declared
        stop = declared if fault.close_after is None else min(fault.close_after, declared)
        if not has_body or stop == 0:
            self._finish(entry)
        try:
            await response.prepare(request)
            if has_body and stop:
                await self._send_body(response, entry, body, stop, fault)
        finally:
            body.close()
        if fault.spill and request.transport is not None:
            await response.write_eof()
            request.transport.write(b"?" * fault.spill)
        if fault.close_after is not None and request.transport is not None:
            await hang_up(request.transport, fault)
        return response

    async def _send_body(
        self, response: web.StreamResponse, entry: Request, body: Body, stop: int, fault: Fault
    ) -> None:
        network, link = self.network, self.network.link
        paced, sent = network.profile.is_paced, 0
        stall_after = fault.stall_after
        stream = link.open(stop, network.now()) if paced else None
        try:
            while sent < stop:
                end = min(sent + (DROP if fault.trickle_s else network.piece), stop)
                if stall_after is not None and sent <= stall_after < end:
                    if sent == stall_after:
                        stall_after = None
                        await network.sleep_until(network.now() + fault.stall_s)
                    else:
                        end = stall_after
                data = body.read(sent, end)
                if stream:
                    await network.through(stream, end)
                # Before the write: who has the end of the reply finds it complete in the log.
                entry.bytes_sent = end
                if end == stop:
                    self._finish(entry)
                try:
                    await response.write(data)
                except ConnectionError:
                    entry.bytes_sent = sent
                    raise
                sent = end
                if fault.trickle_s:
                    await network.sleep_until(network.now() + fault.trickle_s)
                if stream:
                    link.slip(stream, sent, network.now())
        finally:
            if stream:
                link.close(stream, network.now())


def _fault_answer(fault: Fault) -> Answer:
    status = fault.status or 502
    text, kind = fault.body, "application/json; charset=UTF-8"
    if fault.html:
        page = f"<!DOCTYPE html>\n<html><title>Error {status}</title><p><b>{status}.</b> "
        text, kind = text or page + "That's an error.</html>\n", "text/html; charset=UTF-8"
    elif text is None:
        text = Refusal(status, f"Simulated error {status}", fault.reason or "").to_json()
    return Answer(status, {"Content-Type": kind, **fault.headers}, DataBody(text.encode()))


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

    def command(self, name: str, arguments: dict[str, Any], data: bytes) -> Any:
        async def on_the_loop() -> Any:
            return self._service.command(name, arguments, data)

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

    def command(self, name: str, arguments: dict[str, Any], data: bytes) -> Any:
        headers = {"x-sim": json.dumps(arguments), "Content-Type": "application/octet-stream"}
        with self._lock:
            self._connection.request("POST", _CONTROL + name, data, headers)
            reply = self._connection.getresponse()
            text = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"simulated server: {name} failed: {text.decode()}")
        return json.loads(text)

    def close(self) -> None:
        if hasattr(self, "_connection"):
            self._connection.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.terminate()  # forked children of ours may hold the other end of the pipe
        self._process.wait()


class SimServer:
    """A simulated cloud on a loopback port, from `start` (or `with`) until `close`."""

    room: ClassVar[str]

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

    def _make_service(self, network: Network, folder: Path | None) -> Service:
        raise NotImplementedError

    def start(self) -> Self:
        """Return this server, listening."""
        if self._in_process:
            network = Network(self.profile, self.seed, self.time_scale)
            self._runner = _Thread(self._make_service(network, self._folder), self._port)
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

    def _do(self, name: str, data: bytes = b"", /, **arguments: Any) -> Any:
        if self._runner is None:
            raise RuntimeError("the simulated server is not running")
        return self._runner.command(name, arguments, data)

    @property
    def endpoint_url(self) -> str:
        """`http://127.0.0.1:PORT`, without a slash at the end."""
        if self._runner is None:
            raise RuntimeError("the simulated server is not running")
        return self._runner.url

    @property
    def requests(self) -> list[Request]:
        """Copies of all requests since the last reset, in order of arrival."""
        return [Request(**row) for row in self._do("log")]

    def count(self, kind: str | None = None, key: str | None = None) -> int:
        """Return how many requests there were, of a kind and to an object if given."""
        return int(self._do("count", kind=kind, key=key))

    def bytes_sent(self) -> int:
        """Return how many bytes of media were sent."""
        return int(self._do("bytes_sent"))

    @property
    def peak_concurrency(self) -> int:
        """The largest number of requests that were being served at one moment."""
        return int(self._do("peak"))

    def reset(self) -> None:
        """Forget the log and the peak; faults stay."""
        self._do("reset")

    def fail(self, fault: Fault) -> None:
        """Let requests go wrong from now on as the fault says."""
        self._do("fail", fault={**dataclasses.asdict(fault), "headers": dict(fault.headers)})

    def refuse(self, refused: bool = True) -> None:
        """Drop all connections and refuse new ones, or no longer; for a server in this process."""
        if not self._in_process:
            raise RuntimeError("a server that refuses connections could not be told to stop it")
        self._do("refuse", refused=refused)

    def heal(self) -> None:
        """Forget all faults."""
        self._do("heal")

    def require_token(self, *tokens: str) -> None:
        """Answer 401 to everything that does not carry one of these; without any, to all."""
        self._do("tokens", tokens=list(tokens))

    def require_no_token(self) -> None:
        """Serve everybody again."""
        self._do("tokens", tokens=None)

    def forbid(self, bucket: str, forbidden: bool = True) -> None:
        """Answer 403 to everything in this bucket, of Drive about this item; or no longer."""
        self._do("forbid", bucket=bucket, forbidden=forbidden)
