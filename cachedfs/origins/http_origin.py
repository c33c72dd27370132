"""`HTTPOrigin`: objects of a web server.

Reads and lookups are our own requests: the answer that carries the bytes also states size and version. A HEAD is never
asked, because its size may be another. fsspec's HTTPFileSystem gives the options, lists links and writes.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cachedfs.common.types import ObjectInfo, Range, Suffix
from cachedfs.errors import RequestRejected
from cachedfs.origins.base import clipped, range_header
from cachedfs.origins.fsspec_origin import FsspecOrigin, jsonable
from cachedfs.origins.http_answers import HTTPAnswer, answer_of, compared, failure
from cachedfs.origins.http_request import HTTPRequest
from cachedfs.origins.inner_filesystem import AsyncOnce
from cachedfs.origins.origin_errors import mapped
from cachedfs.origins.resumable_stream import ResumableRead, check_length, reaches
from cachedfs.origins.retry import RetryableError

if TYPE_CHECKING:
    from cachedfs.origins.http import HTTPClient, HTTPResponse

MOST_REDIRECTS = 10  # as in aiohttp
_GOOD = frozenset({200, 203, 204, 206, 416})
_MOST_MARKED = 10_000  # objects
_FIRST = Range(0, 1)  # what a lookup reads


class HTTPConnection(NamedTuple):
    """Requests over one session, with the options of the filesystem `inner`."""

    inner: Any
    session: Any
    client: HTTPClient


class HTTPRead(ResumableRead):
    """A read of one version."""

    origin: HTTPOrigin
    connection: HTTPConnection

    async def _open(self) -> None:
        self.connection = await self.origin.connection()
        if self._is_open:
            await self._continue()
        elif isinstance(self.want, Range) and self.want.size == 0:
            self._take_nothing(await self._current())  # HTTP cannot express an empty range
        else:
            await self._try(self._request(self.want))

    def _request(self, want: Range | Suffix | None) -> HTTPRequest:
        return self.origin.request(self.connection, self.path, want, pinned=self.pinned)

    async def _try(self, request: HTTPRequest) -> None:
        """Take version, size and range from the headers of one attempt."""
        try:
            answer, body = await self._answer(request)
        except RequestRejected:
            if not isinstance(request.want, Suffix):
                raise
            # Not all servers know ranges that count from the end.
            await self._try_span(await self._current())
            return
        if answer is not None and answer.is_unusable_part:
            answer, body = await self._answer(self._request(None))
        if answer is None and request.want is None:
            raise RetryableError("the server takes a whole object for a wrong range")
        if answer is None:
            await self._try_span(await self._current())
        elif answer.span is None:
            await self._hold_whole(answer, body)
        else:
            span = clipped(self.want, answer.info.size or 0)
            self.info, self.start, self._at, self.stop = answer.info, span.start, span.start, span.stop
            if span.size:
                self._receive_part(answer.span, body)

    async def _try_span(self, info: ObjectInfo) -> None:
        """Read nothing, read a suffix as a range, or read the whole object."""
        if info.size is not None and not reaches(self.want, info.size):
            self._take_nothing(info)
        elif isinstance(self.want, Suffix) and info.size is not None:
            self.want = clipped(self.want, info.size)
            await self._try(self._request(self.want))
        else:  # the range is in the object, but not in its encoded form
            await self._try(self._request(None))

    async def _hold_whole(self, answer: HTTPAnswer, body: HTTPResponse) -> None:
        """Hold all bytes of an object whose size is known only at its end."""
        if answer.is_unusable_part:
            raise RetryableError("the server answers with a part of unknown size")
        data = await body.read_start(sys.maxsize)
        if answer.info.size not in (None, len(data)):
            raise self._changed(f"it had {answer.info.size} bytes, and has {len(data)}")
        self._take_whole(answer.info, data)

    async def _continue(self) -> None:
        """Receive the next part from another answer: a server may send less than it was asked for."""
        self.want, self.pinned = Range(self._at, self.stop), self.info
        answer, body = await self._answer(self._request(self.want))
        if answer is None:
            await self._current()  # shorter by now, or gone: that is the answer
            raise RetryableError("the server rejects the range")
        if answer.span is None:
            raise RetryableError("the answer does not state which bytes it has")
        self._receive_part(answer.span, body)

    def _receive_part(self, span: Range, body: HTTPResponse) -> None:
        if not span.start <= self._at < span.stop:
            text = f"the answer is of bytes {span.start} to {span.stop}, not from {self._at} on"
            raise RetryableError(text)
        check_length(body, span.size)
        self._offset, self._body_stop = span.start, span.stop

    # Versions
    async def _answer(self, request: HTTPRequest) -> tuple[HTTPAnswer | None, HTTPResponse]:
        """Send `request`; return what its headers state, None for 416, and the response.

        Raises ObjectChanged if it is of another version than the pinned one; else its info is that of the pinned one.
        """
        while True:
            self._response.close()
            answer, self._response = await self.origin.answer(self.connection, self.path, request)
            if answer is None:
                return None, self._response
            if (info := await self._accepted(answer.info)) is not None:
                return answer._replace(info=info), self._response

    async def _current(self) -> ObjectInfo:
        """Return the object from a lookup; raise ObjectChanged if it is not the pinned version."""
        self._response.close()
        info = None
        while info is None:
            info = await self._accepted(await self.origin.head_by_get(self.path, pinned=self.pinned))
        return info

    async def _accepted(self, now: ObjectInfo) -> ObjectInfo | None:
        """Return the pinned version if an answer is of it; raise ObjectChanged if it is of another one.

        If only the evidence differs, it is asked for again: if it stays, the object was replaced; if not, it proves
        nothing, and this returns None: the request has to be sent again.
        """
        if (known := self.pinned) is None:
            return now
        comparison = compared(known, now)
        is_other = comparison == "other"
        if comparison == "other evidence":
            self._response.close()  # a lookup needs the slot
            again = await self.origin.head_by_get(self.path, pinned=known)
            is_other = again.fingerprint is not None and compared(now, again) == "same"
        if is_other:
            raise self._changed(_difference(known, now))
        if comparison != "same":
            self.origin.mark_etag_unreliable(now)
        if comparison == "other evidence":
            return None
        # With the size that is stated now, if it had none.
        return known if known.size is not None else replace(known, size=now.size)


def _difference(known: ObjectInfo, now: ObjectInfo) -> str:
    if known.size != now.size:
        return f"it had {known.size} bytes, and has {now.size}"
    return f"it was {_version_of(known)}, and is {_version_of(now)}"


def _version_of(info: ObjectInfo) -> str:
    stated = [f"{name} {info.details[name]}" for name in ("ETag", "Last-Modified") if name in info.details]
    return info.fingerprint or ", ".join(stated) or "without a version"


class HTTPOrigin(FsspecOrigin):
    """Objects behind http:// and https:// URLs; the fingerprint is the ETag, or else the time of the last change."""

    _connection: AsyncOnce[HTTPConnection]
    _reads = HTTPRead

    def __init__(self, protocol: str, options: Mapping[str, Any], **given: Any) -> None:
        super().__init__(protocol, options, **given)
        self._unreliable = dict[str, None]()  # paths whose ETag differs from answer to answer

    async def _connect(self) -> HTTPConnection:
        inner = await self.filesystem()
        session, credentials = await _new_session(inner)
        limit = getattr(getattr(session, "connector", None), "limit", 0)
        options = {name: value for name, value in inner.kwargs.items() if name not in ("headers", "params")}
        cookies = dict(credentials.get("cookies") or ()) | dict(options.get("cookies") or ())
        client = self._client(
            session,
            failure,
            options={"max_redirects": MOST_REDIRECTS, **credentials, **options, "cookies": cookies or None},
            own_timeout=getattr(session, "timeout", None) if "timeout" in inner.client_kwargs else None,
            can_wait_for_pool=0 < limit < self._slots.max_requests,
        )
        return HTTPConnection(inner, session, client)

    async def connection(self) -> HTTPConnection:
        """Return the connection, created at the first call."""
        return await self._connection.get()

    async def lookup(self, path: str, parent: ObjectInfo | None = None) -> ObjectInfo:
        """Return the object that `path` is now, by a read of its first byte; there are no folders."""
        with mapped(self.url(path), "looking it up", is_read=True):
            return await self.head_by_get(path)

    def lists_all(self, folder: str) -> bool:
        """Return False: a page need not link to everything."""
        return False

    # Requests
    def _options_of(self, inner: Any) -> Mapping[str, Any]:
        """Return the arguments of aiohttp for each request."""
        return inner.kwargs  # type: ignore[no-any-return]  # fsspec has no types

    def _address(self, inner: Any, path: str, pinned: ObjectInfo | None) -> str:
        """Return the URL of a request for the object, or for its version `pinned`."""
        return str(inner.encode_url(path))

    def request(
        self,
        to: HTTPConnection,
        path: str,
        want: Range | Suffix | None,
        *,
        doing: str = "",
        pinned: ObjectInfo | None = None,
    ) -> HTTPRequest:
        """Return the request for bytes, as they are and not compressed unless the options say so."""
        options = self._options_of(to.inner)
        headers = dict(options.get("headers") or {})
        names = {name.lower() for name in (*headers, *getattr(to.session, "headers", ()))}
        if "accept-encoding" not in names:
            headers["Accept-Encoding"] = "identity"
        if want is not None:
            headers["Range"] = range_header(want) or ""
        return HTTPRequest(
            url=self._address(to.inner, path, pinned),
            params=options.get("params") or {},
            subject=self.url(path),
            doing=doing,
            want=want,
            headers=headers,
            is_pinned=pinned is not None,
            good=_GOOD,
            trusts_redirects=True,  # the servers with the bytes may be others
        )

    async def head_by_get(self, path: str, *, pinned: ObjectInfo | None = None) -> ObjectInfo:
        """Return the object from the headers of a read of its first byte, or else of all bytes.

        An empty object has no first byte, and the headers of a part may not tell the size. With `pinned`, an absence is
        ObjectChanged.
        """
        to = await self.connection()
        request = partial(self.request, to, path, doing="looking it up", pinned=pinned)

        async def attempt() -> ObjectInfo:
            for want in (_FIRST, None):
                answer, body = await self.answer(to, path, request(want))
                with closing(body):
                    if answer is None or (want is not None and answer.is_unusable_part):
                        continue
                    if answer.span is not None and answer.span.size <= 1:
                        await body.read_all()  # the connection can be used again then
                    return answer.info
            raise RetryableError("the server takes a whole object for a wrong range")

        return await to.client.retried(attempt, request(_FIRST))

    async def answer(
        self, to: HTTPConnection, path: str, request: HTTPRequest
    ) -> tuple[HTTPAnswer | None, HTTPResponse]:
        """Send `request` once; return what the headers state, None for 416, and the response, to be closed."""
        now_s = time.time()
        body = await to.client.send(request)
        if body.status == 416:
            return None, body
        with ExitStack() as stack:
            stack.callback(body.close)
            answer = self._answer_of(to, path, body, now_s)
            if not answer.is_unusable_part:
                if answer.info.fingerprint is None:
                    self._warn(path)
                elif path in self._unreliable:
                    answer = answer._replace(info=replace(answer.info, fingerprint=None))
            stack.pop_all()
        return answer, body

    def _answer_of(self, to: HTTPConnection, path: str, body: HTTPResponse, now_s: float) -> HTTPAnswer:
        """Return what the headers of an answer state of the object at `path`."""
        url, status = jsonable(str(body.answer.url)), int(body.status)
        if (decodes := to.inner.kwargs.get("auto_decompress")) is None:
            decodes = getattr(to.session, "auto_decompress", True)
        return answer_of(path, status, body.headers, url, now_s, decodes=decodes)

    def mark_etag_unreliable(self, info: ObjectInfo) -> None:
        """Give this object no fingerprint any more, as its ETag proves nothing; warn once."""
        if not self._unreliable:
            warnings.warn(
                f"{self.url(info.path)}: its ETag differs from answer to answer while its size and time stay the same, "
                "as where several servers answer. So nothing of such an object is cached, and every read goes to the "
                "server. Name one of the servers, or copy the data to where a version has one ETag.",
                stacklevel=3,
            )
        self._unreliable[info.path] = None
        if len(self._unreliable) > _MOST_MARKED:
            del self._unreliable[next(iter(self._unreliable))]


async def _new_session(inner: Any) -> tuple[Any, dict[str, Any]]:
    """Return a session with the filesystem's settings, and its credentials, which go with each request.

    aiohttp sends the credentials of a request to no other host after a redirect, but those of a session to any.
    """
    import aiohttp
    from fsspec.implementations.http import get_client

    from cachedfs.origins.http import new_connector

    if inner.get_client is get_client:
        options = dict(inner.client_kwargs)
        credentials = {name: options.pop(name) for name in ("auth", "cookies") if name in options}
        if options.get("connector") is None:
            options["connector"] = new_connector()
        return aiohttp.ClientSession(**options), credentials
    session = await inner.set_session()
    # The filesystem creates itself another one for listings and writes, which our slots do not limit.
    inner._session = None
    return session, {}
