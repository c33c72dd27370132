"""Public downloads and folder pages of the simulated Drive, for callers without an account.

Google does not document them. They are simulated as gdown, yt-dlp and recorded sessions of wget and curl show them, the
page of a folder (`embeddedfolderview`) as programs that read it describe its markup.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote, urlencode

from cachedfs.sim.drive.items import FOLDER, Item
from cachedfs.sim.drive.reading import DriveReading, can
from cachedfs.sim.google import ranged
from cachedfs.sim.messages import Call, Refusal, Response
from cachedfs.sim.network import Network

_SIGN_IN = "https://accounts.google.com/ServiceLogin"
# The part of a link that names the editor of a document.
_EDITORS = {f"application/vnd.google-apps.{kind}": kind for kind in ("document", "presentation")}
_EDITORS |= {
    "application/vnd.google-apps.spreadsheet": "spreadsheets",
    "application/vnd.google-apps.form": "forms",
}


class PublicDownloads(DriveReading):
    """Answers as drive.usercontent.google.com and drive.google.com/embeddedfolderview do."""

    def __init__(self, network: Network, folder: Path | None = None) -> None:
        super().__init__(network, folder)
        self.scan_limit = 100 << 20  # bytes; a larger file is not scanned for viruses
        self.page_limit: int | None = None  # names on the page of a folder at most

    def render(self, style: str, refusal: Refusal) -> Response:
        if style == "html":
            return _page(refusal.status, refusal.message, headers=refusal.headers)
        return super().render(style, refusal)

    def _download(self, call: Call) -> Response:
        item = self.items.get(call.query.get("id", ""))
        if item is None or self.items.is_trashed(item):
            return _page(404, "Error 404 (Not Found)!!1")
        if not self._is_open(item, call):
            return _sign_in(call)
        if item.head is None:  # a folder or a document
            return _page(500, "Error 500 (Server Error)!!1")
        if not can(item, "canDownload"):
            return _page(403, "Google Drive - Access denied")
        if item.head.size > self.scan_limit and not call.query.get("confirm"):
            return _page(200, "Google Drive - Virus scan warning")  # where people confirm the download
        headers = {
            "Content-Type": item.head.mime,
            "Content-Disposition": _attachment(item.name),
            "Accept-Ranges": "bytes",
            "Last-Modified": formatdate(item.modified_ms // 1000, usegmt=True),
            "Date": formatdate(usegmt=True),
        }
        return ranged(call, headers, item.head)

    def _folder_page(self, call: Call) -> Response:
        """Return the page that shows what is in a public folder, for embedding into other pages."""
        item = self.items.get(call.query.get("id", ""))
        if item is None or item.mime != FOLDER or self.items.is_trashed(item):
            return _page(404, "Error 404 (Not Found)!!1")
        if not self._is_open(item, call):
            return _sign_in(call)
        inside = [child for child in self.items.children(item.id) if not child.trashed]
        inside.sort(key=lambda child: (child.mime != FOLDER, child.name, child.id))
        entries = "".join(map(self._entry, inside[: self.page_limit]))
        body = f'<div class="flip-contents"><div class="flip-entries">{entries}</div></div>'
        return _page(200, html.escape(item.name), body)

    def _is_open(self, item: Item, call: Call) -> bool:
        key = item.fields.get("resourceKey")
        return self.items.is_public(item) and (not key or key == call.query.get("resourcekey"))

    def _entry(self, item: Item) -> str:
        """Return one entry of a folder's page; a shortcut is shown as what it leads to."""
        details = item.fields.get("shortcutDetails") or {}
        id, mime = details.get("targetId", item.id), details.get("targetMimeType", item.mime)
        key = item.fields.get("resourceKey")
        if mime == FOLDER:
            link, query = f"https://drive.google.com/drive/folders/{id}", {}
            icon = '<div class="drive-sprite-folder-list-shared-icon" aria-label="Folder"></div>'
        else:
            kind = _EDITORS.get(mime)
            at = (
                f"https://docs.google.com/{kind}/d/{id}/edit"
                if kind
                else f"https://drive.google.com/file/d/{id}/view"
            )
            link, query = at, {"usp": "drive_web"}
            icon = f'<img src="https://drive-thirdparty.googleusercontent.com/16/type/{mime}" alt=""/>'
        query |= {"resourcekey": key} if key else {}
        link = html.escape(f"{link}?{urlencode(query)}" if query else link)
        day = datetime.fromtimestamp(item.modified_ms / 1000, UTC).strftime("%b %-d, %Y")
        return (
            f'<div class="flip-entry" id="entry-{item.id}" tabindex="0" role="link"><div class="flip-entry-info">'
            f'<a href="{link}" target="_blank"><div class="flip-entry-visual"><div class="flip-entry-visual-card">'
            f'<div class="flip-entry-thumb"><img src="https://lh3.google.com/u/0/d/{id}=w200" alt=""/></div></div></div>'
            f'<div class="flip-entry-list-icon">{icon}</div>'
            f'<div class="flip-entry-title">{html.escape(item.name, quote=False)}</div></a></div>'
            f'<div class="flip-entry-last-modified"><div>{day}</div></div></div>'
        )


def _sign_in(call: Call) -> Response:
    target = f"http://{call.host}{call.path}?{urlencode(call.query)}"
    query = urlencode({"service": "wise", "passive": "1209600", "continue": target})
    return Response(302, {"Location": f"{_SIGN_IN}?{query}"})


def _page(status: int, title: str, body: str = "", headers: Mapping[str, str] = {}) -> Response:
    text = (
        f"<!DOCTYPE html>\n<html><head><title>{title}</title></head><body>\n{body or title}\n</body></html>\n"
    )
    return Response(status, {"Content-Type": "text/html; charset=utf-8", **headers}, text.encode())


def _attachment(name: str) -> str:
    plain = re.sub(r'[^ -~]|["\\]', "_", name)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}"
