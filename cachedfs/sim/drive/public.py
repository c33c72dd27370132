"""Public downloads from the simulated Drive, for callers without an account.

Google does not document them. They are simulated as gdown, yt-dlp and recorded sessions of wget and curl show them.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote, urlencode

from cachedfs.sim.drive.reading import DriveReading, can
from cachedfs.sim.messages import Call, Refusal, Response
from cachedfs.sim.network import Network
from cachedfs.sim.objects import DataBody

__all__ = ["PublicDownloads"]

_SIGN_IN = "https://accounts.google.com/ServiceLogin"
_INFECTED = "Only the owner is allowed to download infected files."
_USED_UP = (
    "Too many users have viewed or downloaded this file recently. Please try accessing the file again later."
)


class PublicDownloads(DriveReading):
    """Answers as drive.usercontent.google.com does."""

    def __init__(self, network: Network, folder: Path | None = None) -> None:
        super().__init__(network, folder)
        self.scan_limit = 100 << 20  # bytes; a larger file is not scanned for viruses

    def render(self, style: str, refusal: Refusal) -> Response:
        if style == "html":
            return _page(refusal.status, refusal.message, headers=refusal.headers)
        return super().render(style, refusal)

    def _download(self, call: Call) -> Response:
        item = self.items.get(call.query.get("id", ""))
        if item is None or self.items.is_trashed(item):
            return _page(404, "Error 404 (Not Found)!!1")
        key = item.fields.get("resourceKey")
        if not self.items.is_public(item) or (key and key != call.query.get("resourcekey")):
            target = f"http://{call.host}{call.path}?{urlencode(call.query)}"
            query = urlencode({"service": "wise", "passive": "1209600", "continue": target})
            return Response(302, {"Location": f"{_SIGN_IN}?{query}"})
        if item.head is None:  # a folder or a document
            return _page(500, "Error 500 (Server Error)!!1")
        if item.fields.get("abusive"):
            return _problem("Infected file", _INFECTED)
        if not can(item, "canDownload"):
            return _page(403, "Google Drive - Access denied")
        if item.head.size > self.scan_limit and not call.query.get("confirm"):
            return _warning(call, item.id, item.name)
        headers = {
            "Content-Type": item.head.mime,
            "Content-Disposition": _attachment(item.name),
            "Accept-Ranges": "bytes",
            "Last-Modified": formatdate(item.modified_ms // 1000, usegmt=True),
            "Date": formatdate(usegmt=True),
        }
        answer = self._sent(call, item, item.head, headers)
        return answer or _problem("Quota exceeded", _USED_UP)


def _page(status: int, title: str, body: str = "", headers: Mapping[str, str] = {}) -> Response:
    """Return a page for people."""
    text = (
        f"<!DOCTYPE html>\n<html><head><title>{title}</title></head><body>\n{body or title}\n</body></html>\n"
    )
    return Response(status, {"Content-Type": "text/html; charset=utf-8", **headers}, DataBody(text.encode()))


def _problem(title: str, text: str) -> Response:
    """Return the page that says why a public file cannot be downloaded now. Its status is 200."""
    return _page(200, f"Google Drive - {title}", f'<p class="uc-error-subcaption">{text}</p>')


def _warning(call: Call, item_id: str, name: str) -> Response:
    """Return the page that asks to confirm the download of a file that is too large for a virus scan."""
    hidden = {**call.query, "id": item_id, "confirm": "t"}
    fields = "".join(f'<input type="hidden" name="{n}" value="{html.escape(v)}">' for n, v in hidden.items())
    text = f"<p>Google Drive can't scan this file for viruses.</p><p>{html.escape(name)}</p>"
    form = f'<form id="download-form" action="http://{call.host}/download" method="get">{fields}</form>'
    return _page(200, "Google Drive - Virus scan warning", text + form)


def _attachment(name: str) -> str:
    plain = re.sub(r'[^ -~]|["\\]', "_", name)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}"
