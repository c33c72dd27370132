"""Where the packed arrays go: objects that appear whole, what was sent compared with what is there, the group's metadata last."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple

from fsspec.core import has_magic, url_to_fs

from cachedfs.common import urls as url_names
from cachedfs.common.checksums import RunningChecksum, stated_of
from cachedfs.filesystem import CachedFileSystem
from cachedfs.packing.pack_types import PieceCounts
from cachedfs.packing.shard_encoder import ChunkEncoding

__all__ = ["BESIDE", "ZARR", "ArrayPlan", "ZarrTarget", "StoredObject", "protocols_of"]

BESIDE = ".cachedfs-pack"  # the folder of what only packing needs: gone when it is done
ZARR = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")  # by which others find a store
AT_ONCE = 8  # documents that are written at the same time
STEP = 8 << 20  # bytes that are read back, or summed up, at once
# Where an object is there when it is complete, and not before: it is written where it is to be.
WHOLE = {
    "gs",
    "gcs",
    "cgs",
    "s3",
    "s3a",
    "az",
    "abfs",
    "abfss",
    "adl",
    "drive",
    "cdrive",
    "memory",
    "oss",
    "r2",
}


class StoredObject(NamedTuple):
    """An object that is there as it was sent. `checksum`: what the origin states of it; None: nothing, so it was read back."""

    name: str
    size: int
    checksum: str | None
    is_new: bool = True  # False: an earlier run wrote it


class ArrayPlan(NamedTuple):
    """One array of the store."""

    name: str
    shape: tuple[int, ...]
    encoding: ChunkEncoding
    dimensions: tuple[str, ...]
    attributes: Mapping[str, Any]


class ZarrTarget:
    """A Zarr group at a URL that is being made. It pickles as URL and options."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url, self._options = url, dict(options or {})
        self.fs, path = url_to_fs(url, **self._options)
        self.path = str(path).rstrip("/")
        self._folders: set[str] = set()
        self.is_given_up = False  # nothing is written any more

    def __reduce__(self) -> Any:
        return type(self), (self.url, self._options)

    @property
    def _origin(self) -> Any:
        """The origin itself: what is verified is not what a cache has of it."""
        return self.fs.origin_fs if isinstance(self.fs, CachedFileSystem) else self.fs

    @cached_property
    def protocol(self) -> str:
        """That of the origin: `gs`, `drive`, `file`, ..."""
        fs = self.fs
        name = fs.target_protocol if isinstance(fs, CachedFileSystem) else fs.protocol
        return str(name if isinstance(name, str) else name[0])

    # Objects.

    @property
    def place(self) -> tuple[str, str]:
        """Where it is, whatever is in front of the URL."""
        return self.protocol, self.path

    def at(self, name: str) -> str:
        return f"{self.path}/{name}"

    def shown(self, name: str) -> str:
        return str(self.fs.unstrip_protocol(self.at(name)))

    def put(self, name: str, data: bytes | bytearray) -> None:
        """Write an object so that nobody ever sees a part of it under its name. Raises CancelledError once that is given up."""
        path = self.at(name)
        self._must_go_on()
        if self.protocol in WHOLE:
            self.fs.pipe_file(path, data)
            return
        temporary = self.at(f"{BESIDE}/{uuid.uuid4().hex}.tmp")
        for folder in (path.rpartition("/")[0], temporary.rpartition("/")[0]):
            if folder not in self._folders:
                self.fs.makedirs(folder, exist_ok=True)
                self._folders.add(folder)
        self.fs.pipe_file(temporary, data)
        self._must_go_on()
        self.fs.mv(temporary, path)

    def _must_go_on(self) -> None:
        if self.is_given_up:
            raise CancelledError(f"{self.url}: this pack was interrupted")

    def put_checked(self, name: str, data: bytes | bytearray) -> StoredObject:
        """Write an object and make sure that it is there as it was sent.

        By the checksum that the origin states of it, which is one request; where there is none it is read back.
        Raises OSError for one that is not: it is removed.
        """
        self.put(name, data)
        path = self.at(name)
        info = self.fs.info(path)
        stated = stated_of(info)
        if stated is None:
            wrong = self._contradiction(path, memoryview(data))
        else:
            running = RunningChecksum(stated)
            for start in range(0, len(data), STEP):
                running.add(bytes(memoryview(data)[start : start + STEP]))
            wrong = running.contradiction()
        if wrong is not None or info.get("size") not in (None, len(data)):
            with contextlib.suppress(OSError):
                self.fs.rm_file(path)
            raise OSError(
                f"{self.shown(name)}: written, and not there as sent: {wrong or info.get('size')}; run pack again, it goes on here"
            )
        return StoredObject(name, len(data), None if stated is None else stated.value)

    def _contradiction(self, path: str, data: memoryview) -> str | None:
        """Return where an object differs from what was sent; None where it does not."""
        for start in range(0, len(data), STEP):
            stop = min(start + STEP, len(data))
            # Copied: bytes are compared ten times as fast as views of them.
            if self._origin.cat_file(path, start, stop) != bytes(data[start:stop]):
                return f"bytes {start:,} to {stop:,} are others when they are read back"
        return None

    def read(self, name: str) -> bytes | None:
        """Return an object; None when it is not there."""
        try:
            return bytes(self.fs.cat_file(self.at(name)))
        except FileNotFoundError:
            return None

    def read_back(self, name: str) -> bytes | None:
        """Return an object as the origin has it now; None when it is not there."""
        try:
            return bytes(self._origin.cat_file(self.at(name)))
        except FileNotFoundError:
            return None

    def listing(self) -> dict[str, StoredObject]:
        """Return what is there, as the origin has it now: one listing."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.invalidate_cache(self.path)
            found = self.fs.find(self.path, detail=True)
            head = len(self.path) + 1
            return {str(path)[head:]: _stored(str(path)[head:], info) for path, info in found.items()}
        return {}

    def remove(self, name: str = "") -> None:
        """Remove a folder with all in it; without a name all that is here."""
        path = self.at(name).rstrip("/")
        with contextlib.suppress(FileNotFoundError):
            if has_magic(path):  # which `rm` would take for a pattern, and remove what matches it
                self._remove_each(path)
            else:
                self.fs.rm(path, recursive=True)

    def _remove_each(self, path: str) -> None:
        self.fs.invalidate_cache(path)
        found = self.fs.find(path, withdirs=True, detail=True)
        files = {each for each, info in found.items() if info["type"] == "file"}
        for each in files:
            self.fs.rm_file(each)
        for folder in sorted({path, *found} - files, reverse=True):  # what is in a folder before it
            with contextlib.suppress(OSError):  # where folders are names, none is left
                self.fs.rmdir(folder)

    def clear(self) -> None:
        """Remove all that is here. Killed at any moment, it leaves what nobody takes for a store, and a pack for its own."""
        self.put(f"{BESIDE}/removing", b"")
        there = self.listing()
        for name in ZARR:
            if name in there:
                self.fs.rm_file(self.at(name))
        for name in sorted({name.partition("/")[0] for name in there} - {BESIDE, *ZARR}):
            self.remove(name)
        self.remove()
        self._folders.clear()

    # What is known of pieces, while it is being made.

    def keep(self, piece: str, tally: PieceCounts) -> None:
        self.put(f"{BESIDE}/{piece}.npz", tally.as_bytes())

    def kept(self, piece: str) -> PieceCounts | None:
        data = self.read(f"{BESIDE}/{piece}.npz")
        return None if data is None else PieceCounts.from_bytes(data)

    def keep_done(self, done: Mapping[str, str]) -> None:
        """Write down the checksums of objects that were found to be as they were sent."""
        self.put(f"{BESIDE}/done-{uuid.uuid4().hex}.json", json.dumps(done).encode())

    def kept_done(self, names: Iterable[str]) -> dict[str, str]:
        """Return what was written down, by earlier runs too; `names`: all that is there."""
        found: dict[str, str] = {}
        for name in names:
            if name.startswith(f"{BESIDE}/done-"):
                with contextlib.suppress(ValueError, RecursionError):
                    found |= json.loads(self.read(name) or b"{}")
        return found

    def keep_plan(self, plan: Mapping[str, Any]) -> None:
        self.put(f"{BESIDE}/plan.json", json.dumps(plan).encode())

    def kept_plan(self) -> dict[str, Any] | None:
        data = self.read(f"{BESIDE}/plan.json")
        try:
            return None if data is None else dict(json.loads(data))
        except (ValueError, RecursionError):
            return {}

    # Metadata.

    def finish(self, arrays: list[ArrayPlan], attributes: Mapping[str, Any]) -> None:
        """Write the metadata: those of the group last, with all others in them, so that what opens is complete."""
        documents = metadata_of(arrays, attributes)
        others = [name for name in documents if name != "zarr.json"]
        with ThreadPoolExecutor(AT_ONCE) as threads:  # small ones: what takes time is the way there
            for _ in threads.map(lambda name: self.put(name, documents[name]), others):
                pass
        self.put("zarr.json", documents["zarr.json"])


def protocols_of(fs: Any) -> set[str]:
    """Return the names of the origin's protocol. The filesystem behind a cache is not made for it: offline it cannot be."""
    if isinstance(fs, CachedFileSystem):
        return url_names.protocols_of(fs.target_protocol)
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def _stored(name: str, info: Mapping[str, Any]) -> StoredObject:
    stated = stated_of(info)
    return StoredObject(
        name, int(info.get("size") or 0), None if stated is None else stated.value, is_new=False
    )


def metadata_of(arrays: list[ArrayPlan], attributes: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the documents of a group and its arrays, by name, as zarr writes them; the group's have all in them."""
    import zarr
    from zarr.storage import MemoryStore

    held: dict[str, Any] = {}
    group = zarr.create_group(MemoryStore(held), attributes=dict(attributes))
    for each in arrays:
        encoding = each.encoding
        group.create_array(
            each.name,
            shape=each.shape,
            dtype=encoding.dtype,
            chunks=encoding.grid.chunk,
            shards=encoding.grid.shard,
            compressors=encoding.described,
            fill_value=0,
            # Flat names: each further axis would be another folder, which Drive makes two or three of in a second.
            chunk_key_encoding={"name": "default", "separator": "."},
            dimension_names=each.dimensions,
            attributes=dict(each.attributes),
        )
    documents = {name: json.loads(value.to_bytes()) for name, value in held.items()}
    members = {
        name.removesuffix("/zarr.json"): document
        for name, document in documents.items()
        if name != "zarr.json"
    }
    documents["zarr.json"]["consolidated_metadata"] = {
        "kind": "inline",
        "must_understand": False,
        "metadata": dict(sorted(members.items())),
    }
    return {name: json.dumps(document, indent=2).encode() for name, document in documents.items()}
