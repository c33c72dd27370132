"""Libraries that stream training data in their own formats, if installed: LitData and MosaicML Streaming.

LitData is in the dependency group `rivals`. MosaicML Streaming needs an older NumPy than ours: `make mosaic` creates an environment for
it, in which its contender runs.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.import_torchvision import torchvision

CHUNK = 4 << 20  # a sixteenth of what both use by default; the data are hundredths of their usual size
WORKERS = 2
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
