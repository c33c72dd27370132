"""`Origin`, the base class of the remote services; byte ranges and other values in HTTP headers.

Only the HTTP headers here have inclusive ends. Everywhere else the end of a range is exclusive.
"""

from __future__ import annotations

import dataclasses
import email.utils
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, Self, runtime_checkable

from cachedfs.common.types import AnyVersion, Changes, ObjectInfo, Range, Suffix
from cachedfs.errors import ObjectChanged

if TYPE_CHECKING:
    from cachedfs.origins.request_slots import RequestSlots


def range_header(want: Range | Suffix | None) -> str | None:
    """Return the `Range` header for a non-empty range, always with an end; None for the whole object."""
    if want is None:
        return None
    if isinstance(want, Suffix):
        return f"bytes=-{want.size}"
    return f"bytes={want.start}-{want.stop - 1}"


_NUMBER = re.compile("[0-9]{1,18}")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")


def content_range(text: str) -> tuple[int, int, int | None]:
    """Return start, exclusive stop and total size from `bytes a-b/N`.

    The size is None where N is `*`. Raises ValueError for anything else.
    """
    found = _CONTENT_RANGE.fullmatch(text.strip())
    if not found:
        raise ValueError(f"the answer has no usable Content-Range: {text!r}")
    return int(found[1]), int(found[2]) + 1, int_of(found[3])


def int_of(text: object) -> int | None:
    """Return the number that a header or a JSON text is: up to 18 ASCII digits; None for anything else."""
    return int(text) if isinstance(text, str) and _NUMBER.fullmatch(text) else None


@functools.lru_cache(1024)  # the parts of an object have one time
def http_date(text: str | None) -> datetime | None:
    """Return the time in a header, in UTC where it names no zone; None if it is not a time."""
    try:
        at = email.utils.parsedate_to_datetime(text or "")
        return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)
    except (ValueError, TypeError, LookupError, OverflowError):  # as of a zone of a million hours
        return None


PathLock = Callable[[str], AbstractAsyncContextManager[None]]
"""Locks a path while it is changed: call it with the path and enter the result.

Whoever provides it decides which processes it keeps out.
"""


def clipped(want: Range | Suffix | None, size: int) -> Range:
    """Return the bytes that `want` means in an object of `size` bytes; `[size, size)` past its end."""
    if want is None:
        return Range(0, size)
    if isinstance(want, Suffix):
        return Range(max(size - want.size, 0), size)
    return Range(min(want.start, size), min(want.stop, size))


def describe(want: Range | Suffix | None) -> str:
    """Return the phrase that names a read of `want` in errors."""
    if want is None:
        return "reading all bytes"
    if isinstance(want, Suffix):
        return f"reading the last {want.size} bytes"
    return f"reading bytes {want.start} to {want.stop}"


def subject_of(method: str, args: Sequence[Any]) -> str:
    """Return the path that a call of the inner filesystem is about.

    The first of several paths; "" without one.
    """
    subject = args[1] if method == "put_file" else next(iter(args), "")
    if isinstance(subject, list):
        subject = next(iter(subject), "")
    return subject if isinstance(subject, str) else ""


before_next_page: ContextVar[Callable[[], Awaitable[object]] | None] = ContextVar(
    "cachedfs_before_next_page", default=None
)
"""Awaited before each page of a listing but the first, where a folder is listed only to save lookups: it may wait."""

has_stale_answer = ContextVar("has_stale_answer", default=False)
"""Whether the caller of a request can serve a stale answer while the origin is unreachable, and so waits less long."""


@dataclasses.dataclass(eq=False)
class Reply:
    """A read whose headers have arrived and whose body is still coming.

    The body has non-empty bytes in order, from `start` to `stop` exactly, or raises. The origin resumes a body that
    breaks off, and raises `ObjectChanged` if the version changes. Bytes that came are final: an origin without
    conditional reads holds bytes back until it has confirmed them.
    """

    info: ObjectInfo  # the version being read, with its full size
    start: int  # offset of the first byte
    stop: int  # offset after the last byte that the origin announced
    body: AsyncIterator[bytes]
    # The body raises ChecksumMismatch in place of its last bytes if it, a whole object, has another checksum than stated.
    is_checked_at_end: bool = False


@dataclasses.dataclass(eq=False)
class Read(Reply, ABC):
    """A read of one version: `async with` it returns itself, as the reply, when the headers have arrived."""

    info: ObjectInfo = dataclasses.field(init=False)
    start: int = dataclasses.field(init=False, default=0)
    stop: int = dataclasses.field(init=False, default=0)
    body: AsyncGenerator[bytes, None] = dataclasses.field(init=False)
    is_checked_at_end: bool = dataclasses.field(init=False, default=False)

    origin: Any
    path: str
    want: Range | Suffix | None  # the bytes to read; after the first answer those that are left
    pinned: ObjectInfo | None  # the version to read; after the first answer the one that it is of
    _doing: str = dataclasses.field(init=False, default="")  # "": reading `want`

    async def __aenter__(self) -> Self:
        self.body = self.run()
        await anext(self.body)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.body.aclose()

    @abstractmethod
    def run(self) -> AsyncGenerator[bytes, None]:
        """Yield b"" when the headers have arrived, and all but the body is known; then the bytes of the body."""

    @property
    def url(self) -> str:
        """The URL of the object, as errors name it."""
        return str(self.origin.url(self.path))

    @property
    def doing(self) -> str:
        """The purpose of the read, as errors name it."""
        return self._doing or describe(self.want)

    def _changed(self, how: str) -> ObjectChanged:
        """Return the error for an answer of another version."""
        return ObjectChanged(
            f"{self.url}: the object was replaced while it was read ({self.doing}: {how}); open it again"
        )


class Origin(ABC):
    """A remote service; all methods run on the runtime's event loop.

    An origin retries by itself and raises the errors of `cachedfs.errors`. It calls `on_request` once for every request
    it sends, retries included.
    """

    identity: str
    """Protocol, endpoint host and account ("anon" or "auth"); part of every block key.

    Known without a request or an import.
    """

    on_request: Callable[[], None]

    by_parent: bool = False
    """True where the service looks a name up in its folder, as Google Drive does.

    Then a lookup is cheaper with the folder's metadata, a read cannot replace a lookup, and an absence is certain.
    """

    roots: Sequence[str] = ()
    """Folders in which names are looked up without the metadata of the folder."""

    is_metered: bool = False
    """True where the bytes of a day are limited, as at Google Drive: then less is fetched that may not be read."""

    _slots: RequestSlots
    _reads: type[Read]  # how it reads

    @abstractmethod
    async def lookup(self, path: str, parent: ObjectInfo | None = None) -> ObjectInfo:
        """Return the object or folder that `path` is now; raise `ObjectNotFound` for neither.

        `parent` is the folder it is in, where that is known.
        """
        ...

    async def lookup_path(self, path: str) -> Sequence[ObjectInfo]:
        """Return what the first names of `path` lead to, one after the other, without its top.

        Takes one request, and none where no single one can find them. It may end early: what it lacks may exist.
        """
        return ()

    def read(
        self, path: str, want: Range | Suffix | None, pinned: ObjectInfo | None
    ) -> AbstractAsyncContextManager[Reply]:
        """Request bytes of `path`; use it as an async context manager.

        Entering returns when the headers arrive; leaving early stops the body. `want` None is the whole object. A range
        past the end is clipped, and one that starts at or after the end gives an empty reply (`start == stop ==
        info.size`). With `pinned`, the bytes are of exactly that version, or `ObjectChanged` is raised, also when the
        object was removed. Without it, a missing object raises `ObjectNotFound`.
        """
        return self._reads(self, path, want, pinned)

    @abstractmethod
    def list(
        self, folder: str, parent: ObjectInfo | None = None, *, deep: bool = False
    ) -> AsyncIterator[ObjectInfo]:
        """Yield the children of `folder`, objects and folders, each once.

        `deep` yields all objects below `folder` instead. Where the origin has real folders it yields these too, because
        empty ones would be missed otherwise. `parent` is the metadata of `folder` itself, where that is known. An empty
        folder yields nothing. A missing folder raises `ObjectNotFound`, or yields nothing where the origin cannot tell
        it from an empty one.
        """
        ...

    def list_again(
        self, folder: str, parent: ObjectInfo | None = None, *, deep: bool = False, cuts: Sequence[str] = ()
    ) -> AsyncIterator[ObjectInfo]:
        """List as `list` does, with several requests at a time if the origin can.

        `cuts` are some paths of an earlier listing, in order: the names between two of them are one request or more.
        """
        return self.list(folder, parent, deep=deep)

    def lists_all(self, folder: str) -> bool:
        """Return whether `list` gave all names in `folder`: then a name that it lacks is absent.

        A page of links or of a public folder may leave out names. Such a listing is not kept.
        """
        return True

    @property
    def concurrency(self) -> int:
        """Most requests that callers wait for and that run at once now, without speculative ones."""
        return self._slots.window

    @property
    def requests_per_s(self) -> float | None:
        """Reads per second that this process keeps to now, because of a limit of the service; None without one."""
        return None

    def spare_s(self) -> float:
        """Return in how many seconds to check again for spare request rate; 0: there is some now.

        A speculative request is sent only then: when the service accepts it without delaying a request that a caller
        waits for.
        """
        return 0.0

    async def changes(self, path: str, token: str | None) -> Changes | None:
        """Return what changed since `token`, in the part of the origin that the first name of `path` is.

        Without a token, return only the current token. Return None if the part has no change feed, or if the feed
        cannot continue from this token and must start again.
        """
        return None

    @abstractmethod
    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the inner filesystem ("pipe_file", "rm", "cp_file", "makedirs", "sign", ...).

        This is for writes and everything else that is not reading. Names and arguments are fsspec's. It awaits the
        inner filesystem's coroutine where there is one, and runs the method in a thread where not. Errors become those
        of `cachedfs.errors`.
        """
        ...

    @abstractmethod
    async def filesystem(self) -> Any:
        """Return the inner fsspec filesystem, created at the first call.

        Its synchronous methods work from any thread except the event loop thread.
        """
        ...

    async def storage_quota(self, path: str) -> tuple[int, int] | None:
        """Return the limit and the free bytes of the account's storage at `path`; None without a limit."""
        return None

    def server_time(self) -> float | None:
        """Return the time now by the clock of the service, up to a second ahead; None before an answer states it.

        From any thread.
        """
        return None

    async def aclose(self) -> None:
        """Close the connections; the next call creates new ones."""
        return


@runtime_checkable
class Uploader(Protocol):
    """An origin with an upload of its own. At the others, the inner filesystem writes."""

    async def upload(
        self, path: str, file: BinaryIO, *, replaces: ObjectInfo | AnyVersion | None, mtime_ns: int | None
    ) -> ObjectInfo:
        """Make the bytes of `file` the object at `path`, and return its metadata.

        Raises ObjectExists or ObjectChanged if the origin has another version than `replaces` (None: no object).
        `mtime_ns` is a modification time that the object keeps.
        """
        ...
