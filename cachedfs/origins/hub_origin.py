"""`HubOrigin`: files in repositories of the Hugging Face Hub (`hf://`).

The answer with the bytes of a file names its commit and the hash of its content, so one request is lookup and read. A
branch is read at the commit that the first answer or the listing named. huggingface_hub lists, signs in and writes.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import unquote

from cachedfs.common.logging import without_secrets
from cachedfs.common.optional_imports import importing
from cachedfs.common.types import ObjectInfo, Range, Suffix
from cachedfs.errors import (
    AccessDenied,
    IsAFolder,
    NoSuchBucket,
    ObjectNotFound,
    RequestRejected,
)
from cachedfs.origins.base import Reply
from cachedfs.origins.evidence import fingerprint
from cachedfs.origins.fsspec_origin import jsonable
from cachedfs.origins.http_answers import HTTPAnswer, answer_of
from cachedfs.origins.http_origin import MOST_REDIRECTS, HTTPConnection, HTTPOrigin, HTTPRead
from cachedfs.origins.http_request import HTTPRequest
from cachedfs.origins.origin_errors import ErrorRow, mapped, refusal, retryable
from cachedfs.origins.retry import foreign

if TYPE_CHECKING:
    from cachedfs.origins.http import HTTPResponse

_COMMIT = "X-Repo-Commit"
_REPOSITORY = re.compile(
    "(?P<kind>(?:models|datasets|spaces|kernels)/|)(?!(?:models|datasets|spaces|kernels|buckets)/)(?P<id>[^/@]+/[^/@]+)"
    "(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<name>.*))?"
)
_RESET_S = re.compile(r"\bt=(\d+)")  # in the header RateLimit: seconds until requests are accepted again
_HIDDEN = (
    "no such repository, or this account may not read it; check the name, and sign in with `hf auth login`, or pass "
    'hf={{"token": ...}}'
)
# The Hub also answers 401 for a repository that does not exist: whether it does is not known then.
_ERRORS = (
    ErrorRow(404, "EntryNotFound", ObjectNotFound, "the repository has no file or folder of this name"),
    ErrorRow(404, "RevisionNotFound", ObjectNotFound, "the repository has no such branch, tag or commit"),
    ErrorRow(404, "RepoNotFound", ObjectNotFound, _HIDDEN),
    ErrorRow(401, "", AccessDenied, _HIDDEN),
    ErrorRow(
        403, "", AccessDenied,
        "access denied; accept the conditions on the page of a gated repository, with the account of the token",
    ),
)  # fmt: skip


class HubPath(NamedTuple):
    """A path in a repository, such as `datasets/org/name@branch/folder/file`."""

    root: str  # the repository, as it is written
    kind: str
    repository: str
    revision: str | None
    name: str  # in the repository

    @classmethod
    def of(cls, path: str) -> HubPath:
        """Return the parts of a path. Raises RequestRejected for one that is in no repository, as those of buckets are."""
        found = _REPOSITORY.fullmatch(path)
        if found is None:
            raise RequestRejected(
                f"hf://{path}: this names no repository; write hf://datasets/OWNER/NAME/FILE, hf://spaces/OWNER/NAME/FILE, "
                "or hf://OWNER/NAME/FILE for a model. Buckets of the Hub are read without cachedfs"
            )
        name, kind = found["name"] or "", found["kind"].removesuffix("s/") or "model"
        revision = found["revision"] and unquote(found["revision"])
        return cls(path.removesuffix(f"/{name}" if name else ""), kind, found["id"], revision, name)


class HubRead(HTTPRead):
    """A read of one version: one request, whose headers also have version and size."""

    origin: HubOrigin

    async def __aenter__(self) -> Self:
        try:
            return await super().__aenter__()
        except ObjectNotFound:
            if await self.origin.is_folder(HubPath.of(self.path)):
                raise IsAFolder(f"{self.url}: this is a folder; list it, or read a file in it") from None
            raise


class HubOrigin(HTTPOrigin):
    """Files in repositories of the Hub; the fingerprint is the hash of their content."""

    _reads = HubRead

    async def _connect(self) -> HTTPConnection:
        with importing():
            import aiohttp

            from cachedfs.origins.http import new_connector

        inner = await self.filesystem()
        session = aiohttp.ClientSession(connector=new_connector(), trust_env=True)
        client = self._client(session, failure, options={"max_redirects": MOST_REDIRECTS})
        return HTTPConnection(inner, session, client)

    def _options_of(self, inner: Any) -> Mapping[str, Any]:
        """Return the headers with the token."""
        from huggingface_hub.utils import build_hf_headers

        return {"headers": build_hf_headers(token=inner.token)}

    def _address(self, inner: Any, path: str, pinned: ObjectInfo | None) -> str:
        """Return the URL of a file: at the commit of the pinned version, where there is one."""
        from huggingface_hub import hf_hub_url

        at = HubPath.of(path)
        if not at.name:
            raise IsAFolder(f"{self.url(path)}: this is a repository; list it, or read a file in it")
        revision = at.revision if pinned is None else pinned.details.get("commit", at.revision)
        return str(
            hf_hub_url(at.repository, at.name, repo_type=at.kind, revision=revision, endpoint=inner.endpoint)
        )

    def _answer_of(self, to: HTTPConnection, path: str, body: HTTPResponse, now_s: float) -> HTTPAnswer:
        """Return the metadata that the Hub gives for a file; after a redirect, it is in an earlier answer."""
        chain = (body.answer, *reversed(body.answer.history))
        stated = next((each.headers for each in chain if _COMMIT in each.headers), None)
        if stated is None:
            raise foreign("the answer names no commit of a repository")
        answer = answer_of(path, int(body.status), body.headers, "", now_s)
        etag = (stated.get("X-Linked-ETag") or stated.get("ETag", "")).removeprefix("W/").strip('"')
        version = fingerprint({"size": answer.info.size, "sha256": etag}, now_s)
        details = {"commit": stated[_COMMIT], "etag": etag}
        if "X-Xet-Hash" in stated:
            details["xet_hash"] = stated["X-Xet-Hash"]
        return answer._replace(info=replace(answer.info, fingerprint=version, details=details))

    async def lookup(self, path: str, parent: ObjectInfo | None = None) -> ObjectInfo:
        """Return the file or folder that `path` is now: one request for a file, two for a folder or an absence."""
        path = path.strip("/")
        at = HubPath.of(path)
        if not at.name:
            with mapped(self.url(path), "looking it up", is_read=True):
                return ObjectInfo(path, "directory", details={"commit": await self._commit(at)})
        try:
            return await super().lookup(path)
        except ObjectNotFound:
            if await self.is_folder(at):
                return ObjectInfo(path, "directory")
            raise

    def read(
        self, path: str, want: Range | Suffix | None, pinned: ObjectInfo | None
    ) -> AbstractAsyncContextManager[Reply]:
        return super().read(path.strip("/"), want, pinned)

    def lists_all(self, folder: str) -> bool:
        """Return True: the Hub lists all files of a commit."""
        return True

    async def list(
        self, folder: str, parent: ObjectInfo | None = None, *, deep: bool = False
    ) -> AsyncIterator[ObjectInfo]:
        """Yield the children of `folder`, or everything below it, at one commit.

        Takes a request for the commit, and one for each 1000 names.
        """
        folder = folder.strip("/")
        at, now_s = HubPath.of(folder), time.time()
        try:
            with mapped(self.url(folder), "listing it", is_read=True):
                commit = await self._commit(at)
        except ObjectNotFound as error:
            raise NoSuchBucket(error.message) from None
        try:
            with mapped(self.url(folder), "listing it", is_read=True):
                found = await self._ask(
                    "list_repo_tree", at, at.name or None, recursive=deep, revision=commit
                )
        except ObjectNotFound:
            if deep or (await self.lookup(folder)).kind == "file":
                return
            raise
        for each in found:
            yield _described(at, commit, each, now_s)

    async def is_folder(self, at: HubPath) -> bool:
        with suppress(ObjectNotFound), mapped(self.url(at.root), "looking it up", is_read=True):
            found = await self._ask("get_paths_info", at, [at.name], revision=at.revision)
            return any(hasattr(each, "tree_id") for each in found)
        return False

    async def _commit(self, at: HubPath) -> str:
        """Return the commit that the revision of a path is now."""
        return str((await self._ask("repo_info", at, revision=at.revision, expand=["sha"])).sha)

    async def _ask(self, method: str, at: HubPath, *args: Any, **options: Any) -> Any:
        """Return the result of a method of huggingface_hub's HfApi, which blocks: of a generator, all it yields."""
        from huggingface_hub import HfApi

        inner = await self.filesystem()
        call = getattr(HfApi(endpoint=inner.endpoint, token=inner.token), method)

        def result() -> Any:
            found = call(at.repository, *args, repo_type=at.kind, **options)
            return [*found] if isinstance(found, Iterator) else found

        async with self._slots.slot(method, self.url(at.root)):
            self.on_request()
            return await asyncio.to_thread(result)


def _described(at: HubPath, commit: str, entry: Any, now_s: float) -> ObjectInfo:
    """Return the file or folder that an entry of a listing is."""
    path = f"{at.root}/{entry.path}"
    if hasattr(entry, "tree_id"):
        return ObjectInfo(path, "directory", details={"commit": commit})
    details = {name: getattr(entry, name, None) for name in ("blob_id", "lfs", "xet_hash")}
    details = {"commit": commit, **jsonable({name: value for name, value in details.items() if value})}
    version = fingerprint({"size": entry.size, **details}, now_s)
    return ObjectInfo(path, "file", entry.size, version, details=details)


def failure(request: HTTPRequest, status: int, headers: Mapping[str, str], body: bytes) -> Exception:
    """Return what an error answer of the Hub means: a reason to retry, or the exception to raise."""
    reason, reset = headers.get("X-Error-Code", ""), _RESET_S.search(headers.get("RateLimit", ""))
    text = without_secrets(headers.get("X-Error-Message", reason))
    said = f"{status}: {text}" if text else str(status)
    if reset is not None:
        headers = {"retry-after": reset[1]}
    if (failed := retryable(status, (), said, headers)) is not None:
        return failed
    if status == 404 and reason not in {row.reason for row in _ERRORS if row.reason}:
        return foreign(f"the answer {said} does not look like one of the Hub")
    return refusal(request, status, said, _ERRORS, reasons={reason})
