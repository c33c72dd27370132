"""Helpers for packing tests: sources of every kind, and reading a store with zarr alone."""

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

from cachedfs.datasets import pack


def stored(url, name, *, text=False, **options):
    """Return the samples of a ragged array by its offsets, as any Zarr reader would."""
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


def lines(*texts):
    return "".join(f"{text}\n" for text in texts).encode()


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


def in_each_format(rows):
    """Return the name and the bytes of a CSV, a JSON lines and a Parquet file with these rows."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = pa.table({name: [row.get(name) for row in rows] for name in names})
    text = io.BytesIO()
    pyarrow.csv.write_csv(columns, text)
    return [("x.csv", text.getvalue()), ("x.jsonl", lines_of(rows)), ("x.parquet", parquet(columns))]


def hdf5(**datasets):
    sink = io.BytesIO()
    with h5py.File(sink, "w") as file:
        for name, data in datasets.items():
            file[name.replace("__", "/")] = data
    return sink.getvalue()


def vlen(dtype, rows):
    """Return rows of different lengths as h5py expects them."""
    found = np.empty(len(rows), h5py.vlen_dtype(np.dtype(dtype)))
    for i, row in enumerate(rows):
        found[i] = np.array(row, dtype)
    return found


def tar(members, pax_headers=()):
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.pax_headers = dict(pax_headers)
            file.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def png(pixels):
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "png")
    return sink.getvalue()


def packed(folder, files, **options):
    """Pack files with these bytes; return the samples by field, as any Zarr reader finds them.

    Text is str, JSON is decoded, and numbers are lists of Python numbers.
    """
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    url = str(folder / "out.zarr")
    pack([str(folder / name) for name in files], url, overwrite=True, **options)
    group = zarr.open_group(url, mode="r")
    ragged_attrs = {name: array.attrs.get("cachedfs_ragged") for name, array in group.arrays()}
    offsets = {each["offsets"] for each in ragged_attrs.values() if each}
    reading = {"": np.ndarray.tolist, "bytes": np.ndarray.tobytes, "utf-8": _text, "json": _json}
    return {
        name: list(map(reading[ragged.get("means", "")], stored(url, name)))
        if ragged
        else group[name][:].tolist()
        for name, ragged in ragged_attrs.items()
        if name not in offsets
    }


def _text(elements):
    return elements.tobytes().decode()


def _json(elements):
    text = _text(elements)
    return json.loads(text) if text else None
