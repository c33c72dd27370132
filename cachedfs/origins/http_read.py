"""`HTTPRead`: one read of one version from a web server; the headers of each answer prove the version."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import TYPE_CHECKING

from cachedfs.common.types import ObjectInfo, Range, Suffix
from cachedfs.errors import ObjectChanged, RequestRejected
from cachedfs.origins.base import clipped
from cachedfs.origins.http_answers import HTTPAnswer, compared
from cachedfs.origins.http_connection import HTTPConnection, is_unusable_part
from cachedfs.origins.http_request import HTTPRequest
from cachedfs.origins.resumable_stream import ResumableRead, check_length, reaches
from cachedfs.origins.retry import RetryableError

if TYPE_CHECKING:
    from cachedfs.origins.http import HTTPResponse

__all__ = ["HTTPRead"]


@dataclasses.dataclass(eq=False, kw_only=True)
class HTTPRead(ResumableRead):
    """A read of one version."""

    connection: HTTPConnection

    async def _open(self) -> None:
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
        pieces = []
        while piece := await body.read_some():
            pieces.append(piece)
        data = b"".join(pieces)
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
        known = self.pinned
        while True:
            self._response.close()
            answer, self._response = await self.connection.answer(self.path, request)
            if answer is None or known is None:
                return answer, self._response
            if self._is_same(known, answer.info):
                return answer._replace(info=_of_version(known, answer.info)), self._response
            self._response.close()  # a lookup needs the slot
            await self._check_evidence(known, answer.info)

    def _is_same(self, known: ObjectInfo, now: ObjectInfo) -> bool:
        """Return whether an answer is of the version `known`; False if only the evidence says no."""
        comparison = compared(known, now)
        if comparison == "other":
            raise self._changed(_difference(known, now))
        if comparison == "unreliable etag":
            self.connection.evidence.mark_etag_unreliable(now)
        return comparison != "other evidence"

    async def _check_evidence(self, known: ObjectInfo, now: ObjectInfo) -> None:
        """Ask for the evidence again: if it stays as it is `now`, the object was replaced; if not, it proves nothing."""
        again = await self.connection.head_by_get(self.path, pinned=known)
        if again.fingerprint is not None and compared(now, again) == "same":
            self.connection.evidence.remember_replaced(known)
            raise self._changed(_difference(known, now))
        self.connection.evidence.mark_etag_unreliable(now)

    async def _current(self) -> ObjectInfo:
        """Return the object from a lookup; raise ObjectChanged if it is not the pinned version."""
        self._response.close()
        known = self.pinned
        while True:
            now = await self.connection.head_by_get(self.path, pinned=known)
            if known is None:
                return now
            if self._is_same(known, now):
                return _of_version(known, now)
            await self._check_evidence(known, now)

    def _changed(self, how: str) -> ObjectChanged:
        return ObjectChanged(
            f"{self.url}: the object was replaced while it was read ({self.doing}: {how}); open it again"
        )


def _of_version(known: ObjectInfo, now: ObjectInfo) -> ObjectInfo:
    """Return the version `known`, with the size that is stated now if it had none."""
    return known if known.size is not None else replace(known, size=now.size)


def _difference(known: ObjectInfo, now: ObjectInfo) -> str:
    if known.size != now.size:
        return f"it had {known.size} bytes, and has {now.size}"
    return f"it was {_version_of(known)}, and is {_version_of(now)}"


def _version_of(info: ObjectInfo) -> str:
    stated = [f"{name} {info.details[name]}" for name in ("ETag", "Last-Modified") if name in info.details]
    return info.fingerprint or ", ".join(stated) or "without a version"
