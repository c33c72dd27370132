"""Detect the kind of a source from file names and first bytes, and create the source."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cachedfs.datasets.text_streams import is_compressed

if TYPE_CHECKING:
    from cachedfs.packing.sources.sample_source import SampleSource
    from cachedfs.packing.sources.source_files import SourceFiles


# Kind -> module, class, and the optional library that it needs besides zarr.
_SOURCES = {
    "files": ("file_samples", "FileSource", None),
    "lines": ("text_lines", "LineSource", "pyarrow"),
    "jsonl": ("json_lines", "JSONSource", "pyarrow"),
    "csv": ("csv_records", "CSVSource", "pyarrow"),
    "parquet": ("parquet", "ParquetSource", "pyarrow"),
    "feather": ("parquet", "FeatherSource", "pyarrow"),
    "hdf5": ("hdf5_file", "HDF5Source", "h5py"),
    "tar": ("tars", "TarSource", None),
}
KINDS = tuple(_SOURCES)
TABLES = ("csv", "jsonl", "parquet", "feather")
DECODE = ("image", "image-raw")  # raw: without the EXIF orientation
ENDINGS = {
    "jsonl": "jsonl", "ndjson": "jsonl", "txt": "lines", "csv": "csv", "tsv": "csv", "parquet": "parquet", "pq": "parquet", "feather": "feather", "arrow": "feather",
    "h5": "hdf5", "hdf5": "hdf5", "he5": "hdf5", "nc": "hdf5", "nc4": "hdf5", "tar": "tar",
}  # fmt: skip
# Position and first bytes of what marks a file.
MAGIC = {
    "parquet": (0, b"PAR1"),
    "feather": (0, b"ARROW1"),
    "hdf5": (0, b"\x89HDF\r\n\x1a\n"),
    "tar": (257, b"ustar"),
}
HEAD = 512


def kind_of(paths: Sequence[str], head: bytes) -> str:
    """Return the kind of a source; `head` has the first 512 bytes of the file if there is only one.

    Files with one known ending have the kind of that ending. Several .txt files, mixed endings and unknown endings are
    "files": one sample for each file. A single file with an unknown ending is detected by its first bytes.
    """
    endings = {_ending(path) for path in paths}
    kind = ENDINGS.get(endings.pop(), "files") if len(endings) == 1 else "files"
    if len(paths) > 1:
        return "files" if kind == "lines" else kind
    found = (name for name, (at, magic) in MAGIC.items() if head[at:].startswith(magic))
    return next(found, kind) if kind == "files" else kind


def source_of(
    kind: str,
    files: SourceFiles,
    *,
    decode: str | None = None,
    columns: Any = None,
    rename: Any = None,
    csv: Any = None,
) -> SampleSource:
    """Return the source of a kind.

    Raises ValueError for options that the kind does not support, and ImportError if its library is not installed.
    """
    if decode is not None and (kind != "files" or decode not in DECODE):
        raise ValueError(
            f"decode={decode!r} of {kind}: only files are decoded, by decode='image' or 'image-raw'"
        )
    if rename is not None and kind not in TABLES:
        raise ValueError(f"rename={rename!r} of {kind}: only columns of {', '.join(TABLES)} are renamed")
    if csv is not None and kind != "csv":
        raise ValueError(f"csv={csv!r} of {kind}: these are options of CSV files")
    module, name, needs = _SOURCES[kind]
    try:
        found = import_module(f"cachedfs.packing.sources.{module}")
    except ModuleNotFoundError as error:
        if needs is None or (error.name or "").partition(".")[0] != needs:
            raise
        extras = "pack,hdf5" if needs == "h5py" else "pack"
        raise ImportError(f"packing {kind} needs {needs}: pip install 'cachedfs[{extras}]'") from error
    made = getattr(found, "ImageSource" if decode else name)
    source: SampleSource = made(files, columns, decode=decode, rename=rename, csv=csv)
    return source


def _ending(path: str) -> str:
    stem, _, ending = path.rpartition("/")[2].lower().rpartition(".")
    # `x.csv.gz` has the ending `csv`.
    return stem.rpartition(".")[2] if is_compressed(path) else ending
