"""Accidents that happen to caches: every contender goes through the same five, in real processes."""

from __future__ import annotations

import contextlib
import random
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cachedfs.sim import GCSServer
from tests.benchmarks.abused import PIECE
from tests.benchmarks.harness import ContenderError, Figure, Result, Session
from tests.benchmarks.services import BUCKET, SERVICES

MiB = 1 << 20
SIZE, FULL_SIZE, DISK_SIZE = 16 * MiB, 192 * MiB, 64 * MiB
READERS = 8
MAX_AGE_S = 1
CONTENDERS = ["blockcache", "filecache", "simplecache", "cachedfs"]
MOUNTED = 'mount -t tmpfs -o "size=$0" tmpfs "$1" && shift && exec "$@"'


@dataclass(frozen=True, slots=True)
class Row:
    """One accident."""

    name: str
    title: str
    definition: str
    act: Callable[[Scene], Outcome]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an accident as text, and whether it was wrong; `more` has other numbers."""

    words: str
    is_wrong: bool
    more: Mapping[str, float] = field(default_factory=dict)


class Scene:
    """One contender with an empty cache directory, the cloud, and the right bytes."""

    def __init__(self, contender: str, session: Session, server: GCSServer, cache: Path) -> None:
        self.session, self.server, self.cache = session, server, cache
        self._prefix = SERVICES["gcs"].contenders[contender]

    def url(self, key: str) -> str:
        return f"{self._prefix}{BUCKET}/{key}"

    def put(self, key: str, seed: int, size: int = SIZE) -> list[int]:
        """Put bytes at the origin without the contender; return the checksums of their pieces."""
        data = random.Random(seed).randbytes(size)
        self.server.put(BUCKET, key, data)
        return [zlib.crc32(data[at : at + PIECE]) for at in range(0, size, PIECE)]

    def read(self, key: str, n: int = 1) -> list[dict[str, Any]]:
        """Return what n new processes read."""
        return list(self.order("read", key, n=n)["read"])

    def read_one(self, key: str) -> list[int]:
        """Return the checksums of what a new process reads. Raises ContenderError."""
        [answer] = self.read(key)
        if "error" in answer:
            raise ContenderError(answer["error"])
        return list(answer["crcs"])

    def read_right(self, key: str, right: list[int]) -> None:
        """Let a new process read before anything happens. Raises ContenderError."""
        if self.read_one(key) != right:
            raise ContenderError("wrong bytes before anything happened")

    def order(self, do: str, key: str, **more: Any) -> dict[str, Any]:
        return self.session.order(do=do, url=self.url(key), **more)


# The accidents.


def shared(scene: Scene) -> Outcome:
    right = scene.put("shared.bin", 1)
    answers = scene.read("shared.bin", READERS)
    times = scene.server.bytes_sent() / SIZE
    n_right = sum(answer.get("crcs") == right for answer in answers)
    words = f"{n_right}/{READERS} right, {times:.1f}x"
    return Outcome(words, n_right < READERS, {"downloaded": times})


def replaced(scene: Scene) -> Outcome:
    old = scene.put("replaced.bin", 2)
    scene.read_right("replaced.bin", old)
    new = scene.put("replaced.bin", 3)
    time.sleep(MAX_AGE_S + 0.5)
    found = scene.read_one("replaced.bin")
    words = "new" if found == new else "stale" if found == old else "neither old nor new"
    return Outcome(words, found != new)


def mixed(scene: Scene) -> Outcome:
    old = scene.put("mixed.bin", 4)
    found = scene.order("begin", "mixed.bin")["crcs"]
    new = scene.put("mixed.bin", 5)
    try:
        found += scene.order("finish", "mixed.bin")["crcs"]
    except ContenderError as error:
        if not str(error).startswith("ObjectChanged"):
            raise
        return Outcome("ObjectChanged", False)
    if found in (old, new):
        return Outcome("old" if found == old else "new", False)
    return Outcome("old and new mixed", True)


def flipped(scene: Scene) -> Outcome:
    right = scene.put("flipped.bin", 6)
    scene.read_right("flipped.bin", right)
    for path in scene.cache.rglob("*"):
        if path.is_file() and path.stat().st_size >= MiB:  # bytes of objects, ours in blocks of a MiB
            flip(path)
    is_right = scene.read_one("flipped.bin") == right
    fetched = scene.server.bytes_sent()
    words = ("right, fetched again" if fetched else "right") if is_right else "wrong bytes"
    return Outcome(words, not is_right)


def flip(path: Path) -> None:
    """Flip one bit in the middle of every MiB of a file."""
    with path.open("r+b") as file:
        for at in range(MiB // 2, path.stat().st_size, MiB):
            file.seek(at)
            bit = file.read(1)[0] ^ 1
            file.seek(at)
            file.write(bytes([bit]))


def full(scene: Scene) -> Outcome:
    right = scene.put("full.bin", 7, FULL_SIZE)
    is_right = scene.read_one("full.bin") == right
    return Outcome("right" if is_right else "wrong bytes", not is_right)


_LIST = [
    Row("shared", f"{READERS} processes read one object", f"{SIZE // MiB} MiB, begun 50 ms apart: how many have the right bytes, and what was downloaded, in times its size", shared),
    Row("replaced", "object replaced at the origin", f"read whole, replaced by another of its size, {MAX_AGE_S + 0.5} s later read whole by a new process; `max_age={MAX_AGE_S}`, the others as they are", replaced),
    Row("mixed", "replaced while being read", "after the first MiB through one handle; then the rest is read through it", mixed),
    Row("flipped", "bytes flipped on disk", "one bit in every MiB of all large files of the cache; then read by a new process", flipped),
    Row("full", f"{DISK_SIZE // MiB} MiB disk, {FULL_SIZE // MiB} MiB object", "the cache directory is a tmpfs of its own, the object is read in sequence", full),
]  # fmt: skip
ROWS = {row.name: row for row in _LIST}


# Running the accidents.


def measure_abuse(names: list[str], contender: str, folder: Path) -> list[Result]:
    """Return the results of one contender; rows on a disk of normal size share one cache directory."""
    together = [name for name in names if name != "full"]
    results = []
    with GCSServer("table", process=True) as server:
        if together:
            with _scene(contender, server, folder) as scene:
                results += [_result(ROWS[name], contender, scene) for name in together]
        if "full" in names:
            results.append(_measure_full(contender, server, folder))
    return results


def _measure_full(contender: str, server: GCSServer, folder: Path) -> Result:
    if not _can_mount(folder):
        return Result("full", contender, sample="no tmpfs can be mounted here", outcome="not measured")
    with _scene(contender, server, folder, disk=DISK_SIZE) as scene:
        return _result(ROWS["full"], contender, scene)


@contextlib.contextmanager
def _scene(contender: str, server: GCSServer, folder: Path, disk: int | None = None) -> Iterator[Scene]:
    """Give a contender an empty cache directory; with `disk`, on a private file system of this size."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=f"{contender}-") as name:
        command = [] if disk is None else _mounting(disk, name)
        environ = {"FSSPEC_CACHEDFS_MAX_AGE": str(MAX_AGE_S)}
        with Session(
            SERVICES["gcs"], server, contender, Path(name), command=command, more=environ
        ) as session:
            yield Scene(contender, session, server, Path(name))


def _mounting(size: int, folder: str) -> list[str]:
    """Return the command that runs another one with its own file system, which is removed with it."""
    return ["unshare", "--map-root-user", "--mount", "sh", "-c", MOUNTED, str(size), folder]


def _can_mount(folder: Path) -> bool:
    try:
        done = subprocess.run([*_mounting(MiB, str(folder)), "true"], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


def _result(row: Row, contender: str, scene: Scene) -> Result:
    """Return the result; an error of the contender is a wrong result."""
    result = Result(row.name, contender)
    scene.server.reset()
    try:
        outcome = row.act(scene)
    except ContenderError as error:
        result.error = str(error)
        result.outcome = "ENOSPC" if "No space left" in result.error else result.error.partition(":")[0]
        return result
    result.outcome = outcome.words
    numbers = {"wrong": float(outcome.is_wrong), **outcome.more}
    result.figures = {name: Figure.of([value]) for name, value in numbers.items()}
    result.requests = {"in all": float(scene.server.count())}
    return result
