"""The target of a pack: atomic writes, verification, and metadata that are written last."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, NamedTuple

from fsspec.core import has_magic

from cachedfs.common import urls as url_names
from cachedfs.common.checksums import RunningChecksum, stated_of
from cachedfs.filesystem import CachedFileSystem
from cachedfs.packing.pack_types import WORK_FOLDER
from cachedfs.packing.sources.source_files import version_of

ZARR = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")  # metadata files by which readers find a Zarr store
WRITERS = 8  # threads that write small files, make folders or remove them
STEP = 8 << 20  # bytes that are read back, or checksummed, at a time
# Protocols whose objects appear only when complete: no temporary name is needed.
ATOMIC = {"gs", "gcs", "s3", "s3a", "r2", "oss", "az", "abfs", "abfss", "adl", "drive", "memory"}


class StoredObject(NamedTuple):
    """An object in the store. `version` changes with its content; `is_stated`: the origin states its checksum."""

    name: str
    size: int
    version: str
    is_stated: bool
    is_new: bool = True  # False: an earlier run wrote it


class ZarrTarget:
    """The Zarr group that a pack writes at a URL. It pickles as URL and options."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url, self._options = url, dict(options or {})
        self.fs, path = url_names.filesystem_at(url, self._options)
        self.path = str(self.fs._strip_protocol(path)).rstrip("/")
        self._folders: set[str] = set()
        self.is_interrupted = False  # True: `put` raises CancelledError

    def __reduce__(self) -> Any:
        return type(self), (self.url, self._options)

    @property
    def _origin_fs(self) -> Any:
        """The origin's filesystem: verification must not read from the cache."""
        return self.fs.origin_fs if isinstance(self.fs, CachedFileSystem) else self.fs

    @cached_property
    def protocol(self) -> str:
        """Protocol of the origin: `gs`, `drive`, `file`, ..."""
        return protocols_of(self.fs)[0]

    # Objects.

    def path_of(self, name: str) -> str:
        return f"{self.path}/{name}"

    def put(self, name: str, data: bytes | bytearray) -> None:
        """Write an object atomically. Raises CancelledError after an interrupt (`is_interrupted`)."""
        path = self.path_of(name)
        self._check_not_interrupted()
        if self.protocol in ATOMIC:
            self.fs.pipe_file(path, data)
            return
        temporary = self.path_of(f"{WORK_FOLDER}/{uuid.uuid4().hex}.tmp")
        for folder in (path.rpartition("/")[0], temporary.rpartition("/")[0]):
            if folder not in self._folders:
                self.fs.makedirs(folder, exist_ok=True)
                self._folders.add(folder)
        self.fs.pipe_file(temporary, data)
        self._check_not_interrupted()
        self.fs.mv(temporary, path)

    def begin(self, objects: Mapping[str, bytes], folders: Iterable[str], *, replaces: bool) -> None:
        """Write the first objects of a store, and create its folders at Drive, where each takes a second.

        `replaces`: remove what is there before.
        """
        if replaces:
            self._clear()
        for name, data in objects.items():
            self.put(name, data)
        if self.protocol == "drive":
            with ThreadPoolExecutor(WRITERS) as threads:
                list(threads.map(partial(self.fs.makedirs, exist_ok=True), map(self.path_of, folders)))

    def _check_not_interrupted(self) -> None:
        if self.is_interrupted:
            raise CancelledError(f"{self.url}: this pack was interrupted")

    def put_checked(self, name: str, data: bytes | bytearray) -> StoredObject:
        """Write an object and verify it.

        One request gets the origin's checksum of it. If the origin states none, the object is read back.
        Raises OSError if the stored bytes differ; the object is then removed.
        """
        self.put(name, data)
        path = self.path_of(name)
        info = self.fs.info(path)
        stated = stated_of(info)
        checksum = None if stated is None else RunningChecksum(stated)
        difference: str | None = None
        for start in range(0, len(data), STEP):
            # Copied: comparing bytes is ten times as fast as comparing memoryviews.
            part = bytes(memoryview(data)[start : start + STEP])
            stop = start + len(part)
            if checksum is not None:
                checksum.add(part)
            elif difference is None and self._origin_fs.cat_file(path, start=start, end=stop) != part:
                difference = f"bytes {start:,} to {stop:,} are others when they are read back"
        if checksum is not None:
            difference = checksum.contradiction()
        if difference is not None or info.get("size") not in (None, len(data)):
            with contextlib.suppress(OSError):
                self.fs.rm_file(path)
            raise OSError(
                f"{self.fs.unstrip_protocol(path)}: the stored object differs from the written one: "
                f"{difference or info.get('size')}; run pack again to continue"
            )
        return StoredObject(name, len(data), version_of(info), stated is not None)

    def read(self, name: str) -> bytes | None:
        """Return the bytes of an object; None if it does not exist."""
        try:
            return bytes(self.fs.cat_file(self.path_of(name)))
        except FileNotFoundError:
            return None

    def listing(self) -> dict[str, StoredObject]:
        """Return all objects of the store by name, from one new listing."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.invalidate_cache(self.path)
            found = self.fs.find(self.path, detail=True)
            head = len(self.path) + 1
            return {
                name: StoredObject(
                    name, info.get("size") or 0, version_of(info), stated_of(info) is not None, False
                )
                for name, info in ((str(path)[head:], info) for path, info in found.items())
            }
        return {}

    def remove(self, name: str = "") -> None:
        """Remove a folder and its content; without a name, the whole store."""
        path = self.path_of(name).rstrip("/")
        self._folders.clear()
        with contextlib.suppress(FileNotFoundError):
            if has_magic(path):  # `rm` would expand it as a pattern
                self._remove_each(path)
            else:
                self.fs.rm(path, recursive=True)

    def _remove_each(self, path: str) -> None:
        self.fs.invalidate_cache(path)
        found = self.fs.find(path, withdirs=True, detail=True)
        files = {each for each, info in found.items() if info["type"] == "file"}
        for each in files:
            self.fs.rm_file(each)
        for folder in sorted({path, *found} - files, reverse=True):  # subfolders before their parents
            with contextlib.suppress(OSError):  # object stores have no real folders
                self.fs.rmdir(folder)

    def _clear(self) -> None:
        """Remove the whole store, metadata first.

        If the process is killed, the rest cannot be opened as a store, and a later pack knows it as its own to remove.
        """
        self.put(f"{WORK_FOLDER}/removing", b"")
        existing = self.listing()
        for name in ZARR:
            if name in existing:
                self.fs.rm_file(self.path_of(name))
        others = {name.partition("/")[0] for name in existing} - {WORK_FOLDER, *ZARR}
        with ThreadPoolExecutor(WRITERS) as threads:
            list(threads.map(self.remove, others))
        self.remove()

    def finish(self, documents: Mapping[str, Mapping[str, Any]], check: Callable[[], object]) -> None:
        """Write the metadata documents: that of the group after `check`, so that a group that opens is complete."""
        datas = {name: json.dumps(document, indent=2).encode() for name, document in documents.items()}
        group = datas.pop("zarr.json")
        with ThreadPoolExecutor(WRITERS) as threads:  # small files: latency dominates
            others = threads.map(self.put, datas, datas.values())
            check()
            list(others)
        self.put("zarr.json", group)


def protocols_of(fs: Any) -> list[str]:
    """Return the names of the origin's protocol, first the one that the filesystem itself goes by.

    It does not create the origin's filesystem, which fails offline.
    """
    if isinstance(fs, CachedFileSystem):
        return [fs.target_protocol, *url_names.protocols_of(fs.target_protocol)]
    return [fs.protocol] if isinstance(fs.protocol, str) else [*fs.protocol]
