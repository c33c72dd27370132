"""What Google Drive answers: the API of version 2, what readers need of version 3, and OAuth tokens.

Written from the published reference (developers.google.com/drive/api: v2 and v3 files, changes, drives,
search query terms, resumable uploads, error codes) and the API's discovery documents.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

from cachedfs.sim.drive.call import V2, V3, Ask, bad_fields, invalid, ordered
from cachedfs.sim.drive.items import (
    DOCUMENT,
    EXPORTS,
    FOLDER,
    SHORTCUT,
    Change,
    Item,
    Items,
    Revision,
    rfc3339,
)
from cachedfs.sim.drive.query import Mask, Query, parse_query, project
from cachedfs.sim.drive.show import ME, to_v2
from cachedfs.sim.google import CHUNK, JSON, span_of, split_related
from cachedfs.sim.network import Network
from cachedfs.sim.objects import DataBody
from cachedfs.sim.quota import Meter, units_of
from cachedfs.sim.server import Answer, Call, Refusal, Route, Service

__all__ = ["BINARY", "DriveApi"]

_EXPORT_LIMIT = 10 << 20
_N_CURSORS = 200  # listings whose page tokens are good; older ones are rejected
_JWT_GRANT = "urn:ietf:params:oauth:grant-type:jwt-bearer"
BINARY = "application/octet-stream"
_WRITABLE = {"title", "mimeType", "description", "labels", "properties", "appProperties", "modifiedDate"}
_WRITABLE |= {"folderColorRgb", "originalFilename", "writersCanShare", "copyRequiresWriterPermission"}
_KINDS = {"drives": ("drive#drive", "drives"), "teamdrives": ("drive#teamDrive", "teamDrives")}


@dataclass(slots=True)
class _Cursor:
    """A listing that goes on: what may still match, as it was when the listing began."""

    asked: tuple[str | None, ...]
    candidates: list[Item]
    matches: Callable[[Item], bool]

    def page(self, at: int, limit: int) -> tuple[list[Item], int | None]:
        """Return the next matches, and where the page after them begins; None at the end."""
        found: list[Item] = []
        for i in range(at, len(self.candidates)):
            if self.matches(self.candidates[i]):
                if len(found) == limit:
                    return found, i
                found.append(self.candidates[i])
        return found, None


@dataclass(slots=True)
class _Upload:
    """A file on its way."""

    item_id: str
    is_new: bool
    ask: Ask  # the request that began it
    fields: dict[str, Any]
    mime: str
    data: bytearray = field(default_factory=bytearray)
    result: Item | None = None


class DriveApi(Service):
    """Answers as www.googleapis.com/drive and oauth2.googleapis.com do."""

    def __init__(self, network: Network, folder: Path | None = None) -> None:
        super().__init__(network)
        self.items = Items(network.seed, network.now)
        if folder:
            self.items.load(folder, "root")
        self.uploads: dict[str, _Upload] = {}
        self.cursors: dict[int, _Cursor] = {}  # Invariant: oldest first, at most _N_CURSORS
        self._n_cursors = 0
        self._reserved: set[str] = set()  # ids given out by generateIds
        self.meter = Meter(network.profile.quota)
        self.accounts: dict[str, tuple[str, str]] = {}  # token to user and project
        self.issued: set[str] = set()
        self.expired: set[str] = set()
        self.refuses_tokens = False
        self.short_page: int | None = None
        self.n_dropped = 0
        self.accept_only: int | None = None

    # Who may, and how much
    def render(self, style: str, refusal: Refusal) -> Answer:
        at = {"locationType": "header", "location": "Authorization"} if refusal.status == 401 else {}
        return Answer(refusal.status, {**JSON, **refusal.headers}, DataBody(refusal.to_json(**at).encode()))

    def failure(self) -> tuple[int, str]:
        chances = [(403, "rateLimitExceeded"), (429, "rateLimitExceeded"), (503, "backendError")]
        return self.network.rng.choice(chances)

    def _admit(self, call: Call, route: Route) -> None:
        if route.kind == "token":
            return
        given = _token_of(call)
        if given in self.expired:
            realm = {"WWW-Authenticate": 'Bearer realm="https://accounts.google.com/"'}
            raise Refusal(401, "Invalid Credentials", "authError", headers=realm)
        if given not in self.issued:
            super()._admit(call, route)
        self._charge(call, route)
        if route.key in self._forbidden:
            text = f"The user does not have sufficient permissions for file {route.key}."
            raise Refusal(403, text, "insufficientFilePermissions")

    def _charge(self, call: Call, route: Route) -> None:
        """Count a request against the quota of its user and project; Refusal when there is none left."""
        user, project = self._account(call)
        units = units_of(route.kind) if route.units is None else route.units
        whose = self.meter.charge(user, project, units, self.network.now()) if units else None
        if whose:
            raise self._too_fast(whose)
        call.units = units

    def _account(self, call: Call) -> tuple[str, str]:
        """Return the user and the project that a call is charged to: unless told otherwise, one for all tokens."""
        user, project = self.accounts.get(_token_of(call), ("user", "project"))
        return user, call.headers.get("x-goog-user-project", project)

    def _too_fast(self, whose: str) -> Refusal:
        if self.meter.quota.status == 403 and whose == "user":
            return Refusal(403, "User Rate Limit Exceeded", "userRateLimitExceeded")
        return Refusal(self.meter.quota.status, "Rate Limit Exceeded", "rateLimitExceeded")

    def _count_create(self, call: Call) -> None:
        if not self.meter.create(self._account(call)[0], self.network.now()):
            raise self._too_fast("user")

    def _token(self, call: Call) -> Answer:
        form = dict(parse_qsl(call.body.decode()))
        given = {"refresh_token": form.get("refresh_token"), _JWT_GRANT: form.get("assertion")}
        grant = form.get("grant_type", "")
        if grant not in given:
            return _json({"error": "unsupported_grant_type"}, 400)
        if not given[grant]:
            return _json({"error": "invalid_request"}, 400)
        if self.refuses_tokens:
            text = "Token has been expired or revoked."
            return _json({"error": "invalid_grant", "error_description": text}, 400)
        token = "ya29.sim-" + uuid.uuid4().hex
        self.issued.add(token)
        return _json({"access_token": token, "expires_in": 3599, "token_type": "Bearer"})

    # Which address means what
    def route(self, call: Call) -> Route:
        if call.method == "POST" and call.path in ("/token", "/oauth2/v4/token"):
            return Route("token", self._token)
        found = re.fullmatch(r"(/upload|/resumable/upload)?/drive/(v[23])/(.+)", call.path)
        if not found:
            raise Refusal(404, "Not Found")
        if call.headers.get("x-http-method-override") == "GET":
            call.query.update(parse_qsl(call.body.decode(), True))
            call.method, call.body = "GET", b""
        ask, parts = Ask(call, V3 if found[2] == "v3" else V2), [unquote(p) for p in found[3].split("/")]
        if found[1]:
            return self._route_upload(ask, parts)
        if parts[0] == "files" and len(parts) > 1 and parts[1] != "generateIds":
            return self._route_file(ask, parts[1], parts[2:])
        match call.method, parts:
            case "GET", ["files"]:
                return self._route_list(ask)
            case "POST", ["files"]:
                upload = self._new_upload(ask, ask.body, "")
                return Route("create", lambda _: self._insert(upload), key=upload.item_id)
            case "GET", ["files", "generateIds"]:
                return Route("ids", lambda _: self._generate_ids(ask))
            case "GET", ["changes", "startPageToken"]:
                return Route("change", lambda _: self._start_token(ask), units=5)
            case "GET", ["changes"]:
                return Route("change", lambda _: self._list_changes(ask))
            case "GET", ["about"]:
                return Route("about", lambda _: self._about(ask))
            case "GET", [("drives" | "teamdrives") as which, *rest]:
                units = 5 if rest else None
                return Route("drives", lambda _: self._drives(ask, which, rest), units=units)
        raise Refusal(404, "Not Found")

    def _route_file(self, ask: Ask, item_id: str, rest: list[str]) -> Route:
        item = self.items.get(item_id)
        key = item.id if item else item_id
        match ask.call.method, rest:
            case (("GET" | "HEAD"), []) if ask.query.get("alt") == "media":
                return Route("media", lambda _: self._media(ask, key), key=key)
            case (("GET" | "HEAD"), []):
                return Route("get", lambda _: self._file(ask, self._need(ask, key)), key=key)
            case (("PATCH" | "PUT"), []):
                return Route("update", lambda _: self._update(ask, key), key=key)
            case "DELETE", []:
                return Route("delete", lambda _: self._delete(ask, key), key=key)
            case "POST", [("trash" | "untrash") as verb] if ask.words is V2:
                return Route("update", lambda _: self._trash(ask, key, verb == "trash"), key=key)
            case "POST", ["copy"]:
                return Route("copy", lambda _: self._copy(ask, key), key=key)
            case "GET", ["export"]:
                return Route("export", lambda _: self._export(ask, key), key=key)
            case "GET", ["revisions", revision_id] if ask.query.get("alt") == "media":
                ask.query["revisionId"] = revision_id
                return Route("media", lambda _: self._media(ask, key), key=key)
            case "GET", ["revisions", *which]:
                units = 5 if which else None
                return Route("revisions", lambda _: self._revisions(ask, key, which), key=key, units=units)
            case "GET", ["permissions"]:
                return Route("permissions", lambda _: self._permissions(ask, key), key=key)
        raise Refusal(404, "Not Found")

    def _route_list(self, ask: Ask) -> Route:
        text, query = ask.query.get("q"), None
        try:
            query = parse_query(text, ask.words.terms) if text else None
        except (ValueError, LookupError):
            return Route("list", lambda _: _refuse(invalid("q", "Invalid Value")))
        parents = (query.parents() if query else None) or [""]
        folder = self.items.get(parents[0])
        return Route("list", lambda _: self._list(ask, query), key=folder.id if folder else parents[0])

    def _route_upload(self, ask: Ask, parts: list[str]) -> Route:
        call, upload_id = ask.call, ask.query.get("upload_id")
        if upload_id is not None:
            session = self.uploads.get(upload_id)
            key = session.item_id if session else ""
            return Route("upload", lambda c: self._resume(session, c), key=key, units=5)
        if parts[0] != "files" or len(parts) != (1 if call.method == "POST" else 2):
            raise Refusal(404, "Not Found")
        kind, fields, data = ask.query.get("uploadType"), dict[str, Any](), call.body
        mime = call.headers.get("content-type") or ""
        if kind == "multipart":
            fields, given, data = split_related(call)
            fields, mime = to_v2(fields) if ask.words is V3 else fields, given or ""
        elif kind == "resumable":
            fields, mime = ask.body, call.headers.get("x-upload-content-type", "")
        elif kind != "media":
            raise invalid("uploadType", "Invalid value for uploadType.")
        upload = self._new_upload(ask, fields, mime, *parts[1:])
        return Route("upload", lambda _: self._upload(upload, kind, data), key=upload.item_id)

    def _new_upload(self, ask: Ask, fields: dict[str, Any], mime: str, item_id: str = "") -> _Upload:
        given = item_id or fields.get("id") or self.items.new_id()
        return _Upload(given, not item_id, ask, fields, fields.get("mimeType") or mime)

    # Reading
    def _need(self, ask: Ask, item_id: str, *, in_any_drive: bool = False) -> Item:
        """Return the item that the caller may see; Refusal when it is none."""
        item = self.items.get(item_id)
        missing = Refusal(404, f"File not found: {item_id}.", "notFound", location="fileId")
        if item is None:
            raise missing
        if item.drive_id and not (ask.knows_drives or in_any_drive):
            raise missing
        key = item.fields.get("resourceKey")
        given = ask.call.headers.get("x-goog-drive-resource-keys", "").split(",")
        if key and f"{item.id}/{key}" not in [pair.strip() for pair in given]:
            raise missing
        return item

    def _shows(self, ask: Ask, mask: Mask) -> Callable[[Item], dict[str, Any]]:
        """Return what shows items in the words of the caller's API, as far as the mask keeps them."""
        words, items, host = ask.words, self.items, ask.call.host
        if unknown := [name for name in mask if name != "*" and name not in words.fields]:
            raise bad_fields(unknown[0])
        names = [name for name in words.fields if not mask or "*" in mask or name in mask]
        parts = {name: inner for name, inner in mask.items() if inner and name != "*"}

        def shown(item: Item) -> dict[str, Any]:
            out = words.show(item, items, host, names)
            return out | {name: project(out[name], inner) for name, inner in parts.items() if name in out}

        return shown

    def _file(self, ask: Ask, item: Item) -> Answer:
        return _json(self._shows(ask, ask.mask(ask.words.file_mask))(item))

    def _list(self, ask: Ask, query: Query | None) -> Answer:
        mask, limit, number = ask.mask(ask.words.list_mask), ask.page_size(), 0
        asked = tuple(ask.query.get(name) for name in ("q", "orderBy", "corpora", "driveId", "spaces"))
        if token := ask.query.get("pageToken"):
            cursor_id, at, number = self._from_token(token, asked)
            cursor = self.cursors[cursor_id]
        else:
            cursor, at, cursor_id = self._begin_list(ask, query, asked), 0, self._n_cursors + 1
        if self.short_page is not None:
            limit = min(limit, self.short_page) if number % 2 else 0
        found, resume = cursor.page(at, limit)
        out: dict[str, Any] = {"kind": "drive#fileList", "incompleteSearch": False}
        if ask.words is V2:
            out["selfLink"] = f"http://{ask.call.host}/drive/v2/files"
        if resume is not None:
            self._keep(cursor_id, cursor)
            out["nextPageToken"] = f"~!!~{cursor_id}.{resume}.{number + 1}"
        of_item = mask.get(ask.words.files, mask.get("*", None if mask else {}))
        if of_item is not None:
            out[ask.words.files] = list(map(self._shows(ask, of_item), found))
        answer = _json(project(out, {name: {} for name in mask}))
        answer.n_items = len(found)
        return answer

    def _from_token(self, token: str, asked: tuple[str | None, ...]) -> tuple[int, int, int]:
        found = re.fullmatch(r"~!!~(\d+)\.(\d+)\.(\d+)", token)
        cursor = self.cursors.get(int(found[1])) if found else None
        if not found or cursor is None or cursor.asked != asked:
            raise invalid("pageToken", "Invalid Value")
        return int(found[1]), int(found[2]), int(found[3])

    def _keep(self, cursor_id: int, cursor: _Cursor) -> None:
        if cursor_id not in self.cursors:
            self._n_cursors = cursor_id
            self.cursors[cursor_id] = cursor
            if len(self.cursors) > _N_CURSORS:
                del self.cursors[next(iter(self.cursors))]

    def _begin_list(self, ask: Ask, query: Query | None, asked: tuple[str | None, ...]) -> _Cursor:
        items, corpus, drive_id = self.items, ask.query.get("corpora", ""), ask.drive_id
        if (corpus == "drive" or drive_id) and not (drive_id and ask.wants_drives and corpus == "drive"):
            raise invalid("driveId", "A driveId needs corpora=drive and the two flags of shared drives.")
        if drive_id and drive_id not in items.drives:
            raise Refusal(404, f"Shared drive not found: {drive_id}", "notFound", location="driveId")
        matches = query.test(self._read) if query else lambda _: True
        in_space = ask.query.get("spaces", "drive") == "drive"
        tops = {items.root, *items.drives}

        def is_listed(item: Item) -> bool:
            seen = item.drive_id == drive_id if drive_id else ask.wants_drives or not item.drive_id
            return seen and item.id not in tops and items.get(item.id) is item and matches(item)

        candidates = self._candidates(ask, query) if in_space else []
        return _Cursor(asked, ordered(candidates, ask), is_listed)

    def _candidates(self, ask: Ask, query: Query | None) -> list[Item]:
        """Return few items, among them all that match: never a whole folder where a title is asked for."""
        parents = query.parents() if query else None
        if query is None or parents is None:
            return list(self.items)
        folders = [self._need(ask, parent).id for parent in parents]
        if len(folders) > 1 and self.n_dropped:
            folders = folders[: -self.n_dropped]
        title = query.title()
        found: dict[str, Item] = {}
        for folder in folders:
            rows = self.items.children(folder) if title is None else self.items.titled(folder, title)
            found |= {item.id: item for item in rows}
        return list(found.values())

    def _read(self, item: Item, name: str) -> Any:
        """Return an item's value of a term of a query."""
        match name:
            case "title" | "name":
                return item.title
            case "mimeType":
                return item.mime
            case "parents":
                return [*item.parents, "root"] if self.items.root in item.parents else item.parents
            case "trashed":
                return self.items.is_trashed(item)
            case "starred":
                return item.fields.get("labels", {}).get("starred", False)
            case "sharedWithMe":
                return "sharedWithMeDate" in item.fields
        return item.created_ms if name == "createdTime" else item.modified_ms

    def _revision(self, ask: Ask, item: Item, revision_id: str | None) -> Revision:
        """Return the revision that a request names, by default the newest."""
        if item.head is None:
            text = "Only files with binary content can be downloaded. Use Export with Docs Editors files."
            raise Refusal(403, text, "fileNotDownloadable", location="alt")
        if revision_id is None:
            return item.head
        if not item.fields.get("capabilities", {}).get("canReadRevisions", True):
            raise _forbidden(item)
        for revision in item.revisions:
            if revision.id == revision_id:
                return revision
        raise Refusal(404, f"Revision not found: {revision_id}.", "notFound", location="revisionId")

    def _media(self, ask: Ask, item_id: str) -> Answer:
        # A download link was got by who may see the file: it works without the flags of shared drives.
        item = self._need(ask, item_id, in_any_drive=ask.query.get("source") == "downloadUrl")
        revision = self._revision(ask, item, ask.query.get("revisionId"))
        if not item.fields.get("capabilities", {}).get("canDownload", True):
            raise Refusal(403, "This file cannot be downloaded by the user.", "cannotDownloadFile")
        if item.fields.get("abusive") and not ask.flag("acknowledgeAbuse"):
            text = "This file has been identified as malware or spam and cannot be downloaded."
            raise Refusal(403, text, "cannotDownloadAbusiveFile")
        headers = {"Content-Type": revision.mime, "Content-Disposition": "attachment"}
        given = ask.call.headers.get("range", "")
        span = span_of(given, revision.size)
        is_bounded = span is not None and not given.endswith("-")
        n_bytes = span[1] - span[0] if span and is_bounded else revision.size
        if not self.meter.download(item.id, n_bytes, self.network.now()):
            raise _downloaded_too_often(ask)
        if span is None:
            return Answer(200, headers, revision.body(0, revision.size))
        headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{revision.size}"
        return Answer(206, headers, revision.body(*span))

    def _export(self, ask: Ask, item_id: str) -> Answer:
        item = self._need(ask, item_id, in_any_drive=True)  # export has no parameter to say so
        mime = ask.query.get("mimeType", "")
        if item.mime not in EXPORTS:
            text = "Export only supports Docs Editors files."
            raise Refusal(403, text, "fileNotExportable")
        if mime not in EXPORTS[item.mime]:
            text = "The requested conversion is not supported."
            raise Refusal(400, text, "badRequest", location="convertTo")
        if len(item.text) > _EXPORT_LIMIT:
            text = "This file is too large to be exported."
            raise Refusal(403, text, "exportSizeLimitExceeded")
        # Drive begins the plain text of a document, and of nothing else, with a byte order mark.
        mark = b"\xef\xbb\xbf" if (item.mime, mime) == (DOCUMENT, "text/plain") else b""
        return Answer(200, {"Content-Type": mime}, DataBody(mark + item.text))

    # Writing
    def _may_make(self, upload: _Upload) -> list[str]:
        """Return the folder that a new item goes into; Refusal when none may be made."""
        fields = upload.fields
        if self.items.get(upload.item_id):
            raise Refusal(409, "A file already exists with the provided ID.", "fileIdInUse")
        if "id" in fields and upload.item_id not in self._reserved:
            raise Refusal(400, "The provided file ID is not usable.", location="id")
        parents = _ids(fields.get("parents")) or ["root"]
        if len(parents) > 1:
            raise Refusal(400, "A file cannot be put into several folders.", location="parents")
        folder = self._need(upload.ask, parents[0])
        if not _can(folder, "canAddChildren"):
            raise _forbidden(folder)
        return [folder.id]

    def _new_item(self, upload: _Upload) -> Item:
        """Return the item that a request makes, still empty."""
        parents = self._may_make(upload)
        title, mime = upload.fields.get("title") or "Untitled", upload.mime or BINARY
        return self.items.make(title, mime, parents, item_id=upload.item_id)

    def _insert(self, upload: _Upload) -> Answer:
        """Return the reply to an insert without media: a folder, shortcut, document or empty file."""
        fields, mime, details = upload.fields, upload.mime, {}
        if mime == SHORTCUT:
            target_id = (fields.get("shortcutDetails") or {}).get("targetId", "")
            details = self.details(self._need(upload.ask, target_id).id)
        self._may_make(upload)
        self._count_create(upload.ask.call)
        item = self._new_item(upload)
        if details:
            item.fields["shortcutDetails"] = details
        elif mime != FOLDER and mime not in EXPORTS:
            self.items.write(item, b"", 0)
        self._apply(item, fields)
        return self._file(upload.ask, item)

    def _upload(self, upload: _Upload, kind: str, data: bytes) -> Answer:
        if upload.is_new:
            self._may_make(upload)
            self._count_create(upload.ask.call)
        else:
            self._may_edit(upload.ask, upload.item_id, is_content=True)
        if kind != "resumable":
            return self._file(upload.ask, self._save(upload, data))
        upload_id, call = uuid.uuid4().hex, upload.ask.call
        self.uploads[upload_id] = upload
        at = f"http://{call.host}{call.path}?uploadType=resumable&upload_id={upload_id}"
        return Answer(200, {"Location": at, "X-GUploader-UploadID": upload_id})

    def _save(self, upload: _Upload, data: bytes) -> Item:
        """Return the item with its new content."""
        if upload.is_new:
            item = self._new_item(upload)
        else:
            item = self._may_edit(upload.ask, upload.item_id, is_content=True)
        self.items.write(item, data, len(data), upload.mime)
        if upload.is_new:
            self._apply(item, upload.fields)
        else:
            self._revise(upload.ask, item, upload.fields)
        return item

    def _resume(self, upload: _Upload | None, call: Call) -> Answer:
        """Return the reply to one request of a resumable upload."""
        if upload is None:
            raise Refusal(404, "The upload session is unknown or has expired.", "notFound")
        if call.method == "DELETE":
            del self.uploads[call.query["upload_id"]]
            return Answer(499)
        if upload.result:
            return self._file(upload.ask, upload.result)
        total = self._take(upload, call)
        if total == len(upload.data):
            upload.result = self._save(upload, bytes(upload.data))
            return self._file(upload.ask, upload.result)
        return Answer(308, {"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {})

    def _take(self, upload: _Upload, call: Call) -> int | None:
        """Return the total size as far as it is known, with the bytes that came added to the upload."""
        n = len(call.body)
        given = call.headers.get("content-range", f"bytes 0-{n - 1}/{n}" if n else "bytes */0")
        found = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", given)
        if not found:
            raise Refusal(400, f"Failed to parse Content-Range header: {given}")
        total = None if found[3] == "*" else int(found[3])
        if found[1] is None:
            return total
        start, stop = int(found[1]), int(found[2]) + 1
        if n != stop - start or (total is not None and stop > total):
            raise Refusal(400, f"Invalid request: {n} bytes in the body, {given}.")
        if stop != total and n % CHUNK:
            raise Refusal(400, f"Invalid request: {n} bytes are not a multiple of 262144.")
        if start <= len(upload.data):  # a gap is not stored: the reply says what is
            body = call.body if self.accept_only is None else call.body[: self.accept_only]
            self.accept_only = None
            upload.data += body[len(upload.data) - start :]
        return total

    def _may_edit(self, ask: Ask, item_id: str, *, is_content: bool = False) -> Item:
        item = self._need(ask, item_id)
        if not _can(item, "canEdit"):
            raise _forbidden(item)
        if is_content and item.head is None:
            raise Refusal(403, "The content of this file cannot be replaced.", "fileNotDownloadable")
        return item

    def _apply(self, item: Item, given: Mapping[str, Any]) -> None:
        """Give an item what the body of a request may say of it, its place excepted."""
        fields = {name: value for name, value in given.items() if name in _WRITABLE and value is not None}
        self.items.edit(item, fields)

    def _update(self, ask: Ask, item_id: str) -> Answer:
        item = self._may_edit(ask, item_id)
        self._revise(ask, item, ask.body)
        return self._file(ask, item)

    def _revise(self, ask: Ask, item: Item, given: Mapping[str, Any]) -> None:
        """Change an item as the body and the parameters of an update say."""
        date = given.get("modifiedDate")
        sets_date = ask.words is V3 or ask.flag("setModifiedDate")
        behavior = ask.query.get("modifiedDateBehavior", "fromBodyOrNow" if sets_date else "now")
        self._place(ask, item, given)
        self._apply(item, {name: value for name, value in given.items() if name != "modifiedDate"})
        if behavior.startswith("fromBody") and date:
            self.items.edit(item, {"modifiedDate": date})
        elif behavior != "noChange":
            item.modified_ms = self.items.tick()
        self.items.touch(item)

    def _place(self, ask: Ask, item: Item, fields: Mapping[str, Any]) -> None:
        """Move an item as a request says; since 2020 an item is put into one folder only."""
        added = [p for p in ask.query.get("addParents", "").split(",") if p]
        removed = {p for p in ask.query.get("removeParents", "").split(",") if p}
        if ask.words is V3 and "parents" in fields:
            text = "The parents field is not directly writable in update requests."
            raise Refusal(403, text, "fieldNotWritable")
        parents = _ids(fields.get("parents"))
        if not added and not parents and not removed:
            return
        if len(added or parents) > 1:
            raise Refusal(403, "A file cannot be put into several folders.", "multipleParentsNotAllowed")
        target = [self._need(ask, p).id for p in added or parents]
        left = [p for p in item.parents if p not in {self.items.root if r == "root" else r for r in removed}]
        self.items.move(item, target or left)

    def _trash(self, ask: Ask, item_id: str, trashed: bool) -> Answer:
        item = self._may_edit(ask, item_id)
        if not item.parents and "sharedWithMeDate" not in item.fields:
            raise _forbidden(item)
        self.items.edit(item, {"labels": {"trashed": trashed}})
        self.items.touch(item)
        return self._file(ask, item)

    def _delete(self, ask: Ask, item_id: str) -> Answer:
        item = self._need(ask, item_id)
        if item.id == self.items.root or item.id in self.items.drives or not _can(item, "canDelete"):
            raise _forbidden(item)
        self.items.remove(item)
        return Answer(204)

    def details(self, target_id: str) -> dict[str, str]:
        """Return what a shortcut says of its target; little when that is out of sight."""
        target = self.items.get(target_id)
        if target is None:
            return {"targetId": target_id}
        out = {"targetId": target.id, "targetMimeType": target.mime}
        key = target.fields.get("resourceKey")
        return out | ({"targetResourceKey": key} if key else {})

    def _copy(self, ask: Ask, item_id: str) -> Answer:
        source, fields = self._need(ask, item_id), ask.body
        if source.mime == FOLDER or not _can(source, "canCopy"):
            raise Refusal(403, "This file cannot be copied by the user.", "cannotCopyFile")
        fields = {"parents": list(source.parents), **fields}
        fields["title"] = fields.get("title") or f"Copy of {source.title}"
        upload = self._new_upload(ask, fields, source.mime)
        self._may_make(upload)
        self._count_create(ask.call)
        item = self._new_item(upload)
        item.text = source.text
        item.fields |= {name: value for name, value in source.fields.items() if name in _WRITABLE}
        if source.head:
            self.items.write(item, source.head.data, source.head.size)
        self._apply(item, fields)
        return self._file(ask, item)

    def _generate_ids(self, ask: Ask) -> Answer:
        text = ask.query.get("maxResults" if ask.words is V2 else "count", "10")
        if not 1 <= int(text) <= 1000:
            raise invalid("maxResults" if ask.words is V2 else "count", f"Invalid value '{text}'.")
        ids = [self.items.new_id() for _ in range(int(text))]
        self._reserved.update(ids)
        return _json({"kind": "drive#generatedIds", "space": "drive", "ids": ids})

    # All that is not a file
    def _start_token(self, ask: Ask) -> Answer:
        self._check_drive(ask)
        text = str(self.items.changes()[1])
        return _json(project({"kind": "drive#startPageToken", "startPageToken": text}, ask.mask({})))

    def _check_drive(self, ask: Ask) -> None:
        if ask.drive_id and not ask.knows_drives:
            raise invalid("driveId", "A driveId needs supportsAllDrives.")
        if ask.drive_id and ask.drive_id not in self.items.drives:
            raise Refusal(404, f"Shared drive not found: {ask.drive_id}", "notFound", location="driveId")

    def _list_changes(self, ask: Ask) -> Answer:
        self._check_drive(ask)
        is_v3, limit = ask.words is V3, ask.page_size()
        rest, resume = self._feed(ask)
        mask = ask.mask(ask.words.change_mask)
        with_removed = ask.query.get("includeRemoved" if is_v3 else "includeDeleted", "true") == "true"
        shown = self._shows(ask, mask.get("changes" if is_v3 else "items", {}).get("file", {}))
        rows = list[dict[str, Any]]()
        for change in rest[:limit]:
            item = None if change.left else self.items.get(change.item_id)
            if _is_in_feed(change, ask) and (item or with_removed):
                rows.append(_change(change, shown(item) if item else None, is_v3=is_v3))
        out: dict[str, Any] = {"kind": "drive#changeList", "changes" if is_v3 else "items": rows}
        if len(rest) > limit:
            out["nextPageToken"] = str(rest[limit].number)
        else:
            out["newStartPageToken"] = str(resume)
        if not is_v3:
            out["largestChangeId"] = str(resume - 1)
        answer = _json(project(out, mask))
        answer.n_items = len(rows)
        return answer

    def _feed(self, ask: Ask) -> tuple[list[Change], int]:
        """Return the changes behind the caller's token, and the number of the next one."""
        token = ask.query.get("pageToken")
        if ask.words is V2:
            token = token or ask.query.get("startChangeId", "1")
        if not token:
            raise Refusal(400, "Required parameter: pageToken", "required", location="pageToken")
        try:
            return self.items.changes(int(token))
        except ValueError as error:
            raise invalid("pageToken", "Invalid Value") from error

    def _about(self, ask: Ask) -> Answer:
        if ask.words is V3:
            if "fields" not in ask.query:
                text = "The 'fields' parameter is required for this method."
                raise Refusal(400, text, "required", location="fields")
            quota = {"limit": str(15 << 30), "usage": "0", "usageInDrive": "0", "usageInDriveTrash": "0"}
            return _json(project({"kind": "drive#about", "user": ME, "storageQuota": quota}, ask.mask({})))
        out = {"kind": "drive#about", "name": ME["displayName"], "user": ME, "quotaType": "LIMITED"}
        out |= {"quotaBytesTotal": str(15 << 30), "quotaBytesUsed": "0", "rootFolderId": self.items.root}
        out |= {"largestChangeId": str(self.items.changes()[1] - 1), "permissionId": ME["permissionId"]}
        return _json(project(out, ask.mask({})))

    def _drives(self, ask: Ask, which: str, rest: list[str]) -> Answer:
        kind, key = _KINDS[which]
        names = self.items.drives
        rows = [{"kind": kind, "id": i, "name": n} for i, n in names.items() if not rest or [i] == rest]
        if rest:
            if not rows:
                raise Refusal(404, f"Shared drive not found: {rest[0]}", "notFound", location="driveId")
            return _json(project(rows[0], ask.mask({})))
        out = {"kind": f"{kind}List", key if ask.words is V3 else "items": rows}
        return _json(project(out, ask.mask({})))

    def _revisions(self, ask: Ask, item_id: str, which: list[str]) -> Answer:
        item, is_v3 = self._need(ask, item_id, in_any_drive=True), ask.words is V3
        if item.mime == FOLDER or not _can(item, "canReadRevisions"):
            raise _forbidden(item)
        rows = []
        for revision in [self._revision(ask, item, which[0])] if which else item.revisions:
            at, size = rfc3339(revision.modified_ms), str(revision.size)
            row = {"kind": "drive#revision", "id": revision.id, "mimeType": revision.mime}
            row |= {"originalFilename": item.title, "md5Checksum": revision.digest("md5")}
            row |= {"modifiedTime": at, "size": size} if is_v3 else {"modifiedDate": at, "fileSize": size}
            rows.append(row)
        if which:
            return _json(project(rows[0], ask.mask({})))
        out = {"kind": "drive#revisionList", "revisions" if is_v3 else "items": rows}
        return _json(project(out, ask.mask({})))

    def _permissions(self, ask: Ask, item_id: str) -> Answer:
        self._need(ask, item_id)
        row = {"kind": "drive#permission", "id": ME["permissionId"], "role": "owner", "type": "user"}
        row |= {"emailAddress": ME["emailAddress"]}
        key = "permissions" if ask.words is V3 else "items"
        return _json(project({"kind": "drive#permissionList", key: [row]}, ask.mask({})))


def _token_of(call: Call) -> str:
    return call.headers.get("authorization", "").removeprefix("Bearer ")


def _json(value: Any, status: int = 200) -> Answer:
    return Answer(status, dict(JSON), DataBody(json.dumps(value).encode()))


def _forbidden(item: Item) -> Refusal:
    text = f"The user does not have sufficient permissions for file {item.id}."
    return Refusal(403, text, "insufficientFilePermissions")


def _downloaded_too_often(ask: Ask) -> Refusal:
    """Return the refusal of a file that was downloaded too often; bounded ranges of what is left still pass."""
    text = "The download quota for this file has been exceeded."
    if ask.words is V3:
        return Refusal(403, text, "downloadQuotaExceeded")
    return Refusal(403, text, "quotaExceeded", location="quota.download")


def _refuse(refusal: Refusal) -> Answer:
    raise refusal


def _change(change: Change, shown: dict[str, Any] | None, *, is_v3: bool) -> dict[str, Any]:
    """Return a change as the API has it; of a deleted item nothing is said but its id."""
    at = rfc3339(change.at_ms)
    out: dict[str, Any] = {"kind": "drive#change", "type": "file", "changeType": "file"}
    out |= {"fileId": change.item_id, "removed" if is_v3 else "deleted": shown is None}
    out |= {"time": at} if is_v3 else {"id": str(change.number), "modificationDate": at}
    return out | ({"file": shown} if shown is not None else {})


def _is_in_feed(change: Change, ask: Ask) -> bool:
    if ask.drive_id:
        return change.drive_id == ask.drive_id
    wants = ask.wants_drives and not ask.flag("restrictToMyDrive")
    return (wants and not change.left) or not change.drive_id


def _can(item: Item, capability: str) -> bool:
    return bool(item.fields.get("capabilities", {}).get(capability, True))


def _ids(parents: list[Any] | None) -> list[str]:
    """Return the ids in the parents of a body: references in v2, plain in v3."""
    return [parent["id"] if isinstance(parent, dict) else parent for parent in parents or ()]
