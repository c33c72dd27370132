"""gdrive-fsspec by the URL `gdrivefsspec://My Drive/...`, pointed at the simulated Drive."""

from __future__ import annotations

import os
from typing import Any

import fsspec
from gdrive_fsspec.core import GoogleDriveFileSystem
from googleapiclient import discovery

from cachedfs.demo.jobs import Redirected
from tests.benchmarks.stubborn import Stubborn


class _Redirected(GoogleDriveFileSystem):  # type: ignore[misc]  # untyped
    """gdrive-fsspec with its service at another server than Google's."""

    def connect(self, method: str | None = None) -> None:
        import httplib2

        http = Redirected(os.environ["FSSPEC_DRIVE_ENDPOINT_URL"]).authorize(httplib2.Http())
        self.srv = discovery.build("drive", "v3", http=http, static_discovery=True)
        self.files = self.srv.files()


class GDriveFSSpec(Stubborn):
    """Retries errors, as gdrive-fsspec does not; paths are below My Drive."""

    protocol = "gdrivefsspec"

    def __init__(self, **options: Any) -> None:
        super().__init__(_Redirected(token="anon", skip_instance_cache=True), **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("gdrivefsspec://").removeprefix("My Drive/").rstrip("/")


fsspec.register_implementation("gdrivefsspec", GDriveFSSpec)
