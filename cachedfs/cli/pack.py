"""`pack`: many samples into one sharded Zarr store."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cachedfs.cli.get import counting, progress
from cachedfs.cli.output import print_json
from cachedfs.cli.places import cached_url
from cachedfs.cli.shared import Given, command, option, url_argument

if TYPE_CHECKING:
    from cachedfs.datasets.packing import Packed

__all__ = ["pack"]


@command(
    "cachedfs pack gs://my-bucket/images gs://my-bucket/images.zarr",
    "cachedfs pack gs://my-bucket/train.jsonl train.zarr",
    "cachedfs pack --decode image 'drive://My Drive/cats' cats.zarr",
    "cachedfs pack --column text --column label=int64 data.csv data.zarr",
)
def pack(
    given: Given,
    source: Annotated[
        str,
        url_argument("SOURCE", "A folder, a pattern or a file."),
    ],
    target: Annotated[
        str,
        url_argument("TARGET", "Where the Zarr store is to be."),
    ],
    kind: Annotated[
        str | None,
        option(
            metavar="KIND",
            help="What SOURCE is: files, lines, jsonl, csv, parquet, hdf5 or tar; else its names tell.",
        ),
    ] = None,
    decode: Annotated[
        str | None,
        option(metavar="image", help="Pack the pixels of image files."),
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
        int | None,
        option("--workers", metavar="N", help="Threads; each has a shard or two in memory."),
    ] = None,
    dask: Annotated[
        str | None,
        option(metavar="ADDRESS", help="Work on the Dask cluster of this scheduler."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove a Zarr store that is at TARGET first.")
    ] = False,
) -> None:
    """Pack many samples into one sharded Zarr store.

    Files, lines, rows or members of tars become tens of objects, which any reader of Zarr 3 opens. Run it again after it was
    interrupted: it goes on with what is missing.
    """
    from cachedfs.datasets.packing import Packing

    given.url = source
    cached_url(source)  # refuses what has no protocol and is no local file
    packing = Packing(
        url_of(source),
        url_of(target),
        kind=kind,
        decode=decode,
        columns=columns_of(columns),
        chunk_bytes=chunk_bytes,
        shard_bytes=shard_bytes,
        codec=codec,
        storage_options=options_of(source, given),
        target_options=options_of(target, given),
    )
    if not given.as_json:
        for line in packing.plan.lines():
            typer.echo(line, err=True)
    with progress(packing.source.total_size, is_quiet=given.as_json) as advance:
        done = packing.run(n_workers=n_workers, client=dask, callback=counting(advance), overwrite=overwrite)
    told(done, given)


def told(done: Packed, given: Given) -> None:
    if given.as_json:
        print_json(dataclasses.asdict(done))
    else:
        typer.echo(str(done), err=True)


def url_of(text: str) -> str:
    """Return the URL that reads and writes through the cache; local files are as near as the cache is."""
    is_local = "://" not in text and "::" not in text
    return os.path.abspath(os.path.expanduser(text)) if is_local else cached_url(text)


def options_of(text: str, given: Given) -> dict[str, Any]:
    """Return what `-o` and `--cache-dir` say, as the filesystem of a URL takes it."""
    from fsspec.core import split_protocol

    ours, theirs = given.ours_and_theirs()
    url = url_of(text)
    if url.startswith("cachedfs::"):
        return {"cachedfs": ours, split_protocol(url.rpartition("::")[2])[0] or "file": theirs}
    return {} if os.path.isabs(url) else {"target_options": theirs, **ours}


def columns_of(texts: list[str] | None) -> dict[str, str | None] | list[str] | None:
    """Return what `--column` says: names, or names with types."""
    if not texts:
        return None
    found = {name: type_ or None for name, _, type_ in (text.partition("=") for text in texts)}
    return found if any(found.values()) else list(found)
