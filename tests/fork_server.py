"""A process that forks children for tests: a fork takes some milliseconds, a new interpreter three hundred.

A child runs one module-level function, named as "module:function". It may be killed at any moment by `os.kill`; its process
number is not reused before `wait` has returned.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any, NamedTuple


class Ended(NamedTuple):
    """How a child ended: the signal that killed it (0: none), and the result of its function."""

    signal: int
    result: Any


class ForkServer:
    """Starts children, in which `modules` are imported already; used by one thread, and closed at the end."""

    def __init__(self, *modules: str) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*modules])
        self._children: dict[int, tuple[Any, Connection]] = {}

    def start(self, function: str, *arguments: Any) -> int:
        """Start a child that runs `function`; return its process number."""
        result, answer = self._context.Pipe(duplex=False)
        child = self._context.Process(target=_run, args=(function, arguments, answer), daemon=True)
        child.start()
        answer.close()
        assert child.pid is not None
        self._children[child.pid] = child, result
        return child.pid

    def wait(self, pid: int) -> Ended:
        """Return how the child ended, once it has. AssertionError if it failed by itself."""
        child, result = self._children.pop(pid)
        value, error = None, ""
        with result, contextlib.suppress(EOFError):  # it was killed
            value, error = result.recv()
        child.join()
        assert not error, error
        return Ended(-min(child.exitcode, 0), value)

    def run(self, function: str, *arguments: Any) -> Ended:
        return self.wait(self.start(function, *arguments))

    def close(self) -> None:
        """Kill the children of failed or interrupted tests: they may run forever."""
        for child, result in self._children.values():
            child.kill()
            child.join()
            result.close()


def _run(function: str, arguments: tuple[Any, ...], answer: Connection) -> None:
    warnings.simplefilter("error")
    value, error = None, ""
    try:
        module, _, name = function.partition(":")
        value = getattr(importlib.import_module(module), name)(*arguments)
    except BaseException:  # any error is reported to the waiting test
        error = traceback.format_exc()
    answer.send((value, error))
