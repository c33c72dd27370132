"""`DriveOrigin`: one Google Drive account as an origin."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, BinaryIO

from cachedfs.common.event_loop import side_by_side
from cachedfs.common.types import AnyVersion, Changes, ObjectInfo
from cachedfs.errors import ObjectNotFound
from cachedfs.origins.base import Origin, PathLock, int_of, subject_of
from cachedfs.origins.drive import api, failures
from cachedfs.origins.drive.client import DriveAccount
from cachedfs.origins.drive.drive_path import MY_DRIVE, has_feed, place_of, plain_path
from cachedfs.origins.drive.mutations import DriveWriter
from cachedfs.origins.drive.paths import PathResolver
from cachedfs.origins.drive.read import DriveMediaRead
from cachedfs.origins.inner_filesystem import AsyncOnce, invoke
from cachedfs.origins.origin_errors import mapped
from cachedfs.origins.upload import UploadContent

log = logging.getLogger("cachedfs.origins")


class DriveOrigin(Origin):
    """Files of Google Drive; the fingerprint is id, content checksum and size."""

    by_parent = is_metered = True
    roots: Sequence[str] = (MY_DRIVE,)
    _reads = DriveMediaRead

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        identity: str,
        on_request: Callable[[], None],
        path_lock: PathLock | None = None,
        filesystem_over: Callable[[DriveOrigin], Any] | None = None,
        **of_account: Any,
    ) -> None:
        """Create the origin of an account; it signs in at the first request.

        `path_lock` keeps other writers off a path. `filesystem_over` creates the fsspec filesystem whose
        methods `call` calls, at its first call. Other arguments are those of `DriveAccount`.
        """
        self.identity = identity
        self.on_request = on_request
        self.options = dict(options)
        self._filesystem_over = filesystem_over
        self.account = DriveAccount(
            options,
            identity=identity,
            on_request=lambda: self.on_request(),  # whoever it is by then
            **of_account,
        )
        self._slots, self.policy = self.account.media_slots, self.account.policy
        self.tree = PathResolver(self.account)
        self.writer = DriveWriter(self.account, self.tree, path_lock)
        self._inner = AsyncOnce(self._make)

    async def filesystem(self) -> Any:
        return await self._inner.get()

    async def _make(self) -> Any:
        assert self._filesystem_over is not None
        return await asyncio.to_thread(self._filesystem_over, self)

    def url(self, path: str) -> str:
        return api.url_of(path)

    def server_time(self) -> float | None:
        clients = self.account.connected.value
        return None if clients is None else clients.metadata.server_time()

    async def aclose(self) -> None:
        await self.account.aclose()

    async def lookup(self, path: str, parent: ObjectInfo | None = None) -> ObjectInfo:
        path = plain_path(path)
        with mapped(api.url_of(path), "looking it up"):
            return await self.tree.lookup(path, parent)

    async def lookup_path(self, path: str) -> list[ObjectInfo]:
        path = plain_path(path)
        with mapped(api.url_of(path), "looking it up"):
            return await self.tree.lookup_path(path)

    @property
    def requests_per_s(self) -> float | None:
        return self.account.limits.requests.per_s()

    def spare_s(self) -> float:
        return self.account.limits.spare_s()

    async def list(
        self, folder: str, parent: ObjectInfo | None = None, *, deep: bool = False
    ) -> AsyncIterator[ObjectInfo]:
        """Yield the children of `folder`, with one request per thousand; `parent` is its own metadata."""
        folder = plain_path(folder)
        with mapped(api.url_of(folder), "listing it"):
            try:
                here = parent or await self.tree.lookup(folder)
            except ObjectNotFound:
                if deep:
                    return
                raise
            if here.kind != "directory":
                return
            if not deep:
                for info in await self.tree.children(here):
                    yield info
                return
            async with aclosing(self.tree.below(here)) as found:
                async for info in found:
                    yield info

    def lists_all(self, folder: str) -> bool:
        """Return False for a folder that was listed by its public page."""
        return plain_path(folder) not in self.tree.partly_listed

    async def changes(self, path: str, token: str | None) -> Changes | None:
        """Return what changed in My Drive or in one shared drive; None for other parts, which have no change feed.

        Also None if the feed cannot continue from this token.
        """
        path = plain_path(path)
        part = place_of(path).top
        with mapped(api.url_of(path), "asking what changed"):
            try:
                if token is None:
                    return await self._first_token(part)
                drive_id, _, page_token = token.partition("/")
                after, entries = await self.account.changes(drive_id, page_token, part)
            # Forgotten, or of a drive that is out of sight.
            except (ValueError, ObjectNotFound, failures.DriveOutOfSight) as error:
                log.info("the changes of %s have to begin anew: %s", api.url_of(part), error)
                return None
        return Changes(f"{drive_id}/{after}", tuple(map(api.change_of, entries)))

    async def _first_token(self, part: str) -> Changes | None:
        if not has_feed(part):
            return None
        if part == MY_DRIVE:  # whose folder is needed next, and cannot be another one
            token, _ = await side_by_side([self.account.start_token("", part), self.tree.folder(part)])
            return Changes(f"/{token}")
        drive_id = str((await self.tree.folder(part)).id)
        return Changes(f"{drive_id}/{await self.account.start_token(drive_id, part)}")

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        inner = await self.filesystem()
        path = subject_of(method, args)
        with mapped(api.url_of(plain_path(path)), f"calling {method}"):
            return await invoke(inner, method, *args, **options)

    async def upload(
        self, path: str, file: BinaryIO, *, replaces: ObjectInfo | AnyVersion | None, mtime_ns: int | None
    ) -> ObjectInfo:
        """Make the bytes of `file` the content of a file, which keeps its id; versions are compared just before."""
        path = plain_path(path)
        with mapped(api.url_of(path), "writing it"):
            return await self.writer.write(path, UploadContent(file), replaces=replaces, mtime_ns=mtime_ns)

    async def storage_quota(self, path: str) -> tuple[int, int] | None:
        """Return the limit and the free bytes of the account's storage; None without a limit, and for a shared drive."""
        path = plain_path(path)
        if place_of(path).top.startswith(api.SHARED):  # its organization pays for it
            return None
        found = await self.account.about("storageQuota(limit,usage)", most_tries=2)
        quota = found.get("storageQuota") or {}
        limit, usage = int_of(quota.get("limit")), int_of(quota.get("usage"))
        return None if limit is None else (limit, max(0, limit - (usage or 0)))
