"""Known order: what a caller declares that it will read is fetched in that order, ahead of whoever reads it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any

from fsspec.callbacks import DEFAULT_CALLBACK

from cachedfs.common.text import counted, seconds, shown, size
from cachedfs.config import parse_size
from cachedfs.errors import CachedFSError
from cachedfs.fetch.runtime import Runtime
from cachedfs.prefetch.items import items_of
from cachedfs.prefetch.progress import Progress
from cachedfs.prefetch.runner import PrefetchPlan
from cachedfs.read.reader import Reader

__all__ = ["Prefetch", "Progress", "begin"]

END_S = 5.0  # longest that `cancel` waits for the end
SHOWN = 3  # errors that a summary has in full
SHOWN_S = 0.1  # between two looks at how far it is, where that is shown


class Prefetch:
    """What `fs.prefetch` set going, for as long as somebody holds this: a plan whose handle is dropped ends.

    Leaving a `with` block ends it as well. It stays with the process that began it: after a fork, in the child, it is only
    looked at. From any thread.
    """

    def __init__(self, runtime: Runtime, plan: PrefetchPlan) -> None:
        self._runtime, self._plan, self._pid = runtime, plan, os.getpid()
        # Not at exit: the runtime ends it there.
        weakref.finalize(self, _give_up, runtime, plan, self._pid).atexit = False

    @property
    def progress(self) -> Progress:
        """How far it is."""
        return self._plan.progress()

    @property
    def errors(self) -> list[CachedFSError]:
        """Why objects could not be fetched, each with its URL: the first hundred; `progress.errors` is how many."""
        return [error for _, error in self._plan.tally.errors]

    @property
    def failed(self) -> list[tuple[str, CachedFSError]]:
        """The same errors, each with the path of its object, or of the folder or pattern that could not be listed."""
        return list(self._plan.tally.errors)

    def wait(self, timeout: float | None = None) -> Progress:
        """Wait until all of it is in the cache, and return the sums; after `cancel` until nothing of it runs.

        Raises what ended it early: what its iterator or callback raised, `OriginAway` after a minute without the origin,
        `CacheError` where nothing can be kept. If single objects could not be had, the error names them; all others are
        here then. TimeoutError after `timeout` seconds: it goes on. With a window, or if more than fits, the end waits for
        a reader.
        """
        self._must_be_ours()
        try:
            self._plan.ended.result(timeout)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"still prefetching after {timeout} s: {self.progress}") from None
        return self._outcome()

    async def _wait(self, timeout: float | None = None) -> Progress:
        """Do what `wait` does, on whatever loop."""
        self._must_be_ours()
        ended = asyncio.shield(asyncio.wrap_future(self._plan.ended))
        try:
            async with asyncio.timeout(timeout):
                await ended
        except TimeoutError:
            raise TimeoutError(f"still prefetching after {timeout} s: {self.progress}") from None
        return self._outcome()

    def show(self) -> Progress:
        """Do what `wait` does, behind a bar of bytes: tqdm's, which is a widget in a notebook and a line in a terminal.

        Raises ImportError where tqdm is not installed. Who interrupts it ends the bar, not the plan.
        """
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ImportError('the bar is tqdm\'s: pip install "cachedfs[notebook]"') from error
        self._must_be_ours()
        with tqdm(desc="prefetch", unit="B", unit_scale=True) as bar:
            is_over = False
            while not is_over:
                with contextlib.suppress(concurrent.futures.TimeoutError):
                    self._plan.ended.result(SHOWN_S)
                told = self.progress
                is_over, bar.total = told.is_over, told.bytes_total
                bar.update(told.bytes_fetched + told.bytes_here - bar.n)
            bar.refresh()
        return self._outcome()

    def cancel(self) -> None:
        """Ask for nothing more; what is on its way for nobody else ends at its next block. What came stays."""
        if self._pid != os.getpid():
            return
        self._runtime.call_soon(self._plan.cancel)
        if not self._runtime.is_loop_thread(threading.current_thread()):
            with contextlib.suppress(concurrent.futures.TimeoutError):
                self._plan.ended.result(END_S)

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __repr__(self) -> str:
        return f"<Prefetch {self.progress}>"

    def _repr_html_(self) -> str:
        told, errors = self.progress, self.errors
        came = told.bytes_fetched + told.bytes_here
        bar = (
            f'<progress max="{told.bytes_total}" value="{came}" aria-label="bytes that are here"></progress>'
        )
        of = "" if told.items_total is None else f" of {told.items_total:,}"
        more = [("", f"{told.errors - SHOWN:,} more")] if told.errors > SHOWN else []
        rows = [
            ("objects", f"{told.items:,}{of}"),
            (
                "here",
                f"{size(came)}{f' of {size(told.bytes_total)}' if told.bytes_total is not None else ''}",
            ),
            (
                "fetched",
                f"{size(told.bytes_fetched)} in {counted(told.requests, 'request')}, {size(told.rate)}/s",
            ),
            *(("not had", str(error)) for error in errors[:SHOWN]),
            *more,
        ]
        return shown(
            f"Prefetch: {told.state}, {seconds(told.seconds)}", "", rows, bar if told.bytes_total else ""
        )

    def __reduce__(self) -> Any:
        raise TypeError("a prefetch stays in the process that began it: pass the paths, and prefetch there")

    def _must_be_ours(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError("this was begun before a fork and runs in the parent process: wait there")

    def _outcome(self) -> Progress:
        failure, progress = self._plan.failure, self.progress
        if failure is not None:
            raise failure
        if progress.errors and progress.state == "done":
            raise _summary(self.errors, progress)
        return progress


def begin(
    reader: Reader,
    items: Any,
    *,
    window: Any,
    strip: Callable[[str], str],
    glob: Callable[[str], Awaitable[Mapping[str, Any]]],
    callback: Any = DEFAULT_CALLBACK,
) -> Prefetch:
    """Set going what `fs.prefetch` is asked for; see there."""
    runtime, told = reader.source.runtime, _Told(callback)
    _ = runtime.loop  # which runs from here on
    plan = PrefetchPlan(
        reader,
        items=lambda changed: items_of(items, changed=changed),
        window=_window(window),
        strip=strip,
        glob=glob,
        told=told,
    )
    runtime.call_soon(plan.start)
    return Prefetch(runtime, plan)


def _window(value: Any) -> int | None:
    size = None if value is None else parse_size(value)
    if isinstance(size, float) or size == 0:
        raise ValueError(f"window={value!r}: expected bytes or a size like '64MiB', more than 0, or None")
    return size


class _Told:
    """Tells a callback of fsspec's of bytes, as `get` does."""

    def __init__(self, callback: Any) -> None:
        self._callback, self._value = callback, 0
        self._size: int | None = None

    def __call__(self, value: int, size: int | None) -> None:
        if size != self._size:
            self._size = size
            self._callback.set_size(size)
        if value != self._value:
            self._value = value
            self._callback.absolute_update(value)


def _give_up(runtime: Runtime, plan: PrefetchPlan, pid: int) -> None:
    """End the plan of a handle that is gone; in whatever thread that is, and not in a child that inherited it."""
    if pid == os.getpid():
        runtime.call_soon(plan.cancel)


def _summary(errors: list[CachedFSError], progress: Progress) -> CachedFSError:
    """Return one error for all objects that could not be fetched; of their kind, if it is the same for all."""
    kinds = {type(error) for error in errors}
    kind = kinds.pop() if len(kinds) == 1 else CachedFSError
    if progress.errors == 1:
        return kind(str(errors[0]))
    shown = "; ".join(str(error) for error in errors[:SHOWN])
    more = "; `errors` of what prefetch returned has more" if progress.errors > SHOWN else ""
    return kind(f"{progress.errors:,} of {progress.items:,} objects could not be prefetched: {shown}{more}")
