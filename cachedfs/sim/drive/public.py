"""Callers without an account: the API with an API key, and public downloads.

Google does not document the downloads. They are simulated as gdown, yt-dlp and recorded sessions of wget and curl
show them. One server stands for drive.google.com, drive.usercontent.google.com and docs.google.com.
"""

from __future__ import annotations

import html
import json
import re
import uuid
from collections.abc import Mapping
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from cachedfs.sim.drive.account import key_of
from cachedfs.sim.drive.items import DOCUMENT, PRESENTATION, SPREADSHEET, Item
from cachedfs.sim.drive.items import EXPORT_NAMES as _MIMES
from cachedfs.sim.drive.oauth import token_of
from cachedfs.sim.drive.reading import DriveReading
from cachedfs.sim.messages import Call, Refusal, Response, Route
from cachedfs.sim.network import Network
from cachedfs.sim.objects import DataBody

__all__ = ["PublicAccess"]

_EDITORS = {"document": DOCUMENT, "spreadsheets": SPREADSHEET, "presentation": PRESENTATION}
_FOR_KEYS = {"get", "list", "media", "export", "revisions", "batch"}  # kinds of requests that need no account
_UNREGISTERED = (
    "Method doesn't allow unregistered callers (callers without established identity). Please use API Key or other "
    "form of API consumer identity to call this API."
)
_LOGIN_REQUIRED = (
    "Request is missing required authentication credential. Expected OAuth 2 access token, login cookie or other "
    "valid authentication credential. See https://developers.google.com/identity/sign-in/web/devconsole-project."
)
_SIGN_IN = "https://accounts.google.com/ServiceLogin"
_INFECTED = "Only the owner is allowed to download infected files."
_USED_UP = (
    "Too many users have viewed or downloaded this file recently. Please try accessing the file again later."
)


class _Denied(Refusal):
    """An error that the API's front end reports. Unlike other errors of Drive it has a status, and maybe details."""

    def __init__(
        self, code: int, message: str, reason: str, status: str, *, short: str = "", details: Any = None
    ) -> None:
        realm = {"WWW-Authenticate": 'Bearer realm="https://accounts.google.com/"'} if code == 401 else {}
        super().__init__(code, message, reason, headers=realm)
        self._more = {"status": status} | ({"details": details} if details else {})
        self._short = short or message

    def to_json(self, **more: str) -> str:
        error = json.loads(super().to_json(**more, message=self._short))["error"]
        return json.dumps({"error": error | self._more}, indent=1)


class PublicAccess(DriveReading):
    """Admits callers with an API key, refuses those without any identity, and serves public downloads."""

    def __init__(self, network: Network, folder: Path | None = None) -> None:
        super().__init__(network, folder)
        self.keys: set[str] = set()
        self.scan_limit = 100 << 20  # bytes; a larger file is not scanned for viruses

    def render(self, style: str, refusal: Refusal) -> Response:
        if style == "html":
            return _page(refusal.status, refusal.message, headers=refusal.headers)
        return super().render(style, refusal)

    def _admit(self, call: Call, route: Route) -> None:
        if route.style == "html":
            return
        if key := key_of(call):
            if key not in self.keys:
                raise _invalid_key()
            if route.kind not in _FOR_KEYS:
                raise _login_required()
        elif self._tokens is not None and not token_of(call) and "/drive/v" in call.path:
            if call.method not in ("GET", "HEAD"):
                raise _login_required()
            if route.kind in ("media", "export"):
                raise Refusal(403, "The request is missing a valid API key.", "forbidden")
            raise _Denied(403, _UNREGISTERED, "forbidden", "PERMISSION_DENIED")
        super()._admit(call, route)

    def _route_public(self, call: Call) -> Route | None:
        """Return the route of an address for callers without an account, None for any other address."""
        item_id = call.query.get("id", "")
        if call.path == "/uc":
            return Route("redirect", self._uc, key=item_id, style="html", units=0)
        if call.path == "/download":
            return Route("media", self._download, key=item_id, style="html", units=0)
        if found := re.fullmatch(r"/(document|spreadsheets|presentation)/d/([^/]+)/export", call.path):
            mime, id = _EDITORS[found[1]], found[2]
            return Route("export", lambda _: self._exported(call, mime, id), key=id, style="html", units=0)
        return None

    def _uc(self, call: Call) -> Response:
        """Redirect to the host of downloads. It does not check the item, and forgets a confirmation."""
        known = {name: value for name, value in call.query.items() if name in ("id", "export", "resourcekey")}
        at = f"http://{call.host}/download?{urlencode(known)}"
        return Response(303, {"Content-Type": "application/binary", "Location": at})

    def _public(self, call: Call, item_id: str) -> Item | Response:
        """Return the item of an address, or the reply to who must not see it."""
        item = self.items.get(item_id)
        if item is None or self.items.is_trashed(item):
            return _page(404, "Error 404 (Not Found)!!1")
        key = item.fields.get("resourceKey")
        if not self.items.is_public(item) or (key and key != call.query.get("resourcekey")):
            target = f"http://{call.host}{call.path}?{urlencode(call.query)}"
            query = urlencode({"service": "wise", "passive": "1209600", "continue": target})
            return Response(302, {"Location": f"{_SIGN_IN}?{query}"})
        return item

    def _download(self, call: Call) -> Response:
        item = self._public(call, call.query.get("id", ""))
        if isinstance(item, Response):
            return item
        if item.head is None:  # a folder or a document
            return _page(500, "Error 500 (Server Error)!!1")
        if item.fields.get("abusive"):
            return _problem("Infected file", _INFECTED)
        if not item.fields.get("capabilities", {}).get("canDownload", True):
            return _page(403, "Google Drive - Access denied")
        if item.head.size > self.scan_limit and not call.query.get("confirm"):
            return _warning(call, item)
        headers = {"Content-Type": item.head.mime, "Content-Disposition": _attachment(item.title)}
        headers |= {
            "Accept-Ranges": "bytes",
            "Last-Modified": formatdate(item.modified_ms // 1000, usegmt=True),
        }
        answer = self._sent(call, item, item.head, headers)
        return answer or _problem("Quota exceeded", _USED_UP)

    def _exported(self, call: Call, mime: str, item_id: str) -> Response:
        """Return a document in the format that an address asks for. Ranges are ignored."""
        item, name = self._public(call, item_id), call.query.get("format", "")
        if isinstance(item, Response):
            return item
        if item.mime != mime or name not in _MIMES.get(mime, {}):
            return _page(404 if item.mime != mime else 400, "Sorry, unable to open the file at this time.")
        headers = {
            "Content-Type": _MIMES[mime][name],
            "Content-Disposition": _attachment(f"{item.title}.{name}"),
        }
        return Response(200, headers, DataBody(self._as(item, headers["Content-Type"])), is_chunked=True)


def _invalid_key() -> _Denied:
    details: dict[str, Any] = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": "API_KEY_INVALID",
    }
    details |= {"domain": "googleapis.com", "metadata": {"service": "drive.googleapis.com"}}
    text = "API key not valid. Please pass a valid API key."
    return _Denied(400, text, "badRequest", "INVALID_ARGUMENT", details=[details])


def _login_required() -> _Denied:
    return _Denied(401, _LOGIN_REQUIRED, "required", "UNAUTHENTICATED", short="Login Required.")


def _page(status: int, title: str, body: str = "", headers: Mapping[str, str] = {}) -> Response:
    """Return a page for people."""
    text = (
        f"<!DOCTYPE html>\n<html><head><title>{title}</title></head><body>\n{body or title}\n</body></html>\n"
    )
    return Response(status, {"Content-Type": "text/html; charset=utf-8", **headers}, DataBody(text.encode()))


def _problem(title: str, text: str) -> Response:
    """Return the page that says why a public file cannot be downloaded now. Its status is 200."""
    return _page(200, f"Google Drive - {title}", f'<p class="uc-error-subcaption">{text}</p>')


def _warning(call: Call, item: Item) -> Response:
    """Return the page that asks to confirm the download of a file that is too large for a virus scan."""
    inputs = {"id": item.id, "export": "download", "confirm": "t", "uuid": str(uuid.uuid4())}
    if key := item.fields.get("resourceKey"):
        inputs["resourcekey"] = key
    fields = "".join(f'<input type="hidden" name="{name}" value="{value}">' for name, value in inputs.items())
    button = '<input type="submit" id="uc-download-link" value="Download anyway"/>'
    form = (
        f'<form id="download-form" action="http://{call.host}/download" method="get">{button}{fields}</form>'
    )
    text = "Google Drive can't scan this file for viruses."
    name = f'<span class="uc-name-size"><a href="/open?id={item.id}">{html.escape(item.title)}</a></span>'
    body = f'<p class="uc-warning-caption">{text}</p><p class="uc-warning-subcaption">{name}</p>{form}'
    return _page(200, "Google Drive - Virus scan warning", body)


def _attachment(title: str) -> str:
    plain = re.sub(r'[^ -~]|["\\]', "_", title)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(title, safe='')}"
