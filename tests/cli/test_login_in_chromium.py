"""The sign-in with a real browser: headless Chromium shows the consent page, and a click allows access."""

import json
import webbrowser
from unittest import mock

import fsspec
import pytest

from cachedfs.sim import DriveServer
from tests.cli.helpers import run
from tests.report.browser import CHROMIUM, browser

pytestmark = [pytest.mark.works, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]


@pytest.mark.parametrize("button", ["allow", "deny"])
def test_a_click_in_chromium_signs_in(button, tmp_path, monkeypatch):
    seen = []
    press = f"setTimeout(() => document.querySelector('button[value={button}]').click())"

    def opened(url):
        seen.append(page.look(url, f"{press}; document.body.innerText"))

    with (
        DriveServer("off") as server,
        browser() as page,
        mock.patch.object(webbrowser, "get", return_value=mock.Mock(open=opened)),
    ):
        monkeypatch.setitem(fsspec.config.conf, "drive", {"endpoint_url": server.endpoint_url})
        path = tmp_path / "client.json"
        path.write_text(json.dumps(server.client_json()))
        result = run("login", "drive", "--client", str(path), status=int(button == "deny"))
    assert "My cachedfs wants access to your Google Account" in seen[0]
    assert ("Signed in as Sim User" in result.output) == (button == "allow")
