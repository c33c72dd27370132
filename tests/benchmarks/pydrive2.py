"""PyDrive2's filesystem by the URL `pydrive2://My Drive/...`, pointed at the simulated Drive."""

from __future__ import annotations

from typing import Any

import fsspec
import pydrive2.fs  # noqa: F401  (imported before the clock starts)

from cachedfs.demo.jobs import open_by_pydrive2
from tests.benchmarks.services import SERVICES
from tests.benchmarks.stubborn import Stubborn


class PyDrive2FileSystem(Stubborn):
    """Retries errors, as PyDrive2 does not always; lists names once with `find`."""

    protocol = "pydrive2"

    def __init__(self, **options: Any) -> None:
        inner, _ = open_by_pydrive2(f"drive://{SERVICES['drive'].top}")  # it cannot list My Drive itself
        super().__init__(inner, **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("pydrive2://").replace("My Drive", "root", 1).rstrip("/")


fsspec.register_implementation("pydrive2", PyDrive2FileSystem)
