"""Ranges as HTTP writes them: the only place where an end is inclusive. Pure."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from cachedfs.common.types import Changes, ObjectInfo, Range, Suffix

__all__ = [
    "Alone",
    "Origin",
    "Reply",
    "clipped",
    "content_range",
    "describe",
    "number",
    "range_header",
    "subject_of",
]


def range_header(want: Range | Suffix | None) -> str | None:
    """Return the `Range` header for a non-empty range, always with an end; None for the whole object."""
    if want is None:
        return None
    if isinstance(want, Suffix):
        return f"bytes=-{want.size}"
    return f"bytes={want.start}-{want.stop - 1}"


def content_range(text: str) -> tuple[int, int, int | None]:
    """Return start, stop and total of `bytes a-b/N`, where N may be `*`."""
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", text.strip())
    if not found:
        raise ValueError(f"the answer has no usable Content-Range: {text!r}")
    return int(found[1]), int(found[2]) + 1, number(found[3])


def number(text: str | None) -> int | None:
    """Return the number that a header holds; None where it holds none."""
    return int(text) if text is not None and text.isdigit() else None


Alone = Callable[[str], AbstractAsyncContextManager[None]]
"""Gives the right to change what a path names, which one has at a time: of all processes that whoever hands it in reaches."""


def clipped(want: Range | Suffix | None, size: int) -> Range:
    """Return the bytes that `want` means of an object of `size` bytes; `[size, size)` when it lies behind the end."""
    if want is None:
        return Range(0, size)
    if isinstance(want, Suffix):
        return Range(max(size - want.size, 0), size)
    return Range(min(want.start, size), min(want.stop, size))


def describe(want: Range | Suffix | None) -> str:
    """Return the words that an error has for a read of `want`."""
    if want is None:
        return "reading all bytes"
    if isinstance(want, Suffix):
        return f"reading the last {want.size} bytes"
    return f"reading bytes {want.start} to {want.stop}"


def subject_of(method: str, args: Sequence[Any]) -> str:
    """Return the path that a call of the inner filesystem is about; of several the first, "" where it has none."""
    subject = args[1] if method == "put_file" else next(iter(args), "")
    if isinstance(subject, list):
        subject = next(iter(subject), "")
    return subject if isinstance(subject, str) else ""


class Reply(Protocol):
    """A read whose headers are here and whose body is still coming.

    `info` names the version whose bytes follow and its whole size; `start` is the offset of the first byte,
    `stop` the offset after the last one that the origin announced. Iteration gives non-empty bytes in
    order, from `start` to `stop` exactly, or raises: a body that breaks is resumed by the origin, a version
    that changes is `ObjectChanged`. What iteration has given is true: bytes that need to be confirmed
    first (an origin without conditional reads) are held back until they are.
    """

    info: ObjectInfo
    start: int
    stop: int

    def __aiter__(self) -> AsyncIterator[bytes]: ...


class Origin(Protocol):
    """A remote service that holds the truth. All methods run on the runtime's loop.

    Errors are those of `cachedfs.errors`, made here and nowhere above. Retries are made here, and counted
    by `on_request`, which is called once for every request sent.
    """

    identity: str
    """Protocol, endpoint host, anon or auth: part of every key. Known without any request or import."""

    on_request: Callable[[], None]

    by_parent: bool
    """A name is looked up in its folder: questions are cheaper with what is known of the folder, reading answers none
    of them, and an absence is known for sure."""

    async def lookup(self, path: str, parent: ObjectInfo | None = None) -> ObjectInfo:
        """Return what `path` is now: an object or a folder. Raises `ObjectNotFound` for neither.

        `parent` is the folder that it lies in, as far as that is known.
        """
        ...

    def read(
        self, path: str, want: Range | Suffix | None, pinned: ObjectInfo | None
    ) -> AbstractAsyncContextManager[Reply]:
        """Ask for bytes of `path`; entering returns at the headers, leaving early stops the body.

        `want` None is the whole object; a range may pass the end and is clipped, one that starts at or after the
        end gives an empty reply (`start == stop == info.size`). With `pinned`, bytes are of exactly that version, or
        `ObjectChanged` is raised: also when the object is gone. Without, a missing object is `ObjectNotFound`.
        """
        ...

    def list(
        self, folder: str, parent: ObjectInfo | None = None, *, deep: bool = False
    ) -> AsyncIterator[ObjectInfo]:
        """Give the children of `folder`: objects and folders, each once; `deep`: all objects below it,
        and, where the origin has folders of its own, those too: an empty one would be missed otherwise.

        `parent` is the folder itself, as far as that is known: the parent of what is given.
        Nothing at all for an empty folder, and for a missing one where the origin cannot tell them apart; where it
        can, `ObjectNotFound`.
        """
        ...

    concurrency: int
    """How many requests it has in flight for those who wait; and beside them as many that nobody waits for (`slots`)."""

    def spare_s(self) -> float:
        """Return in how many seconds to look again whether the service takes a request that nobody waits for, without
        keeping one waiting that somebody does; 0: it does now."""
        ...

    async def changes(self, path: str, token: str | None) -> Changes | None:
        """Return what happened since `token` was given, in that part of the origin which the first name of `path` is.

        Without a token: the one of now, and nothing else. None: there is no feed of that part, or it cannot go on from
        this token and has to begin anew.
        """
        ...

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Return what the inner filesystem's `method` returns ("pipe_file", "rm", "cp_file", "makedirs", "sign", ...).

        The door for writes and for everything that is not reading: fsspec's own names and arguments, run as a coroutine
        where the inner filesystem has one, else in a thread; its errors become those of `cachedfs.errors`.
        """
        ...

    async def filesystem(self) -> Any:
        """Return the inner fsspec filesystem, made at the first call; its sync face works from any thread but the loop's."""
        ...

    async def aclose(self) -> None: ...
