"""`DriveAccount` and `DriveConnection`: the requests to Google Drive as one account."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import random
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from cachedfs.common.optional_imports import importing, preload
from cachedfs.common.types import Range
from cachedfs.errors import AccessDenied, OriginUnavailable, RequestRejected
from cachedfs.origins.base import describe, range_header
from cachedfs.origins.drive import api, public, quota
from cachedfs.origins.drive.creation_limit import CreationLimit
from cachedfs.origins.drive.options import DriveOptions, refers_to_objects
from cachedfs.origins.inner_filesystem import AsyncOnce
from cachedfs.origins.proxy import proxy_of, trusted
from cachedfs.origins.rate_limit import RateLimiter
from cachedfs.origins.request_slots import RequestSlots
from cachedfs.origins.retry import RetryableError, RetryAttempts, RetryPolicy, RetryReason

if TYPE_CHECKING:
    from cachedfs.common.types import ObjectInfo
    from cachedfs.origins.drive.auth import DriveAuth
    from cachedfs.origins.http import HTTPClient, HTTPRequest

    Tried = Callable[[Callable[[], Awaitable[dict[str, Any]]], HTTPRequest], Awaitable[dict[str, Any]]]

__all__ = [
    "GOOD",
    "Answer",
    "DriveAccount",
    "DriveConnection",
    "PageRejected",
    "key_of",
]

T = TypeVar("T")
_MOST_LOOKUPS = 16  # requests for metadata in flight: Drive gives one user some 50 listings a second
_IDS = 100  # item ids asked for at once
_MOST_PAGES = 50  # of changes: to list again what is wanted costs less then
GOOD = frozenset({200, 201, 204, 308})


class Answer(NamedTuple):
    """A response that was read to its end."""

    status: int
    headers: Mapping[str, str]  # names in any case
    body: bytes


class DriveAccount:
    """One Drive account and its settings. Cheap to create: it signs in at the first `connection`."""

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        identity: str = "",
        loop: asyncio.AbstractEventLoop,
        on_request: Callable[[], None],
        concurrency: int = 16,
        policy: RetryPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        meter: quota.QuotaMeter | None = None,
    ) -> None:
        self.options = given = DriveOptions.of(options)
        self.on_request = on_request
        self.loop = loop
        self._key = identity.rpartition("|")[2] if "|" in identity else ""  # names the account in cache keys
        self.rate_limiter = RateLimiter(quota.REQUESTS, quota.CREATES)
        self.quota = quota.QuotaLimit(meter or quota.QuotaMeter(), given.daily_limit, given.daily_limit_stops)
        self._policy = policy or RetryPolicy()
        self._clock, self._rng = clock, rng or random.Random()
        self.creates = CreationLimit(clock=clock)
        self.media_slots = RequestSlots(concurrency)
        self.lookup_slots = RequestSlots(min(concurrency, _MOST_LOOKUPS))
        self._connection = AsyncOnce(self._connect)

    async def connection(self) -> DriveConnection:
        """Return the connection, created at the first call.

        Raises AccessDenied or ValueError if there is no way to sign in.
        """
        return await self._connection.get()

    async def _connect(self) -> DriveConnection:
        with importing():
            import aiohttp

            from cachedfs.origins.http import HTTPClient, timeout_of

        policy = self._policy
        auth, proxy, tls = await asyncio.to_thread(_signed_in, self.options, policy)
        if not auth.is_missing and not await asyncio.to_thread(self.is_same):
            raise AccessDenied(
                "Google Drive: another account signed in since this filesystem was made: restart the program, or make a new "
                "filesystem with skip_instance_cache=True"
            )
        # Our slots are the limit.
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=tls), proxy=proxy)
        client_of = partial(
            HTTPClient,
            session,
            auth,
            partial(_judge, auth),
            on_request=self.count,
            new_tries=self.new_tries,
            rate_limiter=self.rate_limiter,
            meter=self.quota,
        )
        media = client_of(slots=self.media_slots, timeout=timeout_of(policy))
        lookups = client_of(slots=self.lookup_slots, timeout=timeout_of(policy))
        slow = timeout_of(dataclasses.replace(policy, stall_s=policy.export_s))
        exports = client_of(slots=self.media_slots, timeout=slow)
        return DriveConnection(self.options, auth, session, media, lookups, exports, self)

    def is_same(self) -> bool:
        """Return whether the options still sign in as the account in the cache keys; blocks on files."""
        from cachedfs.origins.drive.account_key import account_key

        is_live = refers_to_objects(self.options.sign_in)  # which stay what they are
        return not self._key or is_live or self._key == account_key(self.options, may_ask=False)

    def new_tries(self, *, tries: int | None = None) -> RetryAttempts:
        """Return the attempts of a new operation; at most `tries`, if given."""
        policy = self._policy if tries is None else dataclasses.replace(self._policy, tries=tries)
        return RetryAttempts(policy, clock=self._clock, rng=self._rng)

    def metadata_s(self, n_failed: int) -> float:
        """Return how many seconds to wait for the answer about metadata, after `n_failed` failed attempts."""
        return self._policy.first_byte_s(self._policy.metadata_s, n_failed)

    def spare_s(self) -> float:
        """Return in how many seconds to check again whether a speculative request may be sent; 0: now."""
        return self.quota.spare_s() or self.rate_limiter.spare_s()

    def count(self) -> None:
        """Count a request that is being sent."""
        self.on_request()  # whoever it is by now

    async def aclose(self) -> None:
        """Close the connections; the next request creates new ones."""
        if (connection := self._connection.take()) is not None:
            await connection.aclose()

    def drop(self) -> None:
        """Close the connections when no event loop is left to do it."""
        if (connection := self._connection.take()) is not None:
            connection.drop()


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
        raise ImportError(
            f'drive:// needs PyDrive2, which cannot be imported ({error}): pip install "cachedfs[drive]"'
        ) from error
    proxy = proxy_of(options.endpoint_url)
    auth = DriveAuth(sign_in(options.sign_in), policy)
    return auth, proxy, trusted() if options.endpoint_url.startswith("https:") else True


class DriveConnection:
    """Requests to Google Drive as one account."""

    def __init__(
        self,
        options: DriveOptions,
        auth: DriveAuth,
        session: Any,
        media: HTTPClient,
        lookups: HTTPClient,
        exports: HTTPClient,
        account: DriveAccount,
    ) -> None:
        self.options, self.auth, self.creates = options, auth, account.creates
        self.client, self.lookups = media, lookups  # what streams media, and all other requests
        self.exports = exports  # waits longer, for a document to be converted
        self.base = options.endpoint_url
        self.abusive: set[str] = set()  # ids of files that Google takes for malware
        self.without_revisions: set[str] = set()  # ids of files whose revisions Google does not give
        self.is_public = auth.is_missing  # whether to read public files at their public address
        self._session, self._account = session, account
        self._ids: list[str] = []
        self._out_of_sight: set[str] = set()  # shared drives that this account is no member of
        self._asking_ids = asyncio.Lock()

    async def aclose(self) -> None:
        await self._session.close()

    def drop(self) -> None:
        """Close everything without the event loop."""
        connector = self._session.connector
        self._session.detach()
        if connector is not None:
            connector._close()  # its public face wants the loop

    # Media
    def media(self, info: ObjectInfo, path: str, want: Range, revision: str | None) -> HTTPRequest:
        """Return the request for bytes of one item.

        The range always has an end, because Drive charges an open one as the whole file. Google refuses an
        acknowledgement for a file that it does not take for malware, so that is sent only after it said so.
        """
        from cachedfs.origins.http import HTTPRequest

        assert info.id is not None  # what has bytes has an id
        if self.is_public:
            return self._public_request(info.id, info.details.get("resourceKey"), path, want, is_pinned=True)
        params = {"alt": "media"} | ({} if revision else api.ANY_DRIVE)
        params |= {"acknowledgeAbuse": "true"} if info.id in self.abusive else {}
        headers = {"Accept-Encoding": "identity", "Range": range_header(want) or "", **key_of(info)}
        return HTTPRequest(
            url=api.revision_url(self.base, info.id, revision)
            if revision
            else api.file_url(self.base, info.id),
            params=params,
            subject=api.url_of(path),
            doing=describe(want),
            headers=headers,
            as_stored=True,
            is_pinned=True,
            follows_redirects=not self.auth.has_api_key,  # which aiohttp would send along to another host
        )

    def export(self, info: ObjectInfo, path: str, mime: str) -> HTTPRequest:
        """Return the request for a Google document as a file of the type `mime`."""
        from cachedfs.origins.http import HTTPRequest

        assert info.id is not None
        return HTTPRequest(
            url=f"{api.file_url(self.base, info.id)}/export",
            params={"mimeType": mime},  # which knows no supportsAllDrives
            subject=api.url_of(path),
            doing=f"exporting it as {mime}",
            headers=key_of(info),
            is_pinned=True,
            follows_redirects=not self.auth.has_api_key,
        )

    # Metadata
    async def item(
        self, id: str, path: str, *, key: str | None = None, is_pinned: bool = False
    ) -> dict[str, Any]:
        """Return an item by its id; `key` is its resource key.

        Without an account and an API key, Google tells only about single files, at the public address.
        """
        if not self.is_public or not path.startswith("id:"):
            try:
                return await self._item(id, path, key, is_pinned)
            except api.DriveAnonymous:
                if not path.startswith("id:"):
                    raise
                self.is_public = True
        ask = self._public_request(id, key, path, Range(0, 1), is_pinned=is_pinned)
        n_failed = itertools.count()

        async def attempt() -> dict[str, Any]:
            answer = await self.send(ask, within_s=self._account.metadata_s(0))
            # The answer for a folder; but the first time it may be a passing trouble.
            if answer.status == 500 and next(n_failed) == 0:
                raise RetryableError(RetryReason("the public address answered 500"))
            if public.is_page(answer.status, answer.headers):
                raise public.page_error(answer.status, answer.headers, answer.body, ask.subject)
            return public.item_of(id, key, answer.status, answer.headers)

        try:
            return await self.retried(attempt, ask)
        except AccessDenied:
            # Not public; but an account that signed in since may see it.
            if not await self._search():
                raise
            return await self._item(id, path, key, is_pinned)

    async def _search(self) -> bool:
        """Look for a sign-in if there was none; return whether there is one now."""
        if self.auth.is_missing and await self.auth.search(self.options.sign_in, self._account.is_same):
            self.is_public = False
            return True
        return False

    def _public_request(
        self, id: str, key: str | None, path: str, want: Range, *, is_pinned: bool
    ) -> HTTPRequest:
        from cachedfs.origins.http import HTTPRequest

        return HTTPRequest(
            url=public.download_url(self.base),
            params=public.params_of(id, key),
            subject=api.url_of(path),
            doing=describe(want),
            headers={"Accept-Encoding": "identity", "Range": range_header(want) or ""},
            as_stored=True,
            is_pinned=is_pinned,
            good=public.GOOD,
            follows_redirects=False,
        )

    async def _item(self, id: str, path: str, key: str | None, is_pinned: bool) -> dict[str, Any]:
        params = {"fields": api.ITEM_FIELDS, **api.ANY_DRIVE}
        headers = api.key_headers([(id, key)] if key else [])
        return await self.json(
            "GET",
            api.file_url(self.base, id),
            path,
            "looking it up",
            params,
            headers=headers,
            is_pinned=is_pinned,
            asked={} if id == api.ROOT else {"id": id},
        )

    async def about(self) -> dict[str, Any]:
        """Return what Drive reports about the account."""
        params = {"fields": "kind,user(displayName,emailAddress,permissionId),storageQuota(limit,usage)"}
        return await self.json(
            "GET", f"{self.base}/drive/v3/about", "", "looking up the account", params, kind="drive#about"
        )

    async def capabilities(self, info: ObjectInfo) -> dict[str, bool]:
        """Return what the account may do with an item, under Drive's own names."""
        params = {"fields": "kind,id,name,mimeType,capabilities", **api.ANY_DRIVE}
        address = api.file_url(self.base, str(info.id))
        item = await self.json(
            "GET", address, info.path, "looking up permissions", params, headers=key_of(info)
        )
        return dict(item.get("capabilities") or {})

    async def items(self, query: str, folder: ObjectInfo, path: str, doing: str) -> list[dict[str, Any]]:
        """Return all items that a query finds in one folder, with one request per thousand."""
        drive_id = api.drive_of(folder)
        if drive_id is not None and drive_id not in self._out_of_sight:
            with suppress(api.DriveOutOfSight):  # a shortcut led to a folder of another drive
                return await self._items(query, folder, path, doing, drive_id)
            self._out_of_sight.add(drive_id)
        return await self._items(query, folder, path, doing, None)

    async def _items(
        self, query: str, folder: ObjectInfo, path: str, doing: str, drive_id: str | None
    ) -> list[dict[str, Any]]:
        params = {"q": query, "pageSize": "1000", "fields": api.LIST_FIELDS, **api.drive_params(drive_id)}
        url, headers = api.files_url(self.base), key_of(folder)
        return await self._all(url, path, doing, params, kind="drive#fileList", key="files", headers=headers)

    async def drives(self) -> list[dict[str, Any]]:
        """Return the ids and names of the shared drives."""
        params = {"pageSize": "100", "fields": "kind,nextPageToken,drives(id,name)"}
        url, doing = f"{self.base}/drive/v3/drives", "listing the shared drives"
        drives = await self._all(url, "", doing, params, kind="drive#driveList", key="drives")
        # One that is renamed meanwhile may be on two pages.
        return list({drive["id"]: drive for drive in drives}.values())

    async def start_token(self, drive_id: str, path: str) -> str:
        """Return a token for the changes from now on, in a shared drive or ("") in everything the account owns."""
        url = f"{api.changes_url(self.base)}/startPageToken"
        params = {"fields": "kind,startPageToken", **api.changes_params(drive_id)}
        del params["includeItemsFromAllDrives"]  # the listing's alone
        doing = "asking where its changes begin"
        found = await self.json(
            "GET", url, path, doing, params, kind="drive#startPageToken", tried=self.retried_once
        )
        return str(found["startPageToken"])

    async def changes(self, drive_id: str, token: str, path: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the next token and the changes since `token`; raise ValueError if the token is no longer usable."""
        params = {"pageToken": token, "pageSize": "1000", "fields": api.CHANGE_FIELDS}
        params |= api.changes_params(drive_id)
        entries: list[dict[str, Any]] = []
        for _ in range(_MOST_PAGES):
            url, doing = api.changes_url(self.base), "asking what changed"
            page = await self.json(
                "GET", url, path, doing, params, kind="drive#changeList", tried=self.retried_once
            )
            entries += page.get("changes", ())
            if (after := page.get("newStartPageToken")) is not None:
                return str(after), entries
            params["pageToken"] = page["nextPageToken"]
        raise RequestRejected(f"{api.url_of(path)}: too many changes to list")

    async def _all(self, *args: Any, key: str, **options: Any) -> list[dict[str, Any]]:
        """Return the items of all pages; if Drive forgets the listing in the middle, list again once."""
        try:
            return [item async for page in self._pages(*args, **options) for item in page.get(key, ())]
        except PageRejected:
            return [item async for page in self._pages(*args, **options) for item in page.get(key, ())]

    async def _pages(
        self, url: str, path: str, doing: str, params: Mapping[str, str], **options: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        token, seen = "", set[str]()
        while True:
            more = {"pageToken": token} if token else {}
            try:
                page = await self.json("GET", url, path, doing, {**params, **more}, **options)
            except RequestRejected as error:
                raise PageRejected(str(error)) if token else error from None
            yield page
            # A page may be short, or empty, before the end: only the token tells. Without one, the first would come again.
            if not (token := page.get("nextPageToken", "")):
                return
            if token in seen:
                raise OriginUnavailable(
                    f"{api.url_of(path)}: {doing} does not end: Drive names a page as the next one that came before. "
                    "Try again later"
                )
            seen.add(token)

    async def new_id(self) -> str:
        """Return an unused id for a new item, so that a repeated create makes one item."""
        async with self._asking_ids:
            if not self._ids:
                params = {"count": str(_IDS), "space": "drive", "fields": "kind,ids"}
                url = f"{api.files_url(self.base)}/generateIds"
                answer = await self.json("GET", url, "", "asking for ids", params, kind="drive#generatedIds")
                self._ids += answer["ids"]
            return self._ids.pop()

    async def change(
        self,
        method: str,
        what: str | None,
        path: str,
        doing: str,
        resource: Mapping[str, Any] | None = None,
        params: Mapping[str, str] = {},
        *,
        headers: Mapping[str, str] = {},
    ) -> dict[str, Any]:
        """Return the item after a change.

        `what` is the item's id, maybe with an action (`ID/copy`); None creates a new item.
        """
        address = api.files_url(self.base) + (f"/{what}" if what else "")
        given = {"fields": api.ITEM_FIELDS, **api.ANY_DRIVE, **params}
        tried: Tried = self.retried
        if method == "POST" and resource is not None:
            tried = self.created if "id" in resource else self.created_once
        id, _, action = (what or "").partition("/")
        asked = {"id": id} if id and action != "copy" else {}
        asked |= {
            name: (resource or {})[name]
            for name in ("id", "name", "mimeType", "trashed")
            if name in (resource or {})
        }
        kind = None if method == "DELETE" else "drive#file"
        return await self.json(
            *(method, address, path, doing, given),
            kind=kind,
            body=resource,
            headers=headers,
            tried=tried,
            asked={} if kind is None else asked,
        )

    async def json(
        self,
        method: str,
        url: str,
        path: str,
        doing: str,
        params: Mapping[str, str],
        *,
        kind: str | None = "drive#file",
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] = {},
        is_pinned: bool = False,
        tried: Tried | None = None,
        asked: Mapping[str, Any] = {},
    ) -> dict[str, Any]:
        """Return the answer to a request about `path`, after retries by `tried`, one of the methods below.

        `kind` is the kind of resource that Drive answers with, which `params` must name in `fields`; None means no
        content. `asked` is what the resource has to have.
        """
        if self.auth.is_missing and not await self._search():
            raise AccessDenied(f"{api.url_of(path)}: {self.auth.remedy}")
        data = None if body is None else json.dumps(body, ensure_ascii=False).encode()
        given = {**headers, "Content-Type": "application/json; charset=UTF-8"} if data else headers
        ask = self.ask(url, path, doing, params, method=method, data=data, headers=given, is_pinned=is_pinned)
        n_sent = itertools.count()

        async def attempt() -> dict[str, Any]:
            # What changes things must not be sent again because its answer is late.
            within_s = self._account.metadata_s(next(n_sent)) if method == "GET" else None
            answer = await self.send(ask, within_s=within_s)
            found = api.resource_of(answer.status, answer.body, kind)
            if found.get("incompleteSearch"):
                raise RetryableError(RetryReason("Drive searched only a part"))
            return api.confirm(found, asked)

        return await (tried or self.retried)(attempt, ask)

    async def retried(self, attempt: Callable[[], Awaitable[T]], ask: HTTPRequest) -> T:
        """Return the result of `attempt`, repeated for as long as the retry policy allows."""
        return await self.lookups.retried(attempt, ask, self.lookups.new_tries())

    async def retried_once(self, attempt: Callable[[], Awaitable[T]], ask: HTTPRequest) -> T:
        """Return the result of `attempt`, repeated at most once: for what only saves other requests."""
        return await self.lookups.retried(attempt, ask, self._account.new_tries(tries=2))

    async def created(self, attempt: Callable[[], Awaitable[T]], ask: HTTPRequest) -> T:
        """Return the result of `attempt`, which creates an item.

        It waits for its turn, and retries as long as other items are being created. The item has an id that Drive
        generated before, so Drive refuses to create it twice.
        """
        tries, n_made = self.lookups.new_tries(), self.creates.n_made
        while True:
            try:
                async with self.creates.turn():
                    result = await attempt()
            except RetryableError as failed:
                was_progress = self.creates.n_made > n_made  # since the last try, by others
                if failed.trouble.is_rate and was_progress:
                    tries, n_made = self.lookups.new_tries(), self.creates.n_made
                await self.lookups.pause(failed, ask, tries)
            else:
                self.creates.made()
                return result

    async def created_once(self, attempt: Callable[[], Awaitable[T]], ask: HTTPRequest) -> T:
        """Return the result of `attempt`, which creates one more item each time; retry it only if it created none."""

        async def careful() -> T:
            try:
                return await attempt()
            except RetryableError as failed:
                raise RetryableError(_unless_made(failed.trouble)) from (failed.__cause__ or failed)

        return await self.created(careful, ask)

    def ask(
        self, url: str, path: str, doing: str, params: Mapping[str, str], *, method: str = "GET", **more: Any
    ) -> HTTPRequest:
        """Return a request about `path`, before it is sent."""
        from cachedfs.origins.http import HTTPRequest

        kind, good = api.kind_of(method, url), more.pop("good", GOOD)
        return HTTPRequest(
            url=url,
            params=params,
            subject=api.url_of(path),
            doing=doing,
            method=method,
            kind=kind,
            good=good,
            follows_redirects=False,  # Drive redirects none: an answer from elsewhere says nothing about its items
            **more,
        )

    async def send(self, ask: HTTPRequest, *, within_s: float | None = None) -> Answer:
        """Send `ask` once; return its whole answer.

        Raises RetryableError, also if there is no answer within `within_s` seconds, or the final error.
        """
        async with self.lookups.exchange(ask, within_s=within_s) as response:
            return Answer(response.status, response.headers, await response.read_all())


def _unless_made(trouble: RetryReason) -> RetryReason:
    """Return the retry reason of a create that must not be repeated: final if only the answer may be lost."""
    if trouble.is_rate or trouble.is_unreachable:
        return trouble
    remedy = "What it makes may be there all the same: look for it before you try again"
    return dataclasses.replace(trouble, is_final=True, remedy=remedy)


class PageRejected(RequestRejected):
    """A listing cannot continue: Drive has forgotten its page token."""


def key_of(info: ObjectInfo) -> dict[str, str]:
    """Return the headers that open a link-shared item."""
    key = info.details.get("resourceKey")
    return api.key_headers([(info.id, key)] if info.id and key else [])


def _judge(
    auth: DriveAuth, ask: HTTPRequest, status: int, headers: Mapping[str, str], body: bytes
) -> RetryReason | Exception:
    return api.failure(
        status,
        headers,
        body,
        url=ask.subject,
        doing=ask.doing,
        pinned=ask.is_pinned,
        now=datetime.now(UTC),
        account=f"the account that signs in ({auth.name})",
        remedy=auth.remedy,
    )
