"""The command `get`: copy objects and folders to the local disk."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import PurePosixPath
from typing import Annotated, Any, NamedTuple

import typer
from rich.filesize import decimal

from cachedfs.cli.arguments import CommonOptions, argument, command, flag
from cachedfs.cli.output import rate
from cachedfs.cli.urls import OBJECT_ERRORS, Location, UrlsBeforeTarget, before_target, drive_url, locate
from cachedfs.common.text import counted
from cachedfs.origins.drive_links import is_bare_link, is_drive_link

# Up to MOST files are copied at a time. The filesystem holds up to WINDOW bytes of each in memory, so that fewer of the
# files above SMALL are.
MOST, SMALL, WINDOW = 128, 4 << 20, 64 << 20
Errors = list[tuple[str, Exception]]  # of single URLs
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
    force: Annotated[bool, flag("Replace files whose names you did not type.", "--force", "-f")] = False,
) -> None:
    """Copy objects and folders to the local disk.

    As with cp, a copy goes into the target if that is an existing directory.
    Links to Google Drive, and ids of it, need no target: they are copied under
    their own names into the current directory. These names are printed, and get
    asks before it replaces a file of such a name. A file appears only once it is
    complete. If one of several files cannot be read (a Google document has no
    bytes) or written under its name, it is reported, the others are copied, and
    the exit status is 1.
    """
    given = [*(urls or ()), target]
    # A link without `https://` and an id may also be a local name: not if all URLs are such.
    is_bare = is_bare_link(target) and all(map(drive_url, given))
    if is_bare or is_drive_link(target.removeprefix("cachedfs::")):
        urls, target, recursive = given, ".", True
    urls = before_target(urls)
    if "://" in target and not os.path.isdir(target):
        raise typer.BadParameter(f"{target} is a URL, and get copies to the local disk", param_hint="TARGET")
    if len(urls) > 1 and os.path.isfile(target):
        what = f"{target} is a file, and several URLs want a directory"
        raise typer.BadParameter(what, param_hint="TARGET")
    errors, copies, folder = Errors(), list[Copy](), os.path.abspath(os.path.expanduser(target))
    is_into = os.path.isdir(target) or target.endswith("/") or len(urls) > 1
    for text in urls:
        location = locate(text, common)
        try:
            copies += copies_of(location, folder, is_into=is_into, recursive=recursive)
        except OBJECT_ERRORS as error:
            errors.append((text, error))
    copies = distinct(copies)
    if not force:
        confirm_replacing([each.local for each in copies if each.is_titled and os.path.isfile(each.local)])
    done = copy(copies, errors, common)
    failed_urls = {url for url, _ in errors}
    tops = (each for each in copies if each.is_titled and os.path.dirname(each.local) == folder)
    done.written = [os.path.relpath(each.local) for each in tops if each.url not in failed_urls]
    for path in done.written:
        common.say(path)
    if len(errors) == 1 and not done.files:
        common.url, only = errors[0]
        raise only
    failed = f"; {counted(len(errors), 'file')} not copied" if errors else ""
    common.show_with_errors(dataclasses.asdict(done), f"{done}{failed}", errors)


def confirm_replacing(files: list[str]) -> None:
    """Ask whether these files may be replaced. Raises FileExistsError where nobody can be asked."""
    if not files:
        return
    what = os.path.relpath(files[0]) + (f" and {counted(len(files) - 1, 'other file')}" if files[1:] else "")
    if not sys.stdin.isatty():
        raise FileExistsError(f"{what} would be replaced: add --force, or name another TARGET")
    typer.confirm(f"Replace {what}?", abort=True, err=True)


class Copy(NamedTuple):
    """An object or folder and its local destination."""

    location: Location
    path: str
    local: str
    size: int | None
    is_folder: bool = False
    is_titled: bool = False  # the user typed no name: it has its title of Google Drive

    @property
    def url(self) -> str:
        return self.location.url(self.path)

    def n_at_once(self) -> int:
        """Return how many files of this size may be in memory at a time."""
        parts = math.ceil(WINDOW / SMALL if self.size is None else min(WINDOW, self.size) / SMALL)
        return MOST >> max(0, parts - 1).bit_length()

    @property
    def problem(self) -> str:
        """Why no local file can have this name; "" if one can."""
        if "\0" in self.local:
            return "its name contains a NUL character"
        if ".." in self.local.split("/"):
            return "its name leads out of the target"
        return "its name ends in a slash" if self.local.endswith("/") else ""

    def make_folder(self) -> None:
        """Make the local folder, or that of the file. Raises OSError if no local file can have this name."""
        if self.problem:
            raise OSError(errno.EINVAL, self.problem)
        os.makedirs(self.local if self.is_folder else os.path.dirname(self.local), exist_ok=True)


@dataclasses.dataclass
class CopyCounts:
    """Result of `get`; `from_cache` counts the bytes served by the cache, `written` has names the user did not type."""

    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    from_cache: int = 0
    written: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        speed = f", {rate(self.bytes, self.seconds)}" if self.seconds else ""
        copied = f"{counted(self.files, 'file')}, {decimal(self.bytes)} in {self.seconds:.1f} s{speed}"
        return f"{copied}; {decimal(self.from_cache)} of them from the cache"


def copies_of(location: Location, folder: str, *, is_into: bool, recursive: bool) -> Iterator[Copy]:
    """Yield what a URL names and all below it, each with its place in the local folder."""
    found = location.entries()
    if location.is_pattern:
        found, is_into = [info for info in found if info["type"] == "file" or recursive], True
    elif found[0]["type"] == "directory" and not recursive:
        raise IsADirectoryError(f"{location.text} is a folder: -r copies folders")
    for info in found:
        path, top = str(info["name"]), name_of(info, location) if is_into else ""
        is_titled = is_into and has_title(path, location)
        below = location.fs.find(path, withdirs=True, detail=True) if info["type"] == "directory" else {}
        for each in (info, *(each for name, each in below.items() if name != path)):
            name, is_folder = f"{top}{each['name'][len(path) :]}", each["type"] == "directory"
            slash = "/" if name.endswith("/") and not is_folder else ""  # which no local file can have
            local = os.path.join(folder, *PurePosixPath(name.lstrip("/")).parts) + slash
            yield Copy(location, str(each["name"]), local, each["size"], is_folder, is_titled)


def name_of(info: dict[str, Any], location: Location) -> str:
    """Return the last name in a path; for the id of an item in Google Drive, the item's title."""
    path = str(info["name"]).rstrip("/")
    if has_title(path, location):
        from cachedfs.origins.drive.api import shown

        return shown(info.get("title") or location.fs.origin_fs.info(path)["title"])
    return path.rpartition("/")[2]


def has_title(path: str, location: Location) -> bool:
    """Return whether a path is the id of an item in Google Drive, which has a title and no name."""
    return location.fs.target_protocol == "drive" and path.startswith("id:") and "/" not in path.rstrip("/")


def distinct(copies: list[Copy]) -> list[Copy]:
    """Return the copies, each object once where several URLs name it.

    Raises FileExistsError if two objects have the same local file, if one is the other's parent directory, or if a
    directory is in the place of a file, or a file in that of a directory.
    """
    taken: dict[str, Copy] = {}
    for each in copies:
        other = taken.setdefault(each.local, each)
        is_same = (other.location.fs.fsid, other.path) == (each.location.fs.fsid, each.path)
        if not is_same and not (other.is_folder and each.is_folder):
            raise clash(other, each)
    for each in taken.values():
        above = taken.get(os.path.dirname(each.local))
        if above is not None and not above.is_folder:
            raise clash(above, each)
        if not each.problem and os.path.isdir(each.local) != each.is_folder and os.path.lexists(each.local):
            kind = "is no directory" if each.is_folder else "is a directory"
            raise FileExistsError(f"{each.url} cannot replace {each.local}, which {kind}")
    return list(taken.values())


def clash(first: Copy, second: Copy) -> FileExistsError:
    return FileExistsError(
        f"{first.url} and {second.url} cannot both be copied: {first.local} can be one file only; "
        "nothing was written, copy each to a directory of its own"
    )


def copy(copies: list[Copy], errors: Errors, common: CommonOptions) -> CopyCounts:
    """Make folders and copy files. Add the error of one file to `errors`; raise all others."""
    import asyncio  # imported here because the help of commands does not need it

    from fsspec.asyn import _run_coros_in_chunks

    done, started = CopyCounts(), time.perf_counter()
    if not copies:
        return done
    fetched = copies[0].location.fs.stats().bytes_fetched

    async def copy_one(each: Copy) -> None:
        part = bar.branched(each.path, each.local)
        try:
            each.make_folder()
            if each.is_folder:
                return
            await each.location.fs._get_file(each.path, each.local, callback=part)
        except Exception as error:  # of any kind: what is not of this file stops the others
            errors.append((each.url, of_one_file(error, each, common)))
        else:
            done.files, done.bytes = done.files + 1, done.bytes + part.value
            bar.files(done.files, n_files)

    n_files = sum(not each.is_folder for each in copies)
    with common.progress(total=sum(each.size or 0 for each in copies)) as bar:
        for n, some in groupby(sorted(copies, key=Copy.n_at_once), Copy.n_at_once):
            # Not `fs.get`, whose copies would go on in fsspec's thread after Ctrl-C.
            asyncio.run(_run_coros_in_chunks(list(map(copy_one, some)), batch_size=n, nofiles=True))
    done.seconds = round(time.perf_counter() - started, 3)
    done.from_cache = max(0, done.bytes - (copies[0].location.fs.stats().bytes_fetched - fetched))
    return done


def of_one_file(error: Exception, each: Copy, common: CommonOptions) -> Exception:
    """Return the error to report of a file that was not copied. Raises one that affects other files too."""
    if isinstance(error, OSError) and error.errno in NOT_A_NAME:
        return ValueError(f"{each.url} cannot be a local file: {error.strerror}; read it with cat")
    if isinstance(error, OBJECT_ERRORS):
        return error
    common.url = each.location.text
    raise error
