"""The command `doctor`: check the installation, the cache and the way to the data, and say what to change."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.filesize import decimal
from rich.text import Text

from cachedfs.cli import speed
from cachedfs.cli.arguments import CommonOptions, command
from cachedfs.cli.login import text_of_storage
from cachedfs.cli.output import (
    cell,
    message_of,
    print_json,
    print_table,
    print_traceback,
    rate,
    table_of,
)
from cachedfs.cli.speed import median_of_3, timed
from cachedfs.cli.stats import cache_of, contents, is_too_small, shared_state, text_of, texts_of
from cachedfs.cli.urls import Location, locate, url_argument
from cachedfs.common.logging import without_secrets
from cachedfs.common.text import counted
from cachedfs.config import Config
from cachedfs.errors import SignInRefused
from cachedfs.report.analysis import analyse

if TYPE_CHECKING:
    from cachedfs.cache.block_store import BlockStore

WRITTEN = 8 << 20  # bytes written to the cache directory
LARGE = 1 << 20  # bytes of an object whose read tells the speed of the link
SLOW = 30e6  # bytes per second: slower disks are slower than most links
COLORS = {"ok": "green", "warn": "yellow", "fail": "bold red"}
EXTRAS = {"gcsfs": "gcs", "pydrive2": "drive", "zarr": "zarr", "torch": "torch"}
TOO_SMALL = (
    "It is full, and evicts blocks nearly as fast as they arrive: raise cache_size, or lower keep_free"
)
FLAT_KEYS = 'chunk_key_encoding={"name": "default", "separator": "."}'
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
    with common.progress("checking the installation") as bar:
        for name, group in groups.items():
            for check in with_errors(name, group, common):
                checks.append(check)
                bar.say(f"checking {name}: {check.name} done")
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
    # The values of variables may be secret, but not where a service is.
    values = {name: value for name, value in sorted(os.environ.items()) if name.startswith("FSSPEC_")}
    shown = [
        f"{name}={without_secrets(value)}" if name.endswith("_ENDPOINT_URL") else name
        for name, value in values.items()
    ]
    if shown:
        yield Check("environment", "ok", ", ".join(shown))


def cache_checks(common: CommonOptions) -> Iterator[Check]:
    from cachedfs.cache.disk import is_network

    config = common.config()
    values = {name: value for name, value in config._asdict().items() if name != "cache_dir"}
    changed = [
        f"{name}={option_text(value)}" for name, value in values.items() if value != getattr(Config(), name)
    ]
    yield Check("options", "ok", ", ".join(changed) or "all are the defaults")
    try:
        cache = cache_of(common.config_of_existing())
    except FileNotFoundError as error:
        yield Check("cache directory", "fail", str(error))
        return
    if cache.root is None:
        to_do = "Reads work, but everything is fetched every time; --cache-dir or cache_dir= chooses another"
        yield Check("cache directory", "fail", cache.cannot_store or "none", to_do)
        return
    yield Check("cache directory", "ok", f"{cache.root} ({source_of_directory(common)})")
    if cache.old_caches:
        found = f"an earlier release left {', '.join(cache.old_caches)}, which this one does not use"
        yield Check("old cache", "warn", found, "Remove it: cachedfs evict --old")
    if is_network(cache.root):
        to_do = "A cache belongs on a local disk: set cache_dir"
        yield Check("file system", "warn", "a network file system, or FUSE", to_do)
    if (shared := shared_state(config)) is not None:
        is_used = config.shared is not None and shared == config.shared.folder
        yield Check("shared cache", "ok" if is_used else "warn", shared)
    yield write_check(cache.root)
    yield from index_checks(cache, config)


def option_text(value: Any) -> str:
    if value == math.inf:
        return "immutable"
    return decimal(value) if type(value) is int and value >= 1_000_000 else str(value)


def write_check(root: str) -> Check:
    """Check how fast the disk of the cache is, and whether anything can be written to it."""
    data = os.urandom(WRITTEN)
    try:
        with tempfile.TemporaryFile(dir=f"{root}/tmp", buffering=0) as file:
            took_s = timed(lambda: file.write(data)) + timed(lambda: os.fsync(file.fileno()))
    except OSError as error:
        to_do = "Free space on this disk, or set cache_dir to another: until then nothing new is cached"
        return Check("write speed", "fail", f"{root} cannot be written: {error.strerror}", to_do)
    slow = "Slower than most links: set cache_dir to a faster disk" if WRITTEN / took_s < SLOW else ""
    return Check("write speed", "warn" if slow else "ok", rate(WRITTEN, took_s), slow)


def index_checks(cache: BlockStore, config: Config) -> Iterator[Check]:
    """Check what the cache holds, whether there is room for more, and how well it is used."""
    found = contents(cache, config)
    if found["may_hold"] is None:  # unknown because the index cannot be written
        to_do = "The directory may be removed: it is only a cache"
        yield Check("index", "fail", str(found["cannot_store"]), to_do)
        return
    blocks, pins = counted(found["blocks"], "block"), counted(len(found["pins"]), "pin")
    yield Check("index", "ok", f"{blocks}, {decimal(found['bytes'])}, {pins}")
    if found["cannot_store"]:
        yield Check("room", "fail", found["cannot_store"])
    else:
        size, keep, free = (text_of(name, found[name]) for name in ("may_hold", "keep_free", "disk_free"))
        yield Check("room", "ok", f"for {size} in all; {keep} of the {free} now free on the disk stay free")
    counts = cache.counts.total()
    texts = [
        f"{name} {text}" for name, text in texts_of(counts).items() if name in ("hits", "saved", "evicted")
    ]
    state, to_do = (
        ("warn", TOO_SMALL) if is_too_small(counts, found["bytes"], found["may_hold"]) else ("ok", "")
    )
    yield Check("use", state, "; ".join(texts) or "no block was read yet", to_do)


def mount_checks() -> Iterator[Check]:
    """Name the files that were written in a mounted folder and could not be sent."""
    from cachedfs.mount.unsent_files import kept

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


# The way to the data


def origin_checks(text: str, common: CommonOptions) -> Iterator[Check]:
    try:
        common.config_of_existing()
    except FileNotFoundError:  # as the check of the cache directory says
        return
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
    origin, address = fs.origin_fs, drive_address(info) if is_drive else None
    if address is not None and origin.identity() != NOBODY:
        yield rights_check(origin.capabilities(address))

    def ask() -> None:
        origin.invalidate_cache()  # clear the listings cached by the inner filesystem
        (origin.info if address or info["type"] == "file" else origin.ls)(address or path)

    took = milliseconds(median_of_3(ask))
    yield Check("metadata", "ok", f"{took} a request (median of 3, without the cache)")
    is_array = {each["name"] for each in found} >= {f"{path}/zarr.json", f"{path}/c"}
    if is_drive and is_array and any(each["type"] == "directory" for each in fs.ls(f"{path}/c", detail=True)):
        what = "each chunk of this Zarr array is in folders of its own: two more requests for each"
        yield Check("chunks", "warn", what, f"Write it with shards=..., or with {FLAT_KEYS}")
    if any(each["type"] == "file" and each["size"] for each in found):
        yield from speed_checks(location, found, is_immutable=math.isinf(common.config().max_age))


def drive_address(info: dict[str, Any]) -> str | None:
    """Return the id of an item of Drive as a path; resolving a name would take several requests."""
    if info["name"] == "Shared with me" or not info.get("id"):
        return None
    return f"id:{info['id']}" + (f",resourcekey={key}" if (key := info.get("resourceKey")) else "")


def rights_check(can: dict[str, Any]) -> Check:
    may = [word for name, word in RIGHTS.items() if can.get(name)]
    to_do = "" if "read" in may or "list" in may else "Ask its owner for the right to download"
    found = f"this account may {', '.join(may) or 'do nothing'}"
    return Check("rights", "warn" if to_do else "ok", found, to_do)


def account_checks(origin: Any) -> Iterator[Check]:
    """Check which Google account is signed in, and which scopes its credentials have."""
    who = origin.identity()
    if who == NOBODY:
        to_do = "Run `cachedfs login drive`, or give an API key, which lists public folders completely"
        what = "nobody is signed in: only public files and folders can be read"
        yield Check("identity", "warn", what, to_do)
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


def speed_checks(location: Location, found: list[dict[str, Any]], *, is_immutable: bool) -> Iterator[Check]:
    """Measure reads of the largest object past the cache; yield what limits reading and which options to change.

    `found` has the entries of the folder, or the object alone.
    """
    fs, info = location.fs, max(found, key=lambda each: int(each["size"] or 0))
    n = min(fs.config.first_concurrency, speed.AT_ONCE)
    its = speed.measure(fs.origin_fs, str(info["name"]), int(info["size"]), n)
    yield Check("first byte", "ok", f"{milliseconds(its.first_s)} (median of 3)")
    one = f"{decimal(its.size)} in {milliseconds(its.whole_s)}: {rate(its.size, its.whole_s)}"
    small = "" if its.size >= LARGE else "Too small to measure the link: name an object of some MB"
    yield Check("one request", "ok", one, small)
    if its.per_s:
        what = f"{its.n} requests, {decimal(its.at_once)} in {milliseconds(its.took_s)}"
        yield Check("at once", "ok", f"{what}: {rate(its.per_s, 1)}")
    run = speed.forecast(its, location, found, is_immutable=is_immutable)
    analysis = analyse(run)
    why = "there are subfolders" if run.size is None else "more requests at a time are faster"
    yield Check("settings", "ok", speed.facts(run, its.size / its.whole_s))
    yield Check("limit", "ok", analysis.verdict if run.times else f"not known: {why}")
    yield Check("to set", "ok", "; ".join(analysis.advice) or "nothing to change")


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"
