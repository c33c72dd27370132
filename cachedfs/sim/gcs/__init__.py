"""A simulated Google Cloud Storage on a loopback port."""

from __future__ import annotations

from cachedfs.sim.gcs.api import GCSApi
from cachedfs.sim.server import SimServer, command

__all__ = ["GCSServer", "GCSService"]


class GCSService(GCSApi):
    """Google Cloud Storage with the commands of `GCSServer`."""

    def do_put(
        self,
        bucket: str,
        key: str,
        data: bytes,
        content_encoding: str | None = None,
        content_type: str | None = None,
    ) -> int:
        """Return the generation of a new version, made behind the back of the API and its log."""
        given = {"contentEncoding": content_encoding, "contentType": content_type}
        fields = {name: value for name, value in given.items() if value is not None}
        return self.store.put(bucket, key, data, fields).generation

    def do_delete(self, bucket: str, key: str) -> bool:
        """Return whether there was such an object; behind the back of the API."""
        return self.store.remove(bucket, key)

    def do_make_bucket(self, bucket: str) -> None:
        """Make an empty bucket unless it exists."""
        self.store.make_bucket(bucket)


class GCSServer(SimServer):
    """A simulated Google Cloud Storage on a loopback port."""

    room, service = "gcs", GCSService
    put = command(GCSService.do_put)
    delete = command(GCSService.do_delete)
    make_bucket = command(GCSService.do_make_bucket)
