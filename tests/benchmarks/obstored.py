"""obstore by the URL `obstoregs://...`: its fsspec interface, at the simulated Google Cloud Storage."""

from __future__ import annotations

import os
from typing import Any

import fsspec
from obstore.fsspec import FsspecStore
from obstore.store import GCSStore


class ObstoreGCS(FsspecStore):  # type: ignore[misc]  # fsspec has no types
    """obstore's class for `gs://` under another name, as `gs://` is gcsfs here."""

    protocol = "obstoregs"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__("gs", *args, **options)
        self.protocol = "obstoregs"

    def _construct_store(self, bucket: str) -> GCSStore:
        config: Any = {"base_url": os.environ["FSSPEC_GS_ENDPOINT_URL"], "bearer_token": "t"}
        return GCSStore(bucket, config=config, client_options={"allow_http": True})


fsspec.register_implementation("obstoregs", ObstoreGCS)
