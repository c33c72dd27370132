"""The command `doctor`: check the installation, the cache and the way to the data, and say what to change."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
import platform
import re
import shlex
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import typer
from rich.filesize import decimal
from rich.text import Text

from cachedfs.cli.arguments import CommonOptions, command
from cachedfs.cli.login import text_of_storage
from cachedfs.cli.output import (
    busy,
    cell,
    message_of,
    print_json,
    print_table,
    print_traceback,
    rate,
    table_of,
)
from cachedfs.cli.stats import cache_of, contents, text_of, text_of_use
from cachedfs.cli.urls import Location, locate, url_argument
from cachedfs.common.executor import DaemonThreadPool
from cachedfs.common.text import counted, per_cent
from cachedfs.errors import CacheError, SignInRefused
from cachedfs.report.analysis import RunFigures, analyse

WRITTEN = 8 << 20  # bytes written to the cache directory
SLOW = 30e6  # bytes per second: slower disks are slower than most links
LARGE, LEAST = 8 << 20, 1 << 20  # bytes of one request, and of the smallest object whose transfer is timed
AT_ONCE, HALF_S = 8, 0.5  # concurrent requests, and seconds each may take at the speed of a single one
COLORS = {"ok": "green", "warn": "yellow", "fail": "bold red"}
EXTRAS = {"gcsfs": "gcs", "pydrive2": "drive", "zarr": "zarr", "torch": "torch"}
NOBODY = "nobody"  # the identity where no sign-in was found
SCOPES = {  # what each scope of Drive permits, broadest first
    "drive": "reading and writing",
    "drive.readonly": "reading; writes are refused",
    "drive.file": "files that this OAuth client made, and no others",
    "drive.metadata": "names and listings; reading is refused",
    "drive.metadata.readonly": "names and listings; reading is refused",
}
RIGHTS = {"canDownload": "read", "canListChildren": "list", "canEdit": "change", "canAddChildren": "add to"}
RIGHTS |= {"canTrash": "remove"}


class Check(NamedTuple):
    """Result of one check; `state` is "ok", "warn" or "fail"."""

    name: str
    state: str
    found: str
    advice: str = ""


@command(
    "cachedfs doctor",
    "cachedfs doctor gs://my-bucket/train.jsonl",
    "cachedfs doctor --json --cache-dir /fast/nvme",
)
def doctor(
    common: CommonOptions,
    url: Annotated[str | None, url_argument("URL", "Also look at the way to this object or folder.")] = None,
) -> None:
    """Check installation, cache and the way to the data.

    Each check is ok, warn or fail, and says what to do. The exit status is 1
    when one fails.
    """
    groups = {
        "installation": installation_checks(),
        "cache": cache_checks(common),
        "mounts": mount_checks(),
    }
    if url:
        groups["access"] = origin_checks(url, common)
    checks = []
    with busy("checking the installation", is_quiet=common.as_json) as tell:
        for name, group in groups.items():
            for check in with_errors(name, group, common):
                checks.append(check)
                tell(f"checking {name}: {check.name} done")
    if common.as_json:
        print_json([check._asdict() for check in checks])
    else:
        print_table(table_of((), map(row_of, checks)))
    common.has_failed = any(check.state == "fail" for check in checks)


def row_of(check: Check) -> tuple[Text, Text, Text]:
    text = cell(check.found)
    if check.advice:
        text.append("\n").append(cell(check.advice, style="italic"))
    return Text(check.state, style=COLORS[check.state]), Text(check.name, style="bold"), text


def with_errors(name: str, checks: Iterator[Check], common: CommonOptions) -> Iterator[Check]:
    """Yield the checks of a group; an exception ends the group with a failed check."""
    try:
        yield from checks
    except typer.BadParameter:
        raise
    except Exception as error:  # doctor must report every kind of error
        if common.debug:
            print_traceback()
        to_do = ""
        if isinstance(error, PermissionError) and re.search("gc?s://", common.url or ""):
            to_do = "Log in (gcloud auth application-default login), or for public data: -o token=anon"
        elif isinstance(error, ImportError):
            to_do = (
                'Install what reads it: pip install "cachedfs[gcs]", "cachedfs[drive]", or its own package'
            )
        yield Check(name, "fail", message_of(error), to_do)


# Installation and cache


def installation_checks() -> Iterator[Check]:
    from fsspec import available_protocols

    yield Check("python", "ok", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    versions = {}
    for name in ("cachedfs", "fsspec", "aiohttp", *EXTRAS):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    lack = [f'{name} ("cachedfs[{extra}]")' for name, extra in EXTRAS.items() if name not in versions]
    have = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield Check("packages", "ok", have, f"Not installed: {', '.join(lack)}" if lack else "")
    known = [name for name in ("cachedfs", "cgs", "drive", "cdrive") if name in available_protocols()]
    if "cachedfs" in known and "cgs" in known:
        yield Check("protocols", "ok", ", ".join(known))
    else:
        yield Check("protocols", "fail", f"fsspec knows {known}", "Install cachedfs with pip again")


def cache_checks(common: CommonOptions) -> Iterator[Check]:
    from cachedfs.cache.disk import is_network

    config = common.config()
    values = {field: getattr(config, field.name) for field in dataclasses.fields(config)}
    changed = [f"{field.name}={value}" for field, value in values.items() if value != field.default]
    changed = [text for text in changed if not text.startswith("cache_dir=")]
    yield Check("options", "ok", ", ".join(changed) or "all are the defaults")
    cache = cache_of(config)
    if cache.root is None:
        to_do = "Reads work, but everything is fetched every time; --cache-dir or cache_dir= chooses another"
        yield Check("cache directory", "fail", cache.cannot_store or "none", to_do)
        return
    yield Check("cache directory", "ok", f"{cache.root} ({source_of_directory(common)})")
    if cache.old_caches:
        to_do = f"Remove it: rm -r {shlex.join(cache.old_caches)}"
        yield Check("old cache", "warn", "an earlier release made it, and this one does not use it", to_do)
    if is_network(cache.root):
        to_do = "A cache belongs on a local disk: set cache_dir"
        yield Check("file system", "warn", "a network file system, or FUSE", to_do)
    took_s = write_seconds(f"{cache.root}/tmp")
    slow = "Slower than most links: set cache_dir to a faster disk" if WRITTEN / took_s < SLOW else ""
    yield Check("write speed", "warn" if slow else "ok", rate(WRITTEN, took_s), slow)
    found = contents(cache, config)
    if found["may_hold"] is None:  # unknown because the index cannot be written
        to_do = "The directory may be removed: it is only a cache"
        yield Check("index", "fail", str(found["cannot_store"]), to_do)
        return
    blocks, pins = counted(found["blocks"], "block"), counted(len(found["pins"]), "pin")
    yield Check("index", "ok", f"{blocks}, {decimal(found['bytes'])}, {pins}")
    size, keep, free = (text_of(name, found[name]) for name in ("may_hold", "keep_free", "disk_free"))
    try:
        # Try to reserve space for one block, given the pins and the blocks in use.
        cache.lease(config.block_size, config.bounds).close()
        yield Check("room", "ok", f"for {size} in all; {keep} of the {free} now free on the disk stay free")
    except CacheError as error:
        yield Check("room", "fail", error.message, "Raise cache_size, lower keep_free, or free space")
    use, to_do = text_of_use(cache.counts.total(), found["bytes"], found["may_hold"])
    yield Check("use", "warn" if to_do else "ok", use, to_do)


def mount_checks() -> Iterator[Check]:
    """Name the files that were written in a mounted folder and could not be sent."""
    from cachedfs.mount.unsent import kept

    if paths := kept():
        size = sum(os.path.getsize(path) for path in paths)
        found = f"{counted(len(paths), 'file')}, {decimal(size)}, written in a mounted folder; the newest is {paths[-1]}"
        yield Check("unsent files", "warn", found, "Copy them where they belong, then delete them")


def source_of_directory(common: CommonOptions) -> str:
    from fsspec.config import conf

    if "cache_dir" in common.split()[0]:
        return "as given"
    if "FSSPEC_CACHEDFS_CACHE_DIR" in os.environ:
        return "FSSPEC_CACHEDFS_CACHE_DIR"
    return "fsspec's configuration" if "cache_dir" in conf.get("cachedfs", {}) else "the default"


def write_seconds(folder: str) -> float:
    """Return how long it takes to write a file of WRITTEN bytes and sync it to disk."""
    data = os.urandom(WRITTEN)
    with tempfile.TemporaryFile(dir=folder) as file:

        def write() -> None:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

        return timed(write)


# The way to the data


def origin_checks(text: str, common: CommonOptions) -> Iterator[Check]:
    location = locate(text, common, max_age=0, stale_if_error=False)
    fs, path = location.fs, location.path
    if endpoint := location.identity.split("|")[1]:  # includes an endpoint set by an environment variable
        yield Check("endpoint", "ok", endpoint)
    is_drive = fs.target_protocol == "drive"
    if is_drive:
        yield from account_checks(fs.origin_fs)
    info: dict[str, Any] = fs.info(path) if path else {"name": path, "type": "directory"}
    found = [info] if info["type"] == "file" else fs.ls(path, detail=True)
    if info["type"] == "directory":
        what = f"is a folder with {counted(len(found), 'entry', 'entries')}"
    elif info["size"] is None:
        what = f"has no bytes of its own ({info.get('mimeType', 'of an unknown type')})"
    else:
        what = f"is an object of {decimal(info['size'])}"
    yield Check("access", "ok", f"{text} {what}")
    origin, address = fs.origin_fs, None
    if is_drive and info["name"] != "Shared with me" and info.get("id"):
        # By its id, because resolving a name takes several requests.
        key = info.get("resourceKey")
        address = f"id:{info['id']}" + (f",resourcekey={key}" if key else "")
    if address is not None and origin.identity() != NOBODY:
        can = origin.capabilities(address)
        may = [word for name, word in RIGHTS.items() if can.get(name)]
        to_do = "" if "read" in may or "list" in may else "Ask its owner for the right to download"
        what = f"this account may {', '.join(may) or 'do nothing'}"
        yield Check("rights", "warn" if to_do else "ok", what, to_do)

    def ask() -> None:
        origin.invalidate_cache()  # clear the listings cached by the inner filesystem
        (origin.info if address or info["type"] == "file" else origin.ls)(address or path)

    yield Check(
        "metadata", "ok", f"{milliseconds(median_of_3(ask))} a request (median of 3, without the cache)"
    )
    if any(each["type"] == "file" and each["size"] for each in found):
        yield from speed_checks(location, found, is_immutable=math.isinf(common.config().max_age))


def account_checks(origin: Any) -> Iterator[Check]:
    """Check which Google account is signed in, and which scopes its credentials have."""
    who = origin.identity()
    if who == NOBODY:
        to_do = "Run `cachedfs login drive`, or give an API key, which lists public folders completely"
        yield Check(
            "identity", "warn", "nobody is signed in: only public files and folders can be read", to_do
        )
        return
    yield Check("identity", "ok", who)
    try:
        about = origin.about()
    except PermissionError as error:
        # An API key has no account, and later checks show whether more is denied.
        yield Check("account", "fail" if isinstance(error, SignInRefused) else "warn", message_of(error))
        return
    address = (about.get("user") or {}).get("emailAddress", "without an address")
    yield Check("account", "ok", f"{address}; {text_of_storage(about.get('storageQuota'))}")
    if who != "anonymous":
        yield scopes_check(about["scopes"])


def scopes_check(scopes: list[str] | None) -> Check:
    if scopes is None:
        return Check("scopes", "ok", "not known from these credentials")
    short = {scope.rpartition("/auth/")[2] for scope in scopes}
    best = next((name for name in SCOPES if name in short), None)
    found = f"none of Drive's ({', '.join(sorted(short))})" if best is None else f"{best}: {SCOPES[best]}"
    if best == "drive":
        return Check("scopes", "ok", found)
    to_do = "For all of it sign in again, with https://www.googleapis.com/auth/drive among the scopes"
    return Check("scopes", "fail" if best is None else "warn", found, to_do)


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


def speed_checks(location: Location, found: list[dict[str, Any]], *, is_immutable: bool) -> Iterator[Check]:
    """Measure reads of the largest object past the cache; yield what limits reading and which options to change.

    `found` has the entries of the folder, or the object alone.
    """
    fs, info = location.fs, max(found, key=lambda each: int(each["size"] or 0))
    of, path, n = int(info["size"]), str(info["name"]), fs.config.first_concurrency
    size = min(LARGE, of)
    # Opened once, so that each read is one request.
    with fs.origin_fs.open(path, "rb", cache_type="none") as file:

        def read(length: int) -> None:
            file.seek(0)
            file.read(length)

        first_s = median_of_3(lambda: read(1))
        whole_s = timed(lambda: read(size))
    yield Check("first byte", "ok", f"{milliseconds(first_s)} (median of 3)")
    yield Check("one request", "ok", f"{decimal(size)} in {milliseconds(whole_s)}: {rate(size, whole_s)}")
    one_per_s = all_per_s = to_fill = None
    if size >= LEAST:
        one_per_s, n_tried = size / whole_s, min(n, AT_ONCE)
        part = min(size, max(LEAST, int(one_per_s * HALF_S)))
        took_s = timed(lambda: read_at_once(fs.origin_fs, path, n_tried, part, of))
        all_per_s = n_tried * part / took_s
        to_fill = n_to_fill(one_per_s, all_per_s, n_tried)
        what = f"{n_tried} requests, {decimal(n_tried * part)} in {milliseconds(took_s)}"
        yield Check("at once", "ok", f"{what}: {rate(all_per_s, 1)}")
    data = data_of(location, found)
    is_link_known = to_fill is not None or one_per_s is None  # else more requests would be faster still
    times = {}
    if data and is_link_known:
        times["latency"] = data["n_files"] * first_s / n
        if all_per_s:
            times["link"] = data["size"] / all_per_s
    run = RunFigures(
        elapsed_s=max(times.values(), default=0.0),
        times=times,
        requests=data.get("n_files", 0),
        latency_s=first_s,
        bytes_fetched=data.get("size", 0),
        bytes_per_s=all_per_s,
        n_at_once=n,
        n_to_fill=to_fill,
        is_drive=fs.target_protocol == "drive",
        is_immutable=is_immutable,
        **data,
    )
    analysis = analyse(run)
    unknown = "not known: more requests at a time are faster" if data else "not known: there are subfolders"
    yield Check("settings", "ok", facts(run, one_per_s))
    yield Check("limit", "ok", analysis.verdict if times else unknown)
    yield Check("to set", "ok", "; ".join(analysis.advice) or "nothing to change")


def facts(run: RunFigures, one_per_s: float | None) -> str:
    """Return how fast reads can be, as sentences."""
    first_s, n = run.latency_s or 0.0, run.n_at_once or 1
    at_once = f"as a list by fs.cat, {n} in flight: up to {n / first_s:,.0f} a second."
    texts = [f"Small objects one by one: {1 / first_s:,.0f} a second; {at_once}"]
    if run.n_to_fill is not None:
        fill = f"{counted(run.n_to_fill, 'request')} at a time fill it."
        texts.append(f"The link gives {rate(run.bytes_per_s or 0.0, 1)}; {fill}")
    elif one_per_s:
        needed = max(1, math.ceil(125e6 / one_per_s))
        texts.append(f"{needed} requests at a time would fill a link of 1 Gbit/s, {10 * needed} one of 10.")
    if run.size and run.held is not None and run.n_files != 1:
        then = "that share of each further epoch" if run.held < 1 else "from the second time on all of it"
        texts.append(f"Of {decimal(run.size)} here the cache holds {per_cent(run.held)}: {then} is hits.")
    if run.is_drive:
        texts.append(
            "Drive serves an account about 200 downloads a second, and 27 if its project was made since May 2026."
        )
    return " ".join(texts)


def data_of(location: Location, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the data and of the cache for it; empty for a folder with subfolders, of unknown size."""
    if any(each["type"] != "file" or each["size"] is None for each in found):
        return {}
    size, cache = sum(int(each["size"]) for each in found), contents(location.cache, location.fs.config)
    figures: dict[str, Any] = {"n_files": len(found), "size": size}
    if cache["may_hold"] is not None:
        figures["held"] = min(1.0, cache["may_hold"] / size)
    if cache["directory"] is not None:
        figures["could_hold"] = cache["bytes"] + max(0, cache["disk_free"] - cache["keep_free"])
    return figures


def n_to_fill(one_per_s: float, all_per_s: float, n_tried: int) -> int | None:
    """Return how many requests fill the link; None if the `n_tried` requests were too few to see it."""
    n = all_per_s / one_per_s
    return None if n > 0.8 * n_tried else max(1, math.ceil(n))


def read_at_once(origin: Any, path: str, n: int, size: int, of: int) -> None:
    """Read `n` parts of an object of `of` bytes concurrently, one request of `size` bytes each."""
    starts = [(i * size) % (of - size + 1) for i in range(n)]
    threads = DaemonThreadPool(n, "cachedfs-doctor")  # daemon threads: Ctrl-C does not wait for them
    try:
        # By name: the second parameter of s3fs is a version.
        for done in [threads.submit(origin.cat_file, path, start=at, end=at + size) for at in starts]:
            done.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
