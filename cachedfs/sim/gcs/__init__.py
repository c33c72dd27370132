"""A simulated Google Cloud Storage on a loopback port."""

from __future__ import annotations

from pathlib import Path

from cachedfs.sim.gcs.api import GCSApi
from cachedfs.sim.network import Network
from cachedfs.sim.server import SimServer
from cachedfs.sim.service import Service

__all__ = ["GCSServer", "GCSService"]


class GCSService(GCSApi):
    """Google Cloud Storage with the commands of `GCSServer`."""

    def do_put(self, bucket: str, key: str, data: bytes, encoding: str | None, type: str | None) -> int:
        given = {"contentEncoding": encoding, "contentType": type}
        fields = {name: value for name, value in given.items() if value is not None}
        return self.store.put(bucket, key, data, fields).generation

    def do_delete(self, bucket: str, key: str) -> bool:
        return self.store.remove(bucket, key)

    def do_make_bucket(self, bucket: str) -> None:
        self.store.make_bucket(bucket)


class GCSServer(SimServer):
    """A simulated Google Cloud Storage on a loopback port."""

    room = "gcs"

    def _make_service(self, network: Network, folder: Path | None) -> Service:
        return GCSService(network, folder)

    def put(
        self,
        bucket: str,
        key: str,
        data: bytes,
        content_encoding: str | None = None,
        content_type: str | None = None,
    ) -> int:
        """Return the generation of a new version, made behind the back of the API and its log."""
        given = {"encoding": content_encoding, "type": content_type}
        return int(self._do("put", data, bucket=bucket, key=key, **given))

    def delete(self, bucket: str, key: str) -> bool:
        """Return whether there was such an object; behind the back of the API."""
        return bool(self._do("delete", bucket=bucket, key=key))

    def make_bucket(self, bucket: str) -> None:
        """Make an empty bucket unless it exists."""
        self._do("make_bucket", bucket=bucket)
