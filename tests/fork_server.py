"""A process that forks children for tests: a fork takes two milliseconds, a new interpreter three hundred.

A child runs one module-level function, named as "module:function", with JSON for arguments and result. It may be killed
at any moment by `os.kill`; its process number is not reused before `wait` has returned.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from typing import Any, NamedTuple

from tests.support import ROOT


class Ended(NamedTuple):
    """How a child ended: the signal that killed it (0: none), and the result of its function."""

    signal: int
    result: Any


class ForkServer:
    """The process that forks; used by one thread, and closed at the end."""

    def __init__(self, *modules: str) -> None:
        command = [sys.executable, "-W", "error", "-m", "tests.fork_server", *modules]
        pipe = subprocess.PIPE
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=pipe,
            stdout=pipe,
            text=True,
            start_new_session=True,  # so that all can be ended at once
        )

    def start(self, function: str, *arguments: Any) -> int:
        """Start a child that runs `function`; return its process number."""
        return int(self._ask({"function": function, "arguments": arguments}))

    def wait(self, pid: int) -> Ended:
        """Return how the child ended, once it has. AssertionError if it failed by itself."""
        killed_by, status, text = self._ask({"pid": pid})
        assert status == 0, text
        return Ended(killed_by, json.loads(text) if text and not killed_by else None)

    def run(self, function: str, *arguments: Any) -> Ended:
        return self.wait(self.start(function, *arguments))

    def close(self) -> None:
        try:
            self._process.communicate(timeout=600)
        # A test was interrupted while it waited for a child that never ends.
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            raise
        assert self._process.returncode == 0

    def _ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


def _fork(function: str, arguments: list[Any]) -> tuple[int, int]:
    """Fork a child; return its number and the descriptor from which its result is read."""
    result, answer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(answer)
        return pid, result
    status = 1
    try:
        module, _, name = function.partition(":")
        text = json.dumps(getattr(importlib.import_module(module), name)(*arguments))
        status = 0
    except BaseException:  # any error is reported to the waiting test
        text = traceback.format_exc()
    with open(answer, "w") as file:
        file.write(text)
    os._exit(status)


def _read_all(descriptor: int) -> str:
    with open(descriptor) as file:
        return file.read()


def _serve() -> None:
    results: dict[int, int] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if "function" in order:
            pid, results[pid] = _fork(**order)
            answer: Any = pid
        else:
            text = _read_all(results.pop(order["pid"]))
            status = os.waitpid(order["pid"], 0)[1]  # until now its number could not be reused
            answer = (os.WTERMSIG(status), os.WEXITSTATUS(status), text)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for pid in results:  # of failed or interrupted tests: they may run forever
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        importlib.import_module(each)
    _serve()
