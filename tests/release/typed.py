"""Code that a user may write under `mypy --strict`; never run. An unneeded ignore is an error: these calls must be rejected."""

from pathlib import Path
from typing import IO, Any, assert_type

import cachedfs
from cachedfs import CachedFileSystem, CachedGCSFileSystem, ObjectNotFound
from cachedfs.core.statistics import Stats
from cachedfs.core.verify import Verified
from cachedfs.datasets import FileDataset, Loader
from cachedfs.filesystem.file import CachedFile

fs = CachedFileSystem(target_protocol="gs", max_age="immutable", gs={"token": "anon"})
data = fs.cat_file("bucket/key", 0, 100)
assert_type(data, bytes)
assert_type(fs.info(Path("bucket/key")), dict[str, Any])
assert_type(fs.exists("bucket/key"), bool)
assert_type(fs.ls("bucket", detail=False), list[str])
assert_type(fs.ls("bucket"), list[dict[str, Any]])
assert_type(fs.find("bucket"), list[str])
assert_type(fs.glob("bucket/*", detail=True), dict[str, dict[str, Any]])
assert_type(fs.stats(), Stats)
assert_type(fs.stats().hits, int)
assert_type(fs.verify("bucket/key"), list[Verified])
assert_type(fs.cached_extent("bucket/key"), list[tuple[int, int]])
with fs.open("bucket/key") as file:
    assert_type(file, CachedFile)
    assert_type(file.read(10), bytes)
with fs.open("bucket/key", "rt") as text:
    assert_type(text, IO[Any])
with fs.local_path("bucket/key") as name:
    assert_type(name, str)
with fs.prefetch(["bucket/a", ("bucket/b", 0, 100)], window="64MiB") as plan:
    assert_type(plan.progress.bytes_fetched, int)
    plan.wait(10.0)

fs.prefetch(7)  # type: ignore[arg-type]
fs.cat_file("bucket/key", "0")  # type: ignore[arg-type]
fs.pin(1)  # type: ignore[arg-type]
hits = fs.stats().hit  # type: ignore[attr-defined]
cachedfs.log_events(1)  # type: ignore[arg-type]

try:
    CachedGCSFileSystem(token="anon").cat_file("bucket/nothing")
except ObjectNotFound as error:
    assert_type(error.message, str)

loader = Loader(FileDataset("cachedfs::gs://bucket/images"), batch_size=16, shuffle=True, seed=0)
for batch in loader:
    assert_type(batch, Any)
assert_type(loader.epoch, int)

images: FileDataset[tuple[bytes, str]] = FileDataset("cachedfs::gs://bucket/images", label=str)
assert_type(images[0], tuple[bytes, str])


def total(samples: list[bytes]) -> int:
    return sum(map(len, samples))


for size in Loader(FileDataset("cachedfs::gs://bucket/images"), collate_fn=total):
    assert_type(size, int)
position = loader.state_dict()
assert_type(position, dict[str, Any])
Loader([1], batch_size="16")  # type: ignore[arg-type]
