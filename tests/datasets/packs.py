"""What tests of packing share: sources of every kind, and what is in a store by zarr alone."""

import io
import itertools
import json
import tarfile

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import zarr
from PIL import Image


def stored(url, name, *, text=False, **options):
    """Return the samples of a ragged array, as any reader of Zarr finds them: by its offsets."""
    group = zarr.open_group(url, mode="r", **options)
    offsets, elements = group[f"{name}_offsets"][:], group[name][:]
    samples = [elements[a:b] for a, b in itertools.pairwise(offsets)]
    assert offsets[0] == 0
    assert offsets[-1] == len(elements)
    if not text:
        return samples
    return [sample.tobytes().decode() for sample in samples]


def records(n):
    """Return samples of several types, some of which are empty."""
    return [
        {
            "text": f"süß {i} " * (i % 5),
            "label": i % 7,
            "score": None if i % 11 == 3 else i / 8,
            "is_odd": bool(i % 2),
            "ids": list(range(i % 4)),
            "when": "2024-01-01",
            "meta": {"a": [i, None]},
        }
        for i in range(n)
    ]


def lines_of(samples):
    return b"".join(json.dumps(each).encode() + b"\n" for each in samples)


def table(n, start=0):
    numbers = np.arange(start, start + n)
    return pa.table(
        {
            "number": numbers,
            "text": [f"row {i}" if i % 9 else "" for i in numbers.tolist()],
            "when": pa.array(numbers, pa.timestamp("ms")),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(4.0 * n)), 4),
        }
    )


def parquet(of, **options):
    sink = io.BytesIO()
    pyarrow.parquet.write_table(of, sink, **options)
    return sink.getvalue()


def csv(of, **options):
    sink = io.BytesIO()
    pyarrow.csv.write_csv(of, sink, **options)
    return sink.getvalue()


def hdf5(**datasets):
    sink = io.BytesIO()
    with h5py.File(sink, "w") as file:
        for name, data in datasets.items():
            file[name.replace("__", "/")] = data
    return sink.getvalue()


def tar(members):
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def png(pixels):
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "png")
    return sink.getvalue()
