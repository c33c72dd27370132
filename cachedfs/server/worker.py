"""A worker process. It reads its settings from standard input, and ends when that is closed or at SIGTERM."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Mapping
from typing import Any

import fsspec.config
from aiohttp import web

from cachedfs.common.urls import filesystem_at
from cachedfs.server.access import AccessRules
from cachedfs.server.bucket import Bucket
from cachedfs.server.endpoint import Endpoint
from cachedfs.server.signatures import Keys

ENDS_WITHIN_S = 5.0  # the answers that are being sent
OPENS_WITHIN_S = 1.0  # the origins; the first request waits for one that takes longer
IDLE_S = 75.0  # after which a connection without a complete request is closed
MOST_HEADER = 16 << 10  # bytes of a line; a key may have 1 KiB, three times that in percent-encoding


logger = logging.getLogger("cachedfs.server")


def _without_traceback(record: logging.LogRecord) -> bool:
    record.exc_info = None  # of a malformed request, it may show what was sent
    return True


logger.addFilter(_without_traceback)


def run() -> None:
    """Serve. The first line of output says that it is ready, or which error it ends with, as JSON."""
    settings = json.loads(sys.stdin.buffer.readline())
    for level in (logging.WARNING, logging.ERROR):
        logging.addLevelName(level, logging.getLevelName(level).lower())
    logging.basicConfig(level=settings["log_level"], format="cachedfs: %(levelname)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: whoever started this process ends it
    try:
        asyncio.run(_serve(settings))
    except Exception as error:  # of any kind: whoever started this process raises it
        _say({"error": f"{error}" or type(error).__name__})
        raise SystemExit(1) from error


def _say(value: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def _serve(settings: Mapping[str, Any]) -> None:
    fsspec.config.conf.update(settings["conf"])
    buckets = _buckets(settings)
    keys = Keys(*settings["keys"]) if settings["keys"] else None
    access = AccessRules(keys, settings["domains"], settings["origins"])
    server = http_server(Endpoint(buckets, access, tuple(settings["domains"])))
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    opening = asyncio.gather(*(bucket.open_origin() for bucket in buckets.values()))

    def end_with_stdin() -> None:
        if not os.read(0, 4096):
            stop.set()

    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_reader(0, end_with_stdin)
    sock = socket.socket(fileno=settings["fd"])
    listening = await loop.create_server(server, sock=sock, ssl=_tls(settings["tls"]), backlog=1024)
    await asyncio.wait([opening], timeout=OPENS_WITHIN_S)
    _say({"ready": True})
    await stop.wait()
    opening.cancel()
    listening.close()
    server.pre_shutdown()  # closes connections that no request waits on
    await server.shutdown(ENDS_WITHIN_S)


def http_server(endpoint: Endpoint) -> web.Server:
    """Return a protocol factory that answers with `endpoint`. Needs a running event loop."""
    return web.Server(
        endpoint.handle,
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
        keepalive_timeout=IDLE_S,
        lingering_time=ENDS_WITHIN_S,
        logger=logger,
        max_field_size=MOST_HEADER,
        max_line_size=MOST_HEADER,
    )


def _buckets(settings: Mapping[str, Any]) -> dict[str, Bucket]:
    buckets = {}
    for name, (url, options) in settings["buckets"].items():
        fs, path = filesystem_at(url, options)
        buckets[name] = Bucket(fs, fs._strip(path))
    return buckets


def _tls(files: tuple[str, str] | None) -> ssl.SSLContext | None:
    if files is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*files)
    return context
