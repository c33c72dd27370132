"""The command `pack`: pack many samples into one sharded Zarr store."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated, Any

import typer

from cachedfs.cli.arguments import CommonOptions, command, flag, option
from cachedfs.cli.urls import cached_url, drive_url, options_of, url_argument

KIND_HELP = (
    "Kind of SOURCE: files, lines, jsonl, csv, parquet, feather, hdf5 or tar; default: by its file names."
)
DECODE_HELP = "Pack the pixels of image files; raw: without their EXIF orientation."
COLUMN_HELP = "Pack this column (name, ending, dataset), as int64, float32[768], 'ragged int64', utf8, bytes or json; repeatable. If all have types, other columns are kept."
RENAME_HELP = "Pack this column under another name; repeatable."
CSV_HELP = "Option of CSV files: delimiter, encoding, comment, or skipinitialspace=true; repeatable."
ON_ERROR_HELP = "Files that cannot be read or decoded: stop after twenty and name them, or leave them out."


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
    kind: Annotated[str | None, option("KIND", KIND_HELP)] = None,
    decode: Annotated[str | None, option("image|image-raw", DECODE_HELP)] = None,
    columns: Annotated[list[str] | None, option("NAME[=TYPE]", COLUMN_HELP, "--column")] = None,
    rename: Annotated[list[str] | None, option("OLD=NEW", RENAME_HELP, "--rename")] = None,
    csv: Annotated[list[str] | None, option("NAME=VALUE", CSV_HELP, "--csv")] = None,
    chunk_bytes: Annotated[str | None, option("SIZE", "Size of a chunk, such as 256KiB.")] = None,
    shard_bytes: Annotated[str | None, option("SIZE", "Size of a shard, such as 64MiB.")] = None,
    codec: Annotated[str | None, option("CODEC", "none, lz4 or zstd.")] = None,
    n_workers: Annotated[
        int | None, option("N", "Threads; each has a shard or two in memory.", "--workers", min=1)
    ] = None,
    dask: Annotated[str | None, option("ADDRESS", "Work on the Dask cluster of this scheduler.")] = None,
    on_error: Annotated[str, option("raise|skip", ON_ERROR_HELP)] = "raise",
    overwrite: Annotated[bool, flag("Remove a Zarr store that is at TARGET first.", "--overwrite")] = False,
) -> None:
    """Pack many samples into one sharded Zarr store.

    Files, lines, rows or tar members become tens of objects, which any Zarr 3
    reader can open. After an interrupt, run it again: it continues with what is
    missing.
    """
    from cachedfs.packing import Packing

    given: dict[str, Any] = {"kind": kind, "decode": decode, "codec": codec, "on_error": on_error}
    given |= {"chunk_bytes": chunk_bytes, "shard_bytes": shard_bytes}
    check_options(given)
    common.url = source
    cached_url(source)  # raises an error for text that is neither a URL nor a local file
    packing = Packing(
        url_of(source),
        url_of(target),
        columns=columns_of(columns),
        rename=pairs_of(rename, "--rename"),
        csv=csv_of(csv),
        storage_options=options_of(url_of(source), common),
        target_options=options_of(url_of(target), common),
        **given,
    )
    for line in [*packing.notes, *packing.plan.lines]:
        common.say(line, err=True)
    common.url = target
    with common.progress() as callback:
        done = packing.run(n_workers=n_workers, client=dask, callback=callback, overwrite=overwrite)
    common.show(dataclasses.asdict(done), *(f"left out: {line}" for line in done.skipped), str(done))


def check_options(values: dict[str, str | None]) -> None:
    """Raise BadParameter for an option value that is invalid for any SOURCE: of a choice, or no size."""
    from cachedfs.packing.packing import storage_size
    from cachedfs.packing.shard_encoder import CODECS
    from cachedfs.packing.sources.detect import DECODE, KINDS

    choices = {"kind": KINDS, "decode": DECODE, "codec": CODECS, "on_error": ("raise", "skip")}
    for name, value in values.items():
        try:
            if name not in choices:
                storage_size(**{name: value})
            elif value is not None and value not in choices[name]:
                raise ValueError(f"{value!r} is none of: {', '.join(choices[name])}")
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=f"--{name.replace('_', '-')}") from None


def url_of(text: str) -> str:
    """Return the cachedfs URL. Local paths bypass the cache, since it would not be faster."""
    is_local = "://" not in text and "::" not in text and drive_url(text) is None
    return os.path.abspath(os.path.expanduser(text)) if is_local else cached_url(text)


def columns_of(texts: list[str] | None) -> dict[str, str] | list[str | tuple[str, str]] | None:
    """Return the columns of `--column`: types by name, which keep all other columns, or a list if any has no type."""
    if not texts:
        return None
    found = {name: type_ for name, _, type_ in (text.partition("=") for text in texts)}
    return (
        found if all(found.values()) else [(name, type_) if type_ else name for name, type_ in found.items()]
    )


def pairs_of(texts: list[str] | None, name: str) -> dict[str, str] | None:
    """Return the pairs of a repeatable option `name`; None without any. Raises BadParameter for a text without `=`."""
    for text in texts or ():
        if "=" not in text:
            raise typer.BadParameter(f"{text!r} has no '='", param_hint=name)
    return {old: new for old, _, new in (text.partition("=") for text in texts)} if texts else None


def csv_of(texts: list[str] | None) -> dict[str, Any] | None:
    """Return the options of CSV files; a tab is also written as \\t."""
    words = {"true": True, "false": False, "\\t": "\t"}
    found = pairs_of(texts, "--csv")
    return found and {name: words.get(value, value) for name, value in found.items()}
