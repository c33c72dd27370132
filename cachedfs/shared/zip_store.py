"""A shared cache in one zip file, which is written once, or read."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from cachedfs.cache import disk
from cachedfs.shared.metadata_rows import DamagedFile
from cachedfs.shared.piece import has_pieces
from cachedfs.shared.shared_store import BASE, KeptFile, StoredFile, read_exactly

# Before a member: lengths of its name and of an extra field, which precede its bytes.
_HEADER = struct.Struct("<26x2H")


class _Member(StoredFile):
    def __init__(self, fd: int, offset: int, size: int) -> None:
        self._fd, self._offset, self.size, self.modified_at = fd, offset, size, 0.0

    def part(self, start: int, stop: int) -> bytes:
        return read_exactly(self._fd, self._offset + start, stop - start)


class ZipReader:
    """A zip file that was exported, or packed without compression. Raises DamagedFile and OSError."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb")  # noqa: SIM115
        try:
            with zipfile.ZipFile(self._file) as opened:
                self._members = {each.filename: each for each in opened.infolist()}
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            self._file.close()
            raise DamagedFile(f"it is no zip file: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self._file.close()

    def files(self) -> Iterator[KeptFile]:
        for each in self._members.values():
            name = each.filename.removeprefix(f"{BASE}/")
            if name != each.filename and has_pieces(name.rpartition("/")[2]):
                yield KeptFile(name, each.file_size, 0.0, 0.0)

    def open(self, name: str) -> StoredFile:
        member, fd = self._members[f"{BASE}/{name}"], self._file.fileno()
        if member.compress_type != zipfile.ZIP_STORED:
            raise DamagedFile("it is compressed: make the zip file with export, or without compression")
        header = os.pread(fd, _HEADER.size, member.header_offset)
        if len(header) < _HEADER.size:
            raise DamagedFile("the list of members is damaged")
        offset = member.header_offset + _HEADER.size + sum(_HEADER.unpack(header))
        return _Member(fd, offset, member.file_size)


class ZipWriter:
    """Makes a zip file at `path`, which is there once all was written: after the `with` block."""

    def __init__(self, path: str) -> None:
        self._path, self._temp, self._lock = path, f"{path}.part", threading.Lock()
        self._zip = zipfile.ZipFile(self._temp, "w")
        self._names = set[str]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *args: object) -> None:
        try:
            with contextlib.closing(self._zip):
                pass
            if kind is None:
                os.replace(self._temp, self._path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temp)

    def files(self) -> Iterator[KeptFile]:
        return iter(())

    def write(
        self, name: str, data: Sequence[disk.Buffer], index: Callable[[], bytes], *, replaces: bool = False
    ) -> None:
        with self._lock:
            if name not in self._names:
                self._names.add(name)
                self._zip.writestr(f"{BASE}/{name}", b"".join([*data, index()]))

    def open(self, name: str) -> StoredFile:
        raise FileNotFoundError(name)

    def remove(self, name: str) -> None:
        pass
