"""Base class of the simulated clouds: request log, faults, pacing, authorization and control commands."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web

from cachedfs.sim.faults import DROP, Fault, hang_up, spoilt
from cachedfs.sim.messages import JSON, Call, Refusal, Request, Response, Route, unauthorized
from cachedfs.sim.network import Network
from cachedfs.sim.stored_objects import Body

CONTROL = "/_sim/"  # path prefix of control requests, which are neither logged nor delayed


def pack(value: Any) -> bytes:
    """Return the arguments or the result of a command as a line of JSON, with all bytes after it."""
    parts = [b"\n"]

    def appended(data: bytes) -> dict[str, int]:
        parts.append(data)
        return {"n_bytes": len(data)}

    return b"".join([json.dumps(value, default=appended).encode(), *parts])


def unpack(body: bytes) -> Any:
    """Return what was packed."""
    at = body.index(b"\n") + 1
    text = body[:at]

    def found(value: dict[str, Any]) -> Any:
        nonlocal at
        if value.keys() != {"n_bytes"}:
            return value
        at += value["n_bytes"]
        return body[at - value["n_bytes"] : at]

    return json.loads(text, object_hook=found)


@dataclass(slots=True)
class _Rule:
    fault: Fault
    seen: int = 0

    def hits(self, entry: Request) -> bool:
        """Count a matching request; return True if the fault applies to it."""
        fault = self.fault
        if fault.kind not in (None, entry.kind) or fault.key not in (None, entry.key):
            return False
        self.seen += 1
        end = None if fault.times is None else fault.nth + fault.times
        return self.seen >= fault.nth and (end is None or self.seen < end)


class Service(ABC):
    """Serves requests over a simulated network. Used only in its event loop, or while that has ended."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.log: list[Request] = []
        self._rules: list[_Rule] = []
        self._tokens: set[str] | None = None
        self._forbidden: set[str] = set()
        self._known: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()
        self._n_active = self._peak = 0

    @abstractmethod
    def route(self, call: Call) -> Route:
        """Return the route of a request. Raises Refusal for an unknown address."""

    def render(self, style: str, refusal: Refusal) -> Response:
        """Return an error as a reply in the given format of this cloud."""
        return Response(refusal.status, {**JSON, **refusal.headers}, refusal.to_json().encode())

    def failure(self) -> Fault:
        """Return the fault that the profile's error rate triggers."""
        return Fault(status=503)

    # Commands change the state behind the API: method `name` of the server handle calls `do_name` here.
    def command(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, f"do_{name}")(*args, **kwargs)

    def do_log(self) -> list[dict[str, Any]]:
        names = [f.name for f in dataclasses.fields(Request)]
        return [{name: getattr(entry, name) for name in names} for entry in self.log]

    def do_count(self, kind: str | None = None, key: str | None = None) -> int:
        """Return the number of requests, optionally only those of a kind and about an object."""
        return sum(kind in (None, e.kind) and key in (None, e.key) for e in self.log)

    def do_bytes_sent(self) -> int:
        """Return the number of media bytes sent."""
        return sum(entry.bytes_sent for entry in self.log if entry.kind == "media")

    def do_peak(self) -> int:
        return self._peak

    def do_reset(self) -> None:
        """Clear the request log and the peak concurrency; faults stay."""
        self.log, self._peak = [], self._n_active

    def do_fail(self, fault: dict[str, Any]) -> None:
        self._rules.append(_Rule(Fault(**fault)))

    def do_heal(self) -> None:
        self._rules.clear()

    def do_tokens(self, tokens: Iterable[str] | None) -> None:
        self._tokens = None if tokens is None else set(tokens)

    def do_forbid(self, bucket: str, forbidden: bool = True) -> None:
        """Answer 403 to all requests about this bucket, or stop doing so. Drive has no buckets."""
        (self._forbidden.add if forbidden else self._forbidden.discard)(bucket)

    def drop_connections(self) -> None:
        for transport in list(self._known):
            if not transport.is_closing():
                transport.abort()

    # Serving
    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Return the reply to a request. The log has the request from its start, finished or not."""
        if request.raw_path.startswith(CONTROL):
            args, kwargs = unpack(await request.content.read())
            try:
                result = self.command(request.raw_path.removeprefix(CONTROL), *args, **kwargs)
            except Exception as error:  # of any kind: the other process raises one with this text
                return web.Response(status=500, text=f"{type(error).__name__}: {error}")
            return web.Response(body=pack(result))
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
            return web.Response()  # the client disconnected: nothing of this is sent
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
        try:
            route = self.route(call)
        except (Refusal, ValueError, LookupError) as error:
            wrong = self.render("json", _refusal_of(error))
            route = Route("other", lambda call: wrong)
        entry.kind, entry.key, entry.bucket = route.kind, route.key, route.bucket
        struck = [rule.fault for rule in self._rules if rule.hits(entry)]
        fault = struck[0] if struck else Fault()
        network, profile = self.network, self.network.profile
        verdict = profile.first_byte(route.kind, new_connection=is_new, rng=network.rng)
        if verdict.failed and not struck:
            fault = self.failure()
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
        if fault.close_before or fault.lose:
            await hang_up(request.transport, fault)
            return web.Response()
        return await self._send(request, entry, answer, fault)

    def _answer(self, call: Call, route: Route, fault: Fault) -> Response:
        """Return the reply to a call. The call is not executed if a fault replaces the reply."""
        if fault.close_before:
            return Response()
        if fault.status is not None or fault.html:
            return _fault_answer(fault)
        answer = self.answer(call, route)
        answer.headers = {**answer.headers, **fault.headers}
        if fault.total is not None and (span := answer.headers.get("Content-Range")):
            answer.headers["Content-Range"] = f"{span.partition('/')[0]}/{fault.total}"
        return answer

    def answer(self, call: Call, route: Route) -> Response:
        try:
            self._admit(call, route)
            reply = route.act(call)
        except (Refusal, ValueError, LookupError) as error:
            return self.render(route.style, _refusal_of(error))
        if isinstance(reply, Response):
            return reply
        rows = [value for value in reply.values() if isinstance(value, list)]
        n_items = sum(map(len, rows)) if route.kind in ("list", "change") else 0
        return Response(200, dict(JSON), json.dumps(reply).encode(), n_items)

    def _admit(self, call: Call, route: Route) -> None:
        if self._tokens is not None:
            given = call.headers.get("authorization", "").removeprefix("Bearer ")
            if given not in self._tokens:
                if given:
                    raise unauthorized("Invalid Credentials", "authError")
                raise unauthorized("Anonymous caller does not have access.", "required")
        if route.bucket in self._forbidden:
            raise Refusal(
                403,
                "The caller does not have storage.objects access to the Google Cloud Storage "
                "object. Permission denied on resource (or it may not exist).",
            )

    async def _receive(self, request: web.BaseRequest, entry: Request) -> bytes:
        """Return the body of the request, received at the speed of the link."""
        if not request.body_exists:
            return b""
        entry.kind = "upload"  # until the route is known, after the body has arrived
        link, received = self.network.uplink, bytearray()
        size = float("inf") if request.content_length is None else request.content_length
        stream = link.open(size, self.network.now()) if self.network.profile.is_paced else None
        try:
            async for data in request.content.iter_any():
                received += data
                entry.bytes_received = len(received)
                if stream:
                    await self.network.through(link, stream, len(received))
                    link.slip(stream, len(received), self.network.now())
        finally:
            if stream:
                link.close(stream, self.network.now())
        return bytes(received)

    async def _send(
        self, request: web.BaseRequest, entry: Request, answer: Response, fault: Fault
    ) -> web.StreamResponse:
        entry.status = answer.status
        body = spoilt(answer.body, fault) if fault.long_by or fault.flip is not None else answer.body
        has_body = request.method != "HEAD" and answer.status not in (204, 304)
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        declared = max(len(body) - fault.short_by, 0)
        if not answer.is_chunked and answer.status != 204:
            response.content_length = declared
        stop = declared if fault.close_after is None else min(fault.close_after, declared)
        if not has_body or stop == 0:
            self._finish(entry)
        await response.prepare(request)
        if has_body and stop:
            await self._send_body(response, entry, body, stop, fault)
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
                data = body[sent:end]
                if stream:
                    await network.through(link, stream, end)
                # Updated before the write, so that the log is complete once the client has the whole reply.
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


def _refusal_of(error: Exception) -> Refusal:
    """Return the error as a reply; any but a Refusal is about an invalid value in the request."""
    return error if isinstance(error, Refusal) else Refusal(400, f"Invalid request: {error!r}")


def _fault_answer(fault: Fault) -> Response:
    status = fault.status or 502
    text, kind = fault.body, "application/json; charset=UTF-8"
    if fault.html:
        page = f"<!DOCTYPE html>\n<html><title>Error {status}</title><p><b>{status}.</b> "
        text, kind = text or page + "That's an error.</html>\n", "text/html; charset=UTF-8"
    elif text is None:
        text = Refusal(status, f"Simulated error {status}", fault.reason or "").to_json()
    return Response(status, {"Content-Type": kind, **fault.headers}, text.encode())
