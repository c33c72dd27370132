"""The command `doctor`: check the installation and the cache, and what `origin_checks` yields."""

from __future__ import annotations

import dataclasses
import errno
import importlib.metadata
import os
import platform
import re
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from cachedfs.cli.arguments import CommonOptions, command
from cachedfs.cli.cache import cache_of
from cachedfs.cli.monitoring import contents, text_of, text_of_use
from cachedfs.cli.origin_checks import Check, origin_checks, timed
from cachedfs.cli.output import (
    FAILED,
    busy,
    cell,
    message_of,
    plain_table,
    print_json,
    print_table,
    print_traceback,
    rate,
)
from cachedfs.cli.urls import url_argument
from cachedfs.common.text import counted
from cachedfs.errors import CacheError

if TYPE_CHECKING:
    from cachedfs.cache.block_cache import BlockCache
    from cachedfs.config import Config

__all__ = ["doctor"]

WRITTEN = 8 << 20  # bytes written to the cache directory
SLOW = 30e6  # bytes per second: slower disks are slower than most links
COLORS = {"ok": "green", "warn": "yellow", "fail": "bold red"}
EXTRAS = {"gcsfs": "gcs", "pydrive2": "drive", "zarr": "zarr", "torch": "torch"}


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
    groups = {"installation": installation_checks(), "cache": cache_checks(common)}
    if url:
        groups["access"] = origin_checks(url, common)
    checks = []
    with busy("checking the installation", is_quiet=common.as_json) as tell:
        for name, group in groups.items():
            for check in with_errors(name, group, common):
                checks.append(check)
                tell(f"checking {name}: {check.name} done")
    if common.as_json:
        print_json([dataclasses.asdict(check) for check in checks])
    else:
        print_table(table_of(checks))
    if any(check.state == "fail" for check in checks):
        raise typer.Exit(FAILED)


def with_errors(name: str, checks: Iterator[Check], common: CommonOptions) -> Iterator[Check]:
    """Yield the checks of a group; an exception ends the group with a failed check."""
    try:
        yield from checks
    except typer.BadParameter:
        raise
    except Exception as error:  # doctor must report every kind of error
        if common.debug:
            print_traceback()
        yield Check(name, "fail", message_of(error), advice_for(error, common.url or ""))


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
        table.add_row(Text(check.state, style=COLORS[check.state]), Text(check.name, style="bold"), text)
    for column in table.columns[:2]:
        column.no_wrap = True
    return table


def installation_checks() -> Iterator[Check]:
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


def cache_checks(common: CommonOptions) -> Iterator[Check]:
    from cachedfs.cache.disk import is_network

    config = common.config()
    changed = [
        f"{field.name}={getattr(config, field.name)}"
        for field in dataclasses.fields(config)
        if field.name != "cache_dir" and getattr(config, field.name) != field.default
    ]
    yield Check("options", "ok", ", ".join(changed) or "all are the defaults")
    cache = cache_of(config)
    if cache.root is None:
        to_do = "Reads work, but everything is fetched every time; --cache-dir or cache_dir= chooses another"
        yield Check("cache directory", "fail", cache.cannot_store or "none", to_do)
        return
    yield Check("cache directory", "ok", f"{cache.root} ({source_of_directory(common)})")
    if is_network(cache.root):
        to_do = "A cache belongs on a local disk: set cache_dir"
        yield Check("file system", "warn", "a network file system, or FUSE", to_do)
    seconds = write_seconds(f"{cache.root}/tmp")
    slow = "Slower than most links: set cache_dir to a faster disk" if WRITTEN / seconds < SLOW else ""
    yield Check("write speed", "warn" if slow else "ok", rate(WRITTEN, seconds), slow)
    yield from room_checks(cache, config)


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
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:

        def write() -> None:
            if file.write(data) < WRITTEN:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
            os.fsync(file.fileno())

        return timed(write)


def room_checks(cache: BlockCache, config: Config) -> Iterator[Check]:
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
        yield Check("room", "ok", f"for {size}; {keep} stay free of the {free} that are free")
    except CacheError as error:
        yield Check("room", "fail", error.message, "Raise cache_size, lower keep_free, or free space")
    use, to_do = text_of_use(cache.counts.total(), found["bytes"], found["may_hold"])
    yield Check("use", "warn" if to_do else "ok", use, to_do)
