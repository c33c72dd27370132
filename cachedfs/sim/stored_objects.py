"""Bytes of replies and of stored objects, in memory or in files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class Body(Protocol):
    """Bytes of a reply: `bytes`, a `memoryview` or a `FileBody`."""

    def __len__(self) -> int: ...
    def __getitem__(self, span: slice, /) -> bytes | memoryview: ...


class FileBody:
    """Part of an open file. It keeps its content if another file is renamed over it."""

    def __init__(self, path: Path, start: int, stop: int) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        self._start, self._size = start, stop - start

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, span: slice, /) -> bytes:
        start, stop, _ = span.indices(self._size)
        data = os.pread(self._fd, stop - start, self._start + start)
        if len(data) < stop - start:
            raise ConnectionError("the file became shorter while it was served")
        return data

    def __del__(self) -> None:
        if hasattr(self, "_fd"):  # it was opened
            os.close(self._fd)


class Content:
    """Base of objects with bytes, in memory or in a file."""

    __slots__ = ()
    data: bytes | Path
    size: int

    def body(self, start: int, stop: int) -> Body:
        if isinstance(self.data, Path):
            return FileBody(self.data, start, stop)
        return memoryview(self.data)[start:stop]

    def content(self) -> bytes:
        return self.data.read_bytes() if isinstance(self.data, Path) else self.data
