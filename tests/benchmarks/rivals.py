"""Libraries that stream training data in their own formats, if installed: LitData and MosaicML Streaming.

LitData is in the extra `rivals`. MosaicML Streaming needs an older NumPy than ours: `make mosaic` creates an environment for
it, in which its contender runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.import_torchvision import torchvision

__all__ = ["RIVALS", "Writer", "epochs", "is_here", "make_chunks", "make_shards", "python_of", "writer"]

CHUNK = 4 << 20  # a sixteenth of what both use by default; the data are hundredths of their usual size
WORKERS = 2
Writer = Callable[[Path, Path], Any]  # from a source to a target
MOSAIC = Path(f"{sys.prefix}-mosaic", "bin", "python")


def python_of(contender: str) -> str:
    """Return the interpreter of a contender."""
    return str(MOSAIC) if contender == "mosaic" else sys.executable


def is_here(contender: str) -> bool:
    """Return whether a rival is installed; all others are."""
    if contender == "litdata":
        return importlib.util.find_spec("litdata") is not None
    return Path(python_of(contender)).exists()


# Their formats.


def make_chunks(source: Path, path: Path) -> None:
    """Write the files of a folder as LitData chunks, one sample each."""
    from litdata.streaming.writer import BinaryWriter

    path.mkdir()
    writer = BinaryWriter(str(path), chunk_bytes=CHUNK)
    for number, file in enumerate(sorted(source.iterdir())):
        writer[number] = file.read_bytes()
    writer.done()
    writer.merge(1)


def make_shards(source: Path, path: Path) -> None:
    """Write the files of a folder as MosaicML shards, one sample each, in its own environment."""
    code = f"from tests.benchmarks.rivals import _make_shards; _make_shards({str(source)!r}, {str(path)!r})"
    subprocess.run([str(MOSAIC), "-c", code], cwd=Path(__file__).parents[2], check=True)


def _make_shards(source: str, path: str) -> None:
    torchvision()  # which it imports
    from streaming import MDSWriter

    with MDSWriter(out=path, columns={"data": "bytes"}, size_limit=CHUNK) as writer:
        for file in sorted(Path(source).iterdir()):
            writer.write({"data": file.read_bytes()})


# Their writers.


def _read(path: str) -> dict[str, bytes]:
    return {"data": Path(path).read_bytes()}


def _records(span: tuple[str, int, int]) -> Iterator[dict[str, Any]]:
    path, start, end = span
    with open(path, "rb") as file:
        file.seek(start)
        while file.tell() < end:
            yield json.loads(file.readline())


def _spans(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield spans of whole lines of about 16 MiB."""
    size, start = path.stat().st_size, 0
    with path.open("rb") as file:
        while start < size:
            file.seek(start + (16 << 20))
            file.readline()
            end = min(file.tell(), size)
            yield str(path), start, end
            start = end


def writer(contender: str) -> Writer:
    """Return a function that writes a folder of files, or a file of JSON lines, in the format of a rival."""
    return _litdata_writer() if contender == "litdata" else _mosaic_writer()


def _litdata_writer() -> Writer:
    from litdata import optimize

    def write(source: Path, target: Path) -> None:
        inputs: list[Any] = sorted(map(str, source.iterdir())) if source.is_dir() else list(_spans(source))
        do = _read if source.is_dir() else _records
        with contextlib.redirect_stdout(sys.stderr):  # our answers go to the standard output
            optimize(do, inputs, str(target), num_workers=WORKERS, chunk_bytes="64MB")

    return write


def _mosaic_writer() -> Writer:
    torchvision()  # which it imports
    from streaming import MDSWriter

    def write(source: Path, target: Path) -> None:
        if source.is_dir():
            columns, samples = {"data": "bytes"}, (_read(str(path)) for path in sorted(source.iterdir()))
        else:
            columns = {"id": "int", "label": "int", "score": "float64", "text": "str"}
            samples = _records((str(source), 0, source.stat().st_size))
        with MDSWriter(out=str(target), columns=columns, size_limit=64 << 20) as file:
            for sample in samples:
                file.write(sample)

    return write


# Their epochs.


def epochs(contender: str, base: str, *, n: int, step_s: float, cache_size: int) -> None:
    """Read some epochs in random order, in batches of 8, with a cache of `cache_size` bytes."""
    os.environ["STORAGE_EMULATOR_HOST"] = os.environ["FSSPEC_GS_ENDPOINT_URL"]
    os.environ["GOOGLE_CLOUD_PROJECT"] = "benchmark"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # their threads may still write
        batches = RIVALS[contender](base, folder, cache_size)
        for _ in range(n):
            for _batch in batches():
                time.sleep(step_s)


def _litdata(base: str, folder: str, cache_size: int) -> Callable[[], Any]:
    from litdata.streaming import downloader

    # obstore would be used if installed, and it signs in, which simulated services do not accept.
    downloader._OBSTORE_AVAILABLE = False
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(
        f"{base}/blocks.lit",
        shuffle=True,
        seed=0,
        max_cache_size=f"{cache_size}B",
        cache_dir=folder,
        storage_options={},
        transform=len,
    )
    return lambda: StreamingDataLoader(dataset, batch_size=8, num_workers=WORKERS)


def _mosaic(base: str, folder: str, cache_size: int) -> Callable[[], Any]:
    import google.auth
    from google.auth.credentials import AnonymousCredentials

    google.auth.default = lambda *args, **kwargs: (AnonymousCredentials(), None)  # as above
    torchvision()
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(
        remote=f"{base}/blocks.mds",
        local=folder,
        shuffle=True,
        shuffle_seed=0,
        cache_limit=cache_size,
        batch_size=8,
    )
    return lambda: StreamingDataLoader(dataset, batch_size=8, num_workers=WORKERS, collate_fn=_sizes)


def _sizes(samples: list[dict[str, bytes]]) -> dict[str, list[int]]:
    return {"data": [len(sample["data"]) for sample in samples]}


RIVALS: dict[str, Callable[[str, str, int], Callable[[], Any]]] = {"litdata": _litdata, "mosaic": _mosaic}
