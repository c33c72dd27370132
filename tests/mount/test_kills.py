"""Mounts that are killed and started again while threads write and read in them: `make stress`.

Each version of a file is a line with its number and its checksum. So a read that mixes two versions, or that lacks a
part, is seen. Two rules are checked:

- A read that succeeds gives whole versions that their writer began to write.
- Once a write has succeeded, the object is that version or a later one; a log has all of them.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zlib
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest

from cachedfs.sim import GCSServer
from tests.support import HAS_FUSE, Cloud, tally, until

N_MOUNTS = 2
N_WRITERS = N_READERS = 2  # of each mount
LINES = 200  # of a log, before its writer begins another
PAUSE_S = 0.02  # after an error: the mount may be missing


def line(name, number, n_bytes):
    """Return the text of a version, which states its own checksum."""
    body = f"{name} {number} {'x' * n_bytes}".encode()
    return b"%s %08x\n" % (body, zlib.crc32(body))


def numbers_in(name, data):
    """Return the numbers of the versions in a file: a log has many, other files have one. Fails if it is torn."""
    numbers = []
    for text in data.splitlines(keepends=True):
        body, _, checksum = text.rpartition(b" ")
        torn = f"torn: {name} has {len(data):,} bytes: {text[:30]!r}"
        assert checksum == b"%08x\n" % zlib.crc32(body), torn
        writer, number, _ = body.decode().split(" ", 2)
        assert writer == name
        numbers.append(int(number))
    assert numbers == sorted({*numbers})
    assert len(numbers) == 1 or name.startswith("log")
    return numbers


class Mount:
    """A mounted bucket with a cache of its own."""

    def __init__(self, cloud, folder):
        self.cloud, self.folder = cloud, folder
        folder.mkdir()
        self.start()

    def start(self):
        """Mount, and return when the folder is mounted; the system may still be unmounting what was killed."""
        options = ["-o", "max_age=1", "-o", f"cache_dir={self.folder}.cache", "-o", "keep_free=0"]
        command = [
            "mount",
            "--write",
            "--daemon",
            "--json",
            *options,
            self.cloud.url("", "gs://"),
            self.folder,
        ]

        def is_mounted():
            self.done = subprocess.run(
                [sys.executable, "-m", "cachedfs", *command],
                env=self.cloud._environment(), capture_output=True, text=True, check=False,
            )  # fmt: skip
            return self.done.returncode == 0

        until(is_mounted)
        self.pid = json.loads(self.done.stdout)["pid"]

    def numbers_at_origin(self, name):
        """Return the numbers of the versions in an object, read without a mount; none if it is missing."""
        top = f"{self.cloud.server.endpoint_url}/storage/v1/b/{self.cloud.bucket}"
        try:
            with urllib.request.urlopen(f"{top}/o/data%2F{name}?alt=media") as answer:
                return numbers_in(name, answer.read())
        except urllib.error.HTTPError as error:
            if error.code != 404:
                pytest.fail(str(error))
            return []


class Worker:
    """Works in one mount."""

    def __init__(self, mount, number):
        self.mount, self.folder, self.random = mount, mount.folder / "data", random.Random(number)
        self.name, self.counts = f"{mount.folder.name}-w{number}", Counter()

    def work(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                self.step()
            except OSError:
                self.counts["errors"] += 1
                time.sleep(PAUSE_S)


class Writer(Worker):
    """Writes its own files."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.begun, self.accepted = Counter(), defaultdict(list)

    def step(self):
        kind = self.random.choice(["open", "replace", "log"])
        part = self.counts["lines"] // LINES if kind == "log" else self.random.randrange(3)
        name = f"{kind}-{self.name}-{part}"
        number = self.begun[name] = self.begun[name] + 1
        most = 2000 if kind == "log" else self.random.choice([2000, 200_000, 2_000_000])
        path = self.folder / name
        target = path.with_name(f".{name}") if kind == "replace" else path
        with target.open("ab" if kind == "log" else "wb") as file:
            file.write(line(name, number, self.random.randrange(most)))
        if kind == "replace":
            os.replace(target, path)
        self.accepted[name].append(number)
        self.counts.update(["writes accepted", *(["lines"] if kind == "log" else [])])
        self.check(name, [number])

    def check(self, name, numbers):
        found = self.mount.numbers_at_origin(name)
        is_there = {*numbers} <= {*found} if name.startswith("log") else max(found, default=0) >= numbers[-1]
        assert is_there, f"lost: of the versions {numbers} of {name}, there are {found}"


class Reader(Worker):
    """Reads what is complete.

    A program that reads in the mount where another one writes sees what is not complete, as on a local disk. So there,
    only files that are complete when they get their name are read.
    """

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.last = Counter()

    def step(self):
        written = [name for name in os.listdir(self.folder) if "-w" in name and name[0] != "."]
        safe = [name for name in written if name.startswith("replace") or self.mount.folder.name not in name]
        if safe:
            name = self.random.choice(safe)
            self.last[name] = max(self.last[name], numbers_in(name, (self.folder / name).read_bytes())[-1])
            self.counts["reads whole"] += 1
        time.sleep(PAUSE_S / 10)


@pytest.fixture
def mounts(own_cache, tmp_path):
    """Mounts of one bucket, of a server in a process of its own: the threads of this one leave it no time."""
    folders = [tmp_path / f"mount{number}" for number in range(N_MOUNTS)]
    with GCSServer(process=True) as server:
        server.make_bucket("kills")
        cloud = Cloud(server, "kills", own_cache)
        cloud.put("data/first", b"so that the folder exists")
        try:
            yield [Mount(cloud, folder) for folder in folders]
        finally:
            for folder in folders:
                subprocess.run(["fusermount3", "-u", "-z", "-q", folder], capture_output=True, check=False)


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.skipif(not HAS_FUSE, reason="needs FUSE: apt-get install fuse3")
def test_mounts_that_are_killed_tear_no_read_and_lose_no_write(mounts):
    rng, counts = random.Random(0), Counter()
    writers, readers = (
        [kind(mounts[number % N_MOUNTS], number) for number in range(n * N_MOUNTS)]
        for kind, n in ((Writer, N_WRITERS), (Reader, N_READERS))
    )
    with ThreadPoolExecutor(len(writers) + len(readers)) as pool:
        working = [pool.submit(worker.work, 20.0) for worker in (*writers, *readers)]
        while not all(each.done() for each in working):
            time.sleep(rng.uniform(0.2, 1.0))
            mount = rng.choice(mounts)
            os.kill(mount.pid, signal.SIGKILL)
            counts["kills"] += 1
            mount.start()
    for each in working:
        each.result()
    for writer in writers:
        for name, accepted in writer.accepted.items():
            writer.check(name, accepted)
    begun = sum((writer.begun for writer in writers), Counter())
    assert not [reader.last - begun for reader in readers if reader.last - begun], "never written"
    counts = sum((worker.counts for worker in (*writers, *readers)), counts)
    for what, n in counts.items():
        tally(f"mounts that were killed: {what}", n)
    assert all(counts[what] > 0 for what in ("kills", "reads whole", "writes accepted"))
