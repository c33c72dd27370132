"""The workloads: each definition in words and in code, which is the same for every contender."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec

from cachedfs.sim import PROFILES, Profile
from tests.benchmarks import data, services
from tests.benchmarks.data import BIG, BIG_SIZE, DAY, GIGABYTE, LINES, MANY, SMALL, KiB, MiB

Run = Callable[[], Any]
FIRST_STEPS = 12  # until the order of steps is recognized, and enough requests are in flight
STEP_S = 4 * MiB / PROFILES["table"].total_rate  # for a consumer that takes as long as the link


@dataclass(frozen=True, slots=True)
class Place:
    """Where a contender finds the data: a local folder, or the start of a URL."""

    base: str

    def url(self, key: str) -> str:
        return f"{self.base}/{key}"

    def open(self, key: str, mode: str = "rb") -> Any:
        """Return an open file, a builtin one for local data."""
        return fsspec.open(self.url(key), mode).open() if "://" in self.base else open(self.url(key), mode)

    def find(self, folder: str) -> None:
        """List a folder, so that the metadata of its files is cached."""
        fs, root = fsspec.url_to_fs(self.base)
        fs.find(f"{root}/{folder}")

    def names(self, folder: str) -> list[str]:
        """Return the paths in a folder."""
        if "://" not in self.base:
            return [str(path) for path in Path(self.url(folder)).iterdir()]
        fs, root = fsspec.url_to_fs(self.base)
        return list(fs.ls(f"{root}/{folder}", detail=False))

    def cat(self, keys: list[str], **options: Any) -> list[bytes]:
        if "://" not in self.base:
            return [Path(self.url(key)).read_bytes() for key in keys]
        fs, root = fsspec.url_to_fs(self.base)
        found = fs.cat([f"{root}/{key}" for key in keys], **options)
        return [found[f"{root}/{key}"] for key in keys]

    def array(self, key: str) -> Any:
        """Return an open array of Zarr v3, whose slices are read when they are requested."""
        if not self.base.startswith(services.TENSORSTORE):
            import zarr

            return zarr.open_array(self.url(key), mode="r")
        import tensorstore

        bucket, _, path = self.url(key).removeprefix(services.TENSORSTORE).partition("/")
        opened = tensorstore.open(
            {"driver": "zarr3", "kvstore": {"driver": "gcs", "bucket": bucket, "path": f"{path}/"}}
        )
        return _Read(opened.result())

    def prefetch(self, keys: list[str]) -> Any:
        """Start to prefetch files and folders (`name/`) in this order, if supported; return the plan."""
        fs, root = fsspec.url_to_fs(self.base)
        begin = getattr(fs, "prefetch", None)
        return begin and begin([f"{root}/{key}" for key in keys])


class _Read:
    """An array of tensorstore with slices that are NumPy arrays."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __getitem__(self, index: Any) -> Any:
        return self._array[index].read().result()


Prepare = Callable[[Place, int], Run]


@dataclass(frozen=True, slots=True)
class Workload:
    """`prepare(place, n)` does what is not timed and returns what is; `n` items are the whole of it."""

    name: str
    title: str
    definition: str
    n: int
    prepare: Prepare
    is_warm: bool = False  # of cached data only, without a cold result
    modules: tuple[str, ...] = ()  # imported before the clock starts
    service: str = "gcs"
    profile: Profile = PROFILES["table"]
    time_scale: float = 1.0  # how much faster than its profile the service is
    in_flight: int = 0  # concurrency of the ideal schedule that cold passes are compared with; 0: none
    peers: Mapping[str, int] = field(default_factory=dict)  # the items that slow ones do, scaled; 0: all
    n_cold: int = 3  # our passes with an empty cache


# Whole files.


def in_sequence(key: str, step: int = MiB) -> Prepare:
    def prepare(place: Place, n: int) -> Run:
        def run() -> int:
            total = 0
            with place.open(key) as file:
                while piece := file.read(step):
                    total += len(piece)
            return total

        return run

    return prepare


def cold_lines(key: str) -> Prepare:
    def prepare(place: Place, n: int) -> Run:
        def run() -> int:
            done = 0
            with place.open(key) as file:
                for line in file:
                    done += len(line)
                    if done >= n * 10**6:
                        break
            return done

        return run

    return prepare


def first_bytes(place: Place, n: int) -> Run:
    small_one(place, 0)  # so that a session is open and everything is imported

    def run() -> list[bytes]:
        found = []
        for key in (BIG, LINES)[:n]:
            with place.open(key) as file:
                found.append(file.read(1))
        return found

    return run


def beside(read: Callable[[Place, int], Any]) -> Prepare:
    """Read while another thread reads the whole big object, from before the start until after the end."""

    def prepare(place: Place, n: int) -> Run:
        begun = threading.Event()

        def read_all() -> None:
            with place.open(BIG) as file:
                while file.read(MiB):
                    if file.tell() >= 24 * MiB:
                        begun.set()

        place.find("small")
        threading.Thread(target=read_all, daemon=True).start()
        begun.wait(60)
        return lambda: [read(place, number) for number in range(n)]

    return prepare


def small_one(place: Place, number: int) -> Any:
    with place.open(SMALL[number]) as file:
        return file.read()


def block_of_another(place: Place, number: int) -> Any:
    with place.open(LINES) as file:
        file.seek((16 * number + 9) * MiB + 5000)
        return file.read(64 * KiB)


def whole(place: Place, n: int) -> Run:
    if "://" not in place.base:
        return Path(place.url(BIG)).read_bytes

    def run() -> Any:
        fs, path = fsspec.url_to_fs(place.url(BIG))
        return fs.cat_file(path)

    return run


def one_by_one(place: Place, n: int) -> Run:
    def run() -> list[int]:
        found = []
        for key in SMALL[:n]:
            with fsspec.open(place.url(key)) as file:
                found.append(json.load(file)["id"])
        return found

    return run


def batched(place: Place, n: int) -> Run:
    def run() -> list[int]:
        found: list[int] = []
        for start in range(0, n, 16):
            found += [json.loads(text)["id"] for text in place.cat(SMALL[start : min(n, start + 16)])]
        return found

    return run


def prefetched(read: Prepare, keys: list[str]) -> Prepare:
    """Prefetch these files and folders while they are read."""

    def prepare(place: Place, n: int) -> Run:
        reads = read(place, n)

        def run() -> Any:
            plan = place.prefetch(keys)
            found = reads()
            del plan
            return found

        return run

    return prepare


def prefetched_whole(place: Place, n: int) -> Run:
    def run() -> Any:
        plan = place.prefetch([BIG])
        return plan and plan.wait() and None

    return run


# Parts of one file.


def random_reads(place: Place, n: int) -> Run:
    rng = random.Random(1)
    offsets = [rng.randrange(BIG_SIZE - 64 * KiB) for _ in range(n)]

    def run() -> list[bytes]:
        found = []
        with place.open(BIG) as file:
            for offset in offsets:
                file.seek(offset)
                found.append(file.read(64 * KiB))
        return found

    return run


def seeks(span: int) -> Prepare:
    def prepare(place: Place, n: int) -> Run:
        rng = random.Random(2)
        offsets = [rng.randrange(span - 4 * KiB) for _ in range(n)]
        file = place.open(BIG)
        for _ in range(span // MiB):
            file.read(MiB)

        def run() -> int:
            total = 0
            for offset in offsets:
                file.seek(offset)
                total += len(file.read(4 * KiB))
            return total

        return run

    return prepare


def cat_4k(place: Place, n: int) -> Run:
    offsets = [4 * KiB * (number % 256) for number in range(n)]
    if "://" not in place.base:

        def read(start: int) -> bytes:
            with open(place.url(BIG), "rb", 0) as file:
                file.seek(start)
                return file.read(4 * KiB)
    else:
        fs, path = fsspec.url_to_fs(place.url(BIG))

        def read(start: int) -> bytes:
            return fs.cat_file(path, start, start + 4 * KiB)

    for start in set(offsets):
        read(start)

    def run() -> int:
        return sum([len(read(start)) for start in offsets])

    return run


def lines(mode: str) -> Prepare:
    def prepare(place: Place, n: int) -> Run:
        with place.open(LINES) as file:
            while file.read(8 * MiB):
                pass

        def run() -> int:
            total = 0
            with place.open(LINES, mode) as file:
                for line in file:
                    total += len(line)
            return total

        return run

    return prepare


# Zarr.


def dense(place: Place, n: int) -> Run:
    return lambda: place.array(data.DENSE)[:]


def steps(place: Place, n: int) -> Run:
    array = place.array(data.MAPS)
    for index in range(FIRST_STEPS):
        array[index]

    def run() -> list[Any]:
        found = []
        for index in range(FIRST_STEPS, n):
            found.append(array[index])
            time.sleep(STEP_S)  # in place of computing; this leaves the cores to the contender
        return found

    return run


def samples(place: Place, n: int) -> Run:
    rng = random.Random(3)
    order = rng.sample(range(data.SAMPLES_SHAPE[0]), n)

    def run() -> list[Any]:
        array = place.array(data.SAMPLES)
        return [array[index] for index in order]

    return run


# Drive.


def listed(folder: str, read: Prepare) -> Prepare:
    """List a folder before its files are read."""

    def prepare(place: Place, n: int) -> Run:
        place.find(folder)
        return read(place, n)

    return prepare


def at_once(keys: list[str], **options: Any) -> Prepare:
    return lambda place, n: lambda: place.cat(keys[:n], **options)


def crowd(place: Place, n: int) -> Run:
    return lambda: len(place.names(data.CROWD))


_EVEN = f"at an even latency of {services.DRIVE_EVEN.media.median_s * 1e3:.0f} ms, without errors and stalls"
_MINUTE = "at typical latencies, without errors and stalls; 325,000 units a minute, which nobody tells"
_TYPICAL = "at typical latencies and errors, without stalls"
_EVERY = f"every answer {services.EVEN.media.median_s * 1e3:.0f} ms late"
_ZARR = ("zarr",)


def _peers(names: Iterable[str], n: int = 0) -> dict[str, int]:
    return dict.fromkeys(names, n)


_CACHES = ("blockcache", "filecache", "simplecache")
_ALL = _peers(("gcsfs", *_CACHES, "obstore"))
_MOUNT_SLOW = {"mount": 20, "pydrive2": 8, "gdrive": 8, "drive": 0}
_AT_DRIVE = _peers(_MOUNT_SLOW)
_ARRAYS = {"tensorstore": 0}
_LIST = [
    Workload("sequential", "192 MiB in sequence", "one object of random bytes, opened by `fsspec.open(url)`, read 1 MiB at a time to its end", 192, in_sequence(BIG), peers=_ALL),
    Workload("fill", "192 MiB in sequence, nothing slow in between", "the same object in the same way, from a service without latency or limits on the same machine, which costs its own share of the cores", 192, in_sequence(BIG), profile=PROFILES["off"], peers=_ALL),
    Workload("whole", "192 MiB by one `cat_file`", "the same object by one `fs.cat_file(path)`", 192, whole, peers=_peers(["gcsfs", "obstore"])),
    Workload("random", "300 random 64 KiB reads of it", "the same object opened once; seek to a random byte, read 64 KiB", 300, random_reads, peers=_ALL | {"gcsfs": 40}, n_cold=2),
    Workload("one_by_one", "300 small JSON files one by one", "2 KB each: `with fsspec.open(url) as f: json.load(f)`", 300, one_by_one, peers=_ALL | _peers(_CACHES, 20) | {"gcsfs": 30}, n_cold=1),
    Workload("batched", "the same, 16 a batch by `fs.cat`", "`fs.cat` of 16 paths at a time, each parsed", 300, batched, peers=_ALL | _peers(_CACHES, 32)),
    Workload("one_by_one_ahead", "300 small JSON files one by one, with `prefetch` first", "`plan = fs.prefetch(folder)`, its listing in the time, then the same reads at once", 300, prefetched(one_by_one, ["small/"])),
    Workload("batched_ahead", "the same, 16 a batch, with `prefetch` first", "`plan = fs.prefetch(folder)`, its listing in the time, then the same `fs.cat` at once", 300, prefetched(batched, ["small/"])),
    Workload("whole_ahead", "192 MiB by `prefetch`", "the same object as in sequence: `fs.prefetch(path).wait()`", 192, prefetched_whole),
    Workload("dense", "Zarr v3, 360 chunks, `[:]`", "float32 noise (360, 256, 256), 94 MB, chunks (1, 256, 256), zarr's own compression: `zarr.open_array(url)[:]`", 360, dense, modules=_ZARR, peers=_ALL | _ARRAYS),
    Workload("samples", "300 random samples of a sharded array (25 MB)", "uint8 (1600, 64, 256), a sample is one inner chunk of 16 KiB, 8 shards of 200: `zarr.open_array(url)`, then `array[i]` for 300 random i", 300, samples, modules=_ZARR, peers=_ALL | {"gcsfs": 30, "blockcache": 30} | _ARRAYS, n_cold=2),
    # Not obstore: one request for each of 5000 seeks.
    Workload("seek_small", "5000 seek + 4 KiB reads over 1 MiB", "one open file, cached data, random bytes of its first MiB", 5000, seeks(MiB), is_warm=True, peers=_peers(["gcsfs", *_CACHES])),
    Workload("seek_big", "5000 seek + 4 KiB reads over 192 MiB", "the same over the whole object", 5000, seeks(BIG_SIZE), is_warm=True, peers=_peers(_CACHES)),
    Workload("cat_4k", "5000 times `cat_file` of 4 KiB", "`fs.cat_file(path, start, start + 4096)` within one MiB, cached and touched before", 5000, cat_4k, is_warm=True),
    Workload("text_lines", "98 MB of lines, text", "98,000 lines of 1000 bytes: `for line in fsspec.open(url, 'rt')`, cached data", 98_000, lines("rt"), is_warm=True),
    Workload("binary_lines", "98 MB of lines, binary", "the same by `'rb'`", 98_000, lines("rb"), is_warm=True),
    Workload("drive_batch", "64 listed files of Drive by one `fs.cat`", f"2 KB each, listed by `fs.find` before; {_EVEN}", data.N_LISTED, listed("small", at_once(SMALL)), service="drive", profile=services.DRIVE_EVEN, peers=_MOUNT_SLOW),
    Workload("drive_batch_typical", "the same 64 files of Drive at typical latencies", f"the same {_TYPICAL}", data.N_LISTED, listed("small", at_once(SMALL)), service="drive", profile=services.DRIVE_TYPICAL, in_flight=16, peers=_MOUNT_SLOW),
    Workload("drive_one_by_one", "64 listed files of Drive one by one", f"of the same, all of them, `with fsspec.open(url) as f: json.load(f)`; {_TYPICAL}", data.N_LISTED, listed("small", one_by_one), service="drive", profile=services.DRIVE_TYPICAL, peers={"mount": 10, "pydrive2": 6, "gdrive": 6, "drive": 10}, n_cold=1),
    Workload("drive_many", "1,000 listed files of Drive, 200 requests a second", "36 kB each: one `fs.cat(paths, batch_size=64)`; at typical latencies, errors and stalls, 12,000 requests a minute", 1000, listed("many", at_once(MANY, batch_size=64)), service="drive", profile=services.DRIVE_OLD, peers=_MOUNT_SLOW | {"drive": 64}, n_cold=1),
    Workload("drive_many_bad", "the same on a bad day", "the same at the latencies, errors (2 %) and stalls (0.5 %, 30 s) of a bad day, 12,000 requests a minute", 1000, listed("many", at_once(MANY, batch_size=64)), service="drive", profile=services.DRIVE_BAD, n_cold=1),
    Workload("drive_minute", "3,000 listed files of Drive, 325,000 quota units a minute", f"2 KB each: one `fs.cat(paths, batch_size=64)`; {_MINUTE}, in any 60 s", 3000, listed("day", at_once(DAY, batch_size=64)), service="drive", profile=services.DRIVE_UNITS, n_cold=1),
    Workload("drive_minute_fixed", "the same, counted in minutes of the clock", f"the same; {_MINUTE}, counted anew each minute", 3000, listed("day", at_once(DAY, batch_size=64)), service="drive", profile=services.DRIVE_FIXED, n_cold=1),
    Workload("drive_minute_half", "the same, beside a program that uses half of the quota", f"the same; {_MINUTE}, in any 60 s, of which 162,500 are left", 3000, listed("day", at_once(DAY, batch_size=64)), service="drive", profile=services.DRIVE_HALF, n_cold=1),
    Workload("drive_day", "10,000 listed files of Drive on a bad day", "2 KB each, in ten folders: one `fs.cat(paths, batch_size=64)`; at the latencies, errors, stalls and quota of a bad day, all ten times faster, and our minute too", 10_000, listed("day", at_once(DAY, batch_size=64)), service="drive", profile=services.DRIVE_DAY, time_scale=10.0, n_cold=1),
    Workload("drive_many_known", "1,000 listed files of Drive in known order", "the same 36 kB each, listed before: `fs.prefetch(paths)`, and `fs.cat(paths, batch_size=64)` beside it; at typical latencies, errors and stalls, 12,000 requests a minute", 1000, prefetched(listed("many", at_once(MANY, batch_size=64)), MANY), service="drive", profile=services.DRIVE_OLD),
    Workload("drive_list", "10,000 files of Drive listed", f"`fs.ls` of one folder, ten pages; {_EVEN}", data.N_CROWD, crowd, service="drive", profile=services.DRIVE_EVEN, peers=_peers(["mount", "pydrive2", "gdrive"]), n_cold=1),
    Workload("drive_big", "64 MiB of Drive in sequence", f"one file of random bytes, listed before, opened by `fsspec.open(url)`, read 1 MiB at a time to its end; {_TYPICAL}", 64, listed("large", in_sequence(data.LARGE)), service="drive", profile=services.DRIVE_TYPICAL, peers=_AT_DRIVE),
    Workload("steps_small", "192 MiB in sequence, 8 KiB at a time", "one object of random bytes, opened by `fsspec.open(url)`, read 8 KiB at a time to its end", 192, in_sequence(BIG, 8 * KiB), peers=_peers(["gcsfs", "blockcache"])),
    Workload("steps_large", "192 MiB in sequence, 16 MiB at a time", "the same, 16 MiB at a time", 192, in_sequence(BIG, 16 * MiB), peers=_peers(["gcsfs", "blockcache", "obstore"])),
    Workload("steps_lines", "98 MB of lines, never read before", "98,000 lines of 1000 bytes: `for line in fsspec.open(url)`", 98, cold_lines(LINES), peers={"gcsfs": 1, "blockcache": 0}),
    Workload("gigabyte_small", "980 MB in sequence, 8 KiB at a time", "one object of 980,000 lines of 1000 bytes, opened by `fsspec.open(url)`, read 8 KiB at a time to its end", 980, in_sequence(GIGABYTE, 8 * KiB), n_cold=1),
    Workload("gigabyte_large", "980 MB in sequence, 16 MiB at a time", "the same, 16 MiB at a time", 980, in_sequence(GIGABYTE, 16 * MiB), n_cold=1),
    Workload("gigabyte_lines", "980 MB of lines, never read before", "the same: `for line in fsspec.open(url)`", 980, cold_lines(GIGABYTE), n_cold=1),
    Workload("first_byte", "the first byte of two large files", f"192 MiB and 98 MB, one after the other: `fsspec.open(url).read(1)`; {_EVERY}", 2, first_bytes, profile=services.EVEN, peers=_peers(["gcsfs", "obstore"])),
    Workload("beside_small", "10 small files while 192 MiB are read", f"one by one, as above, while another thread reads 192 MiB in sequence; {_EVERY}", 10, beside(small_one), profile=services.EVEN),
    Workload("beside_block", "5 reads of 64 KiB while 192 MiB are read", f"in the middle of 98 MB, each by an `fsspec.open(url)` of its own, while another thread reads 192 MiB in sequence; {_EVERY}", 5, beside(block_of_another), profile=services.EVEN),
    Workload("drive_long", "200 MB of Drive in sequence", "one file of random bytes, listed before, opened by `fsspec.open(url)`, read 1 MiB at a time to its end; at typical latencies, without errors and stalls", 200, listed("long", in_sequence(data.LONG)), service="drive", profile=services.DRIVE_CALM, peers=_AT_DRIVE),
    Workload("steps", "Zarr v3, one time step after the other", f"float32 noise (48, 4, 512, 512), 201 MB, chunks (1, 1, 512, 512): `array[t]`, then {STEP_S * 1e3:.0f} ms of other work (a sleep), as long as the link takes for it, for t in order; timed after the first {FIRST_STEPS} steps", 48, steps, modules=_ZARR, peers=_peers(["gcsfs", "obstore"]) | _ARRAYS),
]  # fmt: skip
WORKLOADS = {workload.name: workload for workload in _LIST}


# The lower bound: the same bytes by a raw client that knows names, sizes and ranges; 64 requests at a time.

Wanted = tuple[str, int, int]  # key, first and last byte; 0, -1: all of it
_BIG = [[(BIG, start, start + 8 * MiB - 1) for start in range(0, BIG_SIZE, 8 * MiB)]]
_FILES: list[Wanted] = [(key, 0, -1) for key in SMALL]
_CHUNKS: list[Wanted] = [(f"{data.DENSE}/c/{index}/0/0", 0, -1) for index in range(data.DENSE_SHAPE[0])]
_SHARDS: list[Wanted] = [(f"{data.SAMPLES}/c/{index}/0/0", 0, -1) for index in range(8)]
FLOORS: dict[str, list[list[Wanted]]] = {  # rounds, one after the other
    "sequential": _BIG,
    "fill": _BIG,
    "whole": _BIG,
    "random": _BIG,
    "one_by_one": [[wanted] for wanted in _FILES],
    "batched": [_FILES[start : start + 16] for start in range(0, len(_FILES), 16)],
    "dense": [[(f"{data.DENSE}/zarr.json", 0, -1)], _CHUNKS],
    "samples": [[(f"{data.SAMPLES}/zarr.json", 0, -1)], _SHARDS],
}
# Our CPU is compared with that of the raw client that writes the bytes to new files.
STORED = ("fill", "dense")


async def fetch_rounds(
    endpoint: str, bucket: str, rounds: list[list[Wanted]], folder: Path | None = None
) -> int:
    """Return how many bytes were received; each answer is written to a new file in `folder`, or discarded."""
    import aiohttp

    gate = asyncio.Semaphore(64)

    async def fetch(client: aiohttp.ClientSession, key: str, first: int, last: int) -> int:
        target = os.devnull if folder is None else folder / quote(f"{key}-{first}", safe="")
        url = f"{endpoint}/download/storage/v1/b/{bucket}/o/{quote(key, safe='')}?alt=media"
        headers = {"Range": f"bytes={first}-{last}"} if last >= 0 else {}
        async with gate, client.get(aiohttp.client.URL(url, encoded=True), headers=headers) as reply:
            reply.raise_for_status()
            with open(target, "wb", 0) as file:  # noqa: ASYNC230  # of less CPU than in a thread
                return sum([file.write(piece) async for piece in reply.content.iter_any()])

    async with aiohttp.ClientSession(read_bufsize=1 << 20) as client:
        return sum([sum(await asyncio.gather(*(fetch(client, *w) for w in wanted))) for wanted in rounds])
