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
from cachedfs.origins.origin_errors import denial, error_of, size_of, text_of, well_formed
from cachedfs.origins.retry import RetryableError, foreign

__all__ = ["CheckedGCSFileSystem", "ForeignResponse"]


class ForeignResponse(ProxyError):
    """An answer that is not the service's own; gcsfs retries it, as it does any proxy error."""


class CheckedGCSFileSystem(GCSFileSystem):  # type: ignore[misc] # gcsfs has no types
    """`gcsfs.core.GCSFileSystem` with checks of every answer before gcsfs sees it."""

    @property
    def session(self) -> Any:
        state = self.__dict__
        return _CheckedSession(
            super().session, state.setdefault("_uploads", {}), state.setdefault("_copies", {})
        )


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

    def __init__(self, session: Any, uploads: dict[str, _Upload], copies: dict[str, int]) -> None:
        self._session, self._uploads = session, uploads
        self._copies = copies  # bytes that an unfinished copy has, by its address

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def get(self, url: str, **options: Any) -> Any:
        return self.request("GET", url, **options)

    @asynccontextmanager
    async def request(self, method: str, url: str, **options: Any) -> AsyncIterator[Any]:
        """Send a request and yield its answer; raise ForeignResponse if it is not the service's own."""
        if method == "DELETE":
            self._uploads.pop(url, None)  # cancels an upload
        async with self._answer(method, url, options) as answer:
            if host := other_host(answer):
                _refuse(f"redirected to {host}, which answered {answer.status}")
            if answer.method != method.upper():
                _refuse(f"redirected, which made {answer.method} of {method}")
            if answer.status in (404, 410):
                if not api.is_absence(answer.headers, await answer.read()):
                    _refuse(f"somebody answered {answer.status}, not in the words of the service")
            elif answer.status >= 400:
                _check_error(await answer.read())
                if answer.status == 412:
                    _raise_unmet_condition(await answer.read())
            elif not _is_media(url, options):
                self._check(method, url, answer, await answer.read(), options)
            yield answer

    @asynccontextmanager
    async def _answer(self, method: str, url: str, options: Mapping[str, Any]) -> AsyncIterator[Any]:
        try:
            async with self._session.request(method=method, url=url, **options) as answer:
                yield answer
        except UnicodeError as error:
            _refuse(f"the answer cannot be read ({error})")

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
            self._check_resource(_json(body), url, params)

    def _check_resource(self, found: Any, url: str, params: Mapping[str, Any]) -> None:
        """Raise ForeignResponse unless JSON is the service's, about the object that the address names."""
        _, is_object, name = url.partition("?")[0].removesuffix("/compose").rpartition("/o/")
        try:
            with well_formed():
                if api.is_resource(found, "rewriteResponse"):
                    found = self._rewritten(found, url, "rewriteToken" in params)
                    if found is None:
                        return
                kind, wanted = ("object", unquote(name)) if is_object else ("", None)
                api.resource_of(found, kind, wanted)
                if is_object:
                    api.object_info(found, "")
                elif found["kind"] == "storage#objects":
                    list(api.children(found, "", params.get("prefix") or ""))
                elif found["kind"] == "storage#buckets":
                    list(map(api.bucket_info, found.get("items", ())))
                api.next_token(found, [params.get("pageToken") or ""])
        except RetryableError as error:
            _refuse(str(error))

    def _rewritten(self, found: Mapping[str, Any], url: str, is_resumed: bool) -> Any:
        """Return the resource of a copy; None if more requests are needed, each of which has to copy more."""
        size, copied = size_of(found["objectSize"]), size_of(found["totalBytesRewritten"])
        before = self._copies.get(url, -1) if is_resumed else -1
        if found["done"] is True:
            self._copies.pop(url, None)
            if size_of(found["resource"]["size"]) != size:
                raise ValueError(f"a copy has {found['resource']['size']} bytes instead of {size}")
            return found["resource"]
        if found["done"] is not False or copied <= before:
            raise ValueError("a copy makes no progress")
        text_of(found["rewriteToken"])
        self._copies[url] = copied
        return None

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


def _check_error(body: bytes) -> None:
    """Raise ForeignResponse for an error in JSON that gcsfs cannot read."""
    try:
        error = json.loads(body.decode("utf-8", "replace"))["error"]
    except RecursionError:
        _refuse("an error was answered in JSON that is nested too deep")
    except (ValueError, TypeError, LookupError):
        return  # gcsfs takes it for a text
    if isinstance(error, dict):
        code, message = error.get("code", 0), error.get("message", "")
        if not (isinstance(code, (int, str)) and isinstance(message, str)):
            _refuse("an error was answered without code and message")


def _raise_unmet_condition(body: bytes) -> NoReturn:
    """Raise what a 412 means, with the words of the service: gcsfs leaves them out.

    The condition of gcsfs's own is that an object does not exist. The service also refuses so what a policy of the
    organization forbids.
    """
    text, reasons = error_of(body)
    if denial(text, reasons):
        raise OSError(f"Forbidden: {text}")
    raise FileExistsError(f"412: {text}")


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
