"""The command `doctor`: check the installation, the cache and the access to an origin."""

from __future__ import annotations

import dataclasses
import errno
import importlib.metadata
import math
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from cachedfs.cli import advice
from cachedfs.cli.advice import Seen
from cachedfs.cli.app import command, url_argument
from cachedfs.cli.arguments import place_of
from cachedfs.cli.cache import cache_of, config_of
from cachedfs.cli.exit_codes import FAILED
from cachedfs.cli.output import (
    Given,
    busy,
    cell,
    message_of,
    plain_table,
    print_json,
    print_table,
    print_traceback,
)
from cachedfs.cli.stats import bytes_of, contents, said
from cachedfs.common.executor import DaemonThreadPool
from cachedfs.common.text import counted
from cachedfs.errors import CacheError

if TYPE_CHECKING:
    from cachedfs.cache.block_cache import BlockCache
    from cachedfs.config import Config
    from cachedfs.filesystem import CachedFileSystem

__all__ = ["doctor"]

PROBE = 8 << 20  # bytes written to the cache directory, and read from the origin
LEAST = 1 << 20  # bytes: smallest object whose transfer rate can be measured
AT_ONCE, HALF_S = 8, 0.5  # concurrent requests, and seconds each may take at the speed of a single one
COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}
EXTRAS = {"gcsfs": "gcs", "pydrive2": "drive", "zarr": "zarr", "torch": "torch"}


@command(
    "cachedfs doctor",
    "cachedfs doctor gs://my-bucket/train.jsonl",
    "cachedfs doctor --json --cache-dir /fast/nvme",
)
def doctor(
    given: Given,
    url: Annotated[
        str | None,
        url_argument("URL", "Also look at the way to this object or folder."),
    ] = None,
) -> None:
    """Check installation, cache and the way to the data.

    Each check is ok, warn or fail, and says what to do. The exit status is 1
    when one fails.
    """
    groups = {"installation": of_installation(), "cache": of_cache(given)}
    if url:
        groups["access"] = of_origin(url, given)
    checks = []
    with busy("checking the installation", is_quiet=given.as_json) as say:
        for name, group in groups.items():
            for check in survived(name, group, given):
                checks.append(check)
                say(f"checking {name}: {check.name} done")
    if given.as_json:
        print_json([dataclasses.asdict(check) for check in checks])
    else:
        print_table(table_of(checks))
    if any(check.state == "fail" for check in checks):
        raise typer.Exit(FAILED)


@dataclasses.dataclass(frozen=True)
class Check:
    """Result of one check; `state` is "ok", "warn" or "fail"."""

    name: str
    state: str
    found: str
    advice: str = ""


def survived(name: str, checks: Iterator[Check], given: Given) -> Iterator[Check]:
    """Yield the checks of a group; an exception ends the group with a failed check."""
    try:
        yield from checks
    except typer.BadParameter:
        raise
    except Exception as error:  # doctor must report every kind of error
        if given.debug:
            print_traceback()
        yield Check(name, "fail", message_of(error), advice_for(error, given.url or ""))


def advice_for(error: Exception, url: str) -> str:
    """Return what to do about an error, or an empty string if its message already says so."""
    if isinstance(error, PermissionError) and re.search("gc?s://", url):
        return "Log in (gcloud auth application-default login), or for public data: -o token=anon"
    if isinstance(error, ImportError):
        return 'Install what reads it: pip install "cachedfs[gcs]", "cachedfs[drive]", or its own package'
    return ""


def table_of(checks: list[Check]) -> Table:
    table = plain_table()
    for check in checks:
        text = cell(check.found, overflow="fold")
        if check.advice:
            text.append("\n").append(cell(check.advice, style="italic"))
        table.add_row(Text(check.state, style=COLOURS[check.state]), Text(check.name, style="bold"), text)
    for column in table.columns[:2]:
        column.no_wrap = True
    return table


# Installation


def of_installation() -> Iterator[Check]:
    from fsspec import available_protocols

    yield Check("python", "ok", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    versions = {name: version_of(name) for name in ("cachedfs", "fsspec", "aiohttp", *EXTRAS)}
    have = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    lack = ", ".join(f'{name} ("cachedfs[{EXTRAS[name]}]")' for name in EXTRAS if not versions[name])
    yield Check("packages", "ok", have, f"Not installed: {lack}" if lack else "")
    known = [name for name in ("cachedfs", "cgs", "drive", "cdrive") if name in available_protocols()]
    if "cachedfs" in known and "cgs" in known:
        yield Check("protocols", "ok", ", ".join(known))
    else:
        yield Check("protocols", "fail", f"fsspec knows {known}", "Install cachedfs with pip again")


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# Cache


def of_cache(given: Given) -> Iterator[Check]:
    from cachedfs.cache.disk import is_network

    config = config_of(given)
    yield Check("options", "ok", options_of(config))
    cache = cache_of(config)
    if cache.root is None:
        to_do = "Reads work, but everything is fetched every time; --cache-dir or cache_dir= chooses another"
        yield Check("cache directory", "fail", cache.cannot_store or "none", to_do)
        return
    yield Check("cache directory", "ok", f"{cache.root} ({source_of_directory(given)})")
    if is_network(cache.root):
        to_do = "A cache belongs on a local disk: set cache_dir"
        yield Check("file system", "warn", "a network file system, or FUSE", to_do)
    rate = write_rate(f"{cache.root}/tmp")
    slow = "Slower than most links: set cache_dir to a faster disk" if rate < 30e6 else ""
    yield Check("write speed", "warn" if slow else "ok", f"{decimal(int(rate))}/s", slow)
    yield from of_room(cache, config)


def options_of(config: Config) -> str:
    """Return the options that differ from their defaults, as text."""
    changed = [
        f"{field.name}={getattr(config, field.name)}"
        for field in dataclasses.fields(config)
        if field.name != "cache_dir" and getattr(config, field.name) != field.default
    ]
    return ", ".join(changed) or "all are the defaults"


def source_of_directory(given: Given) -> str:
    from fsspec.config import conf

    if "cache_dir" in given.ours_and_theirs()[0]:
        return "as given"
    if "FSSPEC_CACHEDFS_CACHE_DIR" in os.environ:
        return "FSSPEC_CACHEDFS_CACHE_DIR"
    return "fsspec's configuration" if "cache_dir" in conf.get("cachedfs", {}) else "the default"


def write_rate(folder: str) -> float:
    """Return the rate at which a small file is written and synced to disk, in bytes per second."""
    data = os.urandom(PROBE)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:

        def write() -> None:
            if file.write(data) < PROBE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
            os.fsync(file.fileno())

        return PROBE / timed(write)


def of_room(cache: BlockCache, config: Config) -> Iterator[Check]:
    found = contents(cache, config)
    if found["may_hold"] is None:  # unknown because the index cannot be written
        to_do = "The directory may be removed: it is only a cache"
        yield Check("index", "fail", str(found["cannot_store"]), to_do)
        return
    state = f"{counted(found['blocks'], 'block')}, {decimal(found['bytes'])}, {counted(len(found['pins']), 'pin')}"
    yield Check("index", "ok", state)
    size, keep, free = (said(name, found[name]) for name in ("may_hold", "keep_free", "disk_free"))
    room = f"for {size}; {keep} stay free of the {free} that are free"
    try:
        # Try to reserve space for one block, given the pins and the blocks in use.
        cache.lease(config.block_size, config.bounds).close()
        yield Check("room", "ok", room)
    except CacheError as error:
        yield Check("room", "fail", error.message, "Raise cache_size, lower keep_free, or free space")
    words, to_do = advice.use(cache.counts.total(), found["bytes"], found["may_hold"])
    yield Check("use", "warn" if to_do else "ok", words, to_do)


# Access to the origin


def of_origin(text: str, given: Given) -> Iterator[Check]:
    place = place_of(text, given, max_age=0, stale_if_error=False)
    fs, path = place.fs, place.path
    if endpoint := fs._source.identity.split("|")[1]:  # includes an endpoint set by an environment variable
        yield Check("endpoint", "ok", endpoint)
    if fs.target_protocol == "drive":
        yield from of_account(fs)
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
    if address is not None:
        yield of_rights(origin, address)

    def ask() -> None:
        origin.invalidate_cache()  # clear the listings cached by the inner filesystem
        (origin.info if address or info["type"] == "file" else origin.ls)(address or path)

    seconds = median_of_3(ask)
    yield Check("metadata", "ok", f"{1e3 * seconds:.0f} ms a request (median of 3, past the cache)")
    objects = [each for each in found if each["type"] == "file" and each["size"]]
    if objects:
        is_immutable = math.isinf(config_of(given).max_age)
        yield from of_reading(
            fs, max(objects, key=lambda each: int(each["size"])), found, is_immutable=is_immutable
        )


def id_of(fs: CachedFileSystem, info: dict[str, Any]) -> str | None:
    """Return the `id:` path of an object on Drive, or None if it has none.

    Resolving a path by name takes several requests, an id only one.
    """
    if fs.target_protocol != "drive" or info["name"] == "Shared with me" or not info.get("id"):
        return None
    key = info.get("resourceKey")
    return f"id:{info['id']}" + (f",resourcekey={key}" if key else "")


def of_account(fs: CachedFileSystem) -> Iterator[Check]:
    """Check which Google account is signed in, and which scopes its credentials have."""
    origin = fs.origin_fs
    who = origin.identity()
    yield Check("identity", "ok", who)
    try:
        about = origin.about()
    except PermissionError as error:  # later checks show whether more is denied
        yield Check("account", "warn", message_of(error))
        return
    user, total = about.get("user") or {}, int(about.get("quotaBytesTotal") or 0)
    room = f"{decimal(int(about.get('quotaBytesUsed') or 0))} used"
    room += f" of {decimal(total)}" if total and about.get("quotaType") != "UNLIMITED" else ""
    yield Check("account", "ok", f"{user.get('emailAddress', 'without an address')}; {room}")
    if who != "anonymous":
        yield of_scopes(about["scopes"])


SCOPES = {  # what each scope permits, broadest first
    "drive": "reading and writing",
    "drive.readonly": "reading; writes are refused",
    "drive.file": "files that this OAuth client made, and no others",
    "drive.metadata": "names and listings; reading is refused",
    "drive.metadata.readonly": "names and listings; reading is refused",
}


def of_scopes(scopes: list[str] | None) -> Check:
    if scopes is None:
        return Check("scopes", "ok", "these credentials do not say for what they are")
    short = {scope.rpartition("/auth/")[2] for scope in scopes}
    best = next((name for name in SCOPES if name in short), None)
    if best == "drive":
        return Check("scopes", "ok", f"drive: {SCOPES['drive']}")
    advice = "For all of it sign in again, with https://www.googleapis.com/auth/drive among the scopes"
    if best is not None:
        return Check("scopes", "warn", f"{best}: {SCOPES[best]}", advice)
    return Check("scopes", "fail", f"none of Drive's ({', '.join(sorted(short))})", advice)


def of_rights(origin: Any, address: str) -> Check:
    """Check what the account may do with one file or folder on Drive."""
    can = origin.capabilities(address)
    names = ("canDownload", "canListChildren", "canEdit", "canAddChildren", "canTrash")
    words = ("read", "list", "change", "add to", "remove")
    may = [word for name, word in zip(names, words, strict=True) if can.get(name)]
    advice = "" if "read" in may or "list" in may else "Ask its owner for the right to download"
    what = f"this account may {', '.join(may) or 'do nothing'}"
    return Check("rights", "warn" if advice else "ok", what, advice)


def timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def median_of_3(function: Callable[[], object]) -> float:
    """Return the median duration of three calls, in seconds."""
    return statistics.median(timed(function) for _ in range(3))


def of_reading(
    fs: CachedFileSystem, info: dict[str, Any], found: list[dict[str, Any]], *, is_immutable: bool
) -> Iterator[Check]:
    """Measure reads of an object past the cache; yield what limits reading and which options to change.

    `found` has the entries of the folder, or the object alone.
    """
    size, path = min(PROBE, int(info["size"])), str(info["name"])
    with fs.origin_fs.open(
        path, "rb", cache_type="none"
    ) as file:  # opened once, so that each read is one request

        def read(n: int) -> None:
            file.seek(0)
            file.read(n)

        first = median_of_3(lambda: read(1))
        whole = timed(lambda: read(size))
    yield Check("first byte", "ok", f"{1e3 * first:.0f} ms (median of 3)")
    rate = f"{decimal(size)} in {1e3 * whole:.0f} ms: {decimal(int(size / whole))}/s"
    yield Check("one request", "ok", rate)
    seen = Seen(
        first,
        fs.config.concurrency,
        is_drive=fs.target_protocol == "drive",
        is_immutable=is_immutable,
    )
    seen = with_data(seen, fs, found)
    if size >= LEAST:
        n = min(fs.config.concurrency, AT_ONCE)
        part = min(size, max(LEAST, int(size / whole * HALF_S)))
        took = timed(lambda: read_at_once(fs.origin_fs, path, n, part, int(info["size"])))
        yield Check(
            "at once",
            "ok",
            f"{n} requests, {decimal(n * part)} in {1e3 * took:.0f} ms: {decimal(int(n * part / took))}/s",
        )
        seen = dataclasses.replace(seen, one_per_s=size / whole, all_per_s=n * part / took, n_at_once=n)
    yield Check("settings", "ok", advice.bounds(seen))
    told = advice.settings(seen)
    yield Check("to set", "ok", "; ".join(told) or "nothing to change")


def with_data(seen: Seen, fs: CachedFileSystem, found: list[dict[str, Any]]) -> Seen:
    """Return `seen` with the size of the data and the current and possible allowance of the cache.

    Returns it unchanged if the folder has subfolders, since their size is unknown.
    """
    if any(each["type"] != "file" or each["size"] is None for each in found):
        return seen
    stats, could = fs.stats(), None
    if stats.cache_dir:
        disk = os.statvfs(stats.cache_dir)
        keep = bytes_of(fs.config.keep_free, disk.f_blocks * disk.f_frsize)
        could = stats.bytes_cached + max(0, disk.f_bavail * disk.f_frsize - keep)
    wanted = sum(int(each["size"]) for each in found)
    return dataclasses.replace(
        seen, n_files=len(found), wanted=wanted, may_hold=fs.may_hold(), could_hold=could
    )


def read_at_once(origin: Any, path: str, n: int, size: int, of: int) -> None:
    """Read `n` parts of an object of `of` bytes concurrently, one request of `size` bytes each."""
    starts = [(i * size) % (of - size + 1) for i in range(n)]
    threads = DaemonThreadPool(n, "cachedfs-doctor")  # daemon threads: Ctrl-C does not wait for them
    try:
        for done in [threads.submit(origin.cat_file, path, start, start + size) for start in starts]:
            done.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
