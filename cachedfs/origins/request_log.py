"""Log every request once, when it ends.

It is a debug line, and an event where events are recorded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cachedfs.common import event_log
from cachedfs.common.logging import public_url
from cachedfs.origins.request_slots import is_speculative

__all__ = ["LoggedRequest", "logged_request"]

logger = logging.getLogger("cachedfs.origins")


class LoggedRequest:
    """One request, from the time it is sent.

    `range_` is its Range header. `size` counts the bytes of the answer as they arrive.
    """

    def __init__(self, method: str, url: str, range_: str = "") -> None:
        self._method, self._url, self._range = method, url, range_
        self._began = time.monotonic()
        self._wait_s: float | None = None
        self._is_speculative, self._is_over = is_speculative(), False
        self.status: int | str = "no answer"
        self.size = 0
        self.refused = False  # for a rate limit or a quota

    def answered(self, status: int | str) -> None:
        """Note the status and the latency, when the headers have arrived."""
        self.status, self._wait_s = status, time.monotonic() - self._began

    def over(self, error: BaseException | None = None) -> None:
        """Log the request: complete, abandoned, or failed with `error` before an answer began.

        Only the first call has an effect.
        """
        if self._is_over:
            return
        self._is_over = True
        if error is not None and self._wait_s is None:
            self.status = type(error.__cause__ or error).__name__
        log = event_log.current()
        if log is None and not logger.isEnabledFor(logging.DEBUG):
            return
        took_s = time.monotonic() - self._began
        wait_s = took_s if self._wait_s is None else self._wait_s
        url = public_url(self._url)
        if log is not None:
            log.note(
                "request",
                self._began,
                method=self._method,
                url=url,
                range=self._range,
                status=self.status,
                bytes=self.size,
                wait_s=round(wait_s, 6),
                took_s=round(took_s, 6),
                ahead=self._is_speculative,
                refused=self.refused,
            )
        target = f"{url} {self._range}" if self._range else url
        logger.debug(
            "%s %s: %s, %d bytes in %.3f s, begun after %.3f s",
            *(self._method, target, self.status, self.size, took_s, wait_s),
        )


@contextmanager
def logged_request(method: str, url: str, range_: str = "") -> Iterator[LoggedRequest]:
    """Log a request whose answer arrives in one piece; it ends with the block, which sets `size`."""
    logged = LoggedRequest(method, url, range_)
    try:
        yield logged
        if logged.status == "no answer":
            logged.answered("ok")
    except BaseException as error:  # also on cancellation
        logged.over(error)
        raise
    logged.over()
