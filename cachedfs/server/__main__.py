"""A worker of `cachedfs serve`."""

from cachedfs.server.worker import run

run()
