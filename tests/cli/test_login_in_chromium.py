"""The sign-in with a real browser: headless Chromium shows the consent page, and a click allows access."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import threading
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import fsspec
import pytest

from cachedfs.sim import DriveServer
from tests.cli.helpers import run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.works, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]


@pytest.fixture
def chromium(tmp_path: Path) -> Iterator[str]:
    """The address of the DevTools of a new Chromium."""
    options = "--headless=new --no-sandbox --disable-gpu --no-proxy-server --remote-debugging-port=0"
    command = [str(CHROMIUM), *options.split(), f"--user-data-dir={tmp_path / 'profile'}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = (re.search(r"ws://(\S+?)/", line) for line in process.stderr)
        yield f"http://{next(found[1] for found in lines if found)}"
        process.terminate()


async def click(devtools: str, url: str, button: str) -> list[str]:
    """Open a page, press a button, and wait for the page that follows; return the texts of both."""
    async with aiohttp.ClientSession() as http:
        async with http.put(f"{devtools}/json/new?about:blank") as reply:
            target = await reply.json()
        async with http.ws_connect(target["webSocketDebuggerUrl"]) as socket:

            async def call(method: str, until: str | None = None, **params: Any) -> Any:
                """Call a method of the protocol; return its result, once the event `until` has come too."""
                await socket.send_json({"id": 1, "method": method, "params": params})
                result = None
                while result is None or until is not None:
                    message = json.loads((await socket.receive()).data)
                    result = message["result"] if message.get("id") == 1 else result
                    until = None if message.get("method") == until else until
                return result

            async def evaluate(code: str, until: str | None = None) -> Any:
                return (await call("Runtime.evaluate", until, expression=code))["result"].get("value")

            await call("Page.enable")
            await call("Page.navigate", "Page.loadEventFired", url=url)
            before = await evaluate("document.body.innerText")
            await evaluate(f"document.querySelector('button[value={button}]').click()", "Page.loadEventFired")
            return [before, await evaluate("document.body.innerText")]


@pytest.mark.parametrize("button", ["allow", "deny"])
def test_a_click_in_chromium_signs_in(
    chromium: str, button: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    threads: list[threading.Thread] = []

    class Browser:
        def open(self, url: str, **_: Any) -> None:
            threads.append(
                threading.Thread(target=lambda: seen.extend(asyncio.run(click(chromium, url, button))))
            )
            threads[-1].start()

    with DriveServer("off") as server, mock.patch.object(webbrowser, "get", return_value=Browser()):
        monkeypatch.setitem(fsspec.config.conf, "drive", {"endpoint_url": server.endpoint_url})
        path = tmp_path / "client.json"
        path.write_text(json.dumps(server.client_json()))
        result = run("login", "drive", "--client", str(path), status=int(button == "deny"))
        threads[0].join()
    assert "My cachedfs wants access to your Google Account" in seen[0]
    assert "go back to the terminal" in seen[1]
    assert ("Signed in as Sim User" in result.output) == (button == "allow")
