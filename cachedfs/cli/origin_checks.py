"""The checks of `doctor` for a URL: sign-in, rights, speed of the origin, and options that fit them."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from cachedfs.cli.arguments import CommonOptions
from cachedfs.cli.monitoring import bytes_of
from cachedfs.cli.output import message_of, rate
from cachedfs.cli.urls import locate
from cachedfs.common.executor import DaemonThreadPool
from cachedfs.common.text import counted, per_cent
from cachedfs.errors import SignInRefused

if TYPE_CHECKING:
    from cachedfs.filesystem import CachedFileSystem

__all__ = ["Check", "Measured", "advice", "limits", "origin_checks", "timed"]

LARGE, LEAST = 8 << 20, 1 << 20  # bytes of one request, and of the smallest object whose transfer is timed
AT_ONCE, HALF_S = 8, 0.5  # concurrent requests, and seconds each may take at the speed of a single one
MANY, SMALL = (
    1000,
    256 << 10,
)  # packing is worthwhile from this number of files on, of at most this average size
MOST_AT_ONCE = 256  # concurrent requests: beyond this, services throttle and throughput does not grow
NOBODY = "nobody"  # the identity where no sign-in was found
SCOPES = {  # what each scope of Drive permits, broadest first
    "drive": "reading and writing",
    "drive.readonly": "reading; writes are refused",
    "drive.file": "files that this OAuth client made, and no others",
    "drive.metadata": "names and listings; reading is refused",
    "drive.metadata.readonly": "names and listings; reading is refused",
}


@dataclasses.dataclass(frozen=True)
class Check:
    """Result of one check; `state` is "ok", "warn" or "fail"."""

    name: str
    state: str
    found: str
    advice: str = ""


def origin_checks(text: str, common: CommonOptions) -> Iterator[Check]:
    location = locate(text, common, max_age=0, stale_if_error=False)
    fs, path = location.fs, location.path
    if endpoint := location.identity.split("|")[1]:  # includes an endpoint set by an environment variable
        yield Check("endpoint", "ok", endpoint)
    if fs.target_protocol == "drive":
        yield from account_checks(fs)
    info: dict[str, Any] = fs.info(path) if path else {"name": path, "type": "directory"}
    found = [info] if info["type"] == "file" else fs.ls(path, detail=True)
    if info["type"] == "directory":
        yield Check("access", "ok", f"{text} is a folder with {len(found):,} entries")
    elif info["size"] is None:
        what = info.get("mimeType", "a kind that is not known")
        yield Check("access", "ok", f"{text} has no bytes of its own ({what})")
    else:
        yield Check("access", "ok", f"{text} is an object of {decimal(info['size'])}")
    origin, address = fs.origin_fs, id_of(fs, info)
    if address is not None and origin.identity() != NOBODY:
        yield rights_check(origin, address)

    def ask() -> None:
        origin.invalidate_cache()  # clear the listings cached by the inner filesystem
        (origin.info if address or info["type"] == "file" else origin.ls)(address or path)

    yield Check("metadata", "ok", f"{milliseconds(median_of_3(ask))} a request (median of 3, past the cache)")
    objects = [each for each in found if each["type"] == "file" and each["size"]]
    if objects:
        largest = max(objects, key=lambda each: int(each["size"]))
        is_immutable = math.isinf(common.config().max_age)
        yield from speed_checks(fs, largest, found, is_immutable=is_immutable)


# Google Drive


def id_of(fs: CachedFileSystem, info: dict[str, Any]) -> str | None:
    """Return the `id:` path of an object on Drive, or None if it has none.

    Resolving a path by name takes several requests, an id only one.
    """
    if fs.target_protocol != "drive" or info["name"] == "Shared with me" or not info.get("id"):
        return None
    key = info.get("resourceKey")
    return f"id:{info['id']}" + (f",resourcekey={key}" if key else "")


def account_checks(fs: CachedFileSystem) -> Iterator[Check]:
    """Check which Google account is signed in, and which scopes its credentials have."""
    origin = fs.origin_fs
    who = origin.identity()
    if who == NOBODY:
        to_do = "Run `cachedfs login drive`, or give an API key for public folders"
        yield Check("identity", "warn", "nobody is signed in: only single public files can be read", to_do)
        return
    yield Check("identity", "ok", who)
    try:
        about = origin.about()
    except (
        PermissionError
    ) as error:  # an API key has no account, and later checks show whether more is denied
        yield Check("account", "fail" if isinstance(error, SignInRefused) else "warn", message_of(error))
        return
    user, quota = about.get("user") or {}, about.get("storageQuota") or {}
    room = f"{decimal(int(quota.get('usage') or 0))} used"
    room += f" of {decimal(int(quota['limit']))}" if quota.get("limit") else ""  # some accounts have no limit
    yield Check("account", "ok", f"{user.get('emailAddress', 'without an address')}; {room}")
    if who != "anonymous":
        yield scopes_check(about["scopes"])


def scopes_check(scopes: list[str] | None) -> Check:
    if scopes is None:
        return Check("scopes", "ok", "these credentials do not say for what they are")
    short = {scope.rpartition("/auth/")[2] for scope in scopes}
    best = next((name for name in SCOPES if name in short), None)
    if best == "drive":
        return Check("scopes", "ok", f"drive: {SCOPES['drive']}")
    to_do = "For all of it sign in again, with https://www.googleapis.com/auth/drive among the scopes"
    if best is not None:
        return Check("scopes", "warn", f"{best}: {SCOPES[best]}", to_do)
    return Check("scopes", "fail", f"none of Drive's ({', '.join(sorted(short))})", to_do)


def rights_check(origin: Any, address: str) -> Check:
    """Check what the account may do with one file or folder on Drive."""
    can = origin.capabilities(address)
    names = ("canDownload", "canListChildren", "canEdit", "canAddChildren", "canTrash")
    words = ("read", "list", "change", "add to", "remove")
    may = [word for name, word in zip(names, words, strict=True) if can.get(name)]
    to_do = "" if "read" in may or "list" in may else "Ask its owner for the right to download"
    what = f"this account may {', '.join(may) or 'do nothing'}"
    return Check("rights", "warn" if to_do else "ok", what, to_do)


# Measurements


def timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def median_of_3(function: Callable[[], object]) -> float:
    """Return the median duration of three calls, in seconds."""
    return statistics.median(timed(function) for _ in range(3))


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


def speed_checks(
    fs: CachedFileSystem, info: dict[str, Any], found: list[dict[str, Any]], *, is_immutable: bool
) -> Iterator[Check]:
    """Measure reads of an object past the cache; yield what limits reading and which options to change.

    `found` has the entries of the folder, or the object alone.
    """
    size, path = min(LARGE, int(info["size"])), str(info["name"])
    # Opened once, so that each read is one request.
    with fs.origin_fs.open(path, "rb", cache_type="none") as file:

        def read(n: int) -> None:
            file.seek(0)
            file.read(n)

        first_s = median_of_3(lambda: read(1))
        whole_s = timed(lambda: read(size))
    yield Check("first byte", "ok", f"{milliseconds(first_s)} (median of 3)")
    yield Check("one request", "ok", f"{decimal(size)} in {milliseconds(whole_s)}: {rate(size, whole_s)}")
    measured = Measured(
        first_s,
        fs.config.first_concurrency,
        is_drive=fs.target_protocol == "drive",
        is_immutable=is_immutable,
        **sizes_of(fs, found),
    )
    if size >= LEAST:
        n = min(fs.config.first_concurrency, AT_ONCE)
        part = min(size, max(LEAST, int(size / whole_s * HALF_S)))
        took_s = timed(lambda: read_at_once(fs.origin_fs, path, n, part, int(info["size"])))
        what = f"{n} requests, {decimal(n * part)} in {milliseconds(took_s)}: {rate(n * part, took_s)}"
        yield Check("at once", "ok", what)
        measured = dataclasses.replace(
            measured, one_per_s=size / whole_s, all_per_s=n * part / took_s, n_at_once=n
        )
    yield Check("settings", "ok", limits(measured))
    yield Check("to set", "ok", "; ".join(advice(measured)) or "nothing to change")


def sizes_of(fs: CachedFileSystem, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sizes in Measured: of the data, and the current and possible allowance of the cache.

    Returns none if the folder has subfolders, since their size is unknown.
    """
    if any(each["type"] != "file" or each["size"] is None for each in found):
        return {}
    stats, could_hold = fs.stats(), None
    if stats.cache_dir:
        disk = os.statvfs(stats.cache_dir)
        keep = bytes_of(fs.config.keep_free, disk.f_blocks * disk.f_frsize)
        could_hold = stats.bytes_cached + max(0, disk.f_bavail * disk.f_frsize - keep)
    size = sum(int(each["size"]) for each in found)
    return {"n_files": len(found), "size": size, "may_hold": fs.may_hold(), "could_hold": could_hold}


def read_at_once(origin: Any, path: str, n: int, size: int, of: int) -> None:
    """Read `n` parts of an object of `of` bytes concurrently, one request of `size` bytes each."""
    starts = [(i * size) % (of - size + 1) for i in range(n)]
    threads = DaemonThreadPool(n, "cachedfs-doctor")  # daemon threads: Ctrl-C does not wait for them
    try:
        for done in [threads.submit(origin.cat_file, path, start, start + size) for start in starts]:
            done.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


# Advice from the measurements


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of the access to the data, and the current configuration.

    Sizes are in bytes, rates in bytes per second. `first_s` is the time to the first byte of a request.
    `one_per_s` is the rate of one request, None if the object is too small to measure. `all_per_s` is the
    combined rate of `n_at_once` concurrent requests.

    `n_files` is the number of files in the folder and `size` their total size; None if unknown. The cache
    may hold `may_hold` bytes now, and `could_hold` bytes without a `cache_size` limit.
    """

    first_s: float
    concurrency: int
    one_per_s: float | None = None
    all_per_s: float | None = None
    n_at_once: int = 0
    n_files: int | None = None
    size: int | None = None
    may_hold: int | None = None
    could_hold: int | None = None
    is_drive: bool = False
    is_immutable: bool = False  # `max_age="immutable"` is set

    @property
    def n_to_fill(self) -> int | None:
        """Number of concurrent requests that fill the link; None if too few were tried or none was timed."""
        if self.one_per_s is None or self.all_per_s is None:
            return None
        n = self.all_per_s / self.one_per_s
        return None if n > 0.8 * self.n_at_once else max(1, math.ceil(n))

    @property
    def share_held(self) -> float | None:
        """Share of the folder that fits in the cache: the best possible hit ratio. None if unknown."""
        if not self.size or self.may_hold is None:
            return None
        return min(1.0, self.may_hold / self.size)


def limits(measured: Measured) -> str:
    """Return what limits reading, as sentences."""
    n, first_s, held = measured.concurrency, measured.first_s, measured.share_held
    at_once = f"as a list by fs.cat, {n} in flight: up to {n / first_s:,.0f} a second."
    texts = [f"Small objects one by one: {1 / first_s:,.0f} a second; {at_once}"]
    if measured.n_to_fill is not None:
        speed = rate(measured.all_per_s or 0, 1)
        texts.append(f"The link gives {speed}; {counted(measured.n_to_fill, 'request')} at a time fill it.")
    elif measured.one_per_s is not None:
        needed = max(1, math.ceil(125e6 / measured.one_per_s))
        texts.append(f"{needed} requests at a time would fill a link of 1 Gbit/s, {10 * needed} one of 10.")
    if measured.size is not None and held is not None and measured.n_files != 1:
        then = "from the second time on all of it is hits"
        if held < 1:
            then = "that share of each further epoch is hits"
        texts.append(f"Of {decimal(measured.size)} here the cache holds {per_cent(held)}: {then}.")
    if measured.is_drive:
        texts.append(
            "Drive serves an account about 200 downloads a second, and 27 if its project was made since May 2026."
        )
    return " ".join(texts)


def advice(measured: Measured) -> list[str]:
    """Return the recommended changes, each with its reason; an empty list if the configuration fits."""
    texts = []
    if measured.n_to_fill is not None and measured.n_to_fill > measured.concurrency:
        texts.append(f"concurrency={min(measured.n_to_fill, MOST_AT_ONCE)}: fewer do not fill the link")
    size, held, n_files = measured.size or 0, measured.share_held, measured.n_files or 0
    if held is not None and held < 1:
        what = "object" if n_files == 1 else "folder"
        if measured.could_hold is not None and measured.could_hold >= size * 1.05:
            texts.append(f'cache_size="{math.ceil(size * 1.05 / 1e9)}GB": then all of the {what} stays')
        else:
            texts.append(f"cache_dir= on a larger disk: the {what} does not fit this one")
    if n_files >= MANY and size <= SMALL * n_files:
        average = decimal(size // n_files)
        texts.append(f"cachedfs pack: {n_files:,} files of {average} become tens of objects")
    if measured.is_drive and not measured.is_immutable:
        texts.append(
            'max_age="immutable", if the data does not change: then known files cost no request at all'
        )
    return texts
