"""`DriveMediaRead`: one read of exactly one version from Google Drive, which has no conditional read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, NoReturn

from cachedfs.common.checksums import StatedChecksum
from cachedfs.common.types import ObjectInfo, Range, Suffix
from cachedfs.errors import (
    AccessDenied,
    IsAFolder,
    NotDownloadable,
    ObjectChanged,
    ObjectNotFound,
    RequestRejected,
)
from cachedfs.origins.base import clipped, content_range, number
from cachedfs.origins.drive import api, failures, public
from cachedfs.origins.drive.options import exported_as, kind_of, types_of
from cachedfs.origins.evidence import is_same_evidence
from cachedfs.origins.resumable_stream import WHOLE, RangeNotSatisfiable, ResumableRead
from cachedfs.origins.retry import RetryableError, RetryReason

if TYPE_CHECKING:
    from cachedfs.origins.drive.client import DriveAccount
    from cachedfs.origins.drive.paths import PathResolver
    from cachedfs.origins.http import HTTPRequest

__all__ = ["WHOLE", "DriveMediaRead", "Proof", "must_have_bytes", "proof_of"]

Proof = Literal["checksum", "revision", "second look"]


def proof_of(info: ObjectInfo, span: Range) -> Proof:
    """Return how to prove that the bytes of `span` are of the version `info`.

    By the MD5, if the whole file is read in one piece of at most 8 MiB. Else by requesting one revision, if this
    account may. Else by a second lookup after the first bytes arrive: if the file is the same before the request and
    after the answer began, it was the same in between.
    """
    if span.size == info.size and span.size <= WHOLE and "md5Checksum" in info.details:
        return "checksum"
    if info.details.get("canReadRevisions") and "headRevisionId" in info.details:
        return "revision"
    return "second look"


def must_have_bytes(info: ObjectInfo, exports: Mapping[str, str] = {}) -> None:
    """Raise an error that says why `info` cannot be read, if it cannot.

    `exports` are the types that Google documents are exported as.
    """
    url = api.url_of(info.path)
    if info.kind == "directory":
        raise IsAFolder(f"{url}: this is a folder; list it, or read a file in it")
    if info.details.get("dangling"):
        raise ObjectNotFound(
            f"{url}: a shortcut to a file that is gone, or that is not shared with this account"
        )
    if info.size is None and exported_as(info, exports) is None:
        if not (kind := kind_of(info)):
            raise NotDownloadable(
                f"{url}: Drive does not say how large this file is ({info.details.get('mimeType')}), so it cannot be read; "
                "a copy of it, made in Drive, may have a size"
            )
        raise NotDownloadable(
            f"{url}: this is a document of Google's own ({info.details.get('mimeType', 'of no known kind')}) and has no "
            f"bytes; say what it shall be exported as ({types_of(kind)}), as in drive={{'export': {{{kind!r}: 'pdf'}}}}, "
            "or download it as a file from its menu in Drive, and put that file into Drive"
        )
    if not info.details.get("canDownload", True):
        raise AccessDenied(f"{url}: its owner has switched off downloading for this account")


class DriveMediaRead(ResumableRead):
    """A read of one version of one file."""

    def __init__(
        self,
        account: DriveAccount,
        tree: PathResolver,
        path: str,
        want: Range | Suffix | None,
        pinned: ObjectInfo | None,
    ) -> None:
        super().__init__(api.url_of(path), want, pinned)
        self._account, self._tree, self._path = account, tree, path
        self._by: Proof = "second look"
        self._second_look: asyncio.Task[None] | None = None

    # Beginning
    async def _begin(self) -> None:
        self._to, self._tries = await self._account.connection(), self._account.new_tries()
        try:
            await self._begin_with(self._pinned or await self._tree.lookup(self._path))
        except ObjectChanged:
            if self._pinned is not None:
                raise
            # Nobody has seen a byte: the newer version is as good.
            await self._begin_with(await self._tree.lookup(self._path))

    async def _begin_with(self, info: ObjectInfo) -> None:
        must_have_bytes(info, self._account.options.exports)
        if (mime := exported_as(info, self._account.options.exports)) is not None:
            await self._export(info, mime)
            return
        if info.fingerprint is None:
            self._tree.warn_unprovable(self._path)
        assert info.size is not None
        span = clipped(self._want, info.size)
        self._settle(info, span)
        if span.size == 0:
            if self._pinned is not None:
                await self._look()  # no bytes will tell
            return
        self._by = proof_of(info, span)
        if self._by == "revision" and info.id in self._account.without_revisions:
            self._by = "second look"
        if self._by == "checksum":
            self._proof = StatedChecksum("md5", info.details["md5Checksum"])
        await self._to.media.retried(partial(self._try, span), await self._request(span), self._tries)

    async def _request(self, span: Range) -> HTTPRequest:
        revision = self.info.details["headRevisionId"] if self._by == "revision" else ""
        return await self._account.media(self.info, self._path, span, revision)

    async def _resume(self, left: Range, failed: RetryableError) -> None:
        request = await self._request(left)
        await self._to.media.pause(failed, request, self._tries)
        await self._to.media.retried(partial(self._try, left), request, self._tries)

    # Documents
    async def _export(self, info: ObjectInfo, mime: str) -> None:
        """Hold the whole export of a document: an export has no ranges, and no size before its end."""
        request = await self._account.export(info, self._path, mime)
        try:
            data = await self._to.exports.retried(partial(self._whole, request, mime), request, self._tries)
        except RequestRejected as error:
            kind = kind_of(info)
            raise RequestRejected(
                f"{self._url}: Drive does not export a {kind} as {mime} (but as {types_of(kind)}): {error}"
            ) from error
        span = clipped(self._want, len(data))
        self._settle(replace(info, size=len(data)), span)
        self._arrived = span.stop
        if span.size:
            self._held.append(data[span.start : span.stop])

    async def _whole(self, request: HTTPRequest, mime: str) -> bytes:
        async with self._to.exports.exchange(request) as body:
            came = body.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if body.status != 200 or (came == "text/html" != mime):
                raise RetryableError(
                    RetryReason(f"the answer ({body.status}, {came or 'of no type'}) is not the export")
                )
            return await body.read_all()

    # One try
    async def _try(self, span: Range) -> None:
        """Open the body of `span`; if a revision cannot be read, prove the version by a second lookup instead."""
        try:
            await self._send_acknowledged(span)
        except (AccessDenied, ObjectChanged):
            if self._by != "revision":
                raise
            await self._look()  # of another version now, or gone: that is the answer
            self._account.without_revisions.add(str(self.info.id))
            self._by = "second look"
            await self._send_acknowledged(span)

    async def _send_acknowledged(self, span: Range) -> None:
        """Open the body; of a file that Google takes for malware only if that is acknowledged.

        Google refuses an acknowledgement for any other file.
        """
        request = await self._request(span)
        try:
            await self._send(request, span)
        except failures.DriveAbusiveFile as error:
            if not self._account.options.acknowledge_abuse:
                raise AccessDenied(str(error)) from None
            params = {**request.params, "acknowledgeAbuse": "true"}
            await self._send(replace(request, params=params), span)

    async def _send(self, request: HTTPRequest, span: Range) -> None:
        await self._attempt.aclose()
        exchange = self._to.media.exchange(request, within_s=self._tries.media_s)
        body = await self._attempt.enter_async_context(exchange)
        try:
            if self._account.is_public and body.status == 500:  # the lookup found a file
                raise RetryableError(RetryReason("the public address answered 500"))
            if self._account.is_public and public.is_page(body.status, body.headers):
                page = await body.read_error()
                raise public.page_error(body.status, body.headers, page, self._url)
            if body.status == 416:
                await self._look()  # shorter by now: that is the answer
            start = self._start_of(body.status, body.headers, span)
            assert self.info.size is not None
            self._receive(body, start, self.info.size if body.status == 200 else span.stop)
        except BaseException:  # a cancellation too: the body is open, and nobody else closes it
            await self._attempt.aclose()
            raise
        if self._by == "second look":
            self._second_look = asyncio.ensure_future(self._look())
            self._attempt.push_async_callback(self._drop_look, self._second_look)

    def _start_of(self, status: int, headers: Mapping[str, str], span: Range) -> int:
        """Return the offset in the file where the body starts; raise an error if the headers are wrong."""
        if status == 416:
            raise RangeNotSatisfiable(RetryReason("no byte of the file is in the range"))
        encoding = headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":  # it was not asked for
            raise RetryableError(RetryReason(f"the answer is encoded as {encoding}: something repacked it"))
        if status == 200:
            # A network's own page is no file, and a checksum is the only other thing to tell them apart.
            length = number(headers.get("Content-Length"))
            if length != self.info.size and (length is not None or self._by != "checksum"):
                raise RetryableError(
                    RetryReason(f"the answer has {length} bytes, and the file {self.info.size}")
                )
            return 0
        try:
            start, stop, total = content_range(headers.get("Content-Range", ""))
        except ValueError as error:
            raise RetryableError(RetryReason(str(error))) from error
        if total not in (None, self.info.size):
            self._raise_changed(f"it has {total} bytes now, not {self.info.size}")
        if (start, stop) != (span.start, span.stop):
            raise RetryableError(
                RetryReason(f"the answer is of bytes {start} to {stop}, not {span.start} to {span.stop}")
            )
        return start

    # Proofs
    async def _prove(self) -> None:
        await super()._prove()
        if self._second_look is not None:
            await self._hold_until_seen(self._second_look)

    async def _doubt(self) -> None:
        await self._look()

    async def _hold_until_seen(self, look: asyncio.Task[None]) -> None:
        """Hold arriving bytes until the second lookup is done, as far as memory allows."""
        n_held = sum(map(len, self._held))
        while self._arrived < self.stop and n_held < 2 * WHOLE and not look.done():
            self._held.append(await self._take())
            n_held += len(self._held[-1])
        await look
        self._second_look = None

    async def _look(self) -> None:
        """Raise ObjectChanged unless the file is still the version being read."""
        assert self.info.id is not None
        key = self.info.details.get("resourceKey")
        item = await self._account.item(self.info.id, self._path, key=key, is_pinned=True)
        now = api.item_info(item, self._path)
        if not _is_same(now, self.info):
            self._raise_changed(f"it was {self.info.fingerprint}, and is {now.fingerprint}")

    async def _drop_look(self, look: asyncio.Task[None]) -> None:
        self._second_look = None
        look.cancel()
        await asyncio.gather(look, return_exceptions=True)  # whoever waits for bytes has had the outcome

    def _raise_changed(self, how: str) -> NoReturn:
        raise ObjectChanged(f"{self._url}: the file was replaced while it was read ({how}); open it again")


def _is_same(now: ObjectInfo, then: ObjectInfo) -> bool:
    """Return whether two lookups of a file show that nothing was written between them.

    Not the checksum alone: a file that was replaced and restored has the same one, though the bytes between differed.
    """
    if (now.size, now.details.get("md5Checksum")) != (then.size, then.details.get("md5Checksum")):
        return False
    one, other = (each.details.get("headRevisionId") for each in (now, then))
    if one or other:
        return is_same_evidence(one, other)
    return bool(now.details.get("modified") == then.details.get("modified"))
