"""gdrive-fsspec by the URL `gdrivefsspec://My Drive/...`, pointed at the simulated Drive."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import fsspec
from gdrive_fsspec.core import GoogleDriveFileSystem
from googleapiclient import discovery

from cachedfs.demo_session import Redirected, stubborn


class _Redirected(GoogleDriveFileSystem):  # type: ignore[misc]  # untyped
    """gdrive-fsspec whose service leads to another server than Google's."""

    def connect(self, method: str | None = None) -> None:
        import httplib2

        http = Redirected(os.environ["FSSPEC_DRIVE_ENDPOINT_URL"]).authorize(httplib2.Http())
        self.srv = discovery.build("drive", "v3", http=http, static_discovery=True)
        self.files = self.srv.files()


class GDriveFSSpec(fsspec.AbstractFileSystem):
    """Asks again after an error, as gdrive-fsspec itself does not; paths are below My Drive."""

    protocol = "gdrivefsspec"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._fs = _Redirected(token="anon", skip_instance_cache=True)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("gdrivefsspec://").removeprefix("My Drive/").rstrip("/")

    def find(self, path: str, **options: Any) -> Any:
        return stubborn(self._fs.find, self._strip_protocol(path))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return stubborn(partial(self._fs.ls, detail=detail), self._strip_protocol(path))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        assert start is end is None
        return stubborn(self._fs.cat_file, self._strip_protocol(path))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return stubborn(self._fs.open, path)


fsspec.register_implementation("gdrivefsspec", GDriveFSSpec)
