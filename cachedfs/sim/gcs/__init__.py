"""The simulated Google Cloud Storage as a server."""

from __future__ import annotations

from cachedfs.sim.gcs.api import GCSService
from cachedfs.sim.server import SimServer, command

__all__ = ["GCSServer", "GCSService"]


class GCSServer(SimServer):
    """A simulated Google Cloud Storage on a port of 127.0.0.1. See SimServer for the parameters.

    Its methods change the objects directly, without an API request, and are not in the request log.
    """

    room, service = "gcs", GCSService
    put = command(GCSService.do_put)
    delete = command(GCSService.do_delete)
    make_bucket = command(GCSService.do_make_bucket)
