"""Mounted folders: ours, and a FUSE passthrough to the local disk, over a simulated Google Cloud Storage.

    python -m tests.benchmarks.mounts [--quick] [passthrough] [cachedfs]

It prints one table. The passthrough serves the same files from the local disk through the same `FuseSession`: it is what
FUSE itself costs in Python. Linux only, with FUSE.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cachedfs.mount.fuse_protocol import ROOT, Attributes, DirEntry, NameEntry, Opened
from cachedfs.mount.fuse_session import FuseSession
from cachedfs.sim import Delay, GCSServer, Profile

BUCKET = "bench"
RATE = 200e6  # bytes a second of the link
PROFILE = Profile(
    name="mount",
    metadata=Delay(0.045),
    media=Delay(0.045),
    listing=Delay(0.06),
    stream_rate=60e6,
    total_rate=RATE,
)
# Long file, files, entries.
SIZES = {"full": (400_000_000, 10_000, 100_000), "quick": (100_000_000, 1000, 10_000)}
SMALL = 2000  # bytes of a small file
CONTENDERS = ("passthrough", "cachedfs")
WAIT_S = 0.05


class Passthrough:
    """A local folder, read through FUSE."""

    kept_s = 1.0

    def __init__(self, root: str) -> None:
        self.files = self  # for the calls about open files
        self._paths, self._numbers = {ROOT: root}, {root: ROOT}
        self._listed: dict[int, list[os.DirEntry[str]]] = {}
        self._handles = itertools.count(1)

    def _attributes(self, path: str, found: os.stat_result) -> Attributes:
        number = self._numbers.setdefault(path, len(self._numbers) + 1)
        self._paths[number] = path
        return Attributes(
            number, found.st_mode, found.st_size, found.st_mtime_ns, found.st_uid, found.st_gid, self.kept_s
        )

    def lookup(self, parent: int, name: str) -> NameEntry:
        path = f"{self._paths[parent]}/{name}"
        return NameEntry(self._attributes(path, os.lstat(path)), self.kept_s)

    def forget(self, number: int, n_lookups: int) -> None:
        pass

    def getattr(self, number: int) -> Attributes:
        return self._attributes(self._paths[number], os.lstat(self._paths[number]))

    def opendir(self, number: int) -> int:
        handle = next(self._handles)
        self._listed[handle] = [*os.scandir(self._paths[number])]
        return handle

    def readdir(self, handle: int, start: int, *, is_plus: bool) -> Iterator[DirEntry]:
        for entry in itertools.islice(self._listed[handle], start, None):
            about = self._attributes(entry.path, entry.stat())
            yield DirEntry(os.fsencode(entry.name), about.mode, NameEntry(about, self.kept_s))

    def releasedir(self, handle: int) -> None:
        del self._listed[handle]

    def open(self, number: int, flags: int, thread: int) -> Opened:
        return Opened(os.open(self._paths[number], os.O_RDONLY))

    def read(self, handle: int, size: int, offset: int) -> bytes:
        return os.pread(handle, size, offset)

    def flush(self, handle: int, thread: int) -> None:
        pass

    def release(self, handle: int) -> None:
        os.close(handle)


# Mounting.


def command(contender: str, local: Path, folder: Path, work: Path) -> list[str]:
    """Return the command that mounts the bucket, or its copy on the local disk, at `folder`."""
    if contender == "passthrough":
        return [sys.executable, "-m", "tests.benchmarks.mounts", "--passthrough", str(local), str(folder)]
    options = ["--cache-dir", str(work / "cache"), "-o", "max_age=3600"]
    return [sys.executable, "-m", "cachedfs", "mount", *options, f"gs://{BUCKET}", str(folder)]


@contextlib.contextmanager
def mounted(arguments: list[str], folder: Path, endpoint: str) -> Iterator[None]:
    environment = {
        **os.environ, "FSSPEC_GS_TOKEN": "anon", "FSSPEC_GS_ENDPOINT_URL": endpoint, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }  # fmt: skip
    with subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while not os.path.ismount(folder):
            if process.poll() is not None:
                raise RuntimeError(f"{arguments[0]}: {process.stderr.read() if process.stderr else ''}")
            time.sleep(WAIT_S)
        try:
            yield
        finally:
            subprocess.run(["fusermount3", "-u", "-z", folder], check=True)
            process.wait()


# Workloads.


def read_long(folder: Path) -> None:
    with (folder / "long.bin").open("rb", buffering=0) as file:
        while file.read(1 << 20):
            pass


def read_small(folder: Path) -> None:
    for name in sorted(os.listdir(folder / "small")):
        (folder / "small" / name).read_bytes()


def find(folder: Path) -> None:
    subprocess.run(["find", folder / "many", "-size", "+1M"], check=True, stdout=subprocess.DEVNULL)


WORKLOADS = {"long": read_long, "small": read_small, "find": find}


def measured(contender: str, local: Path, work: Path, endpoint: str) -> dict[str, list[float]]:
    """Return the seconds of each workload: first pass, second pass, and first pass of a mount made anew."""
    folder = work / "mounted"
    folder.mkdir(exist_ok=True)
    times: dict[str, list[float]] = {name: [] for name in WORKLOADS}
    for passes in (2, 1):
        with mounted(command(contender, local, folder, work), folder, endpoint):
            for name, do in WORKLOADS.items():
                for _ in range(passes):
                    began = time.perf_counter()
                    do(folder)
                    times[name].append(time.perf_counter() - began)
    return times


def make(local: Path, server: GCSServer, sizes: tuple[int, int, int]) -> None:
    """Create the same data in a local folder and in the bucket."""
    length, n_small, n_many = sizes
    server.make_bucket(BUCKET)
    files = {"long.bin": os.urandom(length)}
    files |= {f"small/{number:06}.bin": os.urandom(SMALL) for number in range(n_small)}
    files |= {f"many/{number:06}": b"" for number in range(n_many)}
    for folder in ("small", "many"):
        (local / folder).mkdir(parents=True)
    for name, data in files.items():
        (local / name).write_bytes(data)
        server.put(BUCKET, name, data)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("contenders", nargs="*", choices=[*CONTENDERS, []], help="all if none is named")
    parser.add_argument("--quick", action="store_true", help="a tenth of the data")
    parser.add_argument("--passthrough", nargs=2, metavar=("FROM", "TO"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.passthrough:
        local, folder = options.passthrough
        FuseSession(Passthrough(local), folder, ["ro", "default_permissions"]).serve(lambda: None)
        return 0
    sizes = SIZES["quick" if options.quick else "full"]
    with (
        tempfile.TemporaryDirectory(prefix="mounts-") as name,
        GCSServer(PROFILE, seed=0, process=True) as server,
    ):
        work = Path(name)
        make(work / "local", server, sizes)
        results = {
            contender: measured(contender, work / "local", work, server.endpoint_url)
            for contender in options.contenders or CONTENDERS
        }
    print(table(results, sizes))
    return 0


def table(results: dict[str, dict[str, list[float]]], sizes: tuple[int, int, int]) -> str:
    length, n_small, n_many = sizes
    lines = [
        f"A simulated Google Cloud Storage: 45 ms to the first byte, 60 MB/s a stream, {RATE / 1e6:.0f} MB/s in all.",
        "First pass, second pass, and the first pass of a mount made anew.",
        "",
        f"| mount | {length / 1e6:.0f} MB in sequence, MB/s | {n_small:,} files of {SMALL} bytes, ms a file | find over {n_many:,} entries, s |",
        "|---|---|---|---|",
    ]
    for contender, times in results.items():
        rates = " / ".join(f"{length / 1e6 / seconds:,.0f}" for seconds in times["long"])
        each = " / ".join(f"{seconds / n_small * 1e3:.3g}" for seconds in times["small"])
        found = " / ".join(f"{seconds:.2f}" for seconds in times["find"])
        lines.append(f"| {contender} | {rates} | {each} | {found} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
