"""PyDrive2 and gdrive-fsspec at the simulated Drive, by `pydrive2://My Drive/...` and `gdrivefsspec://My Drive/...`.

Both retry errors here, as they do not always by themselves and the comparison needs.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import fsspec
import pydrive2.fs  # noqa: F401  (imported before the clock starts)
from gdrive_fsspec.core import GoogleDriveFileSystem
from googleapiclient import discovery

from cachedfs.demo.jobs import Redirected, open_by_pydrive2, stubborn
from tests.benchmarks.services import SERVICES


class _Stubborn(fsspec.AbstractFileSystem):
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


class PyDrive2FileSystem(_Stubborn):
    """PyDrive2's filesystem, which lists names once with `find`."""

    protocol = "pydrive2"

    def __init__(self, **options: Any) -> None:
        inner, _ = open_by_pydrive2(f"drive://{SERVICES['drive'].top}")  # it cannot list My Drive itself
        super().__init__(inner, **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("pydrive2://").replace("My Drive", "root", 1).rstrip("/")


class _Redirected(GoogleDriveFileSystem):  # type: ignore[misc]  # untyped
    """gdrive-fsspec with its service at another server than Google's."""

    def connect(self, method: str | None = None) -> None:
        import httplib2

        http = Redirected(os.environ["FSSPEC_DRIVE_ENDPOINT_URL"]).authorize(httplib2.Http())
        self.srv = discovery.build("drive", "v3", http=http, static_discovery=True)
        self.files = self.srv.files()


class GDriveFSSpec(_Stubborn):
    """gdrive-fsspec; its paths are below My Drive."""

    protocol = "gdrivefsspec"

    def __init__(self, **options: Any) -> None:
        super().__init__(_Redirected(token="anon", skip_instance_cache=True), **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("gdrivefsspec://").removeprefix("My Drive/").rstrip("/")


for each in (PyDrive2FileSystem, GDriveFSSpec):
    fsspec.register_implementation(each.protocol, each)
