"""Published trainings, scaled down as a whole, with the bounds for their loaders."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cachedfs.sim import Delay, Profile
from tests.benchmarks import rivals
from tests.benchmarks.harness import ContenderError, Figure, Result, Session
from tests.benchmarks.services import BUCKET, DRIVE_EVEN, SERVICES

MiB = 1 << 20
NAMES = {name: f"DataLoader on {name}" for name in ("gcsfs", "blockcache", "filecache")}
NAMES |= {"torch": "DataLoader", "drive": "DataLoader on `drive://`", "stateful": "StatefulDataLoader"}
NAMES |= {"litdata": "LitData", "mosaic": "MosaicML Streaming"}
WORKERS = (4, 8)  # for torch's DataLoader; the better result counts
FILES, FILE_SIZE = 640, 2_000
# 87 kB each, 168 MB: a quarter of KITTI's pixels along each axis.
IMAGES, IMAGE, IMAGES_SHARD = (1920, (94, 310, 3), 480)
SAMPLES, SAMPLE, SHARD = 5120, (64, 192), 512  # 12 KiB each
WHOLE, PIECE = 512, (512, 512)  # float32: 1 MiB each
BLOCKS = 512  # objects of 1 MiB
TEXTS = 256  # files of 1 MiB
PACK_LINK = Profile(
    name="pack", metadata=Delay(0.03), media=Delay(0.03), listing=Delay(0.05), total_rate=30e6
)
N_EPOCHS = 4
FAST_LINK, SLOW_LINK = 40e6, 10e6  # the rate that Colab was seen to get from Drive
STEP_S = 0.06  # of 16 images of that size
SCALE = 10.0  # images have a tenth of their bytes, and times are a tenth; links are unchanged


def link(rate: float) -> Profile:
    """Return Drive at its mean latencies, without errors, on a link with this rate after scaling."""
    rates = {"stream_rate": rate / SCALE, "total_rate": rate / SCALE}
    return dataclasses.replace(DRIVE_EVEN, name=f"drive-{rate / 1e6:g}", **rates)


SLOW_FILES = Profile(name="0.4 s", metadata=Delay(0.12), media=Delay(0.4, 0.3), listing=Delay(0.5))
TEN_MS = Profile(name="10 ms", metadata=Delay(0.01), media=Delay(0.01), listing=Delay(0.01))
OFF = Profile()


@dataclass(frozen=True, slots=True)
class Row:
    """One training. `bound_s` is a lower bound for any loader, if it is a time."""

    name: str
    title: str
    definition: str
    do: str
    options: Mapping[str, Any]
    shown: Callable[[Mapping[str, float]], str]
    contenders: tuple[str, ...] = ()
    service: str = "gcs"
    profile: Profile = OFF
    time_scale: float = 1.0
    cache_size: str = ""
    block_size: str = ""
    bound_s: float | None = None
    data: tuple[str, ...] = field(default=())  # folders that it reads


# Data.


def make(folder: Path, names: set[str]) -> None:
    """Create the missing folders of these, with the same bytes every time."""
    for name in sorted(names):  # one of them is made from another
        if not (folder / name).exists():
            _MAKERS[name](folder / name)


def _make_files(folder: Path, n: int, size: int) -> None:
    folder.mkdir(parents=True)
    rng = random.Random(0)
    for number in range(n):
        (folder / f"{number:04}").write_bytes(rng.randbytes(size))


def _make_texts(folder: Path) -> None:
    folder.mkdir(parents=True)
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randrange(2, 10))) for _ in range(5000)]
    for number in range(TEXTS):
        text = " ".join(rng.choices(words, k=MiB // 5)).encode()
        (folder / f"{number:04}").write_bytes(text[:MiB])


def _make_array(path: Path, shape: tuple[int, ...], dtype: str, shard: int, codec: str) -> None:
    import numpy as np
    import zarr

    rng = np.random.default_rng(0)
    codecs = {
        "lz4": zarr.codecs.BloscCodec(cname="lz4"),
        "zstd": zarr.codecs.ZstdCodec(level=0),
        "none": None,
    }
    array = zarr.create_array(
        path,
        shape=shape,
        dtype=dtype,
        chunks=(1, *shape[1:]),
        shards=(shard, *shape[1:]),
        compressors=codecs[codec],
        # At Drive, a folder for each axis would cost a request each.
        chunk_key_encoding={"name": "default", "separator": "."},
    )
    for at in range(0, shape[0], shard):
        size = (min(shard, shape[0] - at), *shape[1:])
        if codec == "none":
            array[at : at + size[0]] = rng.integers(0, 256, size, "u1")
            continue
        # Waves with a little noise, like images and fields: they compress to half.
        waves = np.sin(np.arange(at, at + size[0])[:, None] + np.linspace(0, 20, int(np.prod(size[1:]))))
        noisy = waves.reshape(size) * 100 + 128 + rng.integers(0, 8, size)
        array[at : at + size[0]] = noisy.astype(dtype)


_OWN_FORMAT = {"litdata": ["blocks.lit"], "mosaic": ["blocks.mds"]}
_MAKERS: dict[str, Callable[[Path], None]] = {
    "files": lambda path: _make_files(path, FILES, FILE_SIZE),
    "blocks": lambda path: _make_files(path, BLOCKS, MiB),
    "blocks.lit": lambda path: rivals.make_chunks(path.parent / "blocks", path),
    "blocks.mds": lambda path: rivals.make_shards(path.parent / "blocks", path),
    "texts": _make_texts,
    "images.zarr": lambda path: _make_array(path, (IMAGES, *IMAGE), "u1", IMAGES_SHARD, "none"),
    "samples.zarr": lambda path: _make_array(path, (SAMPLES, *SAMPLE), "u1", SHARD, "zstd"),
    "whole.zarr": lambda path: _make_array(path, (WHOLE, *PIECE), "f4", 64, "lz4"),
}


# Descriptions.


def _over(f: Mapping[str, float]) -> str:
    return f"{f['seconds']:.2f} s, {1 / f['over']:.1%} of the bound from the fourth batch on"


def _images(f: Mapping[str, float]) -> str:
    return f"{f['first']:.2f} / {f['second']:.2f} s" + (
        f" (local {f['beside']:.2f})" if "beside" in f else ""
    )


def _microseconds(f: Mapping[str, float]) -> str:
    return f"{f['us']:.0f} us" + (f" (bare loop {f['bare_us']:.0f})" if "bare_us" in f else "")


def _hits(f: Mapping[str, float]) -> str:
    return f"hits {hit_ratio(f):.3f}, {f['remote']:.3f} x the bytes, {f['seconds']:.1f} s"


def hit_ratio(figures: Mapping[str, float]) -> float:
    """Return the share of the reads of later epochs that did not need to be fetched."""
    return 1 - figures["later"] / ((N_EPOCHS - 1) * BLOCKS * MiB)


def _at(f: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix("at "): value for name, value in f.items() if name.startswith("at ")}


def _resumed(f: Mapping[str, float]) -> str:
    return ", ".join(f"{place}: {value * 1e3:.0f} ms" for place, value in _at(f).items())


def _packed(f: Mapping[str, float]) -> str:
    parts = ("read", "encode", "write")
    return (
        f"{f['seconds']:.2f} s, {1 / f['over']:.0%} of the bound ("
        + ", ".join(f"{part} {f[part]:.2f} s" for part in parts)
        + ")"
    )


def _ratio(f: Mapping[str, float]) -> str:
    return ", ".join(f"{share}: {value:.3f}" for share, value in _at(f).items())


# Rows.


def _capped(share: float) -> Row:
    size = int(share * BLOCKS * MiB)
    return Row(
        f"train_c{share * 100:.0f}",
        f"{N_EPOCHS} epochs with a cache of {share:g} of the data",
        f"{BLOCKS} files of 1 MiB in random order, by batches of 8, each at once, `cache_size` {size // MiB} MiB: of what the later epochs "
        f"read the share that is not fetched (no cache can do better than {share:g}), and all bytes over the least, which is the data "
        f"once and {1 - share:g} of them for each later epoch; LitData, which takes chunks in random order and shuffles within them, and MosaicML Streaming, which shuffles all samples: "
        "the same in chunks of 4 MiB, their own bound of the cache, two workers",
        "epochs",
        {"n": N_EPOCHS, "step_s": 0.0},
        _hits,
        tuple(rivals.RIVALS),
        cache_size=str(size),
        data=("blocks",),
    )


def _images_row(name: str, rate: float) -> Row:
    stored = IMAGES * IMAGE[0] * IMAGE[1] * IMAGE[2]  # noise, stored as it is
    # A shard costs requests for its folder, its index, then chunks.
    first_s = (DRIVE_EVEN.listing.median_s + 2 * DRIVE_EVEN.media.median_s) / SCALE
    compute_s, transfer_s = IMAGES / 16 * STEP_S, stored / rate
    bound_s = max(compute_s, transfer_s) + first_s
    return Row(
        name,
        f"{IMAGES} images of Drive in one Zarr, {rate / 1e6:g} MB/s",
        f"uint8 {IMAGE}, {stored / 1e6:.0f} MB in {IMAGES // IMAGES_SHARD} shards, batches of 16 in random order, {STEP_S * 1e3:.0f} ms a step: the "
        f"first epoch, whose bound is the longer of {compute_s:.2f} s of computing and {transfer_s:.2f} s of the link, and three "
        f"latencies; a later one, beside the same Loader on the local disk; images, steps, latencies and blocks are a tenth of KITTI's, "
        f"on a P100, of Drive's, and of the default",
        "images",
        {"step_s": STEP_S, "epochs": 3, "shuffle": "window", "window": 8},
        _images,
        service="drive",
        profile=link(rate),
        time_scale=SCALE,
        block_size="128KiB",  # a tenth of the default, too
        bound_s=bound_s,
        data=("images.zarr",),
    )


def _pack_row(name: str, title: str, profile: Profile, *, is_local: bool) -> Row:
    size = TEXTS * MiB
    how = (
        "files of the local disk"
        if is_local
        else f"objects behind a link of {profile.total_rate / 1e6:g} MB/s"
    )
    return Row(
        name,
        title,
        f"{TEXTS} {how} of 1 MiB of text into shards on the local disk, zstd, verification and all; the bound is the longest of reading "
        f"({'the same files once' if is_local else 'bytes over the rate'}), of encoding the same chunks on all cores, and of writing the same bytes",
        "packed",
        {"read_s": 0.0 if is_local else size / profile.total_rate, "is_local": is_local},
        _packed,
        profile=profile,
        data=("texts",),
    )


_LIST = [
    Row("train_small", "16 small files a batch, 0.4 s each, 2 s a step", f"{FILES} files of Drive of 2 KB, each 0.4 s late (lognormal, sigma 0.3), all ten times faster; `DataLoader` with 4 or 8 processes, whichever is better, its start in the time", "small", {"n": FILES, "batch": 16, "step_s": 0.2}, _over, ("drive",), "drive", SLOW_FILES, 10.0, bound_s=FILES / 16 * 0.2, data=("files",)),
    Row("train_steps", "100 steps of 0.1 s, 10 ms a file", "batches of 4 of 400 files; all of it, the start of what loads as well", "small", {"n": 400, "batch": 4, "step_s": 0.1}, _over, ("gcsfs", "blockcache", "filecache"), "gcs", TEN_MS, bound_s=10.0, data=("files",)),
    Row("train_ratio", "loading 0.1, 0.5, 0.9, 1, 1.1 and 3 times as long as computing", "60 steps of 40 ms, four threads (processes), each batch a sleep: an iteration over the longer of both, without the first and last ones", "ratio", {"step_s": 0.04, "shares": [0.1, 0.5, 0.9, 1.0, 1.1, 3.0]}, _ratio, ("torch",)),
    _images_row("train_images_slow", SLOW_LINK),
    _images_row("train_images", FAST_LINK),
    Row("train_samples", "random samples of 12 KiB from the cache", f"64 a batch, {SAMPLES} in shards of {SHARD}, zstd: microseconds a sample in one thread; a bare loop of `pread` and decoding over the local file; zarr by `array[i]`", "random_samples", {"n": 2560}, _microseconds, ("zarr",), data=("samples.zarr",)),
    Row("train_whole", "all of a blosc-lz4 array from the cache", f"float32 chunks of 1 MiB, {WHOLE} of them, in order by 64: seconds of all cores for a GB that is decoded", "whole", {}, lambda f: f"{1 / f['cpu_s_a_gb']:.2f} GB/s a core", ("zarr",), data=("whole.zarr",)),
    *map(_capped, (0.25, 0.5, 0.75)),
    Row("train_two", "two processes, each with a plan over twice the cache", f"{BLOCKS} files of 1 MiB, half of them for each process, {N_EPOCHS} epochs in random order with a Loader, `cache_size` {BLOCKS // 4} MiB for both: of what the later epochs of a process read the share that is not fetched", "two_plans", {"n": N_EPOCHS, "step_s": 0.0}, lambda f: f"hits {f['hits']:.3f} and {f['more hits']:.3f}, {f['seconds']:.1f} s", cache_size=str(BLOCKS // 4 * MiB), data=("blocks",)),
    _pack_row("pack_link", "packing what comes over a link", PACK_LINK, is_local=False),
    _pack_row("pack_codec", "packing what is on the disk", OFF, is_local=True),
    Row("train_resume", "the first batch after a restart", "16 samples of 12 KiB from the cache, after a state at the beginning, in the middle and near the end of an epoch; torchdata's StatefulDataLoader", "resumed", {"places": [0.01, 0.5, 0.95]}, _resumed, ("stateful",), data=("samples.zarr",)),
]  # fmt: skip
ROWS = {row.name: row for row in _LIST}


def contenders(row: Row, *, ours: bool) -> list[str]:
    """Return the contenders of a row."""
    others = [name for name in row.contenders if rivals.is_here(name)]
    return ["cachedfs"] if ours else [*others, "cachedfs"]


# Measuring.


def measure_training(row: Row, contender: str, folder: Path) -> Result:
    """Return the results of one contender for one row; an error of the contender is a result, too."""
    service = SERVICES[row.service]
    local = folder / "training" / row.service / BUCKET
    make(local, {*row.data, *(_OWN_FORMAT.get(contender, ()) if row.do == "epochs" else ())})
    result = Result(row.name, contender)
    tried: list[dict[str, Any]] = []
    try:
        for options in _options(row, contender, local):
            with (
                service.server(
                    row.profile, folder=local.parent, process=True, time_scale=row.time_scale
                ) as server,
                tempfile.TemporaryDirectory(dir=folder, prefix=f"{contender}-") as cache,
                Session(
                    service,
                    server,
                    contender,
                    Path(cache),
                    python=rivals.python_of(contender),
                    more=_environment(row),
                ) as session,
            ):
                tried.append(session.order(train=row.do, contender=contender, **options))
    except ContenderError as error:
        result.error = str(error)
        return result
    best = min(tried, key=lambda answer: next(iter(answer["figures"].values())))
    figures = dict(best["figures"])
    if row.do == "epochs":
        share = int(row.cache_size) / (BLOCKS * MiB)
        if contender != "cachedfs":  # all at least once, and the rest later
            figures["later"] = best["sent"] - BLOCKS * MiB
        figures["missing"] = share - hit_ratio(figures)
        figures["remote"] = best["sent"] / (BLOCKS * MiB * (1 + (N_EPOCHS - 1) * (1 - share)))
    if row.bound_s:
        figures["over_all"] = next(iter(figures.values())) / row.bound_s
    result.figures = {name: Figure.of([value]) for name, value in figures.items()}
    result.requests = {"in all": float(best["requests"])}
    result.outcome = row.shown(figures)
    return result


def _environment(row: Row) -> dict[str, str]:
    given = {"CACHE_SIZE": row.cache_size, "BLOCK_SIZE": row.block_size}
    return {f"FSSPEC_CACHEDFS_{name}": value for name, value in given.items() if value}


def _options(row: Row, contender: str, local: Path) -> list[dict[str, Any]]:
    """Return the parameters of each try: peers try several numbers of processes if they have them."""
    service = SERVICES[row.service]
    known = service.contenders.get(contender)
    base = f"{known if known else service.contenders['cachedfs']}{service.top}"
    options: dict[str, Any] = {"base": base, **row.options}
    if row.do in ("images", "random_samples", "whole", "packed"):
        options["local"] = str(local)
    if row.do != "small":
        return [options]
    return [{**options, "workers": workers} for workers in ((0,) if contender == "cachedfs" else WORKERS)]
