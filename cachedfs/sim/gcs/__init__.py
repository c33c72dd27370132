"""Server and test commands of the simulated Google Cloud Storage."""

from __future__ import annotations

from cachedfs.sim.gcs.api import GCSApi
from cachedfs.sim.server import SimServer, command

__all__ = ["GCSServer", "GCSService"]


class GCSService(GCSApi):
    """Simulated Google Cloud Storage with the commands of `GCSServer`."""

    def do_put(
        self,
        bucket: str,
        key: str,
        data: bytes,
        content_encoding: str | None = None,
        content_type: str | None = None,
    ) -> int:
        """Store a new version of an object, without an API request; return its generation.

        Creates the bucket if it is missing.
        """
        given = {"contentEncoding": content_encoding, "contentType": content_type}
        fields = {name: value for name, value in given.items() if value is not None}
        return self.store.put(bucket, key, data, fields).generation

    def do_delete(self, bucket: str, key: str) -> bool:
        """Delete an object, without an API request; return False if it did not exist."""
        return self.store.remove(bucket, key)

    def do_make_bucket(self, bucket: str) -> None:
        """Create an empty bucket unless it exists."""
        self.store.make_bucket(bucket)


class GCSServer(SimServer):
    """A simulated Google Cloud Storage on a port of 127.0.0.1. See SimServer for the parameters.

    Its methods change the objects directly, without an API request, and are not in the request log.
    """

    room, service = "gcs", GCSService
    put = command(GCSService.do_put)
    delete = command(GCSService.do_delete)
    make_bucket = command(GCSService.do_make_bucket)
