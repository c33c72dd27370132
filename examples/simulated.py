"""What the examples read where no URL is given: a cloud on this machine, 45 ms away, with a little data in it.

A program of your own needs nothing of this, and neither does an example that is given a URL.
"""

import atexit
import contextlib
import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import fsspec

from cachedfs.sim import DriveServer, GCSServer

SERVERS = {"drive": DriveServer, "gs": GCSServer}
WORDS = ["cell", "gene", "protein", "trial", "dose", "mouse", "patient", "tumour", "risk", "level", "tissue"]
CLASSES, SIDE = 10, 28  # of the digits


@contextlib.contextmanager
def cloud(protocol, make):
    """Serve what `make` writes into a folder: as My Drive ("drive"), or as Cloud Storage ("gs"), whose buckets are its folders.

    fsspec is pointed at it, and cachedfs at a cache that is empty, here and in processes that are started from here.
    """
    folder, cache_dir = tempfile.mkdtemp(), tempfile.mkdtemp()
    for each in folder, cache_dir:  # after cachedfs has stored its last block
        atexit.register(shutil.rmtree, each, ignore_errors=True)
    make(Path(folder))
    with SERVERS[protocol](profile="table", process=True, folder=folder) as server:
        section = f"FSSPEC_{protocol.upper()}"
        os.environ |= {f"{section}_TOKEN": "anon", f"{section}_ENDPOINT_URL": server.endpoint_url}
        os.environ["FSSPEC_CACHEDFS_CACHE_DIR"] = cache_dir
        fsspec.config.set_conf_env(fsspec.config.conf)
        yield


def images(folder):
    """200 small files in 2 folders."""
    for i in range(200):
        write(folder / f"images/{'cats' if i % 2 else 'dogs'}/{i:03}.jpg", random.Random(i).randbytes(10_000))


def texts(folder):
    """200 small files in a bucket."""
    for i in range(200):
        write(folder / f"demo/texts/{i:03}.txt", b"one line of text\n" * 100)


def article(i):
    """One article as the data set of PubMed's for summarisation has it; its abstract repeats some sentences."""
    chance = random.Random(i)
    sentences = [" ".join(chance.choices(WORDS, k=12)) + " ." for _ in range(40)]
    abstract = [f"<S> {sentences[line]} </S>" for line in (0, 1, 20, 39)]
    return {"article_id": f"PMC{i:07}", "article_text": sentences, "abstract_text": abstract}


def articles(folder):
    """200 articles, a file of JSON each."""
    for i in range(200):
        write(folder / f"pubmed/{i:05}.json", json.dumps(article(i)).encode())


def article_lines(folder):
    """1,000 articles, a line of JSON each, in one file."""
    write(folder / "demo/pubmed.jsonl", "".join(json.dumps(article(i)) + "\n" for i in range(1000)).encode())


def street_images(folder):
    """48 pictures of three sizes, as those of KITTI's cameras differ by some pixels; a third as wide."""
    import numpy as np
    from PIL import Image

    chance = np.random.default_rng(0)
    for i in range(48):
        width, height = [(414, 125), (408, 123), (412, 125)][i % 3]
        rough = chance.integers(0, 256, (16, 32, 3), "u1")
        (folder / "kitti").mkdir(parents=True, exist_ok=True)
        Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC).save(
            folder / f"kitti/{i:06}.png"
        )


def digits():
    """Return 2,000 images of 28 x 28 pixels, and their classes: each class has one row that is brighter than the noise."""
    import numpy as np

    chance = np.random.default_rng(0)
    labels = chance.integers(0, CLASSES, 2000)
    pixels = chance.integers(0, 128, (len(labels), SIDE, SIDE), "u1")
    pixels[np.arange(len(labels)), 2 * labels + 4] += 127
    return pixels, labels


def digits_hdf5(folder):
    """The digits in one HDF5 file."""
    import h5py

    pixels, labels = digits()
    (folder / "demo").mkdir(parents=True)
    with h5py.File(folder / "demo/digits.h5", "w") as file:
        file.create_dataset("image", data=pixels, chunks=(100, SIDE, SIDE), compression="gzip")
        file.create_dataset("label", data=labels)


def digits_lmdb(folder):
    """The digits in one LMDB file: the class is the first byte of a record, the pixels are the others."""
    import lmdb

    (folder / "demo").mkdir(parents=True)
    path = str(folder / "demo/digits.lmdb")
    with (
        lmdb.open(path, subdir=False, map_size=64 << 20, lock=False) as data,
        data.begin(write=True) as records,
    ):
        for i, (pixels, label) in enumerate(zip(*digits(), strict=True)):
            records.put(b"%06d" % i, bytes([label]) + pixels.tobytes())


def digits_npy(folder):
    """400 of the digits, a file of NumPy's each, in a folder for each class."""
    import numpy as np

    for i, (pixels, label) in enumerate(zip(*(part[:400] for part in digits()), strict=True)):
        (folder / f"demo/digits/{label}").mkdir(parents=True, exist_ok=True)
        np.save(folder / f"demo/digits/{label}/{i:05}.npy", pixels)


def table(folder):
    """6 files of Parquet with 1,000 rows each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "demo/table").mkdir(parents=True)
    for i in range(6):
        pq.write_table(pa.table({"n": range(1000 * i, 1000 * i + 1000)}), folder / f"demo/table/{i}.parquet")


def weather(folder):
    """Ten years of daily temperatures on a grid of 5 degrees, as Zarr: of each day the month's number plus noise."""
    import numpy as np
    import xarray as xr

    days = np.arange("2001-01-01", "2011-01-01", dtype="M8[D]").astype("M8[ns]")
    lat, lon = np.arange(-87.5, 90, 5), np.arange(0.0, 360, 5)
    chance = np.random.default_rng(0)
    values = chance.standard_normal((len(days), len(lat), len(lon)), "f4")
    values += (days.astype("M8[M]").astype(int) % 12 + 1)[:, None, None]
    data = xr.Dataset({"t2m": (("time", "lat", "lon"), values)}, {"time": days, "lat": lat, "lon": lon})
    data.chunk(time=365).to_zarr(folder / "demo/weather.zarr", zarr_format=2, consolidated=True)


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
