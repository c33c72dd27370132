"""A real browser: headless Chromium, controlled over its own protocol."""

import asyncio
import base64
import contextlib
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

import aiohttp

from tests.support import until

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


class Page:
    """A page that the browser shows."""

    def __init__(self, port: int) -> None:
        self._port = port

    def look(self, url: str, script: str, *, width: int = 1200, picture: pathlib.Path | None = None):
        """Open `url` in a window of a width; return the value of `script` there, and save a screenshot to `picture`."""
        return asyncio.run(self._look(url, script, width, picture))

    async def _look(self, url, script, width, picture):
        async with aiohttp.ClientSession() as session:
            async with session.put(f"http://127.0.0.1:{self._port}/json/new?about:blank") as reply:
                target = await reply.json()
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:

                async def ask(number, method, **params):
                    await socket.send_json({"id": number, "method": method, "params": params})
                    while (answer := await socket.receive_json()).get("id") != number:
                        pass
                    return answer["result"]

                size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
                await ask(1, "Emulation.setDeviceMetricsOverride", **size)
                await ask(2, "Page.enable")
                await socket.send_json({"id": 3, "method": "Page.navigate", "params": {"url": url}})
                while (await socket.receive_json()).get("method") != "Page.loadEventFired":
                    pass
                found = await ask(4, "Runtime.evaluate", expression=script, returnByValue=True)
                if picture is not None:
                    shot = await ask(5, "Page.captureScreenshot", captureBeyondViewport=True)
                    picture.write_bytes(base64.b64decode(shot["data"]))
                return found["result"].get("value")


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """Run the browser for as long as the block does."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        port = pathlib.Path(home, "DevToolsActivePort")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command = [CHROMIUM, *options, f"--user-data-dir={home}", "--remote-debugging-port=0", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until(lambda: port.exists() and len(port.read_text().splitlines()) == 2)
            yield Page(int(port.read_text().splitlines()[0]))
        finally:
            process.terminate()
            process.wait(120)
