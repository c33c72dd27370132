"""Reads from a web server: our own requests, the headers of each answer prove the version, as far as they can.

`HTTPConnection` sends the requests, `VersionEvidence` keeps how far the ETags can be trusted, and `HTTPRead` is one read.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cachedfs.common.types import ObjectInfo, Range, Suffix
from cachedfs.errors import RequestRejected
from cachedfs.origins.base import clipped, range_header
from cachedfs.origins.fsspec_origin import jsonable
from cachedfs.origins.http_answers import HTTPAnswer, answer_of, compared
from cachedfs.origins.http_request import HTTPRequest
from cachedfs.origins.resumable_stream import ResumableRead, check_length, reaches
from cachedfs.origins.retry import RetryableError

if TYPE_CHECKING:
    from cachedfs.origins.http import HTTPClient, HTTPResponse

_GOOD = frozenset({200, 203, 204, 206, 416})
_MOST_MARKED = 10_000  # objects
_FIRST = Range(0, 1)  # what a lookup reads


class VersionEvidence:
    """Objects whose ETag is known to prove nothing, as it differs from answer to answer."""

    def __init__(self, url_of: Callable[[str], str], warn_unversioned: Callable[[str], None]) -> None:
        self._url_of, self._warn_unversioned = url_of, warn_unversioned
        # Path -> the version that was taken for replaced; None if the evidence of the object proves nothing.
        self._marked: OrderedDict[str, ObjectInfo | None] = OrderedDict()
        self._has_warned = False

    def without_unreliable_etag(self, info: ObjectInfo) -> ObjectInfo:
        """Return what an answer states, without a fingerprint if the evidence of this object proves nothing.

        Warns once of objects without a fingerprint.
        """
        if info.fingerprint is None:
            self._warn_unversioned(info.path)
            return info
        if info.path not in self._marked:
            return info
        if (replaced := self._marked[info.path]) is not None:
            times = [each.details.get("Last-Modified") for each in (replaced, info)]
            if replaced.fingerprint != info.fingerprint or times[0] != times[1]:
                return info
        self.mark_etag_unreliable(info)
        return replace(info, fingerprint=None)

    def mark_etag_unreliable(self, info: ObjectInfo) -> None:
        """Give this object no fingerprint any more, and warn once."""
        self.keep(info.path, None)
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"{self._url_of(info.path)}: its ETag differs from answer to answer while its size and time stay the same, "
            "as where several servers answer. So nothing of such an object is cached, and every read goes to the server. "
            "Name one of the servers, or copy the data to where a version has one ETag.",
            stacklevel=3,
        )

    def keep(self, path: str, replaced: ObjectInfo | None) -> None:
        """Remember a version that was taken for replaced: if it comes back, it never was."""
        self._marked[path] = replaced
        while len(self._marked) > _MOST_MARKED:
            self._marked.popitem(last=False)


class HTTPConnection(NamedTuple):
    """Requests over one session, with the options of the HTTPFileSystem `inner`."""

    inner: Any
    session: Any
    client: HTTPClient
    url_of: Callable[[str], str]
    evidence: VersionEvidence

    def request(
        self, path: str, want: Range | Suffix | None, *, doing: str = "", pinned: ObjectInfo | None = None
    ) -> HTTPRequest:
        """Return the request for bytes, as they are and not compressed unless the options say so."""
        options = self.options()
        headers = dict(options.get("headers") or {})
        names = {name.lower() for name in (*headers, *getattr(self.session, "headers", ()))}
        if "accept-encoding" not in names:
            headers["Accept-Encoding"] = "identity"
        if want is not None:
            headers["Range"] = range_header(want) or ""
        return HTTPRequest(
            url=self.address(path, pinned),
            params=options.get("params") or {},
            subject=self.url_of(path),
            doing=doing,
            want=want,
            headers=headers,
            is_pinned=pinned is not None,
            good=_GOOD,
            trusts_redirects=True,  # the servers with the bytes may be others
        )

    def options(self) -> Mapping[str, Any]:
        """Return the arguments of aiohttp for each request."""
        return self.inner.kwargs  # type: ignore[no-any-return]  # fsspec has no types

    def address(self, path: str, pinned: ObjectInfo | None) -> str:
        """Return the URL of a request for the object, or for its version `pinned`."""
        return str(self.inner.encode_url(path))

    async def head_by_get(self, path: str, *, pinned: ObjectInfo | None = None) -> ObjectInfo:
        """Return the object from the headers of a read of its first byte, or else of all bytes.

        An empty object has no first byte, and the headers of a part may not tell the size. With `pinned`, an absence is
        ObjectChanged.
        """
        request = partial(self.request, path, doing="looking it up", pinned=pinned)

        async def attempt() -> ObjectInfo:
            for want in (_FIRST, None):
                answer, body = await self.answer(path, request(want))
                with closing(body):
                    if answer is None or (want is not None and is_unusable_part(answer, body)):
                        continue
                    if answer.span is not None and answer.span.size <= 1:
                        await body.read_all()  # the connection can be used again then
                    return answer.info
            raise RetryableError("the server takes a whole object for a wrong range")

        return await self.client.retried(attempt, request(_FIRST))

    async def answer(self, path: str, request: HTTPRequest) -> tuple[HTTPAnswer | None, HTTPResponse]:
        """Send `request` once; return what the headers state, None for 416, and the response, to be closed."""
        now_s = time.time()
        body = await self.client.send(request)
        if body.status == 416:
            return None, body
        with ExitStack() as stack:
            stack.callback(body.close)
            answer = self.described(path, body, now_s)
            if not is_unusable_part(answer, body):
                answer = answer._replace(info=self.evidence.without_unreliable_etag(answer.info))
            stack.pop_all()
        return answer, body

    def described(self, path: str, body: HTTPResponse, now_s: float) -> HTTPAnswer:
        """Return what the headers of an answer state of the object at `path`."""
        url, status = jsonable(str(body.answer.url)), int(body.status)
        if (decodes := self.options().get("auto_decompress")) is None:
            decodes = getattr(self.session, "auto_decompress", True)
        return answer_of(path, status, body.headers, url, now_s, decodes=decodes)


def is_unusable_part(answer: HTTPAnswer, body: HTTPResponse) -> bool:
    """Return whether the whole object has to be requested: a part may be encoded, or of any bytes."""
    return body.status == 206 and answer.span is None


@dataclasses.dataclass(eq=False, kw_only=True)
class HTTPRead(ResumableRead):
    """A read of one version."""

    connect: Callable[[], Awaitable[HTTPConnection]]
    connection: HTTPConnection = dataclasses.field(init=False)

    async def _open(self) -> None:
        self.connection = await self.connect()
        if self._is_open:
            await self._continue()
        elif isinstance(self.want, Range) and self.want.size == 0:
            self._take_nothing(await self._current())  # HTTP cannot express an empty range
        else:
            await self._try(self._request(self.want))

    def _request(self, want: Range | Suffix | None) -> HTTPRequest:
        return self.connection.request(self.path, want, pinned=self.pinned)

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
        if answer is not None and is_unusable_part(answer, body):
            answer, body = await self._answer(self._request(None))
        if answer is None and request.want is None:
            raise RetryableError("the server takes a whole object for a wrong range")
        if answer is None:
            await self._try_span(await self._current())
        elif answer.span is None:
            await self._hold_whole(answer, body)
        else:
            span = clipped(self.want, answer.info.size or 0)
            self._begin(answer.info, span.start, span.stop)
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
        if is_unusable_part(answer, body):
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
            answer, self._response = await self.connection.answer(self.path, request)
            if answer is None:
                return None, self._response
            if (info := await self._accepted(answer.info)) is not None:
                return answer._replace(info=info), self._response

    async def _current(self) -> ObjectInfo:
        """Return the object from a lookup; raise ObjectChanged if it is not the pinned version."""
        self._response.close()
        info = None
        while info is None:
            info = await self._accepted(await self.connection.head_by_get(self.path, pinned=self.pinned))
        return info

    async def _accepted(self, now: ObjectInfo) -> ObjectInfo | None:
        """Return the pinned version if an answer is of it; raise ObjectChanged if it is of another one.

        If only the evidence differs, it is asked for again: if it stays, the object was replaced; if not, it proves
        nothing, and this returns None: the request has to be sent again.
        """
        if (known := self.pinned) is None:
            return now
        comparison, evidence = compared(known, now), self.connection.evidence
        is_other = comparison == "other"
        if comparison == "other evidence":
            self._response.close()  # a lookup needs the slot
            again = await self.connection.head_by_get(self.path, pinned=known)
            is_other = again.fingerprint is not None and compared(now, again) == "same"
            if is_other:
                evidence.keep(known.path, known)
        if is_other:
            raise self._changed(_difference(known, now))
        if comparison != "same":
            evidence.mark_etag_unreliable(now)
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
