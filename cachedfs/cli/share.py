"""The command `share`: make a shared cache, see what is in it, and keep it within a size."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from cachedfs.cli.arguments import CommonOptions, argument, command, option
from cachedfs.cli.output import minute_of
from cachedfs.common.text import counted
from cachedfs.config import parse_size

ACTIONS = ("init", "stats", "clean")


@command(
    "cachedfs share init /data/cachedfs --group research",
    "cachedfs share stats /data/cachedfs",
    "cachedfs share clean /data/cachedfs --size 2TB",
    common=("as_json", "debug"),
)
def share(
    common: CommonOptions,
    action: Annotated[str, argument("init|stats|clean", "What to do.")],
    folder: Annotated[str, argument("FOLDER", "The folder or URL of a shared cache.")],
    group: Annotated[str | None, option("NAME", "With init: who reads and writes.")] = None,
    size: Annotated[str | None, option("SIZE", "With clean: what may stay, as 2TB.")] = None,
) -> None:
    """Make, show and clean the folder of a shared cache.

    init makes it for a group. clean removes the files that were not used for
    longest, and temporary files older than a day, while others read and write.
    """
    if action not in ACTIONS:
        raise typer.BadParameter(f"expected one of {', '.join(ACTIONS)}", param_hint="ACTION")
    if (action == "clean") != (size is not None):
        raise typer.BadParameter("clean needs it, and nothing else", param_hint="--size")
    most = None if size is None else _bytes_of(size)
    from cachedfs.config import SharedOptions, shared_folder
    from cachedfs.shared.shared_cache import place_at
    from cachedfs.shared.upkeep import make_for_group

    path = shared_folder(folder) or os.path.abspath(folder)
    if action == "init":
        if "://" in path:
            raise typer.BadParameter(
                "a URL needs no preparation: name it as shared_cache", param_hint="FOLDER"
            )
        try:
            make_for_group(path, group)
        except LookupError:
            raise typer.BadParameter(
                f"there is no group {group!r}: `getent group` lists them", param_hint="--group"
            ) from None
        common.show({"folder": path}, f"set shared_cache={path}, or FSSPEC_CACHEDFS_SHARED_CACHE, to use it")
        return
    shared = place_at(SharedOptions(path, "anyone", is_read_only=True))
    with contextlib.closing(shared):
        shared.check()
        _show(common, shared, path, most)


def _bytes_of(size: str) -> int:
    try:
        most = parse_size(size)
    except ValueError as error:
        raise typer.BadParameter(f"{size!r}: {error}", param_hint="--size") from None
    if isinstance(most, float):
        raise typer.BadParameter("expected bytes or a size like 200GB", param_hint="--size")
    return most


def _show(common: CommonOptions, shared: Any, path: str, most: int | None) -> None:
    """Clean a shared cache to a size, or say what is in it."""
    from cachedfs.shared.upkeep import clean

    if most is not None:
        now = shared.now()
        done = clean(shared, most, now=time.time() if now is None else now)
        removed = f"{counted(done.removed, 'file')} of {decimal(done.bytes_removed)} removed"
        common.show(done._asdict(), f"{removed}; {counted(done.files, 'file')} of {decimal(done.bytes)} left")
        return
    files = list(shared.files())
    total = sum(file.size for file in files)
    oldest = min((file.used_at for file in files), default=None)
    at = None if oldest is None else datetime.datetime.fromtimestamp(oldest, datetime.UTC)
    text = f"{counted(len(files), 'file')}, {decimal(total)}"
    used = "" if at is None else f"; the longest unused was used at {minute_of(at)}"
    found = {"folder": path, "files": len(files), "bytes": total, "oldest_use": at}
    common.show(found, text + used, err=False)
