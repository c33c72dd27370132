"""`DriveMediaRead`: one read of exactly one version from Google Drive, which has no conditional read."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from cachedfs.common.types import ObjectInfo, Range
from cachedfs.errors import (
    AccessDenied,
    IsAFolder,
    NotDownloadable,
    ObjectChanged,
    ObjectNotFound,
    RequestRejected,
)
from cachedfs.origins.base import clipped, content_range, int_of
from cachedfs.origins.drive import api, failures, public
from cachedfs.origins.drive.drive_path import plain_path
from cachedfs.origins.drive.options import exported_as, kind_of, types_of
from cachedfs.origins.evidence import is_same_evidence
from cachedfs.origins.http_request import HTTPRequest
from cachedfs.origins.resumable_stream import WHOLE, ResumableRead, check_length
from cachedfs.origins.retry import RetryableError

if TYPE_CHECKING:
    from cachedfs.origins.drive.client import DriveAccount
    from cachedfs.origins.drive.paths import PathResolver

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


def must_have_bytes(info: ObjectInfo, exports: Mapping[str, str] | None = None) -> None:
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


@dataclasses.dataclass(eq=False)
class DriveMediaRead(ResumableRead):
    """A read of one version of one file."""

    account: DriveAccount = dataclasses.field(init=False)
    tree: PathResolver = dataclasses.field(init=False)
    _by: Proof = "second look"
    _is_chosen: bool = False  # the version to read, in `info`
    _n_changed: int = 0  # how often it was replaced before its first byte
    _export_as: str | None = None  # the type of a document

    def __post_init__(self) -> None:
        self.path, self.account, self.tree = plain_path(self.path), self.origin.account, self.origin.tree

    async def _open(self) -> None:
        try:
            await self._open_version()
        except ObjectChanged:
            if self.pinned is not None or self._n_changed:
                raise
            # Nobody has seen a byte: the newer version is as good.
            self._n_changed, self._is_chosen = 1, False
            await self._open_version()

    async def _open_version(self) -> None:
        """Choose the version, if none is chosen yet, and send one attempt for its bytes."""
        self._to = await self.account.clients()
        if not self._is_chosen:
            self._choose(self.pinned or await self.tree.lookup(self.path))
        if self._export_as is not None:
            await self._export(self._export_as)
        elif self._at < self.stop:
            await self._try(Range(self._at, self.stop))
        elif self.pinned is not None:
            await self._look_up()  # no bytes will tell

    def _choose(self, info: ObjectInfo) -> None:
        """Set the version, the range and how to prove that the bytes are of this version."""
        must_have_bytes(info, self.account.options.export)
        self._export_as, self.info = exported_as(info, self.account.options.export), info
        if self._export_as is None:
            if info.fingerprint is None:
                self.tree.warn_unprovable(self.path)
            assert info.size is not None
            span = clipped(self.want, info.size)
            self._by = proof_of(info, span)
            if self._by == "revision" and info.id in self.account.without_revisions:
                self._by = "second look"
            self.start, self._at, self.stop = span.start, span.start, span.stop
            self._expect_checksum(WHOLE if self._by == "checksum" and span.size else 0)
        self._is_chosen = True

    async def _export(self, mime: str) -> None:
        """Hold the whole export of a document: an export has no ranges, and no size before its end."""
        request = await self.account.export(self.info, self.path, mime)
        self._doing = request.doing
        try:
            self._response = body = await self._to.exports.send(request)
        except RequestRejected as error:
            kind = kind_of(self.info)
            raise RequestRejected(
                f"{self.url}: Drive does not export a {kind} as {mime} (but as {types_of(kind)}): {error}"
            ) from error
        came = body.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if body.status != 200 or (came == "text/html" != mime):
            raise RetryableError(f"the answer ({body.status}, {came or 'of no type'}) is not the export")
        self._take_whole(self.info, await body.read_all())

    # One attempt
    async def _try(self, span: Range) -> None:
        """Open the body of `span`; if a revision cannot be read, prove the version by a second lookup instead."""
        try:
            await self._send_acknowledged(span)
        except (AccessDenied, ObjectChanged):
            if self._by != "revision":
                raise
            self._response.close()
            await self._look_up()  # of another version now, or gone: that is the answer
            self.account.without_revisions.add(str(self.info.id))
            self._by = "second look"
            await self._send_acknowledged(span)

    async def _send_acknowledged(self, span: Range) -> None:
        """Open the body; of a file that Google takes for malware only if that is acknowledged.

        Google accepts no acknowledgement for any other file.
        """
        revision = self.info.details["headRevisionId"] if self._by == "revision" else ""
        request = await self.account.media(self.info, self.path, span, revision)
        try:
            await self._send(request, span)
        except failures.DriveAbusiveFile as error:
            if not self.account.options.acknowledge_abuse:
                raise AccessDenied(str(error)) from None
            params = {**request.params, "acknowledgeAbuse": "true"}
            await self._send(dataclasses.replace(request, params=params), span)

    async def _send(self, request: HTTPRequest, span: Range) -> None:
        assert self.info.size is not None
        self._response.close()
        request = dataclasses.replace(request, within_s=self._tries.first_byte_s(self.account.policy.media_s))
        self._response = body = await self._to.media.send(request)
        status = int(body.status)
        if self.account.is_public and status == 500:  # the lookup found a file
            raise RetryableError("the public address answered 500")
        if self.account.is_public and public.is_page(status, body.headers):
            raise failures.page_failure(request, status, await body.read_start())
        if status == 416:
            await self._look_up()  # shorter by now: that is the answer
        self._offset = self._start_of(status, body.headers, span)
        self._body_stop = self.info.size if status == 200 else span.stop
        check_length(body, self._body_stop - self._offset)
        if self._by == "second look":
            self._look = asyncio.ensure_future(self._look_up())

    def _start_of(self, status: int, headers: Mapping[str, str], span: Range) -> int:
        """Return the offset in the file where the body starts; raise an error if the headers are wrong."""
        if status == 416:
            raise RetryableError("no byte of the file is in the range")
        encoding = headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":  # it was not asked for
            raise RetryableError(f"the answer is encoded as {encoding}: something repacked it")
        if status == 200:
            # A network's own page is no file, and a checksum is the only other thing to tell them apart.
            length = int_of(headers.get("Content-Length"))
            if length != self.info.size and (length is not None or self._by != "checksum"):
                raise RetryableError(f"the answer has {length} bytes, and the file {self.info.size}")
            return 0
        try:
            start, stop, total = content_range(headers.get("Content-Range", ""))
        except ValueError as error:
            raise RetryableError(str(error)) from error
        if total not in (None, self.info.size):
            raise self._changed(f"it has {total} bytes now, not {self.info.size}")
        if (start, stop) != (span.start, span.stop):
            raise RetryableError(f"the answer is of bytes {start} to {stop}, not {span.start} to {span.stop}")
        return start

    # Proofs
    async def _explain(self, failed: RetryableError) -> None:
        """Look the file up if its bytes have another checksum: it may have been replaced."""
        if failed.is_damaged:
            await self._look_up()

    async def _look_up(self) -> None:
        """Raise ObjectChanged unless the file is still the version being read."""
        assert self.info.id is not None
        key = self.info.details.get("resourceKey")
        item = await self.account.item(self.info.id, self.path, key=key, is_pinned=True)
        now = api.item_info(item, self.path)
        if not _is_same(now, self.info):
            raise self._changed(f"it was {self.info.fingerprint}, and is {now.fingerprint}")


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
