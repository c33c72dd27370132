"""Common parts of Google's APIs: paths, ranges and uploads."""

from __future__ import annotations

import functools
import json
import re
import uuid
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import unquote, urlencode

from cachedfs.sim.messages import Call, Refusal, Response, Route
from cachedfs.sim.network import Network
from cachedfs.sim.service import Service
from cachedfs.sim.stored_objects import Content

_CHUNK = 256 << 10  # all but the last chunk of a resumable upload must be a multiple of this


@functools.cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", pattern))


def match_path(pattern: str, path: str) -> dict[str, str] | None:
    """Return the parts of a path by their names in a pattern such as `files/{item_id}`; None if they differ."""
    found = _regex(pattern).fullmatch(path)
    return {name: unquote(part) for name, part in found.groupdict().items()} if found else None


def _split_related(call: Call) -> tuple[dict[str, Any], str | None, bytes]:
    """Return the metadata, content type and bytes of a multipart/related body."""
    boundary = re.search(r'boundary="?([^";]+)', call.headers.get("content-type", ""))
    if not boundary:
        raise Refusal(400, "Missing boundary in the Content-Type of a multipart body.")
    mark = b"--" + boundary[1].encode()
    try:
        _, first, second = call.body.split(mark, 2)
    except ValueError:
        raise Refusal(400, "Failed to parse multipart body.") from None
    # Clients end lines with CRLF or LF. Detect which, since the data itself may end with CR.
    end = b"\r\n" if first.startswith(b"\r\n") else b"\n"
    metadata = first.partition(end + end)[2]
    head, _, rest = second.partition(end + end)
    data = rest[: rest.rindex(end + mark)]
    found = re.search(r"(?i)content-type: *([^\r\n]+)", head.decode())
    return json.loads(metadata or b"{}"), found[1] if found else None, data


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


@dataclass(slots=True)
class UploadSession:
    """An upload in progress. `fields` are those of its resource, `mime` is its content type."""

    call: Call  # the request that began it
    key: str  # the name of the object, or the id of the item
    fields: dict[str, Any]
    mime: str | None
    bucket: str = ""
    is_new: bool = True  # not of an item that exists
    data: bytearray = field(default_factory=bytearray)
    result: dict[str, Any] | None = None  # the stored resource


class Uploads(Service):
    """Answers uploads in one request and in several."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.uploads: dict[str, UploadSession] = {}
        self.accepts: list[int] = []  # byte limits of the next chunks

    @abstractmethod
    def check(self, upload: UploadSession) -> None:
        """Raise Refusal if an upload in several requests may not begin."""

    @abstractmethod
    def save(self, upload: UploadSession, data: bytes) -> dict[str, Any]:
        """Store what was uploaded, and return its resource."""

    def upload_route(
        self, call: Call, begin: Callable[[dict[str, Any], str | None], UploadSession], units: int = 5
    ) -> Route:
        """Return the route of a request to an upload URL. `begin` makes an upload of its fields and content type."""
        if (upload_id := call.query.get("upload_id")) is not None:
            known = self.uploads.get(upload_id)
            bucket, key = (known.bucket, known.key) if known else ("", "")
            return Route("upload", lambda call: self._resume(upload_id, call), bucket, key)
        how, data = call.query.get("uploadType"), call.body
        if how == "multipart":
            fields, mime, data = _split_related(call)
        elif how == "resumable":
            fields, mime = call.json(), call.headers.get("x-upload-content-type")
        elif how == "media":
            fields, mime = {}, call.headers.get("content-type")
        else:
            raise Refusal(400, "Invalid value for uploadType.", location="uploadType")
        upload = begin(fields, mime)
        act = partial(self._begin, upload) if how == "resumable" else lambda _: self.save(upload, data)
        return Route("upload", act, upload.bucket, upload.key, units=units)

    def _begin(self, upload: UploadSession, call: Call) -> Response:
        self.check(upload)
        upload_id = uuid.uuid4().hex
        self.uploads[upload_id] = upload
        query = urlencode({**call.query, "upload_id": upload_id})
        location = f"http://{call.host}{call.path}?{query}"
        return Response(200, {"Location": location, "X-GUploader-UploadID": upload_id})

    def _resume(self, upload_id: str, call: Call) -> Response | dict[str, Any]:
        upload = self.uploads.get(upload_id)
        if upload is None:
            raise Refusal(404, "The upload session is unknown or has expired.")
        if call.method == "DELETE":
            del self.uploads[upload_id]
            return Response(499)
        if upload.result is None:
            most = self.accepts.pop() if call.body and self.accepts else None
            total = _take_chunk(upload.data, call, most)
            if total != len(upload.data):
                return Response(308, {"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {})
            upload.result = self.save(upload, bytes(upload.data))
            upload.data.clear()
        return upload.result


def _take_chunk(data: bytearray, call: Call, most: int | None) -> int | None:
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
