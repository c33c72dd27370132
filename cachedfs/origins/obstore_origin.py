"""`ObstoreOrigin`: an obstore store (S3, GCS, Azure, HTTP, local, memory) as an origin, to read from.

One request reads bytes and metadata of one version. With `If-Match`, a replaced object is an error of that request.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from cachedfs.common.types import ObjectInfo, Range, Suffix
from cachedfs.errors import ObjectNotFound, OriginUnavailable
from cachedfs.origins.base import Origin, Read, clipped, range_header
from cachedfs.origins.evidence import fingerprint, is_same_evidence
from cachedfs.origins.origin_errors import mapped
from cachedfs.origins.request_slots import OpenRequest, RequestSlots, is_speculative

_PIECE = 256 << 10  # least bytes that obstore hands over at a time
_ENVIRONMENT = {"S3Store": "AWS_", "GCSStore": "GOOGLE_", "AzureStore": "AZURE_"}
# What obstore takes from the environment, and `store.config` does not show.
_READ_FROM_ENVIRONMENT = re.compile(
    "endpoint|base_url|skip_signature|_key_id|account|application_cred|client_id|role_arn|sas"
)
# Options that change neither the data nor who reads it. A secret key belongs to the id of a key, which stays.
_HARMLESS = re.compile(
    "region|virtual_hosted|payer|copy_if|conditional|checksum|tagging|bulk|unsigned|server_side|sse_"
    "|secret|session_token|session_name|imdsv1"
)
_WHO = re.compile(
    "access_key_id|account_key|sas|token|credential|service_account|client|tenant|role_|identity|object_id|msi"
    "|skip_signature|authority|cli$|sts_|metadata_"
)

# obstore has threads since its first request. A forked process has none of them, and obstore would wait forever.
_has_threads = False
_lost_threads = False


def _after_fork() -> None:
    global _lost_threads
    _lost_threads = _has_threads


os.register_at_fork(after_in_child=_after_fork)


def _kind(store: Any) -> str:
    """Return the name of obstore's class: a subclass reads the same data."""
    for cls in type(store).__mro__:
        if cls.__module__.partition(".")[0] == "obstore":
            return cls.__name__
    raise TypeError(
        f"cachedfs.obspec.CachedStore takes a URL or a store of obstore, not {type(store).__qualname__}"
    )


def identity_of_store(store: Any, account: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Return a text that identifies the data of a store and the account that reads it, without secrets.

    The endpoint, the bucket and the credentials count, as hashes. `account` takes the place of the credentials. Raises
    ValueError if it is missing and a credential provider hides them.
    """
    kind = _kind(store)
    if account is None and getattr(store, "credential_provider", None) is not None:
        raise ValueError(
            "CachedStore(store): the store has a credential_provider, which does not say whose data it reads. Name the "
            "account, as in CachedStore(store, account='me'): stores of one bucket and account share cached blocks"
        )
    config = {name: str(value) for name, value in (getattr(store, "config", None) or {}).items()}
    if prefix := _ENVIRONMENT.get(kind):
        for name, value in environ.items():
            option = name.removeprefix(prefix).lower()
            if name.startswith(prefix) and _READ_FROM_ENVIRONMENT.search(option):
                config.setdefault(option, value)
    if url := getattr(store, "url", None):
        config["url"] = url
    headers = (getattr(store, "client_options", None) or {}).get("default_headers")
    if headers and account is None:
        config["headers"] = str(headers)
    ignored = _HARMLESS if account is None else re.compile(f"{_HARMLESS.pattern}|{_WHO.pattern}")
    kept = sorted((name, value) for name, value in config.items() if not ignored.search(name))
    if kind == "MemoryStore":
        kept.append(("object", os.urandom(8).hex()))  # no two have the same data
    digest = hashlib.blake2b(repr((kept, account)).encode(), digest_size=16).hexdigest()
    return f"obstore|{kind}|{digest}"


def root_of_store(store: Any) -> str:
    """Return the path of the store: bucket and prefix, the folder, or host and path; "" for a memory store.

    Stores of one bucket with different prefixes so share the paths of their objects.
    """
    if url := getattr(store, "url", None):
        parts = urlsplit(url)
        return f"{parts.netloc.rpartition('@')[2]}{parts.path}".strip("/")
    config = getattr(store, "config", None) or {}
    bucket = str(config.get("bucket") or config.get("container_name") or "")
    return f"{bucket}/{str(getattr(store, 'prefix', None) or '').strip('/')}".strip("/")


class _Read(Read):
    """A read of one version."""

    origin: ObstoreOrigin

    async def run(self) -> AsyncGenerator[bytes, None]:
        """Yield b"" when the headers have arrived, then the bytes."""
        self.path = self.path.strip("/")
        slot = self.origin._slots.slot("get_async", self.url, range_header(self.want) or "")
        async with slot as request:
            with mapped(self.url, self.doing, is_read=True):
                answer = await self._send()
                request.answered("ok")
                yield b""
                if answer is not None:
                    async for data in self._body(answer):
                        request.size += len(data)
                        yield data

    async def _body(self, answer: Any) -> AsyncIterator[bytes]:
        position = self.start
        async for piece in answer.stream(min_chunk_size=_PIECE):
            if not (data := bytes(piece)):
                continue
            position += len(data)
            if position > self.stop:
                break
            if self.origin._is_local:
                await self._look_up()
            yield data
        if position != self.stop:
            raise OriginUnavailable(
                f"{self.url}: the body has another length than announced ({self.doing}); read it again"
            )

    async def _send(self) -> Any:
        """Send the request, and set the version and the range; return obstore's answer, if it has a body."""
        origin, want, options = self.origin, self.want, dict[str, Any]()
        if isinstance(want, Range):
            if not want.size:
                return await self._without_body(want)
            options["range"] = (want.start, want.stop)
        elif isinstance(want, Suffix):
            options["range"] = {"suffix": want.size}
        e_tag = str(self.pinned.details.get("e_tag", "W/")) if self.pinned else "W/"
        if not e_tag.startswith("W/"):  # a weak one stays the same when bytes change
            options["if_match"] = e_tag
        origin._count(self.path)
        now_s = time.time()
        try:
            answer = await origin.store.get_async(origin._key(self.path), options=options)
        except FileNotFoundError as error:
            if self.pinned is None:
                raise
            raise self._changed("it is gone") from error
        except Exception as error:  # obstore's errors have no common class but this
            if type(error).__name__ == "PreconditionError":
                raise self._changed("it was replaced") from error
            # The range begins after the end; or Azure, which has no ranges that count from the end.
            if want is None or "range" not in str(error).lower():
                raise
            return await self._without_body(want)
        self._pin(origin._described(answer.meta, now_s))
        self.start, self.stop = answer.range
        return answer

    async def _without_body(self, want: Range | Suffix) -> Any:
        """Read nothing, after a lookup; or read a suffix as a range."""
        info = await self._look_up()
        assert info.size is not None
        span = clipped(want, info.size)
        if span.size and isinstance(want, Range):
            raise OriginUnavailable(f"{self.url}: the origin rejected the range ({self.doing})")
        self.want, self.start, self.stop = span, span.start, span.stop
        return await self._send() if span.size else None

    async def _look_up(self) -> ObjectInfo:
        """Return the object as it is now; raise ObjectChanged if it is not the pinned version."""
        try:
            info = await self.origin._head(self.path)
        except FileNotFoundError as error:
            if self.pinned is None:
                raise
            raise self._changed("it is gone") from error
        return self._pin(info)

    def _pin(self, info: ObjectInfo) -> ObjectInfo:
        """Read this version from now on; raise ObjectChanged if another one is pinned."""
        self.info, pinned = info, self.pinned or info
        if info.size != pinned.size or not is_same_evidence(info.fingerprint, pinned.fingerprint):
            raise self._changed(f"it was {pinned.fingerprint}, and is {info.fingerprint}")
        self.pinned = pinned
        return info


class ObstoreOrigin(Origin):
    """An origin over an obstore store."""

    _reads = _Read

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        identity: str,
        on_request: Callable[[], None],
        concurrency: int = 16,
    ) -> None:
        self.identity, self.on_request, self._slots = identity, on_request, RequestSlots(concurrency)
        self.store = options["store"]
        self._root = root_of_store(self.store)
        self._can_list = _kind(self.store) != "HTTPStore"
        # A local file may change while it is open, so its version is checked again after each piece.
        self._is_local = _kind(self.store) == "LocalStore"

    def url(self, path: str) -> str:
        """Return the URL that errors show for `path`."""
        return f"obstore://{path}"

    def _key(self, path: str) -> str:
        """Return the path within the store."""
        path = path.strip("/")
        if not self._root or path == self._root:
            return path.removeprefix(self._root)
        if not path.startswith(f"{self._root}/"):
            raise ObjectNotFound(
                f"{self.url(path)}: it is outside of the store, which begins at {self._root}"
            )
        return path[len(self._root) + 1 :]

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}".strip("/")

    def _described(self, meta: Mapping[str, Any], now_s: float) -> ObjectInfo:
        """Return the object that obstore's metadata, requested at `now_s`, describe."""
        details = {name: meta[name] for name in ("e_tag", "version", "last_modified") if meta.get(name)}
        # A server that states no time.
        if "last_modified" in details and not details["last_modified"].timestamp():
            del details["last_modified"]
        evidence = {**details, "size": meta["size"]}
        if self._is_local:  # its ETag is its inode, time and size
            evidence["ino"] = evidence.pop("e_tag", None)
        version = fingerprint(evidence, now_s)
        return ObjectInfo(self._path(meta["path"]), "file", meta["size"], version, details=details)

    def _count(self, path: str) -> None:
        """Count a request that is about to be sent; raise OriginUnavailable where it would hang."""
        global _has_threads
        if _lost_threads:
            raise OriginUnavailable(
                f"{self.url(path)}: not in the cache, and obstore does not work in a process forked from one that used "
                'it: start processes with "spawn" or "forkserver"'
            )
        _has_threads = True
        self.on_request()

    async def _ask(self, method: str, path: str, *args: Any) -> Any:
        """Return the result of an async method of the store, as one request; the caller has a slot."""
        self._count(path)
        with OpenRequest(method, self.url(path), is_speculative=is_speculative()):
            answer = getattr(self.store, method)(*args)
            return await (answer.collect_async() if method == "list_async" else answer)

    async def _head(self, path: str) -> ObjectInfo:
        now_s = time.time()
        return self._described(await self._ask("head_async", path, self._key(path)), now_s)

    async def lookup(self, path: str, parent: ObjectInfo | None = None) -> ObjectInfo:
        """Return the object or folder that `path` is now: one request, or two if it is no object."""
        path = path.strip("/")
        key = self._key(path)
        with mapped(self.url(path), "looking it up", is_read=True):
            async with self._slots.slot():
                try:
                    if key:
                        return await self._head(path)
                except FileNotFoundError:
                    if not self._can_list:
                        raise
                found = await self._ask("list_with_delimiter_async", path, key)
            if key and not found["objects"] and not found["common_prefixes"]:
                raise FileNotFoundError(path)
        return ObjectInfo(path, "directory")

    async def list(
        self, folder: str, parent: ObjectInfo | None = None, *, deep: bool = False
    ) -> AsyncIterator[ObjectInfo]:
        """Yield the children of `folder`, or all objects below it."""
        folder = folder.strip("/")
        key, now_s = self._key(folder), time.time()
        with mapped(self.url(folder), "listing it", is_read=True):
            async with self._slots.slot():
                if deep:
                    objects, folders = await self._ask("list_async", folder, key), []
                else:
                    found = await self._ask("list_with_delimiter_async", folder, key)
                    objects, folders = found["objects"], found["common_prefixes"]
            infos = [self._described(meta, now_s) for meta in objects]
        for info in infos:
            if info.path != folder:
                yield info
        for name in folders:
            yield ObjectInfo(self._path(name), "directory")

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Raise NotImplementedError: obstore's own methods write."""
        raise NotImplementedError(
            f"cachedfs only reads an obstore store, so there is no {method}: use the store itself, and after a write call "
            "fs.invalidate_cache()"
        )

    async def filesystem(self) -> Any:
        """Raise NotImplementedError: there is no fsspec filesystem below."""
        return await self.call("origin_fs")

    async def aclose(self) -> None:
        """Do nothing: the store belongs to the caller."""
