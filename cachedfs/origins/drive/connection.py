"""`DriveConnection`: sign in to Google Drive, and send the requests of one account."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote

from cachedfs.common.optional_imports import importing, preload
from cachedfs.common.urls import import_error
from cachedfs.errors import AccessDenied
from cachedfs.origins.drive import api, failures
from cachedfs.origins.drive.account_key import key_of
from cachedfs.origins.drive.credentials import SignIn
from cachedfs.origins.drive.options import DriveOptions
from cachedfs.origins.drive.quota import DriveLimits, QuotaMeter
from cachedfs.origins.google_upload import JSON
from cachedfs.origins.http_request import Answer, HTTPRequest
from cachedfs.origins.inner_filesystem import AsyncOnce
from cachedfs.origins.proxy import proxy_of, tls_context
from cachedfs.origins.request_slots import RequestSlots
from cachedfs.origins.retry import RetryableError, RetryAttempts, RetryPolicy
from cachedfs.origins.tokens import finding_credentials

if TYPE_CHECKING:
    from cachedfs.origins.drive.auth import DriveAuth
    from cachedfs.origins.http import HTTPClient

T = TypeVar("T")
_MOST_LOOKUPS = 16  # requests for metadata in flight: Drive gives one user some 50 listings a second
_SEARCH_AGAIN_S = 5.0  # a search for credentials may ask a metadata server that does not answer
GOOD = frozenset({200, 201, 204, 308})


class Clients(NamedTuple):
    """The sign-in of an account and its HTTP clients, which share one session."""

    auth: DriveAuth
    session: Any
    media: HTTPClient
    metadata: HTTPClient  # and all other requests
    exports: HTTPClient  # waits longer, for a document to be converted


class DriveConnection:
    """Sends requests to Google Drive as one account. Cheap to create: it signs in at the first request."""

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
        self._on_request = on_request
        self._key = identity.rpartition("|")[2] if "|" in identity else ""  # names the account in cache keys
        self.connected = AsyncOnce(self._connect)
        self._search = AsyncOnce(self._search_again)

    # Signing in
    async def clients(self) -> Clients:
        """Return the clients, made at the first call; raise AccessDenied or ValueError without a way to sign in."""
        async with finding_credentials("drive://", self.policy):
            return await self.connected.get()

    async def _connect(self) -> Clients:
        with importing():
            import aiohttp

            from cachedfs.origins.http import HTTPClient, new_connector, timeouts_of

        auth, policy = await asyncio.to_thread(self._sign_in), self.policy
        proxy = await asyncio.to_thread(proxy_of, self.base)
        tls = await asyncio.to_thread(tls_context) if self.base.startswith("https:") else True
        self.is_public = auth.signed_in.is_missing
        session = aiohttp.ClientSession(connector=new_connector(ssl=tls), proxy=proxy)

        def judge(request: HTTPRequest, status: int, headers: Mapping[str, str], body: bytes) -> Exception:
            return failures.failure(request, status, headers, body, auth.signed_in)

        client = partial(HTTPClient, session, auth, judge, on_request=self._on_request, policy=policy)
        client = partial(client, limits=self.limits, timeouts=timeouts_of(policy))
        slow = timeouts_of(dataclasses.replace(policy, stall_s=policy.export_s))
        return Clients(
            auth,
            session,
            media=client(slots=self.media_slots),
            metadata=client(slots=self.metadata_slots),
            exports=client(slots=self.media_slots, timeouts=slow),
        )

    def _sign_in(self) -> DriveAuth:
        """Return the tokens of the account; blocks on files, on imports, and perhaps on a metadata server."""
        try:
            with importing():
                from cachedfs.origins.drive.auth import DriveAuth, sign_in
            preload(["encodings.idna"])  # which looking for a host needs
        except ImportError as error:
            raise import_error("drive", error, "pydrive2") from error
        found = sign_in(self.options.sign_in)
        if not found.is_missing and not self._is_same(found):
            raise AccessDenied(
                "Google Drive: another account signed in since this filesystem was made: restart the program, or make a new "
                "filesystem with skip_instance_cache=True"
            )
        return DriveAuth(found, self.policy)

    def _is_same(self, found: SignIn) -> bool:
        """Return whether a sign-in has the account in the cache keys; blocks on a file."""
        if not self._key or found.kind == "credentials":  # an object stays what it is
            return True
        return self._key == key_of(found, self.base, may_ask=False)

    async def signed_in(self) -> SignIn:
        return (await self.clients()).auth.signed_in

    async def is_missing(self) -> bool:
        """Return whether there is no sign-in, also after looking for one again."""
        if (await self.signed_in()).is_missing:
            if self._search.value is not None and time.monotonic() >= self._search.value + _SEARCH_AGAIN_S:
                self._search.take()
            await self._search.get()
        return (await self.signed_in()).is_missing

    async def _search_again(self) -> float:
        """Look for default credentials once more, and return when that was.

        They are used only if they belong to the account in the cache keys.
        """
        from cachedfs.origins.drive.auth import sign_in

        def find() -> SignIn | None:
            found = sign_in(self.options.sign_in)
            return found if not found.is_missing and self._is_same(found) else None

        now, auth = time.monotonic(), (await self.clients()).auth
        if (found := await asyncio.to_thread(find)) is not None:
            auth.use(found)
            self.is_public = False
        return now

    async def aclose(self) -> None:
        """Close the connections; the next request creates new ones."""
        if (clients := self.connected.take()) is not None:
            await clients.session.close()

    # Any request
    def request(
        self,
        to: str | tuple[str | None, ...],
        path: str,
        doing: str,
        *,
        method: str = "GET",
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] = {},
        **more: Any,
    ) -> HTTPRequest:
        """Return a request about `path`, before it is sent; `body` is sent as JSON.

        It goes `to` a URL, or a resource of the API, such as ("files", ID, "copy"), without the parts that are empty. Drive
        redirects none but media: an answer from elsewhere says nothing about its items.
        """
        if isinstance(to, tuple):
            to = f"{self.base}/drive/v3/" + "/".join(quote(part, safe="") for part in to if part)
        if body is not None:
            headers = {"Content-Type": JSON, **headers}
            more["data"] = json.dumps(body, ensure_ascii=False).encode()
        more = {"kind": api.kind_of(method, to), "good": GOOD, "follows_redirects": False, **more}
        return HTTPRequest(to, api.url_of(path), doing=doing, method=method, headers=headers, **more)

    async def send(self, request: HTTPRequest) -> Answer:
        """Send a request once; return its whole answer. Raises RetryableError or the final error."""
        return await (await self.clients()).metadata.answer(request)

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
        policy = self.policy if most_tries is None else dataclasses.replace(self.policy, tries=most_tries)
        if request.kind != "download" and await self.is_missing():
            raise AccessDenied(f"{request.subject}: {(await self.signed_in()).remedy}")
        limits = self.limits if request.kind == "create" else None
        tries, n_created = RetryAttempts(policy), self.limits.n_created
        while True:
            # What changes things must not be sent again because its answer is late.
            if request.method == "GET":
                request = dataclasses.replace(request, within_s=tries.first_byte_s(policy.metadata_s))
            try:
                async with limits.creating() if limits else nullcontext():
                    return parse(await self.send(request))
            except RetryableError as failed:
                if limits and not (has_id or failed.is_rate or failed.is_unreachable):
                    remedy = "What it makes may be there all the same: look for it before you try again"
                    failed.is_final, failed.remedy = True, remedy
                if limits and failed.is_rate and limits.n_created > n_created:  # others make progress
                    tries, n_created = RetryAttempts(policy), limits.n_created
                await tries.pause(failed, request.subject, request.purpose)

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
