"""What both simulated services of Google share: ranges, JSON bodies, uploads in parts."""

from __future__ import annotations

import json
import re
from typing import Any

from cachedfs.sim.server import Call, Refusal

__all__ = ["CHUNK", "JSON", "body_of", "boundary_of", "span_of", "split_related"]

JSON = {"Content-Type": "application/json; charset=UTF-8"}
CHUNK = 256 << 10  # all but the last request of a resumable upload carry multiples of it


def body_of(call: Call) -> dict[str, Any]:
    """Return the JSON object in the body, empty when there is none; ValueError when it is none."""
    value = json.loads(call.body or b"{}")
    return value if isinstance(value, dict) else {}


def boundary_of(call: Call) -> str:
    found = re.search(r'boundary="?([^";]+)', call.headers.get("content-type", ""))
    if not found:
        raise Refusal(400, "Missing boundary in the Content-Type of a multipart body.")
    return found[1]


def split_related(call: Call) -> tuple[dict[str, Any], str | None, bytes]:
    """Return metadata, content type and bytes of a multipart/related body."""
    mark, body = b"--" + boundary_of(call).encode(), call.body
    # Clients end lines with CRLF or LF; only knowing which keeps a CR that ends the data.
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
    """Return the half-open span that a Range header asks for; None when it is to be ignored."""
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
