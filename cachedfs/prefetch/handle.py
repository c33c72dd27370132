"""Handle of a running prefetch, as `fs.prefetch` returns it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

from fsspec.callbacks import DEFAULT_CALLBACK

from cachedfs.common.text import counted, seconds, shown, size
from cachedfs.config import parse_size
from cachedfs.core.engine import Engine
from cachedfs.core.reader import Reader
from cachedfs.errors import CachedFSError
from cachedfs.prefetch.plan import PrefetchPlan
from cachedfs.prefetch.progress import Progress

END_S = 5.0  # longest that `cancel` waits for the plan to end
SHOWN = 3  # errors that a summary lists in full
SHOWN_S = 0.1  # between two updates of the progress bar


class Prefetch:
    """A running prefetch, as `fs.prefetch` returns it. All methods may be called from any thread.

        with fs.prefetch(paths) as plan:
            for path in paths:
                process(fs.cat_file(path))
        print(plan.progress)

    The prefetch runs while the program holds this handle. It is cancelled at the end of a `with` block, and
    when the handle is garbage-collected. It belongs to the process that started it: a forked child can only
    look at `progress` and `errors`.
    """

    def __init__(self, engine: Engine, plan: PrefetchPlan) -> None:
        self._engine, self._plan, self._pid = engine, plan, os.getpid()
        finalizer = weakref.finalize(self, _cancel, engine, plan, self._pid)
        finalizer.atexit = False  # there the engine ends the plan
        # The failure of a plan has the frames of those who waited for it, and they have this handle.
        plan.ended.add_done_callback(lambda _: finalizer.detach())

    @property
    def progress(self) -> Progress:
        """The progress so far."""
        return self._plan.progress()

    @property
    def errors(self) -> list[CachedFSError]:
        """The errors of objects that could not be fetched, each with its URL.

        At most 100 are kept; `progress.errors` is their number.
        """
        return [error for _, error in self._plan.counts.errors]

    @property
    def failed(self) -> list[tuple[str, CachedFSError]]:
        """The same errors, as pairs of path and error.

        The path is that of the object, or of the folder or pattern that could not be listed.
        """
        return list(self._plan.counts.errors)

    def wait(self, timeout: float | None = None) -> Progress:
        """Wait until everything is cached and return the final progress; after `cancel`, wait for its end.

        With a window, or if the items do not fit into the cache, the end depends on a reader that reads them.

        Raises TimeoutError after `timeout` seconds; the prefetch then goes on. Raises the error that ended
        the prefetch early: one of the iterator of items or of the callback, `OriginUnreachable` after a
        minute without the origin, or `CacheError` if nothing can be stored. If only some objects failed, all
        others are cached and the error names the failed ones.
        """
        self._must_be_ours()
        try:
            self._plan.ended.result(timeout)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"still prefetching after {timeout} s: {self.progress}") from None
        return self._outcome()

    async def _wait(self, timeout: float | None = None) -> Progress:
        """Do the same as `wait`, as a coroutine on any event loop."""
        self._must_be_ours()
        ended = asyncio.shield(asyncio.wrap_future(self._plan.ended))
        try:
            async with asyncio.timeout(timeout):
                await ended
        except TimeoutError:
            raise TimeoutError(f"still prefetching after {timeout} s: {self.progress}") from None
        return self._outcome()

    def show(self) -> Progress:
        """Wait like `wait`, and show a progress bar in bytes: a widget in a notebook, a line in a terminal.

        Raises ImportError if tqdm is not installed. An interrupt (Ctrl-C) ends the bar, not the prefetch.
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
                progress = self.progress
                is_over, bar.total = progress.is_over, progress.bytes_total
                bar.update(progress.bytes_fetched + progress.bytes_here - bar.n)
            bar.refresh()
        return self._outcome()

    def cancel(self) -> None:
        """Request nothing more, and end the requests that no reader waits for. Cached blocks stay.

        Waits up to 5 seconds for the end. Does nothing in a forked child.
        """
        if self._pid != os.getpid():
            return
        self._engine.call_soon(self._plan.cancel)
        if threading.current_thread() is not self._engine.thread:
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
        progress, errors = self.progress, self.errors
        came = progress.bytes_fetched + progress.bytes_here
        bar = f'<progress max="{progress.bytes_total}" value="{came}" aria-label="bytes that are here"></progress>'
        of = "" if progress.items_total is None else f" of {progress.items_total:,}"
        more = [("", f"{progress.errors - SHOWN:,} more")] if progress.errors > SHOWN else []
        rows = [
            ("objects", f"{progress.items:,}{of}"),
            (
                "here",
                f"{size(came)}{f' of {size(progress.bytes_total)}' if progress.bytes_total is not None else ''}",
            ),
            (
                "fetched",
                f"{size(progress.bytes_fetched)} in {counted(progress.requests, 'request')}, {size(progress.rate)}/s",
            ),
            *(("not had", str(error)) for error in errors[:SHOWN]),
            *more,
        ]
        return shown(
            f"Prefetch: {progress.state}, {seconds(progress.seconds)}",
            "",
            rows,
            bar if progress.bytes_total else "",
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
    """Start a prefetch plan and return its handle. `fs.prefetch` documents the parameters."""
    engine = reader.objects.engine
    _ = engine.loop  # starts the event loop thread
    report = partial(_report, callback)
    plan = PrefetchPlan(reader, items, window=_window(window), strip=strip, glob=glob, report=report)
    engine.call_soon(plan.start)
    return Prefetch(engine, plan)


def _window(value: Any) -> int | None:
    size = None if value is None else parse_size(value)
    if isinstance(size, float) or size == 0:
        raise ValueError(f"window={value!r}: expected bytes or a size like '64MiB', more than 0, or None")
    return size


def _report(callback: Any, value: int, size: int | None) -> None:
    """Report bytes to an fsspec callback, as `get` does."""
    if size != callback.size:
        callback.set_size(size)
    if value != callback.value:
        callback.absolute_update(value)


def _cancel(engine: Engine, plan: PrefetchPlan, pid: int) -> None:
    """Cancel the plan of a garbage-collected handle, from any thread; do nothing in a forked child."""
    if pid == os.getpid():
        engine.call_soon(plan.cancel)


def _summary(errors: list[CachedFSError], progress: Progress) -> CachedFSError:
    """Return one error for all failed objects; it has their type if they share one."""
    kinds = {type(error) for error in errors}
    kind = kinds.pop() if len(kinds) == 1 else CachedFSError
    if progress.errors == 1:
        return kind(str(errors[0]))
    shown = "; ".join(str(error) for error in errors[:SHOWN])
    more = "; `errors` of what prefetch returned has more" if progress.errors > SHOWN else ""
    return kind(f"{progress.errors:,} of {progress.items:,} objects could not be prefetched: {shown}{more}")
