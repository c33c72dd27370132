"""Read requests about files of the simulated Drive: metadata, listings, media and exports."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachedfs.sim.drive.account import Accounts, key_of
from cachedfs.sim.drive.call import V2, V3, Ask, bad_fields, invalid, ordered
from cachedfs.sim.drive.items import DOCUMENT, EXPORTS, Item, Items, Revision
from cachedfs.sim.drive.query import Mask, Query, project
from cachedfs.sim.google import json_answer, ranged
from cachedfs.sim.messages import Call, Refusal, Response
from cachedfs.sim.network import Network
from cachedfs.sim.objects import DataBody

__all__ = ["DriveReading", "can", "can_read_revisions", "forbidden"]

_EXPORT_LIMIT = 10 << 20
_N_CURSORS = 200  # number of listings with valid page tokens; tokens of older ones are rejected


@dataclass(slots=True)
class _Cursor:
    """A listing in progress: the candidates from when it started, filtered as pages are requested."""

    asked: tuple[str | None, ...]
    candidates: list[Item]
    matches: Callable[[Item], bool]

    def page(self, at: int, limit: int) -> tuple[list[Item], int | None]:
        """Return the next matches and the position of the next page; None at the end."""
        found: list[Item] = []
        for i in range(at, len(self.candidates)):
            if self.matches(self.candidates[i]):
                if len(found) == limit:
                    return found, i
                found.append(self.candidates[i])
        return found, None


class DriveReading(Accounts):
    """Answers requests that read files."""

    def __init__(self, network: Network, folder: Path | None = None) -> None:
        super().__init__(network)
        self.items = Items(network.seed, network.now)
        if folder:
            self.items.load(folder, "root")
        self.cursors: dict[int, _Cursor] = {}  # Invariant: oldest first, at most _N_CURSORS
        self._n_cursors = 0
        self.short_page: int | None = None
        self.n_dropped = 0

    def _need(self, ask: Ask, item_id: str, *, in_any_drive: bool = False) -> Item:
        """Return an item that the caller may see. Raises Refusal (404) otherwise."""
        item = self.items.get(item_id)
        missing = Refusal(404, f"File not found: {item_id}.", "notFound", location="fileId")
        if item is None or not self.items.is_visible(item, is_reader=bool(key_of(ask.call))):
            raise missing
        if item.drive_id and not (ask.knows_drives or in_any_drive):
            raise missing
        key = item.fields.get("resourceKey")
        given = ask.call.headers.get("x-goog-drive-resource-keys", "").split(",")
        if key and f"{item.id}/{key}" not in [pair.strip() for pair in given]:
            raise missing
        return item

    def _shows(self, ask: Ask, mask: Mask) -> Callable[[Item], dict[str, Any]]:
        """Return a function that renders items in the caller's API version, limited to the mask."""
        words, items, host, is_reader = ask.words, self.items, ask.call.host, bool(key_of(ask.call))
        if unknown := [name for name in mask if name != "*" and name not in words.fields]:
            raise bad_fields(unknown[0])
        names = [name for name in words.fields if not mask or "*" in mask or name in mask]
        parts = {name: inner for name, inner in mask.items() if inner and name != "*"}

        def shown(item: Item) -> dict[str, Any]:
            out = words.show(item, items, host, names, is_reader=is_reader)
            return out | {name: project(out[name], inner) for name, inner in parts.items() if name in out}

        return shown

    def _get(self, ask: Ask, item_id: str) -> Response:
        item = self._need(ask, item_id)
        if ask.flag("acknowledgeAbuse"):
            text = "The acknowledgeAbuse parameter is only applicable for download requests."
            raise Refusal(403, text, "invalidAbuseAcknowledgment", location="acknowledgeAbuse")
        return self._file(ask, item)

    def _file(self, ask: Ask, item: Item) -> Response:
        return json_answer(self._shows(ask, ask.mask(ask.words.file_mask))(item))

    def _list(self, ask: Ask, query: Query | None) -> Response:
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
        answer = json_answer(project(out, {name: {} for name in mask}))
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
        self._check_drive(ask)
        matches = query.test(self._read) if query else lambda _: True
        in_space = ask.query.get("spaces", "drive") == "drive"
        tops, wants, is_reader = {items.root, *items.drives}, ask.wants_drives, bool(key_of(ask.call))

        def is_listed(item: Item) -> bool:
            is_here = item.drive_id == drive_id if drive_id else wants or not item.drive_id
            is_seen = is_here and items.is_visible(item, is_reader=is_reader) and item.id not in tops
            return is_seen and items.get(item.id) is item and matches(item)

        candidates = self._candidates(ask, query) if in_space else []
        return _Cursor(asked, ordered(candidates, ask), is_listed)

    def _candidates(self, ask: Ask, query: Query | None) -> list[Item]:
        """Return a small superset of the matching items. Uses the title index if the query names a title."""
        parents = query.parents() if query else None
        if query is None or parents is None:
            return [] if key_of(ask.call) else list(self.items)  # without an account there is no corpus
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
        """Return the value of an item for a query term."""
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
        if not can_read_revisions(ask, item):
            raise forbidden(item)
        for revision in item.revisions:
            if revision.id == revision_id:
                return revision
        raise Refusal(404, f"Revision not found: {revision_id}.", "notFound", location="revisionId")

    def _media(self, ask: Ask, item_id: str, revision_id: str | None) -> Response:
        # A downloadUrl works without the shared-drive flags: its holder was allowed to see the file. The method of
        # v3 for revisions has no such flags.
        is_any = ask.query.get("source") == "downloadUrl" or (ask.words is V3 and revision_id is not None)
        item = self._need(ask, item_id, in_any_drive=is_any)
        revision = self._revision(ask, item, revision_id)
        if not item.fields.get("capabilities", {}).get("canDownload", True):
            raise Refusal(403, "This file cannot be downloaded by the user.", "cannotDownloadFile")
        _check_abuse(ask, item)
        headers = {"Content-Type": revision.mime, "Content-Disposition": "attachment"}
        answer = self._sent(ask.call, item, revision, headers)
        if answer is None:
            raise _downloaded_too_often(ask)
        return answer

    def _sent(self, call: Call, item: Item, revision: Revision, headers: dict[str, str]) -> Response | None:
        """Return the bytes that a call asks for, or None if the quota of the file is used up."""
        answer = ranged(call, headers, revision)
        is_open = call.headers.get("range", "").endswith("-")
        n_bytes = revision.size if is_open else answer.body.size
        return answer if self.meter.download(item.id, n_bytes, self.network.now()) else None

    def _export(self, ask: Ask, item_id: str) -> Response:
        item = self._need(ask, item_id, in_any_drive=True)  # export has no supportsAllDrives parameter
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
        return Response(200, {"Content-Type": mime}, DataBody(self._as(item, mime)))

    def _as(self, item: Item, mime: str) -> bytes:
        """Return a document in another format."""
        # Drive starts plain text exports of documents, but of no other type, with a byte order mark.
        mark = b"\xef\xbb\xbf" if (item.mime, mime) == (DOCUMENT, "text/plain") else b""
        return mark + item.text

    def _check_drive(self, ask: Ask) -> None:
        if ask.drive_id and not ask.knows_drives:
            raise invalid("driveId", "A driveId needs supportsAllDrives.")
        if ask.drive_id and ask.drive_id not in self.items.drives.keys() - self.items.foreign:
            raise Refusal(404, f"Shared drive not found: {ask.drive_id}", "notFound", location="driveId")


def forbidden(item: Item) -> Refusal:
    text = f"The user does not have sufficient permissions for file {item.id}."
    return Refusal(403, text, "insufficientFilePermissions")


def _check_abuse(ask: Ask, item: Item) -> None:
    """Refuse a flagged file unless its owner acknowledges that, and an acknowledgement for any other file."""
    is_flagged, location = bool(item.fields.get("abusive")), "acknowledgeAbuse"
    if not ask.flag(location):
        if is_flagged:
            text = "This file has been identified as malware or spam and cannot be downloaded."
            raise Refusal(403, text, "cannotDownloadAbusiveFile")
    elif not is_flagged:
        text = "This file has not been flagged for abuse."
        raise Refusal(403, text, "invalidAbuseAcknowledgment", location=location)
    elif "sharedWithMeDate" in item.fields:
        text = "Only the owner can download abusive files."
        raise Refusal(403, text, "cannotDownloadAbusiveFile", location=location)


def _downloaded_too_often(ask: Ask) -> Refusal:
    """Return the error for an exceeded file quota. Bounded ranges within the remaining quota still succeed."""
    text = "The download quota for this file has been exceeded."
    if ask.words is V3:
        return Refusal(403, text, "downloadQuotaExceeded")
    return Refusal(403, text, "quotaExceeded", location="quota.download")


def can_read_revisions(ask: Ask, item: Item) -> bool:
    """Return True if the caller may read all revisions of an item: not just a reader, as who has only a key is."""
    return can(item, "canReadRevisions") and not key_of(ask.call)


def can(item: Item, capability: str) -> bool:
    return bool(item.fields.get("capabilities", {}).get(capability, True))
