"""The data of all workloads: one folder that the simulated cloud serves and local readers read directly."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

KiB, MiB = 1 << 10, 1 << 20
BIG, LINES, DENSE, MAPS, SAMPLES = "big.bin", "lines.jsonl", "dense.zarr", "maps.zarr", "samples.zarr"
BIG_SIZE = 192 * MiB
LARGE, LARGE_SIZE = "large/large.bin", 64 * MiB  # at Drive
LONG, LONG_SIZE = "long/long.bin", 200_000_000  # at Drive
N_LISTED = 64  # the same small files at Drive
# At Drive, of the size of small images.
MANY, MANY_SIZE = ([f"many/{number:04}.bin" for number in range(1000)], 36_000)
DAY = [f"day/{number // 1000}/{number % 1000:03}.bin" for number in range(10_000)]
DAY_SIZE = 2_000
CROWD, N_CROWD = "crowd", 10_000  # a folder of Drive with ten pages of files
SMALL = [f"small/{number:03}.json" for number in range(300)]
N_LINES, LINE_SIZE = 98_000, 1000
GIGABYTE, N_REPEATED = "gigabyte.jsonl", 10  # the same lines repeated
GIGABYTE_SIZE = N_REPEATED * N_LINES * LINE_SIZE
DENSE_SHAPE, DENSE_CHUNK = (360, 256, 256), (1, 256, 256)  # float32: 360 chunks of 256 KiB, 94 MB
MAPS_SHAPE, MAPS_CHUNK = (48, 4, 512, 512), (1, 1, 512, 512)  # float32: 4 chunks of 1 MiB a time step, 201 MB
# uint8: 16 KiB a sample.
SAMPLES_SHAPE, SAMPLES_CHUNK, SAMPLES_SHARD = ((1600, 64, 256), (1, 64, 256), (200, 64, 256))


def make(folder: Path) -> None:
    """Fill an empty folder, with the same bytes every time."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    (folder / BIG).write_bytes(rng.randbytes(BIG_SIZE))
    _make_small(folder, SMALL, rng)
    with open(folder / LINES, "w") as file:
        for number in range(N_LINES):
            head = f'{{"id": {number:06}, "text": "'
            file.write(f'{head}{rng.randbytes(LINE_SIZE).hex()[: LINE_SIZE - len(head) - 3]}"}}\n')
    lines = (folder / LINES).read_bytes()
    with open(folder / GIGABYTE, "wb") as file:
        for _ in range(N_REPEATED):
            file.write(lines)
    _make_arrays(folder)


def make_for_drive(folder: Path) -> None:
    """Fill an empty folder with the data of the Drive rows, with the same bytes every time."""
    rng = random.Random(0)
    (folder / LARGE).parent.mkdir(parents=True)
    (folder / LARGE).write_bytes(rng.randbytes(LARGE_SIZE))
    _make_small(folder, SMALL[:N_LISTED], rng)
    for names, size in ((MANY, MANY_SIZE), (DAY, DAY_SIZE)):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(rng.randbytes(size))
    (folder / LONG).parent.mkdir()
    (folder / LONG).write_bytes(rng.randbytes(LONG_SIZE))
    (folder / CROWD).mkdir()
    for number in range(N_CROWD):
        (folder / CROWD / f"{number:05}.bin").touch()


def _make_small(folder: Path, names: list[str], rng: random.Random) -> None:
    (folder / "small").mkdir()
    for number, name in enumerate(names):
        record = {"id": number, "text": rng.randbytes(900).hex(), "box": [rng.random() for _ in range(4)]}
        (folder / name).write_text(json.dumps(record))


def _make_arrays(folder: Path) -> None:
    import numpy as np
    import zarr

    rng = np.random.default_rng(0)
    dense: dict[str, Any] = {"shape": DENSE_SHAPE, "chunks": DENSE_CHUNK, "dtype": "float32"}
    zarr.create_array(folder / DENSE, **dense)[:] = rng.standard_normal(DENSE_SHAPE, "float32")
    maps: dict[str, Any] = {"shape": MAPS_SHAPE, "chunks": MAPS_CHUNK, "dtype": "float32"}
    zarr.create_array(folder / MAPS, **maps)[:] = rng.standard_normal(MAPS_SHAPE, "float32")
    sharded: dict[str, Any] = {"shape": SAMPLES_SHAPE, "chunks": SAMPLES_CHUNK, "shards": SAMPLES_SHARD}
    array = zarr.create_array(folder / SAMPLES, dtype="uint8", **sharded)
    array[:] = rng.integers(0, 256, SAMPLES_SHAPE, "uint8")
