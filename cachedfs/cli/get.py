"""The command `get`: copy objects and folders to the local disk."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import PurePosixPath
from typing import Annotated, Any, NamedTuple

import typer
from rich.filesize import decimal

from cachedfs.cli.arguments import CommonOptions, argument, command, flag
from cachedfs.cli.output import failure, progress, rate
from cachedfs.cli.urls import OBJECT_ERRORS, Location, UrlsBeforeTarget, before_target, drive_url, locate
from cachedfs.common.drive_links import is_bare_link, is_drive_link
from cachedfs.common.text import counted

# Up to MOST files are copied at a time. The filesystem holds up to WINDOW bytes of each in memory, so that fewer of the
# files above SMALL are.
MOST, SMALL, WINDOW = 128, 4 << 20, 64 << 20
NOT_A_NAME = (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL)  # the local disk refuses a name


@command(
    "cachedfs get gs://my-bucket/train.jsonl .",
    "cachedfs get -r gs://my-bucket/data /tmp/data",
    "cachedfs get 'gs://my-bucket/data/*.parquet' /tmp/tables/",
    "cachedfs get 'https://drive.google.com/file/d/ID/view?usp=sharing'",
)
def get(
    common: CommonOptions,
    urls: UrlsBeforeTarget = None,
    *,
    target: Annotated[str, argument("TARGET", "A local file or directory; the latter for several URLs.")],
    recursive: Annotated[bool, flag("Copy folders too.", "-r", "--recursive")] = False,
) -> None:
    """Copy objects and folders to the local disk.

    As with cp, a copy goes into the target if that is an existing directory.
    Links to Google Drive, and ids of it, need no target: they are copied under
    their own names into the current directory. A file appears only once it is
    complete. If one of several files cannot be read (a Google document has no
    bytes) or written under its name, it is reported, the others are copied, and
    the exit status is 1.
    """
    if is_drive_link(target.removeprefix("cachedfs::")) or is_another_link(target, urls or []):
        urls, target, recursive = [*(urls or ()), target], ".", True
    urls = before_target(urls)
    if "://" in target and not os.path.isdir(target):
        raise typer.BadParameter(f"{target} is a URL, and get copies to the local disk", param_hint="TARGET")
    if len(urls) > 1 and os.path.isfile(target):
        raise typer.BadParameter(
            f"{target} is a file, and several URLs want a directory", param_hint="TARGET"
        )
    done, copies = CopyCounts(), list[Copy]()
    is_into = os.path.isdir(target) or target.endswith("/") or len(urls) > 1
    for text in urls:
        location = locate(text, common)
        try:
            copies += copies_of(location, target, done, is_into=is_into, recursive=recursive)
        except OBJECT_ERRORS as error:
            if len(urls) == 1:
                raise
            done.failed.append(failure(text, error))
    copy(without_duplicates(copies), done, common, is_only=len(urls) == 1)
    common.print_result(dataclasses.asdict(done), str(done), done.failed)


def is_another_link(target: str, urls: list[str]) -> bool:
    """Return whether TARGET is a link without `https://` or an id, like the URLs before it, and no local name."""
    return is_bare_link(target) and all(map(drive_url, [*urls, target]))


class Copy(NamedTuple):
    """An object or folder and its local destination."""

    location: Location
    path: str
    local: str
    size: int | None
    is_folder: bool = False

    @property
    def url(self) -> str:
        return self.location.url(self.path)

    @property
    def n_at_once(self) -> int:
        """How many files of this size may be in memory at a time."""
        parts = math.ceil(WINDOW / SMALL if self.size is None else min(WINDOW, self.size) / SMALL)
        return MOST >> max(0, parts - 1).bit_length()


@dataclasses.dataclass
class CopyCounts:
    """Result of `get`.

    `from_cache` counts the bytes served by the cache. `failed` lists the files that were not copied.
    """

    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    from_cache: int = 0
    failed: list[dict[str, str]] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        speed = f", {rate(self.bytes, self.seconds)}" if self.seconds else ""
        failed = f"; {counted(len(self.failed), 'file')} not copied" if self.failed else ""
        return (
            f"{counted(self.files, 'file')}, {decimal(self.bytes)} in {self.seconds:.1f} s{speed}; "
            f"{decimal(self.from_cache)} of them from the cache{failed}"
        )


def copies_of(
    location: Location, target: str, done: CopyCounts, *, is_into: bool, recursive: bool
) -> list[Copy]:
    """Return the copies that a URL stands for; add those that no local file can have to `done.failed`.

    Raises an error if the URL cannot be copied to the target at all.
    """
    named = list(_named(location, is_into=is_into or location.is_pattern, recursive=recursive))
    copies, folder = [], os.path.abspath(os.path.expanduser(target))
    for info, name in named:
        parts, is_folder = PurePosixPath(name.lstrip("/")).parts, info["type"] == "directory"
        each = Copy(location, str(info["name"]), os.path.join(folder, *parts), info["size"], is_folder)
        if why := _why_not_local(name, is_folder=is_folder):
            error = no_local_name(each.url, f"its name {why}")
            if len(named) == 1:
                raise error
            done.failed.append(failure(each.url, error))
        elif os.path.isdir(each.local) != is_folder and os.path.lexists(each.local):
            kind = "is no directory" if is_folder else "is a directory"
            raise FileExistsError(f"{each.url} cannot replace {each.local}, which {kind}")
        else:
            copies.append(each)
    return copies


def _named(location: Location, *, is_into: bool, recursive: bool) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield what a URL names and all below, each with its name in the target; that of the target itself is empty."""
    if location.is_pattern:
        found = [info for info in location.matches() if info["type"] == "file" or recursive]
    else:
        found = [location.fs.info(location.path)]
        if found[0]["type"] == "directory" and not recursive:
            raise IsADirectoryError(f"{location.text} is a folder: -r copies folders")
    for info in found:
        path, top = str(info["name"]), name_of(info, location) if is_into else ""
        yield info, top
        if info["type"] == "directory":
            for each in location.fs.find(path, withdirs=True, detail=True).values():
                if rest := str(each["name"])[len(path) :]:
                    yield each, f"{top}/{rest}"


def _why_not_local(name: str, *, is_folder: bool) -> str:
    """Return why no local file can have this name in the target; "" if one can."""
    if "\0" in name:
        return "contains a NUL character"
    if ".." in PurePosixPath(name).parts:
        return "leads out of the target"
    return "ends in a slash" if name.endswith("/") and not is_folder else ""


def name_of(info: dict[str, Any], location: Location) -> str:
    """Return the last name in a path; for the id of an item in Google Drive, the item's title."""
    path = str(info["name"]).rstrip("/")
    if location.fs.target_protocol == "drive" and path.startswith("id:") and "/" not in path:
        from cachedfs.origins.drive.api import shown

        return shown(info.get("title") or location.fs.origin_fs.info(path)["title"])
    return path.rpartition("/")[2]


def no_local_name(url: str, why: str | None) -> ValueError:
    return ValueError(f"{url} cannot be a local file: {why}; read it with cat")


def without_duplicates(copies: list[Copy]) -> list[Copy]:
    """Return the copies, each object once where several URLs name it.

    Raises FileExistsError if two objects have the same local file, or if one is the other's parent directory.
    """
    taken: dict[str, Copy] = {}
    clashes: list[tuple[Copy, Copy]] = []
    for each in copies:
        other = taken.setdefault(each.local, each)
        is_same = (other.location.fs.fsid, other.path) == (each.location.fs.fsid, each.path)
        if not is_same and not (other.is_folder and each.is_folder):
            clashes.append((other, each))
    for each in taken.values():
        above = taken.get(os.path.dirname(each.local))
        if above is not None and not above.is_folder:
            clashes.append((above, each))
    if clashes:
        first, second = clashes[0]
        raise FileExistsError(
            f"{first.url} and {second.url} cannot both be copied: {first.local} can be one file only; "
            "nothing was written, copy each to a directory of its own"
        )
    return list(taken.values())


def copy(copies: list[Copy], done: CopyCounts, common: CommonOptions, *, is_only: bool) -> None:
    """Create folders and copy files.

    Errors of one of several files are recorded. Other errors are raised; the first one cancels the other copies.
    """
    if not copies:
        return
    fs, started = copies[0].location.fs, time.perf_counter()
    fetched = fs.stats().bytes_fetched
    is_only = is_only and sum(not each.is_folder for each in copies) == 1

    def record(each: Copy, error: Exception) -> None:
        common.url = each.location.text
        if isinstance(error, OSError) and error.errno in NOT_A_NAME:
            error = no_local_name(each.url, error.strerror)
        elif not isinstance(error, OBJECT_ERRORS):
            raise error
        if is_only:
            raise error from None
        done.failed.append(failure(each.url, error))

    files = []
    for each in copies:
        try:
            os.makedirs(each.local if each.is_folder else os.path.dirname(each.local), exist_ok=True)
        except OSError as error:
            record(each, error)
        else:
            files += [] if each.is_folder else [each]
    copy_files(files, done, record, is_quiet=common.as_json)
    done.seconds = round(time.perf_counter() - started, 3)
    done.from_cache = max(0, done.bytes - (fs.stats().bytes_fetched - fetched))


def copy_files(
    files: list[Copy], done: CopyCounts, record: Callable[[Copy, Exception], None], *, is_quiet: bool
) -> None:
    """Copy files with fsspec, as many at a time as their sizes permit; `record` gets the error of one."""
    import asyncio  # imported here because the help of commands does not need it

    from fsspec.callbacks import Callback

    by_local = {each.local: each for each in files}

    class Copies(Callback):  # type: ignore[misc]  # fsspec has no types
        def branch_coro(self, get_file: Any) -> Any:
            async def copy_one(path: str, local: str) -> None:
                part = bar.branched(path, local)
                try:
                    await get_file(path, local, callback=part)
                except Exception as error:  # of any kind: `record` raises what stops the others
                    record(by_local[local], error)
                else:
                    done.files, done.bytes = done.files + 1, done.bytes + part.value
                    bar.files(done.files, len(files))

            return copy_one

    def group(each: Copy) -> tuple[str, int]:
        return each.location.fs.fsid, each.n_at_once

    with progress(total=sum(each.size or 0 for each in files), is_quiet=is_quiet) as bar:
        for (_, n), some in groupby(sorted(files, key=group), group):
            locations, paths, local, *_ = zip(*some, strict=True)
            # Not `get`, whose copies would go on in fsspec's thread after Ctrl-C.
            asyncio.run(locations[0].fs._get(list(paths), list(local), callback=Copies(), batch_size=n))
