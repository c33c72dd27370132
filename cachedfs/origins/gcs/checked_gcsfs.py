"""A gcsfs filesystem that accepts only answers of the service.

An upload succeeds only if the answer confirms it. gcsfs itself takes any 404 for an absence, and any 200 for success.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NoReturn
from urllib.parse import unquote

from gcsfs.core import GCSFileSystem
from requests.exceptions import ProxyError

from cachedfs.common.checksums import RunningChecksum, StatedChecksum, has_crc32c, stated_of
from cachedfs.origins.gcs import api
from cachedfs.origins.http import other_host
from cachedfs.origins.retry import foreign

__all__ = ["CheckedGCSFileSystem", "ForeignResponse"]


class ForeignResponse(ProxyError):
    """An answer that is not the service's own; gcsfs retries it, as it does any proxy error."""


class CheckedGCSFileSystem(GCSFileSystem):  # type: ignore[misc] # gcsfs has no types
    """`gcsfs.core.GCSFileSystem` with checks of every answer before gcsfs sees it."""

    @property
    def session(self) -> Any:
        return _CheckedSession(super().session, self.__dict__.setdefault("_uploads", {}))


class _Upload:
    """A resumable upload.

    It has the object's name, and the checksum of the bytes that the service has received.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.sum = RunningChecksum(StatedChecksum("crc32c" if has_crc32c() else "md5", ""))

    def with_more(self, data: bytes) -> RunningChecksum:
        """Return a new checksum of the received bytes and `data`.

        This one stays as it is, so that a repeated request adds nothing twice.
        """
        more = self.sum.copy()
        more.add(data)
        return more

    def check(self, found: Any, data: bytes, size: int) -> None:
        """Raise ForeignResponse unless the answer confirms the upload.

        It must have the object's name, and the size and checksum of all bytes sent.
        """
        if not api.is_resource(found, "object", self.name) or str(found.get("size")) != str(size):
            _refuse("an upload was answered without the object's name and size")
        stated = stated_of(found)
        if stated is None or (wrong := self.with_more(data).contradiction(stated)):
            _refuse(f"an upload was answered with {wrong if stated else 'no checksum'}")


class _CheckedSession:
    """An aiohttp session for gcsfs that checks every answer."""

    def __init__(self, session: Any, uploads: dict[str, _Upload]) -> None:
        self._session, self._uploads = session, uploads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def get(self, url: str, **options: Any) -> Any:
        return self.request("GET", url, **options)

    @asynccontextmanager
    async def request(self, method: str, url: str, **options: Any) -> AsyncIterator[Any]:
        """Send a request and yield its answer; raise ForeignResponse if it is not the service's own."""
        if method == "DELETE":
            self._uploads.pop(url, None)  # cancels an upload
        async with self._session.request(method=method, url=url, **options) as answer:
            if host := other_host(answer):
                _refuse(f"redirected to {host}, which answered {answer.status}")
            if answer.method != method.upper():
                _refuse(f"redirected, which made {answer.method} of {method}")
            if answer.status in (404, 410):
                if not api.is_absence(answer.headers, await answer.read()):
                    _refuse(f"somebody answered {answer.status}, not in the words of the service")
            elif answer.status < 400 and not _is_media(url, options):
                self._check(method, url, answer, await answer.read(), options)
            yield answer

    def _check(self, method: str, url: str, answer: Any, body: bytes, options: Mapping[str, Any]) -> None:
        """Raise ForeignResponse unless a success is the service's own answer to this request."""
        params, headers = options.get("params") or {}, options.get("headers") or {}
        kind = params.get("uploadType")
        if kind == "resumable":
            if not (location := answer.headers.get("Location")):
                _refuse("an upload was begun, and the answer has no address for it")
            self._uploads[location] = _Upload(options["json"]["name"])
        elif kind == "multipart":
            name, data = _split_multipart(headers["Content-Type"], _bytes(options.get("data")))
            _Upload(name).check(_json(body), data, len(data))
        elif method == "POST" and (upload := self._uploads.get(url)):
            self._check_chunk(upload, answer, body, headers["Content-Range"], _bytes(options.get("data")))
            if answer.status != 308:
                del self._uploads[url]
        elif method == "DELETE":
            if body.strip() not in (b"", b"null"):  # the service sends nothing, an emulator `null`
                _refuse("a removal was answered with a text")
        elif headers.get("Content-Type", "").startswith("multipart/mixed"):  # a batch
            if answer.content_type != "multipart/mixed":
                _refuse("a batch was answered with something else")
        elif "fields" not in params:
            _check_resource(_json(body), url)

    def _check_chunk(self, upload: _Upload, answer: Any, body: bytes, range_: str, data: bytes) -> None:
        """Raise ForeignResponse unless the answer to a part of an upload says which bytes were received."""
        found = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", range_)
        assert found is not None  # gcsfs wrote it
        total = None if found[2] == "*" else int(found[2])
        start = int(found[1] or found[2])
        stop = start + len(data)
        if answer.status != 308:
            if stop != total:
                _refuse("an upload was answered as complete before it was")
            upload.check(_json(body), data, stop)
            return
        _, _, last = answer.headers.get("Range", "").partition("-")
        received = int(last) + 1 if last.isdigit() else 0
        if not start < received <= stop or received == total:
            _refuse(f"of bytes {start} to {stop} of an upload, the answer says that {received} are there")
        upload.sum = upload.with_more(data[: received - start])


def _check_resource(found: Any, url: str) -> None:
    """Raise ForeignResponse unless JSON is the service's, about the object that the address names."""
    _, is_object, name = url.partition("?")[0].removesuffix("/compose").rpartition("/o/")
    if api.is_resource(found, "rewriteResponse") and not found.get("done"):
        return
    if api.is_resource(found, "rewriteResponse"):
        found = found.get("resource")
    if not api.is_resource(found, "object" if is_object else "", unquote(name) if is_object else None):
        _refuse("the answer lacks what the service always sends")


def _is_media(url: str, options: Mapping[str, Any]) -> bool:
    """Return whether the request reads an object's bytes; those are checked by their reader."""
    params = options.get("params") or {}
    return "/download/" in url or "alt=media" in url or params.get("alt") == "media"


def _split_multipart(content_type: str, data: bytes) -> tuple[str, bytes]:
    """Return name and bytes of the object in a multipart upload's body, as gcsfs writes it."""
    boundary = b"\n--" + content_type.partition("boundary=")[2].strip('"').encode()
    metadata = data.index(b"\n\n") + 2
    end = data.index(boundary, metadata)
    start, stop = data.index(b"\n\n", end) + 2, data.rindex(boundary)
    return json.loads(data[metadata:end])["name"], data[start:stop]


def _bytes(data: Any) -> bytes:
    """Return the body that gcsfs sends as bytes; it may be a view or a file in memory."""
    return bytes(data.getbuffer() if hasattr(data, "getbuffer") else data or b"")


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _refuse(reason: str) -> NoReturn:
    raise ForeignResponse(f"{reason}. {foreign('').remedy}")
