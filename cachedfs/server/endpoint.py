"""Answer HTTP requests: S3's, and plain ones for the same paths. A handler of aiohttp's server."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import unquote

from aiohttp import web

from cachedfs.common.types import Range
from cachedfs.errors import ChecksumMismatch, ObjectChanged
from cachedfs.server import documents
from cachedfs.server.access import AccessRules
from cachedfs.server.bucket import PIECE, Bucket, Described
from cachedfs.server.conditions import Slice, is_not_modified, range_in, slice_of
from cachedfs.server.key_pages import page_of
from cachedfs.server.s3_errors import S3Error, s3_error_of
from cachedfs.server.s3_requests import Query, S3Request, operation_of, query_of

if TYPE_CHECKING:
    from cachedfs.core.download import Download
    from cachedfs.core.objects import Entry

logger = logging.getLogger("cachedfs.server")

MOST_REQUESTS = 256  # answered at once
MOST_IN_PAGE = 1000  # keys
STALLED_S = 60.0  # after which a client that takes nothing of a body is disconnected
TRIES = 3  # of an object that is replaced before its first byte is sent
REGION = "us-east-1"
NO_BYTES = Range(0, 0)
_SERVER = {"Server": "cachedfs"}
_XML = {**_SERVER, "Content-Type": "application/xml"}
_HTML = {
    **_SERVER,
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'",
}
_ECHOED = {"continuation-token": "ContinuationToken", "start-after": "StartAfter"}
_PREFLIGHT = {"Access-Control-Allow-Methods": "GET, HEAD", "Access-Control-Allow-Headers": "*, Authorization"}


class Endpoint:
    """The buckets by name, for requests that `access` allows, in path style or as virtual hosts of `domains`."""

    def __init__(self, buckets: Mapping[str, Bucket], access: AccessRules, domains: tuple[str, ...]) -> None:
        self._buckets, self._access, self._domains = buckets, access, domains
        self._n_active, self._began = 0, time.time()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request, and log an error of the origin in a line."""
        cors: dict[str, str] = {}
        self._n_active += 1
        try:
            cors = self._access.check_origin(request.headers)
            if self._n_active > MOST_REQUESTS:
                raise S3Error("SlowDown", f"{MOST_REQUESTS} requests are being answered; ask again later")
            if request.method == "OPTIONS" and cors:
                return _response(request, 200, {**_SERVER, **_PREFLIGHT, **cors})
            return await self._answer(request, cors)
        except ConnectionAbortedError:  # by us, in the middle of a body
            raise
        except Exception as error:  # of any kind: an answer says what
            return _refusal(request, s3_error_of(error), cors)
        finally:
            self._n_active -= 1

    async def _answer(self, request: web.BaseRequest, cors: dict[str, str]) -> web.StreamResponse:
        headers, method = request.headers, request.method
        path, _, text = request.raw_path.partition("?")
        query = query_of(text)
        is_signed = self._access.check(method, path, query, headers)
        asked = operation_of(method, path, query, headers["Host"], self._domains)
        if asked.bucket and asked.bucket not in self._buckets:
            raise S3Error("NoSuchBucket", "No bucket of this endpoint has this name", BucketName=asked.bucket)
        is_folder = asked.key == "" or asked.key.endswith("/")
        if is_folder and not (is_signed or query):  # a browser, curl, GDAL, fsspec's http
            return _response(request, 200, {**_HTML, **cors}, await self._folder(asked))
        match asked.operation:
            case "GetObject":
                return await self._get(request, asked, cors, is_signed=is_signed)
            case "HeadObject":
                return await self._head(request, asked, cors)
            case "ListObjects" | "ListObjectsV2":
                body = await self._list(asked, query)
            case "ListBuckets":
                body = documents.buckets_document(sorted(self._buckets), self._began)
            case "GetBucketLocation":
                body = documents.location_document()
            case _:  # HeadBucket
                return _response(request, 200, {**_SERVER, "x-amz-bucket-region": REGION, **cors})
        return _response(request, 200, {**_XML, **cors}, body)

    # Objects.

    async def _head(
        self, request: web.BaseRequest, asked: S3Request, cors: dict[str, str]
    ) -> web.StreamResponse:
        described = await self._buckets[asked.bucket].head(asked.key)
        status, headers, want = _begin(request, described, slice_of(request.headers.get("Range")))
        return _response(request, status, {**headers, "Content-Length": str(want.size), **cors})

    async def _get(
        self, request: web.BaseRequest, asked: S3Request, cors: dict[str, str], *, is_signed: bool
    ) -> web.StreamResponse:
        bucket, wanted = self._buckets[asked.bucket], slice_of(request.headers.get("Range"))
        tries_left = TRIES
        while True:
            try:
                entry, download = await bucket.open(asked.key, wanted)
            except IsADirectoryError:
                if is_signed:
                    raise
                return _response(request, 301, {**_SERVER, "Location": f"{request.raw_path}/", **cors})
            status, headers, want = _begin(request, bucket.described(entry.object), wanted)
            headers = {**headers, **cors} if cors else headers
            if status == 304:
                return _response(request, status, headers)
            try:
                if want.size <= PIECE:
                    body = await bucket.read(entry, want, download)
                    return _response(request, status, headers, body)
                return await _stream(request, bucket, entry, want, download, status, headers)
            except (ObjectChanged, ChecksumMismatch):  # before the first byte: the next version may answer
                bucket.expire(entry)
                tries_left -= 1
                if not tries_left:
                    raise

    # Keys.

    async def _list(self, asked: S3Request, query: Query) -> bytes:
        given, is_v2 = dict(query), asked.operation == "ListObjectsV2"
        prefix, delimiter = given.get("prefix", ""), given.get("delimiter", "")
        token = given.get("continuation-token" if is_v2 else "marker", "")
        after = (unquote(token) if is_v2 else token) or given.get("start-after", "")
        encoding, most = given.get("encoding-type", ""), _most(given.get("max-keys", ""))
        if encoding not in ("", "url"):
            raise S3Error("InvalidArgument", "encoding-type must be url")
        bucket = self._buckets[asked.bucket]
        table = await bucket.table(prefix, one_level=delimiter == "/", is_first=not token)
        page = page_of(table.keys, prefix=prefix, delimiter=delimiter, after=after, most=most)
        said: dict[str, object] = {"Name": asked.bucket, "Prefix": prefix, "MaxKeys": most}
        said |= {"Delimiter": delimiter} if delimiter else {}
        said |= {"EncodingType": encoding} if encoding else {}
        said["IsTruncated"] = page.is_truncated
        if is_v2:
            said |= {"KeyCount": len(page.rows) + len(page.groups)}
            said |= {name: given[key] for key, name in _ECHOED.items() if key in given}
            said |= {"NextContinuationToken": documents.quoted(page.last)} if page.is_truncated else {}
        else:
            said |= {"Marker": token} | ({"NextMarker": page.last} if page.is_truncated and delimiter else {})
        return documents.page_document(said, table, page, is_encoded=bool(encoding))

    async def _folder(self, asked: S3Request) -> bytes:
        if not asked.bucket:
            return documents.folder_page("/", [f"{name}/" for name in sorted(self._buckets)])
        table = await self._buckets[asked.bucket].table(asked.key, one_level=True, is_first=True)
        names = [key[len(asked.key) :] for key in table.keys if key != asked.key]
        if not names and asked.key:
            raise S3Error("NoSuchKey", "There is no such folder, or nothing is in it")
        return documents.folder_page(f"/{asked.bucket}/{asked.key}", names)


def _most(text: str) -> int:
    if not re.fullmatch("[0-9]{0,9}", text):
        raise S3Error("InvalidArgument", "max-keys must be a number")
    return min(int(text), MOST_IN_PAGE) if text else MOST_IN_PAGE


def _begin(
    request: web.BaseRequest, described: Described, wanted: Slice | None
) -> tuple[int, dict[str, str], Range]:
    """Return status and headers of an answer with an object, and the bytes to send. Raises S3Error."""
    size, headers = described.size, described.headers
    if is_not_modified(request.headers, described.etag, described.modified):
        return 304, headers, NO_BYTES
    if wanted is None or request.headers.get("If-Range", described.etag) != described.etag:
        return 200, headers, Range(0, size)
    want = range_in(wanted, size)
    return 206, {**headers, "Content-Range": f"bytes {want.start}-{want.stop - 1}/{size}"}, want


async def _stream(
    request: web.BaseRequest,
    bucket: Bucket,
    entry: Entry,
    want: Range,
    download: Download | None,
    status: int,
    headers: dict[str, str],
) -> web.StreamResponse:
    """Send a large body in pieces. If it cannot go on, break the connection: so the client knows that it is short."""
    response = web.StreamResponse(status=status, headers=headers)
    response.content_length = want.size
    pieces = bucket.pieces(entry, want, download)
    piece = await anext(pieces)  # an error now has a status
    try:
        await response.prepare(request)
        while piece:
            async with asyncio.timeout(STALLED_S):
                await response.write(piece)
            piece = await anext(pieces, b"")
        await response.write_eof()
    except Exception as error:  # of any kind: the status is sent already
        if request.transport is not None:
            request.transport.abort()
        if not isinstance(error, ConnectionError):
            _log(request, s3_error_of(error))
        raise ConnectionAbortedError from error
    return response


def _response(
    request: web.BaseRequest, status: int, headers: Mapping[str, str], body: bytes | None = None
) -> web.Response:
    response = web.Response(status=status, headers=headers, body=body)
    if request.can_read_body:  # a body that nobody reads
        response.force_close()
    return response


def _refusal(request: web.BaseRequest, error: S3Error, cors: Mapping[str, str]) -> web.Response:
    _log(request, error)
    path = request.raw_path.partition("?")[0]
    body = None if request.method == "HEAD" else documents.error_document(error, path)
    return _response(request, error.status, {**_XML, **error.headers, **cors}, body)


def _log(request: web.BaseRequest, error: S3Error) -> None:
    """Log an error, without the query, which may be a signature. Many clients ask for what may be absent."""
    level = logging.INFO if error.status in (404, 412, 416) else logging.WARNING
    path = request.raw_path.partition("?")[0]
    line = f"{request.method} {path}: {error.code}: {error.message}"
    logger.log(level, "%s", re.sub(r"[\x00-\x1f\x7f-\x9f]", "?", line))
