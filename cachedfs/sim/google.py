"""Common parts of Google's APIs: paths, ranges and uploads."""

from __future__ import annotations

import functools
import json
import re
from typing import Any
from urllib.parse import unquote

from cachedfs.sim.messages import Call, Refusal, Response
from cachedfs.sim.stored_objects import Content

_CHUNK = 256 << 10  # all but the last chunk of a resumable upload must be a multiple of this


@functools.cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", pattern))


def match_path(pattern: str, path: str) -> dict[str, str] | None:
    """Return the parts of a path by their names in a pattern such as `files/{item_id}`; None if they differ."""
    found = _regex(pattern).fullmatch(path)
    return {name: unquote(part) for name, part in found.groupdict().items()} if found else None


def split_related(call: Call) -> tuple[dict[str, Any], str | None, bytes]:
    """Return the metadata, content type and bytes of a multipart/related body."""
    boundary = re.search(r'boundary="?([^";]+)', call.headers.get("content-type", ""))
    if not boundary:
        raise Refusal(400, "Missing boundary in the Content-Type of a multipart body.")
    parts = call.body.split(b"--" + boundary[1].encode())
    if len(parts) != 4:
        raise Refusal(400, "Failed to parse multipart body.")
    # Clients end lines with CRLF or LF. Detect which, since the data itself may end with CR.
    end = b"\r\n" if parts[1].startswith(b"\r\n") else b"\n"
    metadata = parts[1].partition(end + end)[2]
    head, _, data = parts[2].partition(end + end)
    found = re.search(r"(?i)content-type: *([^\r\n]+)", head.decode())
    return json.loads(metadata or b"{}"), found[1] if found else None, data.removesuffix(end)


def _span(given: str | None, size: int) -> tuple[int, int] | None:
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
    span = _span(call.headers.get("range"), stored.size)
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
