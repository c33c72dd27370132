"""Retries for the filesystems of others, which the comparison needs."""

from __future__ import annotations

from functools import partial
from typing import Any

import fsspec

from cachedfs.demo.jobs import stubborn


class Stubborn(fsspec.AbstractFileSystem):
    """Retries the calls of `inner` after an error; a subclass defines its paths with `_strip_protocol`."""

    def __init__(self, inner: fsspec.AbstractFileSystem, **options: Any) -> None:
        super().__init__(**options)
        self._fs = inner

    def find(self, path: str, **options: Any) -> Any:
        return stubborn(self._fs.find, self._strip_protocol(path))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return stubborn(partial(self._fs.ls, detail=detail), self._strip_protocol(path))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        assert start is end is None
        return stubborn(self._fs.cat_file, self._strip_protocol(path))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return stubborn(self._fs.open, path)
