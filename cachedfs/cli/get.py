"""The command `get`: copy objects and folders to the local disk. Also the progress bars of other commands."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from cachedfs.cli.app import Copying, Urls, argument, command
from cachedfs.cli.arguments import ABOUT_ONE, Place, place_of
from cachedfs.cli.output import Given, print_summary
from cachedfs.common.text import counted

if TYPE_CHECKING:
    from cachedfs.filesystem import CachedFileSystem

__all__ = ["counting", "get", "progress", "shown"]

AT_ONCE = 128  # files copied concurrently: an eighth of the usual limit of open files
WINDOW = 64 << 20  # bytes of one file in memory at most; the next line is the limit for all files together
ALL_WINDOWS = 512 << 20


@command(
    "cachedfs get gs://my-bucket/train.jsonl .",
    "cachedfs get -r gs://my-bucket/data /tmp/data",
    "cachedfs get 'gs://my-bucket/data/*.parquet' /tmp/tables/",
    kind=Copying,
)
def get(
    given: Given,
    urls: Urls,
    target: Annotated[
        str,
        argument("TARGET", "A local file or directory; the latter for several URLs."),
    ],
    recursive: Annotated[
        bool, typer.Option("-r", "--recursive", metavar="", help="Copy folders too.")
    ] = False,
) -> None:
    """Copy objects and folders to the local disk.

    As with cp, a copy goes into the target if that is an existing directory. A
    file appears only once it is complete. If one of several files cannot be read
    (a Google document has no bytes), it is reported, the others are copied, and
    the exit status is 1.
    """
    if "://" in target and not os.path.isdir(target):
        raise typer.BadParameter(f"{target} is a URL, and get copies to the local disk", param_hint="TARGET")
    if len(urls) > 1 and os.path.isfile(target):
        raise typer.BadParameter(
            f"{target} is a file, and several URLs want a directory", param_hint="TARGET"
        )
    done, planned = CopyCounts(), list[Planned]()
    is_into = os.path.isdir(target) or target.endswith("/") or len(urls) > 1
    for text in urls:
        place = place_of(text, given)
        with done.noting(text, is_only=len(urls) == 1):
            planned.append((place, copies_of(place, target, is_into=is_into, recursive=recursive)))
    for place, copies in one_of_each(planned):
        given.url = place.text
        with done.noting(place.text, is_only=len(urls) == 1):
            done.add(copy(place, copies, is_quiet=given.as_json))
    print_summary(done, as_json=given.as_json)


@dataclasses.dataclass(frozen=True)
class Copy:
    """An object or folder and its local destination."""

    path: str
    local: str
    size: int | None
    is_folder: bool = False


Planned = tuple["Place", list[Copy]]  # a URL and the copies it stands for


@dataclasses.dataclass
class CopyCounts:
    """Result of `get`.

    `from_cache` counts the bytes served by the cache. `failed` lists the files that could not be read.
    """

    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    from_cache: int = 0
    failed: list[dict[str, str]] = dataclasses.field(default_factory=list)

    def add(self, more: CopyCounts) -> None:
        self.files += more.files
        self.bytes += more.bytes
        self.seconds = round(self.seconds + more.seconds, 3)
        self.from_cache += more.from_cache
        self.failed += more.failed

    @contextlib.contextmanager
    def noting(self, url: str, *, is_only: bool) -> Iterator[None]:
        """Record an error of one URL in `failed` so that the others go on; raise it if it is the only URL."""
        try:
            yield
        except ABOUT_ONE as error:
            if is_only:
                raise
            self.failed.append(failure_of(url, error))

    def __str__(self) -> str:
        rate = f", {decimal(int(self.bytes / self.seconds))}/s" if self.seconds else ""
        failed = f"; {counted(len(self.failed), 'file')} not copied" if self.failed else ""
        return (
            f"{counted(self.files, 'file')}, {decimal(self.bytes)} in {self.seconds:.1f} s{rate}; "
            f"{decimal(self.from_cache)} of them from the cache{failed}"
        )


def failure_of(url: str, error: BaseException) -> dict[str, str]:
    """Return the entry of `failed` for a file that could not be copied."""
    return {"url": url, "type": type(error).__name__, "message": str(error)}


def copies_of(place: Place, target: str, *, is_into: bool, recursive: bool) -> list[Copy]:
    """Return the copies that a URL stands for. Raises an error before any write if one is impossible."""
    if place.is_pattern:
        found = [info for info in place.matches() if info["type"] == "file" or recursive]
    else:
        found = [place.fs.info(place.path)]
        if found[0]["type"] == "directory" and not recursive:
            raise IsADirectoryError(f"{place.text} is a folder: -r copies folders")
    copies: list[Copy] = []
    for info in found:
        copies += copies_of_one(place, info, target, is_into=is_into or place.is_pattern)
    for each in copies:
        if os.path.isdir(each.local) != each.is_folder and os.path.lexists(each.local):
            kind = "is no directory" if each.is_folder else "is a directory"
            raise FileExistsError(f"{place.url(each.path)} cannot replace {each.local}, which {kind}")
    return copies


def copies_of_one(place: Place, info: dict[str, Any], target: str, *, is_into: bool) -> list[Copy]:
    path = str(info["name"])
    local = os.path.abspath(os.path.expanduser(target))
    if is_into:
        local = below(local, path.rstrip("/").rpartition("/")[2])
    if info["type"] == "file":
        return [Copy(path, local, info["size"])]
    copies = [Copy(path, local, None, is_folder=True)]
    for child in place.fs.find(path, withdirs=True, detail=True).values():
        name = str(child["name"]).removeprefix(path).lstrip("/")
        if name:
            is_folder = child["type"] == "directory"
            copies.append(Copy(str(child["name"]), below(local, name), child["size"], is_folder))
    return copies


def one_of_each(planned: list[Planned]) -> list[Planned]:
    """Return the planned copies, without duplicates of objects that several URLs name.

    Raises FileExistsError if two objects map to the same local file, or if one is the other's parent
    directory.
    """
    taken: dict[str, tuple[Place, Copy]] = {}
    left = [(place, [each for each in copies if _is_first(place, each, taken)]) for place, copies in planned]
    for local, (place, each) in taken.items():
        above = taken.get(os.path.dirname(local))
        if above is not None and not above[1].is_folder:
            raise _one_path(above, (place, each), above[1].local)
    return left


def _is_first(place: Place, copy: Copy, taken: dict[str, tuple[Place, Copy]]) -> bool:
    """Record a copy; return False for a duplicate. Folders may share a destination."""
    of, other = taken.setdefault(copy.local, (place, copy))
    if other is copy or (other.is_folder and copy.is_folder):
        return True
    if (of.fs.fsid, other.path) != (place.fs.fsid, copy.path):
        raise _one_path((of, other), (place, copy), copy.local)
    return False


def _one_path(a: tuple[Place, Copy], b: tuple[Place, Copy], local: str) -> FileExistsError:
    first, second = (place.url(copy.path) for place, copy in (a, b))
    return FileExistsError(
        f"{first} and {second} cannot both be copied: {local} can be one file only; nothing was written, "
        "copy each to a directory of its own"
    )


def below(folder: str, name: str) -> str:
    """Return the local path of `name` in `folder`. Raises ValueError if the name leads out of the folder."""
    parts = PurePosixPath(name.lstrip("/")).parts
    if not parts or ".." in parts:
        raise ValueError(f"the name {name!r} leads out of {folder}: copy this object by itself, with cat")
    return os.path.join(folder, *parts)


def copy(place: Place, copies: list[Copy], *, is_quiet: bool) -> CopyCounts:
    """Create folders and copy files. Errors of one of several files are recorded, others are raised."""
    fs, started = place.fs, time.perf_counter()
    fetched = fs.stats().bytes_fetched
    for each in copies:
        os.makedirs(each.local if each.is_folder else os.path.dirname(each.local), exist_ok=True)
    files = [each for each in copies if not each.is_folder]
    done = CopyCounts()
    with progress(sum(each.size or 0 for each in files), is_quiet=is_quiet) as advance:
        for wave in waves(files):
            for each, error in zip(wave, copy_wave(fs, wave, advance), strict=True):
                if error is None:
                    done.files += 1
                    done.bytes += os.path.getsize(each.local) if each.size is None else each.size
                elif isinstance(error, ABOUT_ONE) and len(files) > 1:
                    done.failed.append(failure_of(place.url(each.path), error))
                else:
                    raise error
    done.seconds = time.perf_counter() - started
    done.from_cache = max(0, done.bytes - (fs.stats().bytes_fetched - fetched))
    return done


def copy_wave(
    fs: CachedFileSystem, wave: list[Copy], advance: Callable[[int], None]
) -> list[BaseException | None]:
    """Copy files concurrently; return the error of each file, or None."""
    import asyncio  # imported here because other commands do not need it

    async def copy_all() -> list[BaseException | None]:
        copied = (fs._get_file(each.path, each.local, callback=counting(advance)) for each in wave)
        return await asyncio.gather(*copied, return_exceptions=True)

    return asyncio.run(copy_all())


def waves(files: list[Copy]) -> Iterator[list[Copy]]:
    """Yield groups of files to copy concurrently, within the limits for memory and open files."""
    wave: list[Copy] = []
    room = ALL_WINDOWS
    for each in files:
        need = min(WINDOW, each.size if each.size is not None else WINDOW)
        if wave and (need > room or len(wave) == AT_ONCE):
            yield wave
            wave, room = [], ALL_WINDOWS
        wave.append(each)
        room -= need
    if wave:
        yield wave


@contextlib.contextmanager
def progress(total: int | None, *, is_quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal; yield a function that advances it by bytes."""
    with _bar(is_quiet=is_quiet) as bar:
        task = bar.add_task("", total=total)
        yield lambda size: bar.advance(task, size)


@contextlib.contextmanager
def shown(*, is_quiet: bool) -> Iterator[Callable[[int, int | None], None]]:
    """Show a progress bar; yield a function that sets its position and total, both in bytes."""
    with _bar(is_quiet=is_quiet) as bar:
        task = bar.add_task("", total=None)
        yield lambda size, total: bar.update(task, completed=size, total=total)


def _bar(*, is_quiet: bool) -> Progress:
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    is_off = is_quiet or not console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=is_off)


def counting(advance: Callable[[int], None]) -> Any:
    """Return an fsspec callback that reports the bytes of one file to `advance`."""
    from fsspec.callbacks import Callback

    class OfFile(Callback):  # type: ignore[misc]  # fsspec has no types
        def call(self, *args: Any, **kwargs: Any) -> None:
            advance(self.value - self.told)
            self.told = self.value

        told = 0

    return OfFile()
