"""The processes of the accidents: they read, at the same time as others or while things change, as ordered."""

from __future__ import annotations

import multiprocessing
import time
import zlib
from multiprocessing.connection import Connection
from typing import Any

import fsspec

PIECE = 1 << 20
APART_S = 0.05  # pause between the starts of processes that read together, as without a common start
_open: list[Any] = []  # the file that is read on after the accident


def act(do: str, url: str, n: int = 1) -> dict[str, Any]:
    """Do one thing in `n` processes; return the CRC-32 of every piece that each of them read."""
    if do == "begin":
        _open.append(fsspec.open(url).open())
        return {"crcs": [zlib.crc32(_open[0].read(PIECE))]}
    if do == "finish":
        with _open.pop() as file:
            return {"crcs": _rest(file)}
    return {"read": _in_new_processes(url, n)}


def _rest(file: Any) -> list[int]:
    return [zlib.crc32(data) for data in iter(lambda: file.read(PIECE), b"")]


def _in_new_processes(url: str, n: int) -> list[dict[str, Any]]:
    """Return what each of n processes read; they start with everything imported and nothing else."""
    context, pairs = multiprocessing.get_context("fork"), []
    for _ in range(n):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_read, args=(url, there))
        process.start()
        there.close()
        pairs.append((process, here))
        if n > 1:
            time.sleep(APART_S)
    answers = []
    for process, here in pairs:
        try:
            answers.append(here.recv())
        except EOFError:
            answers.append({"error": "the process died"})
        process.join()
    return answers


def _read(url: str, answers: Connection) -> None:
    try:
        with fsspec.open(url) as file:
            answer: dict[str, Any] = {"crcs": _rest(file)}
    except Exception as error:  # an error of a contender is a result
        answer = {"error": f"{type(error).__name__}: {error}"[:300]}
    answers.send(answer)
    answers.close()
