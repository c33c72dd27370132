"""The command `pack`: pack many samples into one sharded Zarr store."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from cachedfs.cli.arguments import CommonOptions, command, flag, option
from cachedfs.cli.output import print_json, progress, say
from cachedfs.cli.urls import cached_url, drive_url, url_argument
from cachedfs.errors import CachedFSError

__all__ = ["pack"]


@command(
    "cachedfs pack gs://my-bucket/images gs://my-bucket/images.zarr",
    "cachedfs pack gs://my-bucket/train.jsonl train.zarr",
    "cachedfs pack --decode image 'drive://My Drive/cats' cats.zarr",
    "cachedfs pack --column text --column label=int64 data.csv data.zarr",
)
def pack(
    common: CommonOptions,
    source: Annotated[str, url_argument("SOURCE", "A folder, a pattern or a file.")],
    target: Annotated[str, url_argument("TARGET", "Where the Zarr store is to be.")],
    kind: Annotated[
        str | None,
        option(
            metavar="KIND",
            help="Kind of SOURCE: files, lines, jsonl, csv, parquet, hdf5 or tar; default: by its file names.",
        ),
    ] = None,
    decode: Annotated[
        str | None,
        option(
            metavar="image|image-raw",
            help="Pack the pixels of image files; raw: without their EXIF orientation.",
        ),
    ] = None,
    columns: Annotated[
        list[str] | None,
        option(
            "--column",
            metavar="NAME[=TYPE]",
            help="Pack this column (name, ending, dataset), as int64, float32[768], 'ragged int64', utf8, bytes or json; repeatable.",
        ),
    ] = None,
    chunk_bytes: Annotated[
        str | None, option(metavar="SIZE", help="Size of a chunk, such as 256KiB.")
    ] = None,
    shard_bytes: Annotated[str | None, option(metavar="SIZE", help="Size of a shard, such as 64MiB.")] = None,
    codec: Annotated[str | None, option(metavar="CODEC", help="none, lz4 or zstd.")] = None,
    n_workers: Annotated[
        int | None, option("--workers", metavar="N", help="Threads; each has a shard or two in memory.")
    ] = None,
    dask: Annotated[
        str | None, option(metavar="ADDRESS", help="Work on the Dask cluster of this scheduler.")
    ] = None,
    on_error: Annotated[
        str,
        option(
            metavar="raise|skip",
            help="Files that cannot be read or decoded: stop after twenty and name them, or leave them out.",
        ),
    ] = "raise",
    overwrite: Annotated[
        bool, flag("--overwrite", help="Remove a Zarr store that is at TARGET first.")
    ] = False,
) -> None:
    """Pack many samples into one sharded Zarr store.

    Files, lines, rows or tar members become tens of objects, which any Zarr 3
    reader can open. After an interrupt, run it again: it continues with what is
    missing.
    """
    from cachedfs.packing import Packing

    check_choices(kind=kind, decode=decode, codec=codec, on_error=on_error)
    check_sizes(chunk_bytes=chunk_bytes, shard_bytes=shard_bytes)
    if n_workers is not None and n_workers < 1:
        raise typer.BadParameter(f"{n_workers} is not 1 or more", param_hint="--workers")
    common.url = source
    cached_url(source)  # raises an error for text that is neither a URL nor a local file
    packing = Packing(
        url_of(source),
        url_of(target),
        kind=kind,
        decode=decode,
        columns=columns_of(columns),
        chunk_bytes=chunk_bytes,
        shard_bytes=shard_bytes,
        codec=codec,
        storage_options=options_of(source, common),
        target_options=options_of(target, common),
        on_error=on_error,
    )
    if not common.as_json:
        for line in [*packing.notes, *packing.plan.lines]:
            say(line, err=True)
    with progress(is_quiet=common.as_json) as callback, naming(target):
        done = packing.run(n_workers=n_workers, client=dask, callback=callback, overwrite=overwrite)
    if common.as_json:
        print_json(dataclasses.asdict(done))
    else:
        for line in done.skipped:
            say(f"left out: {line}", err=True)
        say(str(done), err=True)


def check_choices(**values: str | None) -> None:
    """Raise BadParameter for an option value that is invalid for any SOURCE."""
    from cachedfs.packing.shard_encoder import CODECS
    from cachedfs.packing.sources.detect import DECODE, KINDS

    choices = {"kind": KINDS, "decode": DECODE, "codec": CODECS, "on_error": ("raise", "skip")}
    for name, value in values.items():
        if value is not None and value not in choices[name]:
            raise typer.BadParameter(
                f"{value!r} is none of: {', '.join(choices[name])}", param_hint=f"--{name.replace('_', '-')}"
            )


def check_sizes(**sizes: str | None) -> None:
    """Raise BadParameter for an option value that is no size."""
    from cachedfs.packing.api import part_size

    for name, size in sizes.items():
        try:
            part_size(**{name: size})
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=f"--{name.replace('_', '-')}") from None


@contextlib.contextmanager
def naming(target: str) -> Iterator[None]:
    """Add the target's name to a disk-full error: the system names no file when a write fails."""
    try:
        yield
    except OSError as error:
        is_named = error.filename or isinstance(error, CachedFSError)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or is_named:
            raise
        raise OSError(error.errno, os.strerror(error.errno), target) from error


def url_of(text: str) -> str:
    """Return the cachedfs URL. Local paths bypass the cache, since it would not be faster."""
    is_local = "://" not in text and "::" not in text and drive_url(text) is None
    return os.path.abspath(os.path.expanduser(text)) if is_local else cached_url(text)


def options_of(text: str, common: CommonOptions) -> dict[str, Any]:
    """Return the `-o` and `--cache-dir` options as storage options for the filesystem of a URL."""
    from fsspec.core import split_protocol

    ours, theirs = common.split()
    url = url_of(text)
    if url.startswith("cachedfs::"):
        return {"cachedfs": ours, split_protocol(url.rpartition("::")[2])[0] or "file": theirs}
    return {} if os.path.isabs(url) else {"target_options": theirs, **ours}


def columns_of(texts: list[str] | None) -> dict[str, str | None] | list[str] | None:
    """Return the columns of `--column`: a list of names, or a dict of names and types if any has a type."""
    if not texts:
        return None
    found = {name: type_ or None for name, _, type_ in (text.partition("=") for text in texts)}
    return found if any(found.values()) else list(found)
