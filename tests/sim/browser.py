"""A bare HTTP client for the simulated clouds, and a browser for the consent page of the simulated Google."""

from __future__ import annotations

import contextlib
import html
import http.client
import re
import threading
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Iterator
from typing import Any
from unittest import mock
from urllib.parse import urlencode, urljoin, urlsplit

from cachedfs.sim import SimServer

Reply = tuple[int, Any, bytes]


def ask(
    server: SimServer, target: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> Reply:
    """Send one request with a bare client; return status, headers and body."""
    connection = http.client.HTTPConnection(urlsplit(server.endpoint_url).netloc, timeout=60)
    try:
        connection.request(method, target, body, {k.replace("_", "-"): v for k, v in headers.items()})
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read()
    finally:
        connection.close()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None: ...


def fetch(url: str, fields: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Return status, redirect target and text of a GET, or of a POST of these fields."""
    opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, None if fields is None else urlencode(fields).encode()) as reply:
            return reply.status, "", reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers.get("Location", ""), error.read().decode()


def allow(url: str, decision: str = "allow") -> str:
    """Press a button of the consent page at `url`; return the address that the browser is sent to."""
    status, _, page = fetch(url)
    assert status == 200, page
    [action] = re.findall('<form .*action="(.*?)"', page)
    hidden = re.findall('<input .*?name="(.*?)" value="(.*?)"', page)
    fields = {html.unescape(name): html.unescape(value) for name, value in hidden}
    return fetch(urljoin(url, action), {**fields, "decision": decision})[1]


@contextlib.contextmanager
def opening(decision: str | None = "allow") -> Iterator[list[str]]:
    """Replace the browser that Python opens; yield the addresses it was given. None: the user closes the window."""
    opened, threads = list[str](), list[threading.Thread]()

    class Browser:
        def open(self, url: str, new: int = 0, autoraise: bool = True) -> bool:
            opened.append(url)
            if decision is not None:
                threads.append(threading.Thread(target=lambda: fetch(allow(url, decision))))
                threads[-1].start()
            return True

    with mock.patch.object(webbrowser, "get", return_value=Browser()):
        yield opened
    for thread in threads:
        thread.join()
