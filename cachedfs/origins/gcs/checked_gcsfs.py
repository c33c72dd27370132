"""A gcsfs filesystem that accepts only answers of the service.

An upload succeeds only if the answer confirms it. gcsfs itself takes any 404 for an absence, and any 200 for success.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import unquote

from gcsfs.core import GCSFileSystem
from requests.exceptions import ProxyError

from cachedfs.common.checksums import crc32c_of, has_crc32c
from cachedfs.origins.gcs import api
from cachedfs.origins.http import other_host
from cachedfs.origins.origin_errors import advice_of, error_of, size_of, text_of, well_formed
from cachedfs.origins.retry import RetryableError, foreign


class ForeignResponse(ProxyError):
    """An answer that is not the service's own; gcsfs retries it, as it does any proxy error."""


class CheckedGCSFileSystem(GCSFileSystem):  # type: ignore[misc] # gcsfs has no types
    """`gcsfs.core.GCSFileSystem` with checks of every answer before gcsfs sees it."""

    @property
    def session(self) -> Any:
        uploads, copies = (self.__dict__.setdefault(name, {}) for name in ("_uploads", "_copies"))
        return _CheckedSession(super().session, uploads, copies)


class _CheckedSession:
    """An aiohttp session for gcsfs that checks every answer."""

    def __init__(self, session: Any, uploads: dict[str, tuple[str, int]], copies: dict[str, int]) -> None:
        # By their address: name and CRC-32C of the bytes that an upload has; how many bytes an unfinished copy has.
        self._session, self._uploads, self._copies = session, uploads, copies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def get(self, url: str, **options: Any) -> Any:
        return self.request("GET", url, **options)

    @asynccontextmanager
    async def request(self, method: str, url: str, **options: Any) -> AsyncIterator[Any]:
        """Send a request and yield its answer; raise ForeignResponse if it is not the service's own."""
        if method == "DELETE":
            self._uploads.pop(url, None)  # cancels an upload
        async with AsyncExitStack() as stack:
            try:
                with well_formed("the answer is not the service's own"):
                    sent = self._session.request(method=method, url=url, **options)
                    answer = await stack.enter_async_context(sent)
                    await self._check(method, url, answer, options)
            except RetryableError as failed:
                raise ForeignResponse(f"{failed}. {failed.remedy}") from failed
            yield answer

    async def _check(self, method: str, url: str, answer: Any, options: Mapping[str, Any]) -> None:
        """Raise RetryableError, or any error about its content, unless an answer is the service's own."""
        if host := other_host(answer):
            raise foreign(f"redirected to {host}, which answered {answer.status}")
        if answer.method != method.upper():
            raise foreign(f"redirected, which made {answer.method} of {method}")
        if answer.status in (404, 410):
            if not api.is_absence(answer.headers, await answer.read()):
                raise foreign(f"somebody answered {answer.status}, not in the words of the service")
        elif answer.status == 412:
            _check_condition(await answer.read())
        elif answer.status < 400 and not _is_media(url, options):  # whose reader checks it
            self._check_success(method, url, answer, await answer.read(), options)

    def _check_success(
        self, method: str, url: str, answer: Any, body: bytes, options: Mapping[str, Any]
    ) -> None:
        params, headers = options.get("params") or {}, options.get("headers") or {}
        kind, data = params.get("uploadType"), options.get("data") or b""
        data = bytes(data.getbuffer() if hasattr(data, "getbuffer") else data)  # a view, or a file in memory
        if kind == "resumable":
            self._uploads[answer.headers["Location"]] = options["json"]["name"], 0
        elif kind == "multipart":
            name, content = _split_multipart(headers["Content-Type"], data)
            _check_object(body, name, len(content), _crc32c(content))
        elif method == "POST" and url in self._uploads:
            self._check_piece(url, answer, body, headers["Content-Range"], data)
        elif method == "DELETE":
            if body.strip() not in (b"", b"null"):  # the service sends nothing, an emulator `null`
                raise foreign("a removal was answered with a text")
        elif headers.get("Content-Type", "").startswith("multipart/mixed"):  # a batch
            if answer.content_type != "multipart/mixed":
                raise foreign("a batch was answered with something else")
        elif "fields" not in params:
            self._check_resource(json.loads(body), url, params)

    def _check_piece(self, url: str, answer: Any, body: bytes, range_: str, data: bytes) -> None:
        """Check that the answer to a part of an upload says which bytes were received."""
        found = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", range_)
        assert found is not None  # gcsfs wrote it
        total, start = found[2], int(found[1] or found[2])
        (name, crc), stop = self._uploads[url], start + len(data)
        if answer.status != 308:
            if str(stop) != total:
                raise foreign("an upload was answered as complete before it was")
            _check_object(body, name, stop, _crc32c(data, crc))
            del self._uploads[url]
            return
        _, _, last = answer.headers.get("Range", "").partition("-")
        received = int(last) + 1 if last.isdigit() else 0
        if not start < received <= stop or str(received) == total:
            raise foreign(
                f"of bytes {start} to {stop} of an upload, the answer says that {received} are there"
            )
        self._uploads[url] = name, _crc32c(data[: received - start], crc)

    def _check_resource(self, found: Any, url: str, params: Mapping[str, Any]) -> None:
        """Check that JSON is the service's, about the object that the address names."""
        _, is_object, name = url.partition("?")[0].removesuffix("/compose").rpartition("/o/")
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


def _crc32c(data: bytes, before: int = 0) -> int:
    return crc32c_of(data, before) if has_crc32c() else 0  # in Python it takes longer than sending


def _check_object(body: bytes, name: str, size: int, crc: int) -> None:
    """Raise RetryableError unless an answer has the object's name, and the size and checksum of all bytes sent."""
    found, expected = json.loads(body), base64.b64encode(crc.to_bytes(4, "big")).decode()
    if not api.is_resource(found, "object", name) or str(found.get("size")) != str(size):
        raise foreign("an upload was answered without the object's name and size")
    if has_crc32c() and found.get("crc32c") != expected:
        raise foreign(f"an upload was answered with the CRC32C {found.get('crc32c')} instead of {expected}")


def _check_condition(body: bytes) -> None:
    """Raise what a 412 means, with the words of the service: gcsfs omits them.

    The condition of gcsfs's own is that an object does not exist. The service also refuses so what a policy of the
    organization forbids.
    """
    text, reasons = error_of(body)
    raise OSError(f"Forbidden: {text}") if advice_of(text, reasons) else FileExistsError(f"412: {text}")


def _is_media(url: str, options: Mapping[str, Any]) -> bool:
    """Return whether the request reads an object's bytes."""
    params = options.get("params") or {}
    return "/download/" in url or "alt=media" in url or params.get("alt") == "media"


def _split_multipart(content_type: str, data: bytes) -> tuple[str, bytes]:
    """Return name and bytes of the object in a multipart upload's body, as gcsfs writes it."""
    boundary = b"\n--" + content_type.partition("boundary=")[2].strip('"').encode()
    metadata = data.index(b"\n\n") + 2
    end = data.index(boundary, metadata)
    start, stop = data.index(b"\n\n", end) + 2, data.rindex(boundary)
    return json.loads(data[metadata:end])["name"], data[start:stop]
