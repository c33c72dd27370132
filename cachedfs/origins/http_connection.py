"""`HTTPConnection`: our own requests to a web server, and how far its evidence of versions can be trusted."""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cachedfs.common.types import ObjectInfo, Range, Suffix
from cachedfs.origins.base import range_header
from cachedfs.origins.fsspec_origin import jsonable
from cachedfs.origins.http_answers import HTTPAnswer, answer_of
from cachedfs.origins.http_request import HTTPRequest
from cachedfs.origins.retry import RetryableError

if TYPE_CHECKING:
    from cachedfs.origins.http import HTTPClient, HTTPResponse

__all__ = ["HTTPConnection", "VersionEvidence", "is_unusable_part"]

GOOD = frozenset({200, 203, 204, 206, 416})
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
        replaced = self._marked[info.path]
        if replaced is not None and not _is_back(replaced, info):
            return info
        self.mark_etag_unreliable(info)
        return replace(info, fingerprint=None)

    def remember_replaced(self, replaced: ObjectInfo) -> None:
        """Remember a version that was taken for replaced: if it comes back, it never was."""
        self._keep(replaced.path, replaced)

    def mark_etag_unreliable(self, info: ObjectInfo) -> None:
        """Give this object no fingerprint any more, and warn once."""
        self._keep(info.path, None)
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"{self._url_of(info.path)}: its ETag differs from answer to answer while its size and time stay the same, "
            "as where several servers answer. So nothing of such an object is cached, and every read goes to the server. "
            "Name one of the servers, or copy the data to where a version has one ETag.",
            stacklevel=3,
        )

    def _keep(self, path: str, replaced: ObjectInfo | None) -> None:
        self._marked[path] = replaced
        while len(self._marked) > _MOST_MARKED:
            self._marked.popitem(last=False)


def _is_back(replaced: ObjectInfo, now: ObjectInfo) -> bool:
    """Return whether an answer is of a version that had been replaced, with the time from before."""
    times = [info.details.get("Last-Modified") for info in (replaced, now)]
    return replaced.fingerprint == now.fingerprint and times[0] == times[1]


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
        headers = dict(self.inner.kwargs.get("headers") or {})
        names = {name.lower() for name in (*headers, *getattr(self.session, "headers", ()))}
        if "accept-encoding" not in names:
            headers["Accept-Encoding"] = "identity"
        if want is not None:
            headers["Range"] = range_header(want) or ""
        return HTTPRequest(
            url=str(self.inner.encode_url(path)),
            params=self.inner.kwargs.get("params") or {},
            subject=self.url_of(path),
            doing=doing,
            want=want,
            headers=headers,
            is_pinned=pinned is not None,
            good=GOOD,
            trusts_redirects=True,
        )

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
        if (decodes := self.inner.kwargs.get("auto_decompress")) is None:
            decodes = getattr(self.session, "auto_decompress", True)
        return answer_of(path, status, body.headers, url, now_s, decodes=decodes)


def is_unusable_part(answer: HTTPAnswer, body: HTTPResponse) -> bool:
    """Return whether the whole object has to be requested: a part may be encoded, or of any bytes."""
    return body.status == 206 and answer.span is None
