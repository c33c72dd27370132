"""A model of a mounted Drive: local files with the delays of published measurements.

By the URL `mountmodel:///folder/key`. The first read of a file waits for its first byte and then has a bandwidth; later
reads use the mount's own copy; the first listing of a folder waits. One request at a time, as a mount serves one
program. It is a model and not Drive, and the results say so.
"""

from __future__ import annotations

import io
import time
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

FIRST_BYTE_S = 0.18  # of a file that is read for the first time
COLD_RATE, WARM_RATE = 60e6, 125e6  # bytes a second, at the first read and from the mount's copy
# Files from which on the first listing of a folder takes this long; with fewer files it is shorter in proportion.
CROWD, CROWD_S = 600, 20.0


class MountModel(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Waits like a mount of Google Drive, and remembers what was read in this process."""

    protocol = "mountmodel"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._read: set[str] = set()
        self._listed: set[str] = set()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("mountmodel://").rstrip("/")

    def ls(self, path: str, detail: bool = False, **options: Any) -> list[Any]:
        path = self._strip_protocol(path)
        found = list(super().ls(path, detail))
        if path not in self._listed:
            time.sleep(CROWD_S * min(1.0, len(found) / CROWD))
            self._listed.add(path)
        return found

    def _open(self, path: str, mode: str = "rb", **options: Any) -> io.BufferedReader:
        is_known = path in self._read
        self._read.add(path)
        if not is_known:
            time.sleep(FIRST_BYTE_S)
        return io.BufferedReader(_Slow(path, WARM_RATE if is_known else COLD_RATE), buffer_size=1 << 20)


class _Slow(io.FileIO):
    """A file with a limited rate."""

    def __init__(self, path: str, rate: float) -> None:
        super().__init__(path)
        self._rate, self._start, self._n = rate, time.monotonic(), 0

    def readinto(self, buffer: Any) -> int:
        n = super().readinto(buffer) or 0
        self._n += n
        time.sleep(max(0.0, self._start + self._n / self._rate - time.monotonic()))
        return n


fsspec.register_implementation("mountmodel", MountModel)
