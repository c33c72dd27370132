"""Imports that delay forks.

A child process that inherits a module half imported by another thread would wait forever for that import to finish.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Iterable, Iterator

_MAX_WAIT_S = 10.0  # longest delay of a fork: a longer import may itself be waiting for the forking thread

_lock = threading.RLock()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Delay forks of this process, by any thread, while the `with` block imports modules."""
    with _lock:
        yield


def preload(names: Iterable[str]) -> None:
    """Import modules that libraries import lazily, so that forks wait for the import.

    Missing modules are skipped.
    """
    with importing():
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def _before_fork() -> None:
    _lock.acquire(timeout=_MAX_WAIT_S)


def _after_fork_in_parent() -> None:
    with contextlib.suppress(RuntimeError):  # `_before_fork` timed out
        _lock.release()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
    )
