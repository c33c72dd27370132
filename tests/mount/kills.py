"""Two mounts of one bucket that are killed and replaced, while other processes write and read in them.

Each version of a file is a line with its number and its checksum. So a read that mixes two versions, or that lacks a
part, is seen. Two rules are checked:

- A read that succeeds gives a whole version that its writer began to write.
- Once a write has succeeded, the object is that version or a later one.

`test_kills.py` runs it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cachedfs.sim import GCSServer

BUCKET = "kills"
FOLDER = "data"  # in the bucket: where nothing is mounted, the local folder lacks it
N_MOUNTS = 2
N_WRITERS = N_READERS = 2  # of each mount
LINES = 200  # of a log, before its writer begins another
MOUNTED_S = 60.0
JOINED_S = 60.0
PAUSE_S = 0.02  # after an error: the mount may be missing


class Version(NamedTuple):
    """A version of a file: its name and its number."""

    name: str
    number: int


def encoded(version: Version, pad: str) -> bytes:
    """Return the text of a version, one line. It states its own checksum."""
    body = f"{version.name} {version.number} {pad}".encode()
    return b"%s %08x\n" % (body, zlib.crc32(body))


def decoded(line: bytes) -> Version | None:
    """Return the version whose whole text `line` is, or None."""
    body, _, checksum = line.rpartition(b" ")
    if checksum != b"%08x\n" % zlib.crc32(body):
        return None
    name, number, _ = body.decode().split(" ", 2)
    return Version(name, int(number))


def versions_in(name: str, data: bytes) -> list[int] | None:
    """Return the numbers of the versions in a file, in order; None if it is torn.

    A log has many, other files have one.
    """
    found = [decoded(line) for line in data.splitlines(keepends=True)]
    if not found or (len(found) > 1 and not is_log(name)):
        return None
    numbers = [each.number for each in found if each is not None and each.name == name]
    return numbers if len(numbers) == len(found) and numbers == sorted({*numbers}) else None


def is_log(name: str) -> bool:
    return "log" in name


# Workers.


class Worker:
    """A writer or a reader: one process. `mount` is the number of its mount, `folder` where it works there."""

    def __init__(self, number: int, mount: int, folder: Path, endpoint: str, seed: int) -> None:
        self.number, self.mount, self.folder, self.endpoint = number, mount, folder, endpoint
        self.random = random.Random(f"{seed} {type(self).__name__} {number}")
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []  # what breaks one of the two rules

    def work(self, until: float) -> Worker:
        """Work until that time; return this worker, as it is then."""
        while time.time() < until:
            self.step()
        return self

    def step(self) -> None:
        raise NotImplementedError

    def tried(self, what: str, do: Callable[[], object]) -> bool:
        """Call `do`; count its error, and wait for the mount to come back."""
        try:
            do()
        except OSError as error:
            self.counts[f"{what} {errno.errorcode.get(error.errno or 0, 'without errno')}"] += 1
            time.sleep(PAUSE_S)
            return False
        return True


class Writer(Worker):
    """Writes its own files, through one mount only."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.begun: dict[str, int] = {}
        self.accepted: dict[str, list[int]] = {}
        self.n_logs = 0

    def step(self) -> None:
        kind = self.random.choice(["open", "replace", "log"])
        name = f"{kind}-m{self.mount}-w{self.number}-"
        name += str(self.n_logs if kind == "log" else self.random.randrange(3))
        number = self.begun[name] = self.begun.get(name, 0) + 1
        most = 2000 if kind == "log" else self.random.choice([2000, 200_000, 2_000_000])
        data = encoded(Version(name, number), "x" * self.random.randrange(most))
        path = self.folder / name

        def write() -> None:
            target = path.with_name(f".{name}") if kind == "replace" else path
            with target.open("ab" if kind == "log" else "wb") as file:
                file.write(data)
            if kind == "replace":
                os.replace(target, path)

        if not self.tried("write", write):
            return
        self.counts["writes accepted"] += 1
        self.accepted.setdefault(name, []).append(number)
        if not is_there(self.endpoint, name, number):
            self.wrong.append(f"lost: version {number} of {name}")
        if kind == "log" and number % LINES == 0:
            self.n_logs += 1


class Reader(Worker):
    """Reads through one mount.

    A program that reads in the mount where another one writes sees what is not complete, as on a local disk. So there,
    only files that are complete when they get their name are read.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.last: dict[str, int] = {}

    def step(self) -> None:
        names: list[str] = []
        if not self.tried("list", lambda: names.extend(os.listdir(self.folder))):
            return
        safe = [name for name in names if name.startswith("replace") or f"-m{self.mount}-" not in name]
        if written := [name for name in safe if "-w" in name and name[0] != "."]:
            for name in self.random.choices(written, k=5):
                self.tried("read", functools.partial(self.check, self.folder / name))

    def check(self, path: Path) -> None:
        name, data = path.name, path.read_bytes()
        numbers = versions_in(name, data)
        if numbers is None:
            self.wrong.append(f"torn: {name} has {len(data):,} bytes: {data[:30]!r}...{data[-30:]!r}")
            return
        self.counts["reads whole"] += 1
        self.last[name] = max(self.last.get(name, 0), numbers[-1])


def is_there(endpoint: str, name: str, number: int) -> bool:
    """Return whether the object is this version or a later one; a log has to contain it."""
    numbers = versions_in(name, at_origin(endpoint, name)) or []
    return number in numbers if is_log(name) else max(numbers, default=0) >= number


def at_origin(endpoint: str, name: str) -> bytes:
    """Return the bytes of an object, b"" if it is missing."""
    key = urllib.parse.quote(f"{FOLDER}/{name}", safe="")
    try:
        with urllib.request.urlopen(f"{endpoint}/storage/v1/b/{BUCKET}/o/{key}?alt=media") as answer:
            data: bytes = answer.read()
            return data
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        return b""


# Mounts.


class Mount:
    """A mount in a process that may be killed, with its own cache."""

    def __init__(self, work: Path, number: int, endpoint: str) -> None:
        self.folder = work / f"mount-{number}"
        self.folder.mkdir()
        self._log = work / f"mount-{number}.log"
        self._environment = {
            **os.environ, "FSSPEC_GS_TOKEN": "anon", "FSSPEC_GS_ENDPOINT_URL": endpoint,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "FSSPEC_CACHEDFS_KEEP_FREE": "0",
            "FSSPEC_CACHEDFS_CACHE_DIR": str(work / f"cache-{number}"),
        }  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Mount, and return when the folder is mounted. Raises RuntimeError with the log."""
        until = time.monotonic() + MOUNTED_S
        while self._process is None or not self._is_served():
            # The system may still be unmounting what was killed: then mounting fails once.
            if self._process is None or self._process.poll() is not None:
                options = ["--write", "-o", "max_age=1", f"gs://{BUCKET}", str(self.folder)]
                with self._log.open("ab") as log:
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", "cachedfs", "mount", *options],
                        env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    )  # fmt: skip
            if time.monotonic() > until:
                raise RuntimeError(f"not mounted: {self.said()}")
            time.sleep(PAUSE_S)

    def _is_served(self) -> bool:
        """Return whether the mount answers: of one that was killed, the system may still know the attributes."""
        try:
            return FOLDER in os.listdir(self.folder)
        except OSError:
            return False

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(MOUNTED_S)
            self._process.kill()
            self._process.wait()
        subprocess.run(["fusermount3", "-u", "-z", "-q", self.folder], capture_output=True, check=False)

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


# The run.


def run(seconds: float, seed: int) -> tuple[Counter[str], list[str]]:
    """Run for so many seconds; return what was counted, and what is wrong."""
    rng, context = random.Random(f"{seed} kills"), multiprocessing.get_context("spawn")
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cachedfs-kills-")))
        server = stack.enter_context(GCSServer(process=True))
        server.put(BUCKET, f"{FOLDER}/first", b"so that the folder exists")
        endpoint = server.endpoint_url
        mounts = [Mount(work, number, endpoint) for number in range(N_MOUNTS)]
        for mount in mounts:
            stack.callback(mount.end)
            mount.start()
        until = time.time() + seconds
        workers = [
            kind(number, number % N_MOUNTS, mounts[number % N_MOUNTS].folder / FOLDER, endpoint, seed)
            for kind, n in ((Writer, N_WRITERS), (Reader, N_READERS))
            for number in range(n * N_MOUNTS)
        ]
        pool = stack.enter_context(context.Pool(len(workers)))
        working = [pool.apply_async(worker.work, (until,)) for worker in workers]
        while time.time() < until:
            time.sleep(min(rng.uniform(0.2, 3.0), max(0.0, until - time.time())))
            mount = rng.choice(mounts)
            mount.kill()
            counts["kills"] += 1
            mount.start()
        writers, readers = [], []
        for each in working:
            try:
                worker = each.get(JOINED_S)
            except multiprocessing.TimeoutError:
                wrong.append("stuck: a worker")
                continue
            (writers if isinstance(worker, Writer) else readers).append(worker)
            counts.update(worker.counts)
            wrong += worker.wrong
        for mount in mounts:
            mount.end()
        wrong += wrong_at_end(writers, readers, endpoint)
    return counts, wrong


def wrong_at_end(writers: list[Writer], readers: list[Reader], endpoint: str) -> Iterator[str]:
    """Yield the versions that are lost at the end, and those that were read and never written."""
    begun = {name: number for writer in writers for name, number in writer.begun.items()}
    for writer in writers:
        for name, accepted in writer.accepted.items():
            for number in accepted if is_log(name) else accepted[-1:]:
                if not is_there(endpoint, name, number):
                    yield f"lost at the end: version {number} of {name}"
    for reader in readers:
        for name, number in reader.last.items():
            if number > begun.get(name, 0):
                yield f"never written: version {number} of {name}"
