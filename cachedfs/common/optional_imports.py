"""Imports that a fork waits for: a child that inherits a module half imported by another thread waits for it for ever."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Iterable, Iterator

__all__ = ["importing", "preload"]

_MOST_WAIT_S = 10.0  # of a fork: an import that takes longer may itself wait for the thread that forks

_lock = threading.RLock()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Hold back forks of this process while modules are imported, in whatever thread that is."""
    with _lock:
        yield


def preload(names: Iterable[str]) -> None:
    """Import modules that libraries import in the middle of a call; one that is not installed is passed over."""
    with importing():
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def _before_fork() -> None:
    _lock.acquire(timeout=_MOST_WAIT_S)


def _after_fork_in_parent() -> None:
    with contextlib.suppress(RuntimeError):  # it waited in vain
        _lock.release()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
    )
