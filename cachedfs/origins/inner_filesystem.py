"""Create the inner fsspec filesystem of an origin, and call it as a coroutine or in a thread."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

from fsspec.asyn import AsyncFileSystem
from fsspec.config import apply_config
from fsspec.dircache import DirCache
from fsspec.spec import AbstractFileSystem
from fsspec.utils import stringify_path

from cachedfs.common.optional_imports import importing, preload
from cachedfs.common.types import Range
from cachedfs.common.urls import filesystem_class
from cachedfs.errors import OriginUnavailable
from cachedfs.origins.base import range_header

T = TypeVar("T")

_S3_CONNECTIONS = 128  # most requests in flight; botocore's own limit is 10


class AsyncOnce(Generic[T]):
    """A value created at the first `get`, once for all waiting callers.

    A failure is raised in all waiting callers, and the next `get` tries again. Without `keeps`, it also runs again after a
    success: callers only share what is running. Unlike in `SingleFlight`, it goes on when no caller waits any more.
    """

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]], *, keeps: bool = True) -> None:
        self._make, self._keeps = make, keeps
        self._task: asyncio.Task[T] | None = None
        self.value: T | None = None  # once it is created

    async def get(self) -> T:
        """Return the value; cancelling one caller does not stop the creation for the others."""
        if self._task is None or _has_failed(self._task):
            self._task = asyncio.ensure_future(self._make())
            self._task.add_done_callback(self._created)
        return await asyncio.shield(self._task)

    def _created(self, task: asyncio.Task[T]) -> None:
        # The exception has the frames of all waiting callers. Without them, asyncio would log it if it were not read.
        has_failed = _has_failed(task)
        if self._task is task:
            is_kept = self._keeps and not has_failed
            self.value, self._task = (task.result(), task) if is_kept else (None, None)

    @property
    def is_idle(self) -> bool:
        """True if there is no value, and nobody creates one."""
        return self._task is None

    def take(self) -> T | None:
        """Return the value if it exists, and remove it: the next `get` creates another."""
        task, self._task, self.value = self._task, None, None
        if task is None or not task.done():
            if task is not None:
                task.cancel()
            return None
        return None if _has_failed(task) else task.result()


def _has_failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def make_filesystem(
    protocol: str, options: Mapping[str, Any], loop: asyncio.AbstractEventLoop
) -> AbstractFileSystem:
    """Return a new filesystem, not shared through fsspec's instance cache.

    Blocks, so call it in a thread.
    """
    with importing():
        cls = filesystem_class(protocol)
    preload(["encodings.idna"])  # needed to resolve host names
    private, given = make_private(options), apply_config(cls, dict(options))
    if protocol in ("s3", "s3a"):
        cls = _s3_filesystem(cls)
        private["config_kwargs"] = {
            "max_pool_connections": _S3_CONNECTIONS,
            **(given.get("config_kwargs") or {}),
        }
    client = given.get("client_kwargs") or {}
    if protocol in ("http", "https") and client.get("connector") is not None and "get_client" not in given:
        private["client_kwargs"] = {"connector_owner": False, **client}  # a session would close the user's
    if cls.async_impl:
        private |= {"asynchronous": False, "loop": loop}
    return without_listing_cache(cls(**private))


def _s3_filesystem(cls: Any) -> Any:
    """Return s3fs's class `cls` with names that end in a slash, and with reads of one ETag."""

    class S3FileSystem(cls):  # type: ignore[misc]  # s3fs has no types
        @classmethod
        def _strip_protocol(cls, path: Any) -> Any:
            """Return the name of an object with the slash that may end it, as gcsfs does."""
            name = super()._strip_protocol(path)
            if isinstance(path, list) or "/" not in name:
                return name
            return name + _slashes_after(stringify_path(path))

        def split_path(self, path: str) -> tuple[str, str, str | None]:
            slashes = _slashes_after(path)
            bucket, key, version = super().split_path(path.removesuffix(slashes))
            return bucket, key and key + slashes, version

        async def _read_version(
            self, path: str, start: int, end: int, *, etag: str, size: int
        ) -> bytes | None:
            """Return bytes of an object of `size` bytes if its ETag is `etag`; None if the answer has another one.

            S3 refuses the request then, which raises s3fs's OSError. A compatible service may ignore the condition.
            """
            import s3fs.core

            bucket, key, version = self.split_path(path)
            range_, failure = range_header(Range(start, end)), None
            options = {**self.req_kw, "Bucket": bucket, "Key": key, "Range": range_, "IfMatch": etag}
            if version:
                options["VersionId"] = version
            for _ in range(self.retries):  # s3fs itself repeats only the request, not the body
                answer = await self._call_s3("get_object", **options)
                try:
                    data: bytes = await answer["Body"].read()
                except s3fs.core.S3_RETRYABLE_ERRORS as error:
                    failure = error
                    continue
                finally:
                    answer["Body"].close()
                if answer.get("ETag", etag) != etag:
                    return None
                if len(data) == size:  # also where the service ignored the range
                    return data[start:end]
                if len(data) == end - start and "ETag" in answer:
                    return data
            raise OriginUnavailable(
                f"s3://{path}: no usable answer from the origin; check the network, or try again later "
                f"({range_}: {failure or 'the answer has another size, or no ETag'})"
            ) from failure

    return S3FileSystem


def _slashes_after(path: str) -> str:
    return path[len(path.rstrip("/")) :]


def make_private(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with fsspec's instance cache off, for wrapped filesystems too."""
    private = {**options, "skip_instance_cache": True}
    if private.get("target_protocol"):
        private["target_options"] = make_private(private.get("target_options") or {})
    return private


def without_listing_cache(inner: Any) -> Any:
    """Turn off the filesystem's listing cache and return it: cachedfs caches metadata itself."""
    wrapped = inner
    while isinstance(wrapped, AbstractFileSystem):
        wrapped.dircache = DirCache(use_listings_cache=False)
        wrapped = getattr(wrapped, "fs", None)
    return inner


async def invoke(inner: Any, method: str, *args: Any, **options: Any) -> Any:
    """Return the result of the filesystem's `method`.

    It is awaited on this loop where possible, else it runs in a thread.
    """
    if _is_native(inner, method):
        return await getattr(inner, "_" + method)(*args, **options)
    return await asyncio.to_thread(getattr(inner, method), *args, **options)


def _is_native(inner: Any, method: str) -> bool:
    """Return whether `_method` is a coroutine that does the work on the loop that awaits it."""
    # A wrapper created its wrapped filesystem without our loop, or that one is synchronous.
    if not inner.async_impl or hasattr(inner, "fs"):
        return False
    cls, hidden = type(inner), "_" + method
    if not inspect.iscoroutinefunction(getattr(cls, hidden, None)):
        return False
    is_default = getattr(cls, hidden) is getattr(AsyncFileSystem, hidden, None)
    return not is_default or getattr(cls, method, None) is getattr(AbstractFileSystem, method, None)


async def close_session(inner: Any) -> None:
    """Close the network sessions: `_session` of aiohttp-based filesystems, and those of s3fs and adlfs."""
    if (client := getattr(inner, "_s3creator", None)) is not None:
        await client.__aexit__(None, None, None)
        inner._s3 = inner._s3creator = None
    if hasattr(inner, "service_client"):
        clients: list[Any] = [inner.service_client, getattr(inner, "credential", None)]
        for each in clients:
            if inspect.iscoroutinefunction(getattr(each, "close", None)):
                await each.close()
        _detach_finalizers(inner)
    session: Any = getattr(inner, "_session", None)
    if inspect.iscoroutinefunction(getattr(session, "close", None)):
        await session.close()
        inner._session = None


def _detach_finalizers(inner: Any) -> None:
    """Keep adlfs from closing its clients at the end of the process, on our loop, which is gone by then."""
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        if (found := finalizer.peek()) and found[0] is inner:
            finalizer.detach()
