"""PyDrive2's filesystem by the URL `pydrive2://My Drive/...`, pointed at the simulated Drive."""

from __future__ import annotations

from functools import partial
from typing import Any

import fsspec
import pydrive2.fs  # noqa: F401  (imported before the clock starts)

from cachedfs.demo_session import open_by_pydrive2, stubborn
from tests.benchmarks.services import SERVICES


class PyDrive2FileSystem(fsspec.AbstractFileSystem):
    """Asks again after an error, as PyDrive2 itself does not always; knows its names once `find` was called."""

    protocol = "pydrive2"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._fs, _ = open_by_pydrive2(f"drive://{SERVICES['drive'].top}")  # it cannot list My Drive itself

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("pydrive2://").replace("My Drive", "root", 1).rstrip("/")

    def find(self, path: str, **options: Any) -> Any:
        return stubborn(self._fs.find, self._strip_protocol(path))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return stubborn(partial(self._fs.ls, detail=detail), self._strip_protocol(path))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        assert start is end is None
        return stubborn(self._fs.cat_file, self._strip_protocol(path))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return stubborn(self._fs.open, path)


fsspec.register_implementation("pydrive2", PyDrive2FileSystem)
