"""Helpers shared by tests: the simulated clouds, and new processes."""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import http.server
import io
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import fsspec

from cachedfs.core import engines
from cachedfs.core.engine import Engine
from cachedfs.filesystem import CachedDriveFileSystem, CachedFileSystem, CachedGCSFileSystem
from cachedfs.origins.drive.filesystem import DriveFileSystem
from cachedfs.sim import DriveServer, GCSServer, SimServer

ROOT = pathlib.Path(__file__).parent.parent
KiB, MiB = 1 << 10, 1 << 20
AGE_S = 600  # `max_age` for a second pass after a first one that may be slow, such as processes that import all of torch
NAMES = ["cachedfs::gs://", "cgs://", "cachedfs::drive://"]  # of clouds, in front of a path
LONG_TIMEOUTS = "import tests.long_timeouts\n"  # first line of the code of a process
OURS = (CachedFileSystem, CachedGCSFileSystem, CachedDriveFileSystem, DriveFileSystem)
HAS_FUSE = bool(os.access("/dev/fuse", os.W_OK) and shutil.which("fusermount3"))


def make_old(path: pathlib.Path) -> None:
    """Set the time of a local file back by a minute: a time of just now is no evidence of a version."""
    old = path.stat().st_mtime_ns - 60 * 10**9
    os.utime(path, ns=(old, old))


def noise(size: int, seed: int = 0) -> bytes:
    """Return `size` random bytes, so that no two blocks are equal."""
    import random

    return random.Random(seed).randbytes(size)


def files_below(folder: pathlib.Path) -> dict[str, bytes]:
    """Return the bytes of all files below a local folder, by their paths in it."""
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


class WebServer(http.server.ThreadingHTTPServer):
    """Serves the files of a folder over HTTP until it is closed."""

    def __init__(self, folder, handler=http.server.SimpleHTTPRequestHandler):
        quiet = type("Quiet", (handler,), {"log_message": lambda *_: None})
        super().__init__(("127.0.0.1", 0), functools.partial(quiet, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, args=[0.01])
        self._thread.start()

    def close(self):
        self.shutdown()
        self.server_close()
        self._thread.join()

    def __exit__(self, *_):
        self.close()


_TALLY: collections.Counter[str] = collections.Counter()


def tally(what: str, n: int = 1) -> None:
    """Count kills, faults, reads and so on; the sums are printed at the end of the run."""
    _TALLY[what] += n


def tallied() -> dict[str, int]:
    return dict(_TALLY)


def until(condition: Callable[[], object], *, within_s: float = 120.0) -> None:
    """Wait for a condition that another thread or process makes true; fail if it does not."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.005)


def until_quiet(engine: Engine) -> None:
    """Wait until all is stored and nothing is left: no request, lookup, task or fetch lock, also ahead of readers.

    Not for a second engine of one cache: the lock of the first one's writer stays until the process ends.
    """

    async def is_quiet() -> (
        bool
    ):  # on the loop, where no request is between the queue and the list of active ones
        ahead = engine.speculation.queued or engine.speculation._lookups
        return not (ahead or engine.active_requests or engine.by_block)

    def is_free() -> bool:
        locks = engine.cache.locks.held().keys() - {engine.cache.space.writer & (1 << 62) - 1}
        return not (
            engine.by_block or engine.active_requests or engine.lookups._running or engine._tasks or locks
        )

    until(lambda: engine.drain(120) and engine.run(is_quiet()) and is_free())


def stack_dump() -> str:
    """Return the stack of every thread and every task of the engines, for a test that hangs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident)}:\n{''.join(traceback.format_stack(frame, limit=12))}"
        for ident, frame in sys._current_frames().items()
    ]
    for engine in engines._engines.values():
        for task in asyncio.all_tasks(engine._loop) if engine._loop is not None else ():
            out = io.StringIO()
            task.print_stack(limit=12, file=out)
            parts.append(out.getvalue())
        by_block = [(f.start, f.filled, f.stop, f.demand, f.done, f.stopped) for f in engine.active_requests]
        parts.append(
            f"{engine.cache.root}: active {by_block}, {len(engine.by_block)} blocks, {engine.store_queue.queued_bytes} behind"
        )
    return "\n".join(parts)


def item_threads() -> set[threading.Thread]:
    """Return the threads of this process in which prefetch plans take items from an iterator."""
    return {thread for thread in threading.enumerate() if thread.name == "cachedfs-items"}


def forget() -> None:
    """Do what the end of this process would: store everything and drop all memory. The next use starts afresh."""
    # The real end waits for five seconds; a busy machine may take longer.
    assert all(engine.drain(120) for engine in list(engines._engines.values()))
    engines._close_all()
    for cls in OURS:
        cls.clear_instance_cache()


@dataclasses.dataclass
class Machine:
    """A simulated service and a cache directory, with the requests sent and processes that use both."""

    server: SimServer
    name: str  # of the bucket or folder of one test
    cache_dir: pathlib.Path

    protocol = ""

    def asked(self) -> list[str]:
        """Return the sorted kinds of the requests since the last call."""
        kinds = sorted(request.kind for request in self.server.requests)
        self.server.reset()
        return kinds

    @property
    def options(self) -> dict:
        """Storage options for one filesystem, independent of the configuration."""
        return {self.protocol: {"token": "anon", "endpoint_url": self.server.endpoint_url}}

    def python(self, code: str, *arguments: str, timeout: float = 600) -> str:
        """Run `code` in a new process with the configuration of this one; return its output."""
        command = [sys.executable, "-c", LONG_TIMEOUTS + textwrap.dedent(code), *arguments]
        done = subprocess.run(
            command, env=self._environment(), capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, done.stderr
        assert not done.stderr, done.stderr
        return done.stdout

    @contextlib.contextmanager
    def talking(self, code: str, *arguments: str) -> Iterator[Callable[[str], str]]:
        """Run `code` in a process; yield a function that sends it a line and returns the line that it answers."""
        command = [sys.executable, "-c", LONG_TIMEOUTS + textwrap.dedent(code), *arguments]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, env=self._environment(), text=True, stdin=pipe, stdout=pipe
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None

            def ask(line: str) -> str:
                print(line, file=process.stdin, flush=True)
                return process.stdout.readline().rstrip("\n")

            yield ask
            process.stdin.close()
        assert process.returncode == 0

    @property
    def configuration(self) -> dict[str, str]:
        """Environment variables that configure fsspec in a new process as in this one."""
        return {
            "FSSPEC_CACHEDFS_CACHE_DIR": str(self.cache_dir),
            "FSSPEC_CACHEDFS_KEEP_FREE": "0",
            **{
                f"FSSPEC_{self.protocol.upper()}_{name.upper()}": value
                for name, value in self.options[self.protocol].items()
            },
        }

    def _environment(self) -> dict[str, str]:
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("FSSPEC_", "GCSFS_"))
        }
        return inherited | {
            **self.configuration,
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "error::ResourceWarning",
            "BUCKET": self.name,
        }


@dataclasses.dataclass
class Cloud(Machine):
    """One bucket at the simulated GCS."""

    server: GCSServer

    protocol = "gs"

    @property
    def bucket(self) -> str:
        return self.name

    def url(self, key: str = "", prefix: str = "cachedfs::gs://") -> str:
        return f"{prefix}{self.bucket}/{key}".rstrip("/")

    def path(self, key: str) -> str:
        return f"{self.bucket}/{key}"

    def put(self, key: str, data: bytes, **options) -> bytes:
        """Put an object without cachedfs."""
        self.server.put(self.bucket, key, data, **options)
        return data

    def delete(self, key: str) -> None:
        self.server.delete(self.bucket, key)


@dataclasses.dataclass
class Drive(Machine):
    """One folder at the simulated Drive."""

    server: DriveServer

    protocol = "drive"

    def url(self, key: str = "", prefix: str = "cachedfs::drive://") -> str:
        return f"{prefix}{self.path(key)}".rstrip("/")

    def path(self, key: str = "") -> str:
        return f"My Drive/{self.name}/{key}".rstrip("/")

    def put(self, key: str, data: bytes, **options) -> bytes:
        """Put a file without cachedfs; an existing file gets a new revision."""
        self.server.put(f"{self.name}/{key}", data, **options)
        return data

    def delete(self, key: str) -> None:
        for item in self.server.find(f"{self.name}/{key}"):
            self.server.remove(item["id"])


@dataclasses.dataclass
class S3(Machine):
    """One bucket at the simulated S3, which is in tests/s3_server.py: it needs moto."""

    protocol = "s3"

    @property
    def options(self) -> dict:
        return {"s3": {"endpoint_url": self.server.endpoint_url, "key": "an-id", "secret": "a-secret"}}

    def url(self, key: str = "", prefix: str = "cachedfs::s3://") -> str:
        return f"{prefix}{self.path(key)}".rstrip("/")

    def path(self, key: str) -> str:
        return f"{self.name}/{key}"

    def put(self, key: str, data: bytes) -> bytes:
        """Put an object without cachedfs."""
        self.server.put(self.name, key, data)
        return data

    def delete(self, key: str) -> None:
        self.server.delete(self.name, key)


@dataclasses.dataclass(frozen=True)
class Place:
    """A part of a simulated cloud under one of the URL forms that a user may write."""

    machine: Cloud | Drive | S3
    prefix: str

    def url(self, key: str = "") -> str:
        return self.machine.url(key, self.prefix)

    def path(self, key: str = "") -> str:
        return self.machine.path(key)

    def put(self, key: str, data: bytes) -> bytes:
        """Put an object without cachedfs."""
        return self.machine.put(key, data)

    @property
    def fs(self) -> CachedFileSystem:
        fs: CachedFileSystem = fsspec.url_to_fs(self.url())[0]
        return fs

    @property
    def options(self) -> dict:
        """Storage options for a process without any configuration."""
        ours = {"cache_dir": str(self.machine.cache_dir), "keep_free": 0, "max_age": AGE_S}
        if self.prefix == "cgs://":  # one protocol with the options of one
            return {**ours, **self.machine.options}
        return {"cachedfs": ours, **self.machine.options}

    def twice(self, fetches: int | None = None) -> Iterator[int]:
        """Let a loop run twice, each time like a new process: first with n requests for media, then with none."""
        forget()
        self.machine.asked()
        yield 1
        forget()
        sent = self.machine.asked().count("media")
        assert fetches is None or sent == fetches, f"{sent} requests for bytes the first time"
        yield 2
        forget()
        asked = self.machine.asked()
        assert not asked, f"asked the second time: {asked}"
