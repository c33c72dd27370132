"""`HTTPRead`: one read of one version from a web server; the headers of each answer prove the version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from cachedfs.common.types import ObjectInfo, Range, Suffix
from cachedfs.errors import ObjectChanged, RequestRejected
from cachedfs.origins.base import Reply, clipped
from cachedfs.origins.http_answers import HTTPAnswer, compared
from cachedfs.origins.http_connection import is_unusable_part
from cachedfs.origins.origin_errors import mapped
from cachedfs.origins.resumable_stream import RangeNotSatisfiable, ResumableRead, reaches
from cachedfs.origins.retry import RetryableError, RetryReason

if TYPE_CHECKING:
    from cachedfs.origins.http import HTTPRequest, HTTPResponse
    from cachedfs.origins.http_connection import HTTPConnection

__all__ = ["HTTPRead"]


class HTTPRead(ResumableRead):
    """A read of one version."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[HTTPConnection]],
        url: str,
        path: str,
        want: Range | Suffix | None,
        pinned: ObjectInfo | None,
    ) -> None:
        super().__init__(url, want, pinned)
        self._connect, self._path = connect, path
        # Where the answer being received ends: a server may send less than it was asked for.
        self._part_stop = -1

    async def __aenter__(self) -> Reply:
        with mapped(self._url, self._doing):
            self._connection = await self._connect()
        self._tries = self._connection.client.new_tries()
        return await super().__aenter__()

    async def _begin(self) -> None:
        if isinstance(self._want, Range) and self._want.size == 0:
            self._settle_empty(await self._current())  # HTTP cannot express an empty range
            return
        try:
            await self._open(self._want)
        except RequestRejected:
            if not isinstance(self._want, Suffix):
                raise
            # Not all servers know ranges that count from the end.
            await self._open_suffix(await self._current())

    async def _resume(self, left: Range, failed: RetryableError) -> None:
        """Request the remaining bytes of the same version."""
        request = self._request(left)
        if self._arrived != self._part_stop:
            await self._connection.client.pause(failed, request, self._tries)
        await self._connection.client.retried(partial(self._continue, request, left), request, self._tries)

    # Opening
    def _request(self, want: Range | Suffix | None) -> HTTPRequest:
        is_pinned = self._pinned is not None or self._part_stop >= 0
        return self._connection.request(self._path, want, doing=self._doing, is_pinned=is_pinned)

    async def _open(self, want: Range | Suffix | None) -> None:
        request = self._request(want)
        await self._connection.client.retried(partial(self._try, request, want), request, self._tries)

    async def _try(self, request: HTTPRequest, want: Range | Suffix | None) -> None:
        """Take version, size and range from the headers of one attempt."""
        answer, body = await self._answer(request, self._pinned)
        if answer is not None and is_unusable_part(answer, body):
            answer, body = await self._answer(self._request(None), self._pinned)
        if answer is None:
            await self._try_otherwise(request, want)
        elif answer.span is None:
            await self._hold_whole(answer, body)
        else:
            span = clipped(want, answer.info.size or 0)
            self._settle(answer.info, span)
            if span.size:
                self._receive_part(answer.span, body)

    async def _try_otherwise(self, request: HTTPRequest, want: Range | Suffix | None) -> None:
        """After a 416, settle on no bytes, read a suffix as a range, or read the whole object."""
        if "Range" not in request.headers:
            raise RangeNotSatisfiable(RetryReason("the server takes a whole object for a wrong range"))
        info = await self._current()
        if info.size is not None and not reaches(want, info.size):
            self._settle_empty(info)
        elif isinstance(want, Suffix):
            await self._open_suffix(info)
        else:  # the range is in the object, but not in its encoded form
            await self._try(self._request(None), want)

    async def _open_suffix(self, info: ObjectInfo) -> None:
        await self._open(None if info.size is None else clipped(self._want, info.size))

    async def _hold_whole(self, answer: HTTPAnswer, body: HTTPResponse) -> None:
        """Hold all bytes of an object whose size is known only at its end, and keep the range that was requested."""
        if is_unusable_part(answer, body):
            raise RetryableError(RetryReason("the server answers with a part of unknown size"))
        pieces = []
        while piece := await body.read_some():
            pieces.append(piece)
        data = b"".join(pieces)
        if answer.info.size not in (None, len(data)):
            raise self._changed(f"it had {answer.info.size} bytes, and has {len(data)}")
        span = clipped(self._want, len(data))
        self._settle(replace(answer.info, size=len(data)), span)
        self._arrived = span.stop
        if span.size:
            self._held.append(data[span.start : span.stop])

    async def _continue(self, request: HTTPRequest, left: Range) -> None:
        """Receive the next part from another answer."""
        answer, body = await self._answer(request, self.info)
        if answer is None:
            await self._current()  # shorter by now, or gone: that is the answer
            raise RangeNotSatisfiable(RetryReason("the server rejects the range"))
        if answer.span is None:
            raise RetryableError(RetryReason("the answer does not state which bytes it has"))
        self._receive_part(answer.span, body)

    def _receive_part(self, span: Range, body: HTTPResponse) -> None:
        if not span.start <= self._arrived < span.stop:
            raise RetryableError(
                RetryReason(
                    f"the answer is of bytes {span.start} to {span.stop}, not from {self._arrived} on"
                )
            )
        self._receive(body, span.start, span.stop)
        self._part_stop = min(span.stop, self.stop)

    # Versions
    async def _answer(
        self, request: HTTPRequest, known: ObjectInfo | None
    ) -> tuple[HTTPAnswer | None, HTTPResponse]:
        """Send `request`; return what its headers state, None for 416, and the response.

        Raises ObjectChanged if it is of another version than `known`; else its info is that of `known`.
        """
        while True:
            await self._attempt.aclose()
            entered = self._connection.answer(self._path, request)
            answer, body = await self._attempt.enter_async_context(entered)
            if answer is None or known is None:
                return answer, body
            if self._is_same(known, answer.info):
                return answer._replace(info=_of_version(known, answer.info)), body
            await self._attempt.aclose()  # a lookup needs the slot
            await self._check_evidence(known, answer.info)

    def _is_same(self, known: ObjectInfo, now: ObjectInfo) -> bool:
        """Return whether an answer is of the version `known`; False if only the evidence says no."""
        comparison = compared(known, now)
        if comparison == "other":
            raise self._changed(_difference(known, now))
        if comparison == "unreliable etag":
            self._connection.evidence.mark_etag_unreliable(now)
        return comparison != "other evidence"

    async def _check_evidence(self, known: ObjectInfo, now: ObjectInfo) -> None:
        """Ask for the evidence again: if it stays as it is `now`, the object was replaced; if not, it proves nothing."""
        again = await self._connection.head_by_get(self._path, is_pinned=True)
        if again.fingerprint is not None and compared(now, again) == "same":
            self._connection.evidence.remember_replaced(known)
            raise self._changed(_difference(known, now))
        self._connection.evidence.mark_etag_unreliable(now)

    async def _current(self) -> ObjectInfo:
        """Return the object from a lookup; raise ObjectChanged if it is not the pinned version."""
        await self._attempt.aclose()
        known = self._pinned
        while True:
            now = await self._connection.head_by_get(self._path, is_pinned=known is not None)
            if known is None:
                return now
            if self._is_same(known, now):
                return _of_version(known, now)
            await self._check_evidence(known, now)

    async def _doubt(self) -> None:
        """Do nothing: there is no checksum."""

    def _changed(self, how: str) -> ObjectChanged:
        return ObjectChanged(
            f"{self._url}: the object was replaced while it was read ({self._doing}: {how}); open it again"
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
