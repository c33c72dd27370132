"""Common parts of the simulated Google services: JSON replies, batches, ranges and resumable uploads."""

from __future__ import annotations

import gzip
import json
import re
from typing import Any
from urllib.parse import parse_qsl

from cachedfs.sim.faults import Fault
from cachedfs.sim.messages import Call, Refusal, Response, Route
from cachedfs.sim.objects import Content, DataBody
from cachedfs.sim.service import Service

__all__ = ["GoogleService", "body_of", "json_answer", "ranged", "span_of", "split_related", "take_chunk"]

_JSON = {"Content-Type": "application/json; charset=UTF-8"}
_CHUNK = 256 << 10  # all but the last chunk of a resumable upload must be a multiple of this
_MOST_CALLS, _LONGEST_TARGET = 100, 8000  # limits of a batch


class GoogleService(Service):
    """Answers in JSON, compressed if the client accepts gzip as documented. Media is never compressed."""

    def render(self, style: str, refusal: Refusal) -> Response:
        at = {"locationType": "header", "location": "Authorization"} if refusal.status == 401 else {}
        return Response(
            refusal.status, {**_JSON, **refusal.headers}, DataBody(refusal.to_json(**at).encode())
        )

    def _answer(self, call: Call, route: Route, fault: Fault) -> Response:
        answer = super()._answer(call, route, fault)
        wants = all("gzip" in call.headers.get(name, "") for name in ("accept-encoding", "user-agent"))
        is_json = answer.headers.get("Content-Type") == _JSON["Content-Type"]
        # Not if a fault applies: its byte counts refer to plain bytes, and a decompressor may ignore extra bytes.
        if not (wants and is_json) or route.kind in ("media", "export") or fault != Fault():
            return answer
        answer.headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        answer.body = DataBody(gzip.compress(bytes(answer.body.read(0, answer.body.size)), 1))
        return answer

    def batch(self, call: Call) -> Response:
        """Return the replies to a batch of up to 100 calls. Each call is charged separately."""
        parts = call.body.replace(b"\r\n", b"\n").split(b"--" + _boundary_of(call).encode())[1:-1]
        if len(parts) > _MOST_CALLS:
            raise Refusal(400, "The batch request has more than 100 calls.")
        asked = [self._asked(call, part) for part in parts]  # if one is invalid, none is executed
        text = "".join(self._part(call, *each) for each in asked) + "--batch_sim--\r\n"
        return Response(200, {"Content-Type": "multipart/mixed; boundary=batch_sim"}, DataBody(text.encode()))

    def _asked(self, call: Call, part: bytes) -> tuple[Call, Route, str]:
        """Parse one part of a batch; return its call, its route and its content id."""
        outer, _, inner = part.strip(b"\n").partition(b"\n\n")
        head, _, body = inner.partition(b"\n\n")
        line, *rows = head.decode().split("\n")
        method, target, *_ = line.split()
        if len(target) > _LONGEST_TARGET:
            raise Refusal(400, "The URL of a call in a batch is too long.")
        path, _, query = re.sub(r"^https?://[^/]*", "", target).partition("?")
        pairs = [row.partition(":") for row in rows]
        headers = {**call.headers, **{k.lower(): v.strip() for k, _, v in pairs}}
        asked = Call(method, path, dict(parse_qsl(query, True)), headers, body)
        route = self._route(asked)
        if route.kind in ("media", "upload", "export", "batch", "token"):
            raise Refusal(400, "Batch calls cannot carry media.")
        unfolded = re.sub(rb"\n[ \t]+", b" ", outer)
        found = re.search(rb"(?i)content-id: *<?([^>\n]*)", unfolded)
        return asked, route, found[1].decode() if found else ""

    def _part(self, call: Call, asked: Call, route: Route, name: str) -> str:
        """Execute one call of a batch and return its reply as a multipart section."""
        answer = self.answer(asked, route)
        call.units += asked.units
        status = f"HTTP/1.1 {answer.status} {'OK' if answer.status < 300 else 'Error'}"
        text = bytes(answer.body.read(0, answer.body.size)).decode()
        kind = answer.headers.get("Content-Type", "application/json")
        return (
            f"--batch_sim\r\nContent-Type: application/http\r\nContent-ID: <response-{name}>"
            f"\r\n\r\n{status}\r\nContent-Type: {kind}\r\nContent-Length: {len(text.encode())}"
            f"\r\n\r\n{text}\r\n"
        )


def json_answer(value: Any, status: int = 200) -> Response:
    return Response(status, dict(_JSON), DataBody(json.dumps(value).encode()))


def body_of(call: Call) -> dict[str, Any]:
    """Return the JSON object in the body, or an empty dict. Raises ValueError for invalid JSON."""
    value = json.loads(call.body or b"{}")
    return value if isinstance(value, dict) else {}


def _boundary_of(call: Call) -> str:
    found = re.search(r'boundary="?([^";]+)', call.headers.get("content-type", ""))
    if not found:
        raise Refusal(400, "Missing boundary in the Content-Type of a multipart body.")
    return found[1]


def split_related(call: Call) -> tuple[dict[str, Any], str | None, bytes]:
    """Return the metadata, content type and bytes of a multipart/related body."""
    mark, body = b"--" + _boundary_of(call).encode(), call.body
    # Clients end lines with CRLF or LF. Detect which, since the data itself may end with CR.
    begin = body.find(mark) + len(mark)
    end = b"\r\n" if body[begin : begin + 2] == b"\r\n" else b"\n"
    middle, last = body.find(end + mark, begin), body.rfind(end + mark)
    if middle < 0 or middle == last:
        raise Refusal(400, "Failed to parse multipart body.")
    _, _, metadata = body[begin:middle].partition(end + end)
    head_end = body.find(end + end, middle + len(end + mark))
    head = body[middle:head_end].decode()
    found = re.search(r"(?i)content-type: *([^\r\n]+)", head)
    fields = body_of(Call("", "", {}, {}, metadata))
    return fields, found[1] if found else None, body[head_end + 2 * len(end) : last]


def span_of(given: str | None, size: int) -> tuple[int, int] | None:
    """Return the half-open range that a Range header asks for, or None if it is to be ignored.

    Raises Refusal (416) for a range outside the object.
    """
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", given or "")
    if not found or found[0] == "bytes=-" or (all(found.groups()) and int(found[1]) > int(found[2])):
        return None
    if found[1]:
        start, stop = int(found[1]), min(int(found[2]) + 1, size) if found[2] else size
    else:
        start, stop = max(size - int(found[2]), 0), size
    if start >= size or start == stop:
        raise Refusal(416, "Request range not satisfiable", headers={"Content-Range": f"bytes */{size}"})
    return start, stop


def ranged(call: Call, headers: dict[str, str], stored: Content) -> Response:
    """Return the bytes that a request asks for, as a 200 or 206 reply."""
    span = span_of(call.headers.get("range"), stored.size)
    if span is None:
        return Response(200, headers, stored.body(0, stored.size))
    headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{stored.size}"
    return Response(206, headers, stored.body(*span))


def take_chunk(data: bytearray, call: Call, most: int | None = None) -> int | None:
    """Append a chunk of a resumable upload to its data; return the total size, or None if not yet known.

    Keeps at most `most` bytes of the body. Ignores bytes that are already present, and a chunk that leaves a
    gap.
    """
    n = len(call.body)
    given = call.headers.get("content-range", f"bytes 0-{n - 1}/{n}" if n else "bytes */0")
    found = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", given)
    if not found:
        raise Refusal(400, f"Failed to parse Content-Range header: {given}")
    total = None if found[3] == "*" else int(found[3])
    if found[1] is None:
        return total
    start, stop = int(found[1]), int(found[2]) + 1
    if n != stop - start or (total is not None and stop > total):
        raise Refusal(400, f"Invalid request: {n} bytes in the body, {given}.")
    if stop != total and n % _CHUNK:
        raise Refusal(400, f"Invalid request: {n} bytes are not a multiple of 262144.")
    if start <= len(data):
        data += call.body[:most][len(data) - start :]
    return total
