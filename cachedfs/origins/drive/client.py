"""`DriveAccount`: the requests to Google Drive as one account."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote

from cachedfs.common.optional_imports import importing, preload
from cachedfs.common.types import Range
from cachedfs.common.urls import import_error
from cachedfs.errors import (
    AccessDenied,
    CachedFSError,
    NotDownloadable,
    ObjectNotFound,
    OriginUnavailable,
    RequestRejected,
)
from cachedfs.origins.base import range_header
from cachedfs.origins.drive import api, failures, public
from cachedfs.origins.drive.account_key import account_key
from cachedfs.origins.drive.options import DriveOptions
from cachedfs.origins.drive.quota import DriveLimits, QuotaMeter
from cachedfs.origins.http_request import Answer, HTTPRequest
from cachedfs.origins.inner_filesystem import AsyncOnce
from cachedfs.origins.proxy import proxy_of, trusted
from cachedfs.origins.request_slots import RequestSlots
from cachedfs.origins.retry import RetryableError, RetryAttempts, RetryPolicy
from cachedfs.origins.tokens import finding_credentials
from cachedfs.origins.upload import JSON

if TYPE_CHECKING:
    from cachedfs.common.types import ObjectInfo
    from cachedfs.origins.drive.auth import DriveAuth
    from cachedfs.origins.http import HTTPClient

T = TypeVar("T")
BeforePage = Callable[[], Awaitable[object]]
_MOST_LOOKUPS = 16  # requests for metadata in flight: Drive gives one user some 50 listings a second
_SEARCH_AGAIN_S = 5.0  # a search for credentials may ask a metadata server that does not answer
_IDS = 100  # item ids asked for at once
_MOST_PAGES = 50  # of changes: to list again what is wanted costs less then
GOOD = frozenset({200, 201, 204, 308})
_MEDIA: dict[str, Any] = {"kind": "download", "good": frozenset({200, 206, 416})}


class _Connection(NamedTuple):
    """The sign-in of an account and its HTTP clients, which share one session."""

    auth: DriveAuth
    session: Any
    media: HTTPClient
    metadata: HTTPClient  # and all other requests
    exports: HTTPClient  # waits longer, for a document to be converted


class DriveAccount:
    """Requests to Google Drive as one account. Cheap to create: it signs in at the first request."""

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        identity: str = "",
        loop: asyncio.AbstractEventLoop,
        on_request: Callable[[], None],
        concurrency: int = 16,
        policy: RetryPolicy | None = None,
        meter: QuotaMeter | None = None,
    ) -> None:
        self.options = given = DriveOptions.of(options)
        self.base = given.endpoint_url
        self.policy = policy or RetryPolicy()
        self.loop = loop
        self.limits = DriveLimits(meter or QuotaMeter(), given.daily_limit, given.daily_limit_stops)
        self.media_slots = RequestSlots(concurrency)
        self.metadata_slots = RequestSlots(min(concurrency, _MOST_LOOKUPS))
        self.is_public = False  # whether to read public files at their public address
        self.public_folders = public.FolderPages(self._folder_page)
        self.without_revisions: set[str] = set()  # ids of files whose revisions Google does not give
        self._on_request = on_request
        self._key = identity.rpartition("|")[2] if "|" in identity else ""  # names the account in cache keys
        self._ids: list[str] = []
        self._asking_ids = asyncio.Lock()
        self._out_of_sight: set[str] = set()  # shared drives that this account is no member of
        self._connection = AsyncOnce(self._connect)
        self._search = AsyncOnce(self._search_again)

    # Signing in
    async def connection(self) -> _Connection:
        """Return the connection, made at the first call; raise AccessDenied or ValueError without a way to sign in."""
        async with finding_credentials("drive://", self.policy):
            return await self._connection.get()

    async def _connect(self) -> _Connection:
        with importing():
            import aiohttp

            from cachedfs.origins.http import HTTPClient, new_connector, timeouts_of

        policy = self.policy
        auth, proxy, tls = await asyncio.to_thread(_signed_in, self.options, policy)
        if not auth.is_missing and not await asyncio.to_thread(self._is_same):
            raise AccessDenied(
                "Google Drive: another account signed in since this filesystem was made: restart the program, or make a new "
                "filesystem with skip_instance_cache=True"
            )
        self.is_public = auth.is_missing
        session = aiohttp.ClientSession(connector=new_connector(ssl=tls), proxy=proxy)

        def judge(request: HTTPRequest, status: int, headers: Mapping[str, str], body: bytes) -> Exception:
            return failures.failure(request, status, headers, body, auth.signed_in)

        def client_of(slots: RequestSlots, policy: RetryPolicy) -> HTTPClient:
            return HTTPClient(
                session,
                auth,
                judge,
                slots=slots,
                on_request=self._on_request,
                policy=self.policy,
                timeouts=timeouts_of(policy),
                limits=self.limits,
            )

        slow = dataclasses.replace(policy, stall_s=policy.export_s)
        return _Connection(
            auth,
            session,
            media=client_of(self.media_slots, policy),
            metadata=client_of(self.metadata_slots, policy),
            exports=client_of(self.media_slots, slow),
        )

    def _is_same(self) -> bool:
        """Return whether the options still sign in as the account in the cache keys; blocks on files."""
        given = self.options.sign_in
        is_object = not isinstance(given.get("google_auth", ""), (str, os.PathLike))
        if not self._key or is_object or "credentials" in given:  # an object stays what it is
            return True
        return self._key == account_key(given, self.base, may_ask=False)

    async def _is_missing(self, auth: DriveAuth) -> bool:
        """Return whether there is no sign-in, also after looking for one again."""
        if auth.is_missing:
            if self._search.value is not None and time.monotonic() >= self._search.value + _SEARCH_AGAIN_S:
                self._search.take()
            await self._search.get()
            self.is_public = auth.is_missing
        return auth.is_missing

    async def _search_again(self) -> float:
        """Look for default credentials once more, and return when that was.

        They are used only if they belong to the account in the cache keys.
        """
        from cachedfs.origins.drive.auth import sign_in

        now, auth = time.monotonic(), (await self.connection()).auth
        found = await asyncio.to_thread(sign_in, self.options.sign_in)
        if not found.is_missing and await asyncio.to_thread(self._is_same):
            auth.use(found)
        return now

    async def aclose(self) -> None:
        """Close the connections; the next request creates new ones."""
        if (connection := self._connection.take()) is not None:
            await connection.session.close()

    def close_now(self) -> None:
        """Close the connections when no event loop is left to do it."""
        if (connection := self._connection.take()) is not None:
            connector = connection.session.connector
            connection.session.detach()
            if connector is not None:
                connector._close()  # its public face wants the loop

    # Any request
    def address(self, *parts: str | None, upload: bool = False) -> str:
        """Return the address of a resource, such as "files", ID, "copy"; without the parts that are empty."""
        path = "/".join(quote(part, safe="") for part in parts if part)
        return f"{self.base}/{'upload/' if upload else ''}drive/v3/{path}"

    def request(
        self,
        url: str,
        path: str,
        doing: str,
        *,
        method: str = "GET",
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] = {},
        **more: Any,
    ) -> HTTPRequest:
        """Return a request about `path`, before it is sent; `body` is sent as JSON.

        Drive redirects none but media: an answer from elsewhere says nothing about its items.
        """
        if body is not None:
            headers = {"Content-Type": JSON, **headers}
            more["data"] = json.dumps(body, ensure_ascii=False).encode()
        kind = api.kind_of(method, url)
        given: dict[str, Any] = {"params": {}, "kind": kind, "good": GOOD, "follows_redirects": False}
        given |= {"subject": api.url_of(path), "doing": doing, "method": method, "headers": headers}
        return HTTPRequest(url=url, **given | more)

    async def send(self, request: HTTPRequest) -> Answer:
        """Send a request once; return its whole answer. Raises RetryableError or the final error."""
        return await (await self.connection()).metadata.answer(request)

    async def answered(
        self,
        request: HTTPRequest,
        parse: Callable[[Answer], T],
        *,
        has_id: bool = True,
        most_tries: int | None = None,
    ) -> T:
        """Return what `parse` makes of the answer, after retries.

        A request that creates an item waits for its turn, and is retried as long as other items are being created. With
        an id that Drive generated before (`has_id`), it creates one item, however often it is sent. Without one, it is
        sent again only if it surely created none.
        """
        to, policy = await self.connection(), self.policy
        if most_tries is not None:
            policy = dataclasses.replace(policy, tries=most_tries)
        if request.kind != "download" and await self._is_missing(to.auth):
            raise AccessDenied(f"{request.subject}: {to.auth.signed_in.remedy}")
        limits = self.limits if request.kind == "create" else None
        tries, n_created = RetryAttempts(policy), self.limits.n_created
        while True:
            # What changes things must not be sent again because its answer is late.
            if request.method == "GET":
                within_s = policy.first_byte_s(policy.metadata_s, tries.n_failed)
                request = dataclasses.replace(request, within_s=within_s)
            try:
                async with limits.creating() if limits else nullcontext():
                    result = parse(await self.send(request))
            except RetryableError as failed:
                if limits and not (has_id or failed.is_rate or failed.is_unreachable):
                    remedy = "What it makes may be there all the same: look for it before you try again"
                    failed.is_final, failed.remedy = True, remedy
                if limits and failed.is_rate and limits.n_created > n_created:  # others make progress
                    tries, n_created = RetryAttempts(policy), limits.n_created
                await tries.pause(failed, request.subject, request.purpose)
            else:
                if limits:
                    limits.n_created += 1
                return result

    async def call(
        self,
        request: HTTPRequest,
        *,
        kind: str | None = "drive#file",
        asked: Mapping[str, Any] | None = None,
        **how: Any,
    ) -> dict[str, Any]:
        """Return the resource that Drive answers with, as `answered` does.

        `kind` is the kind of resource, which the request names in `fields`; None means no content. `asked` is what the
        resource has to have.
        """
        return await self.answered(
            request, lambda answer: api.resource_of(answer.status, answer.body, kind, asked), **how
        )

    # Items
    async def item(
        self, id: str, path: str, *, key: str | None = None, is_pinned: bool = False
    ) -> dict[str, Any]:
        """Return an item by its id; `key` is its resource key.

        Without an account and an API key, Google tells only about files and folders that are public, at other addresses.
        """
        given = {"fields": api.ITEM_FIELDS, **api.ANY_DRIVE}
        keys, url = api.key_headers(id, key), self.address("files", id)
        request = self.request(url, path, "looking it up", params=given, headers=keys, is_pinned=is_pinned)
        find = partial(self.call, request, asked={} if id == api.ROOT else {"id": id})
        if not path.startswith("id:"):
            return await find()
        auth = (await self.connection()).auth
        if not self.is_public:
            try:
                return await find()
            except failures.DriveAnonymous:
                self.is_public = True
        was_missing = auth.is_missing
        try:
            return await self._public_item(id, path, key, is_pinned)
        except AccessDenied:
            # Not public; but an account that signed in since may see it.
            if not was_missing or await self._is_missing(auth):
                raise
            return await find()

    # Without an account
    async def uses_pages(self, path: str) -> bool:
        """Return whether a folder is listed by its public page: nobody has signed in, and there is no API key."""
        await self.connection()
        return self.is_public and path.startswith("id:")

    async def has_new_sign_in(self) -> bool:
        """Return whether there is a new sign-in, where there was none: then folders are listed by the API."""
        auth = (await self.connection()).auth
        return not self.is_public or (auth.is_missing and not await self._is_missing(auth))

    async def _public_item(self, id: str, path: str, key: str | None, is_pinned: bool) -> dict[str, Any]:
        if is_pinned:
            return await self._public_file(id, path, key, is_pinned=True)
        if self.public_folders.is_folder(id):
            return await self.public_folders.folder(id, key, path)
        try:
            return await self._public_file(id, path, key, tries=1)
        except (AccessDenied, NotDownloadable, ObjectNotFound) as error:
            not_a_file = error
        try:
            return await self.public_folders.folder(id, key, path)
        except CachedFSError as error:
            # Only a second 404 means that there is nothing.
            is_hidden = isinstance(not_a_file, ObjectNotFound) and not isinstance(error, public.NoFolderPage)
            has_failed = isinstance(not_a_file, NotDownloadable) and not isinstance(error, AccessDenied)
            if is_hidden or has_failed:
                raise
        if not isinstance(not_a_file, NotDownloadable):
            raise not_a_file
        return await self._public_file(id, path, key, tries=1)  # its trouble may have passed

    async def public_version(self, item: dict[str, Any], path: str) -> dict[str, Any]:
        """Return an item of a folder's public page with the size and version that its own answer states."""
        if api.is_native(item["mimeType"]):
            return item
        try:
            found = await self._public_file(item["id"], path, item.get("resourceKey"))
        except ObjectNotFound as error:  # the page shows it: it is no proof that there is no such file
            raise AccessDenied(f"{error.message}; the public page of its folder shows it") from None
        return {**found, "name": item["name"]}

    async def _folder_page(self, id: str, key: str | None, path: str, is_known: bool) -> tuple[int, bytes]:
        url, params = public.page_url(self.base), {"id": id, **({"resourcekey": key} if key else {})}
        request = self.request(
            url, path, "reading its public page", params=params, kind="download", good=public.GOOD
        )

        def page_of(answer: Answer) -> tuple[int, bytes]:
            if answer.status == 500 and is_known:
                raise RetryableError("the public page of the folder answered 500")
            return answer.status, answer.body

        return await self.answered(request, page_of)

    async def _public_file(
        self, id: str, path: str, key: str | None, *, is_pinned: bool = False, tries: int = 2
    ) -> dict[str, Any]:
        request = self._public_request(id, key, path, Range(0, 1), is_pinned)
        n_failed = itertools.count(1)

        def item_of(answer: Answer) -> dict[str, Any]:
            # The answer for a folder or a document, or a passing trouble.
            if answer.status == 500 and next(n_failed) < tries:
                raise RetryableError("the public address answered 500")
            if public.is_page(answer.status, answer.headers):
                raise public.page_error(answer.status, answer.headers, answer.body, request.subject)
            return public.item_of(id, key, answer.status, answer.headers)

        return await self.answered(request, item_of)

    async def items(
        self,
        query: str,
        folder: ObjectInfo,
        path: str,
        doing: str,
        *,
        page: int = 1000,
        before_page: BeforePage | None = None,
    ) -> list[dict[str, Any]]:
        """Return all items that a query finds in one folder, with one request per `page` items (1000 at most).

        `before_page` is awaited before each page but the first.

        A listing names the shared drive only if the path begins with it, and only members can list it so. A folder that
        was shared with others is listed like one outside any drive.

        Raises AccessDenied for a folder that the account may see and not open: Drive would answer that it is empty.
        """
        if not folder.details.get("canListChildren", True):
            name = (await self.connection()).auth.signed_in.name
            raise AccessDenied(
                f"{api.url_of(path)}: you may see the folder {api.url_of(folder.path)}, not open it ({doing}): its access is "
                f"limited. Ask its owner to share this folder itself with the account that signs in ({name})"
            )
        params = {"q": query, "pageSize": str(page), "fields": api.LIST_FIELDS, **api.EVERYWHERE}
        request = self.request(self.address("files"), path, doing, params=params, headers=key_of(folder))
        drive_id = folder.details.get("driveId") if folder.path.startswith(api.SHARED) else None
        if drive_id is not None and drive_id not in self._out_of_sight:
            of_drive = {**params, "corpora": "drive", "driveId": drive_id}
            with suppress(failures.DriveOutOfSight):  # a shortcut led to a folder of another drive
                of_drive_request = dataclasses.replace(request, params=of_drive)
                return await self._all("files", of_drive_request, before_page=before_page)
            self._out_of_sight.add(drive_id)
        return await self._all("files", request, before_page=before_page)

    async def drives(self, path: str) -> list[dict[str, Any]]:
        """Return the ids and names of the shared drives, to find `path`."""
        params = {
            "pageSize": "100",
            "fields": "kind,nextPageToken,drives(id,name,capabilities(canListChildren))",
        }
        request = self.request(self.address("drives"), path, "listing the shared drives", params=params)
        drives = await self._all("drives", request, kind="drive#driveList")
        # One that is renamed meanwhile may be on two pages.
        return list({drive["id"]: drive for drive in drives}.values())

    async def _all(
        self,
        key: str,
        request: HTTPRequest,
        *,
        kind: str = "drive#fileList",
        before_page: BeforePage | None = None,
        is_again: bool = False,
    ) -> list[dict[str, Any]]:
        """Return the items of all pages; if the listing expires in the middle, list again once."""
        found, token, seen = list[dict[str, Any]](), "", set[str]()
        while token not in seen:
            seen.add(token)
            more = {"pageToken": token} if token else {}
            try:
                page = await self.call(
                    dataclasses.replace(request, params={**request.params, **more}), kind=kind
                )
            except RequestRejected:
                if is_again or not token:
                    raise
                return await self._all(key, request, kind=kind, before_page=before_page, is_again=True)
            found += page.get(key, ())
            # A page may be short, or empty, before the end: only the token tells.
            if not (token := page.get("nextPageToken", "")):
                return found
            if before_page is not None:
                await before_page()
        raise OriginUnavailable(
            f"{request.subject}: {request.doing} does not end: Drive names a page as the next one that came before. Try "
            "again later"
        )

    # Changes by others
    async def start_token(self, drive_id: str, path: str) -> str:
        """Return a token for the changes from now on, in a shared drive or ("") in everything the account owns."""
        params = {"fields": "kind,startPageToken", **api.ANY_DRIVE} | (
            {"driveId": drive_id} if drive_id else {}
        )
        url, doing = self.address("changes", "startPageToken"), "asking where its changes begin"
        request = self.request(url, path, doing, params=params)
        # The feed only saves other requests: these do not wait for it.
        return str((await self.call(request, kind="drive#startPageToken", most_tries=2))["startPageToken"])

    async def changes(self, drive_id: str, token: str, path: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the next token and the changes since `token`; raise ValueError if the token is no longer usable.

        Changes of everything the account owns include shared drives: else Drive does not report what moves there.
        """
        params = {"pageToken": token, "pageSize": "1000", "fields": api.CHANGE_FIELDS, **api.EVERYWHERE}
        params |= {"driveId": drive_id} if drive_id else {}
        entries: list[dict[str, Any]] = []
        for _ in range(_MOST_PAGES):
            request = self.request(self.address("changes"), path, "asking what changed", params=params)
            page = await self.call(request, kind="drive#changeList", most_tries=2)
            entries += page.get("changes", ())
            if (after := page.get("newStartPageToken")) is not None:
                return str(after), entries
            params = {**params, "pageToken": page["nextPageToken"]}
        raise RequestRejected(f"{api.url_of(path)}: too many changes to list")

    async def about(self, fields: str, *, most_tries: int | None = None) -> dict[str, Any]:
        """Return what Drive reports about the account."""
        request = self.request(
            self.address("about"), "", "looking up the account", params={"fields": f"kind,{fields}"}
        )
        return await self.call(request, kind="drive#about", most_tries=most_tries)

    # Own changes
    async def new_id(self, path: str) -> str:
        """Return an unused id for a new item at `path`, so that a repeated create makes one item."""
        async with self._asking_ids:
            if not self._ids:
                params = {"count": str(_IDS), "space": "drive", "fields": "kind,ids"}
                url = self.address("files", "generateIds")
                request = self.request(url, path, "asking for an id", params=params)
                self._ids += (await self.call(request, kind="drive#generatedIds"))["ids"]
            return self._ids.pop()

    async def change(
        self,
        method: str,
        id: str | None,
        path: str,
        doing: str,
        resource: Mapping[str, Any],
        params: Mapping[str, str] = {},
        *,
        headers: Mapping[str, str] = {},
    ) -> dict[str, Any]:
        """Return the item after a change. A POST creates an item: a copy of the item `id`, if there is one."""
        is_copy = method == "POST" and id is not None
        url = self.address("files", id, "copy" if is_copy else None)
        asked = {name: resource[name] for name in ("id", "name", "mimeType", "trashed") if name in resource}
        if id and not is_copy:
            asked["id"] = id
        given = {"fields": api.ITEM_FIELDS, **api.ANY_DRIVE, **params}
        request = self.request(url, path, doing, method=method, body=resource, params=given, headers=headers)
        try:
            return await self.call(request, asked=asked, has_id="id" in resource)
        except FileExistsError:
            if "id" not in resource:
                raise
            # An earlier try arrived, and only its answer did not.
            return await self.item(resource["id"], path)

    async def delete(self, id: str, path: str, doing: str, *, revision: str = "") -> None:
        """Delete an item, or one revision of it, for good."""
        url = self.address("files", id, revision and "revisions", revision)
        params = {} if revision else api.ANY_DRIVE
        await self.call(self.request(url, path, doing, method="DELETE", params=params), kind=None)

    # Media
    async def media(self, info: ObjectInfo, path: str, want: Range, revision: str = "") -> HTTPRequest:
        """Return the request for bytes of one item.

        The range always has an end, because Drive charges an open one as the whole file.
        """
        assert info.id is not None  # what has bytes has an id
        auth = (await self.connection()).auth
        if self.is_public:
            return self._public_request(info.id, info.details.get("resourceKey"), path, want, True)
        return self.request(
            self.address("files", info.id, revision and "revisions", revision),
            path,
            "",
            want=want,
            params={"alt": "media"} | ({} if revision else api.ANY_DRIVE),
            headers={"Accept-Encoding": "identity", "Range": range_header(want) or "", **key_of(info)},
            as_stored=True,
            is_pinned=True,
            **_MEDIA,
            follows_redirects=not auth.has_api_key,  # which aiohttp would send along to another host
        )

    async def export(self, info: ObjectInfo, path: str, mime: str) -> HTTPRequest:
        """Return the request for a Google document as a file of the type `mime`."""
        assert info.id is not None
        auth = (await self.connection()).auth
        return self.request(
            self.address("files", info.id, "export"),
            path,
            f"exporting it as {mime}",
            params={"mimeType": mime},  # which knows no supportsAllDrives
            headers=key_of(info),
            is_pinned=True,
            **_MEDIA,
            follows_redirects=not auth.has_api_key,
        )

    def _public_request(
        self, id: str, key: str | None, path: str, want: Range, is_pinned: bool
    ) -> HTTPRequest:
        return self.request(
            public.download_url(self.base),
            path,
            "",
            want=want,
            params={"id": id, "export": "download", "confirm": "t", **({"resourcekey": key} if key else {})},
            headers={"Accept-Encoding": "identity", "Range": range_header(want) or ""},
            as_stored=True,
            is_pinned=is_pinned,
            kind="download",
            good=public.GOOD,
        )


def _signed_in(
    options: DriveOptions, policy: RetryPolicy
) -> tuple[DriveAuth, str | None, ssl.SSLContext | bool]:
    """Return the credentials, the proxy and the TLS settings.

    Blocks on files, on imports, and perhaps on a metadata server.
    """
    try:
        with importing():
            from cachedfs.origins.drive.auth import DriveAuth, sign_in
        preload(["encodings.idna"])  # which looking for a host needs
    except ImportError as error:
        raise import_error("drive", error, "pydrive2") from error
    proxy = proxy_of(options.endpoint_url)
    auth = DriveAuth(sign_in(options.sign_in), policy)
    return auth, proxy, trusted() if options.endpoint_url.startswith("https:") else True


def key_of(info: ObjectInfo) -> dict[str, str]:
    """Return the headers that open a link-shared item."""
    return api.key_headers(info.id, info.details.get("resourceKey"))
