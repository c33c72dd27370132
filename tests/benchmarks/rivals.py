"""What streams training data in a format of its own, where it is installed (extra `rivals`): LitData."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from pathlib import Path

__all__ = ["epochs", "is_here", "make_chunks"]

CHUNK = 4 << 20  # a sixteenth of LitData's own, as the data are hundredths of what it is made for
WORKERS = 2


def is_here() -> bool:
    return importlib.util.find_spec("litdata") is not None


def make_chunks(source: Path, path: Path) -> None:
    """Write the files of a folder as LitData's chunks, a sample each."""
    from litdata.streaming.writer import BinaryWriter

    path.mkdir()
    writer = BinaryWriter(str(path), chunk_bytes=CHUNK)
    for number, file in enumerate(sorted(source.iterdir())):
        writer[number] = file.read_bytes()
    writer.done()
    writer.merge(1)


def epochs(url: str, *, n: int, step_s: float, cache_size: int) -> None:
    """Read so many epochs in random order, by batches of 8, beside a cache of `cache_size` bytes."""
    from litdata.streaming import downloader

    # obstore would take its place where it is installed, and signs in, which no simulated service takes.
    downloader._OBSTORE_AVAILABLE = False
    from litdata import StreamingDataLoader, StreamingDataset

    os.environ["STORAGE_EMULATOR_HOST"] = os.environ["FSSPEC_GS_ENDPOINT_URL"]
    os.environ["GOOGLE_CLOUD_PROJECT"] = "benchmark"
    with tempfile.TemporaryDirectory() as folder:
        dataset = StreamingDataset(
            url,
            shuffle=True,
            seed=0,
            max_cache_size=f"{cache_size}B",
            cache_dir=folder,
            storage_options={},
            transform=len,
        )
        for _ in range(n):
            for _batch in StreamingDataLoader(dataset, batch_size=8, num_workers=WORKERS):
                time.sleep(step_s)
