"""Read requests of the simulated Drive: items, listings, media, exports, changes, shared drives and the account."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cachedfs.sim.drive.access import Access, key_of
from cachedfs.sim.drive.fields import FIELDS, ME, show
from cachedfs.sim.drive.items import DOCUMENT, EXPORTS, Item, ItemChange, Items, Revision, rfc3339
from cachedfs.sim.drive.query import Mask, Query, parse_mask, parse_query, project
from cachedfs.sim.google import ranged
from cachedfs.sim.messages import Call, Refusal, Response
from cachedfs.sim.network import Network

_N_PAGES = 2000  # number of valid page tokens; older ones are rejected
# Fields of a reply without the parameter `fields`.
_FILE = parse_mask("kind,id,name,mimeType,resourceKey,driveId")
_LIST = {**parse_mask("kind,incompleteSearch,nextPageToken"), "files": _FILE}
_DRIVES = parse_mask("kind,nextPageToken,drives(kind,id,name)")
_CHANGES = parse_mask(
    "kind,nextPageToken,newStartPageToken,changes(kind,type,changeType,time,removed,fileId)"
)
_CHANGES = {**_CHANGES, "changes": {**_CHANGES["changes"], "file": _FILE}}


class _Page(NamedTuple):
    """A page of a listing, whose items were found when it began."""

    asked: tuple[str | None, ...]
    found: list[Item]
    is_listed: Callable[[Item], bool]  # an item may have changed since then
    start: int = 0  # index of the first item of this page
    number: int = 0


class DriveReading(Access):
    """Answers requests that change nothing."""

    def __init__(self, network: Network, folder: Path | None = None) -> None:
        super().__init__(network)
        self.items = Items(network.seed, network.now)
        if folder:
            self.items.load(folder, "root")
        self._pages: dict[str, _Page] = {}  # by token. Invariant: oldest first, at most _N_PAGES
        self.short_page: int | None = None

    # Items
    def _need(self, call: Call, item_id: str, *, in_any_drive: bool = False) -> Item:
        """Return an item that the caller may see. Raises Refusal (404) otherwise."""
        item = self.items.get(item_id)
        missing = Refusal(404, f"File not found: {item_id}.", "notFound", location="fileId")
        if item is None or not self.items.is_visible(item, is_reader=bool(key_of(call))):
            raise missing
        if item.drive_id and not (in_any_drive or call.flag("supportsAllDrives")):
            raise missing
        key = item.fields.get("resourceKey")
        given = call.headers.get("x-goog-drive-resource-keys", "").split(",")
        if key and f"{item.id}/{key}" not in [pair.strip() for pair in given]:
            raise missing
        return item

    def _shows(self, call: Call, mask: Mask) -> Callable[[Item], dict[str, Any]]:
        """Return a function that renders items for the caller, limited to the mask."""
        items, is_reader, names = self.items, bool(key_of(call)), mask or FIELDS
        if unknown := [name for name in mask if name not in FIELDS]:
            raise _bad_fields(unknown[0])
        parts = {name: inner for name, inner in mask.items() if inner}

        def shown(item: Item) -> dict[str, Any]:
            out = show(item, items, names, is_reader=is_reader)
            return out | project({name: out[name] for name in parts if name in out}, parts)

        return shown

    def _file(self, call: Call, item: Item) -> dict[str, Any]:
        return self._shows(call, _mask(call, _FILE))(item)

    def _get(self, call: Call, item_id: str) -> dict[str, Any]:
        return self._file(call, self._need(call, item_id))

    # Listings
    def _list(self, call: Call) -> dict[str, Any]:
        mask, limit, token = _mask(call, _LIST), _page_size(call), call.query.get("pageToken")
        asked = tuple(call.query.get(name) for name in ("q", "orderBy", "corpora", "driveId", "spaces"))
        page = self._pages.get(token) if token else self._first_page(call, asked)
        if page is None or page.asked != asked:
            raise invalid("pageToken")
        if self.short_page is not None:
            limit = min(limit, self.short_page) if page.number % 2 else 0
        end = page.start + limit
        out: dict[str, Any] = {"kind": "drive#fileList", "incompleteSearch": False}
        if end < len(page.found):
            out["nextPageToken"] = token = f"~!!~{uuid.uuid4().hex}"
            self._pages[token] = page._replace(start=end, number=page.number + 1)
            if len(self._pages) > _N_PAGES:
                del self._pages[next(iter(self._pages))]
        if not mask or "files" in mask:
            part = page.found[page.start : end]
            there = [item for item in part if self.items.get(item.id) is item and page.is_listed(item)]
            out["files"] = list(map(self._shows(call, mask.get("files", {})), there))
        return project(out, {name: {} for name in mask})

    def _first_page(self, call: Call, asked: tuple[str | None, ...]) -> _Page:
        items, drive_id, wants = self.items, call.query.get("driveId"), _wants_drives(call)
        query, is_reader = query_of(call), bool(key_of(call))
        if (call.query.get("corpora") == "drive") != bool(drive_id) or (drive_id and not wants):
            raise invalid("driveId", "A driveId needs corpora=drive and the two flags of shared drives.")
        if call.query.get("orderBy", "name") != "name":
            raise invalid("orderBy", "Only the order by name is simulated.")
        self._check_drive(call)
        tops = {items.root, *items.drives}

        def is_listed(item: Item) -> bool:
            is_here = item.drive_id == drive_id if drive_id else wants or not item.drive_id
            is_seen = is_here and items.is_visible(item, is_reader=is_reader) and item.id not in tops
            return is_seen and (query is None or query.matches(items, item))

        found = list(filter(is_listed, self._candidates(call, query)))
        if call.query.get("orderBy"):
            found.sort(key=lambda item: item.name.lower())
        return _Page(asked, found, is_listed)

    def _candidates(self, call: Call, query: Query | None) -> list[Item]:
        """Return a small superset of the matching items. Uses the index of names if the query has a name."""
        if query is None or query.parents is None:
            return [] if key_of(call) else list(self.items)  # without an account there is no corpus
        found: dict[str, Item] = {}
        for id in query.parents:
            folder = self._need(call, id).id
            rows = self.items.children(folder) if query.name is None else self.items.alike(folder, query.name)
            found |= {item.id: item for item in rows}
        return list(found.values())

    # Bytes
    def _revision(self, call: Call, item: Item, revision_id: str | None) -> Revision:
        """Return the revision that a request names, by default the newest."""
        if item.head is None:
            text = "Only files with binary content can be downloaded. Use Export with Docs Editors files."
            raise Refusal(403, text, "fileNotDownloadable", location="alt")
        if revision_id is None:
            return item.head
        if not _may_read_revisions(call, item):
            raise forbidden(item)
        for revision in item.revisions:
            if revision.id == revision_id:
                return revision
        raise Refusal(404, f"Revision not found: {revision_id}.", "notFound", location="revisionId")

    def _media(self, call: Call, item_id: str, revision_id: str | None = None) -> Response:
        # The method for revisions has no parameter for shared drives.
        item = self._need(call, item_id, in_any_drive=revision_id is not None)
        revision = self._revision(call, item, revision_id)
        if not can(item, "canDownload"):
            raise Refusal(403, "This file cannot be downloaded by the user.", "cannotDownloadFile")
        _check_abuse(call, item)
        headers = {"Content-Type": revision.mime, "Content-Disposition": "attachment"}
        return ranged(call, headers, revision)

    def _revisions(self, call: Call, item_id: str) -> dict[str, Any]:
        item = self._need(call, item_id, in_any_drive=True)
        if item.head is None or not _may_read_revisions(call, item):
            raise forbidden(item)
        rows = [{"kind": "drive#revision", "id": each.id, "size": str(each.size)} for each in item.revisions]
        return project({"kind": "drive#revisionList", "revisions": rows}, _mask(call, {}))

    def _export(self, call: Call, item_id: str) -> Response:
        item = self._need(call, item_id, in_any_drive=True)  # export has no supportsAllDrives parameter
        mime = call.query.get("mimeType", "")
        if item.mime not in EXPORTS:
            text = "Export only supports Docs Editors files."
            raise Refusal(403, text, "fileNotExportable")
        if mime not in EXPORTS[item.mime]:
            text = "The requested conversion is not supported."
            raise Refusal(400, text, "badRequest", location="convertTo")
        # Drive starts plain text exports of documents, but of no other type, with a byte order mark.
        mark = b"\xef\xbb\xbf" if (item.mime, mime) == (DOCUMENT, "text/plain") else b""
        return Response(200, {"Content-Type": mime}, mark + item.text)

    # Changes
    def _start_token(self, call: Call) -> dict[str, Any]:
        self._check_drive(call)
        text = str(self.items.changes()[1])
        return project({"kind": "drive#startPageToken", "startPageToken": text}, _mask(call, {}))

    def _list_changes(self, call: Call) -> dict[str, Any]:
        self._check_drive(call)
        if unknown := [name for name in ("includeRemoved", "restrictToMyDrive") if name in call.query]:
            raise Refusal(501, f"The simulation has no {unknown[0]}.")
        mask, limit, token = _mask(call, _CHANGES), _page_size(call), call.query.get("pageToken")
        if not token:
            raise Refusal(400, "Required parameter: pageToken", "required", location="pageToken")
        try:
            rest, resume = self.items.changes(int(token))
        except ValueError as error:
            raise invalid("pageToken") from error
        shown, rows = self._shows(call, mask.get("changes", {}).get("file", {})), list[dict[str, Any]]()
        for change in rest[:limit]:
            item = None if change.left else self.items.get(change.item_id)
            if (item is None or self.items.is_visible(item)) and _is_in_feed(change, call):
                row: dict[str, Any] = {
                    "kind": "drive#change",
                    "type": "file",
                    "changeType": "file",
                    "fileId": change.item_id,
                }
                row |= {"time": rfc3339(change.at_ms), "removed": item is None}
                rows.append(row | ({"file": shown(item)} if item else {}))
        out: dict[str, Any] = {"kind": "drive#changeList", "changes": rows}
        is_last = len(rest) <= limit
        out |= {"newStartPageToken": str(resume)} if is_last else {"nextPageToken": str(rest[limit].number)}
        return project(out, mask)

    # The account
    def _about(self, call: Call) -> dict[str, Any]:
        if "fields" not in call.query:
            text = "The 'fields' parameter is required for this method."
            raise Refusal(400, text, "required", location="fields")
        name = self._account(call)[0]
        user = ME if name == "user" else {**ME, "permissionId": name, "emailAddress": f"{name}@example.com"}
        quota = {"limit": str(15 << 30), "usage": "0", "usageInDrive": "0", "usageInDriveTrash": "0"}
        return project({"kind": "drive#about", "user": user, "storageQuota": quota}, _mask(call, {}))

    def _drives(self, call: Call) -> dict[str, Any]:
        names = {id: name for id, name in self.items.drives.items() if id not in self.items.foreign}
        can = {"canListChildren": True}
        rows = [
            {"kind": "drive#drive", "id": id, "name": name, "capabilities": can} for id, name in names.items()
        ]
        return project({"kind": "drive#driveList", "drives": rows}, _mask(call, _DRIVES))

    def _check_drive(self, call: Call) -> None:
        drive_id = call.query.get("driveId")
        if drive_id and not call.flag("supportsAllDrives"):
            raise invalid("driveId", "A driveId needs supportsAllDrives.")
        if drive_id and drive_id not in self.items.drives.keys() - self.items.foreign:
            raise Refusal(404, f"Shared drive not found: {drive_id}", "notFound", location="driveId")


def invalid(parameter: str, text: str = "Invalid Value") -> Refusal:
    return Refusal(400, text, "invalid", location=parameter)


def _bad_fields(text: str) -> Refusal:
    return Refusal(400, f"Invalid field selection {text}", "invalidParameter", location="fields")


def forbidden(item: Item) -> Refusal:
    text = f"The user does not have sufficient permissions for file {item.id}."
    return Refusal(403, text, "insufficientFilePermissions")


def can(item: Item, capability: str) -> bool:
    return bool(item.fields.get("capabilities", {}).get(capability, True))


def _may_read_revisions(call: Call, item: Item) -> bool:
    return can(item, "canReadRevisions") and not key_of(call)  # a reader sees only the newest


def query_of(call: Call) -> Query | None:
    text = call.query.get("q")
    try:
        return parse_query(text) if text else None
    except (ValueError, LookupError) as error:
        raise invalid("q") from error


def _wants_drives(call: Call) -> bool:
    return call.flag("includeItemsFromAllDrives") and call.flag("supportsAllDrives")


def _is_in_feed(change: ItemChange, call: Call) -> bool:
    if drive_id := call.query.get("driveId"):
        return change.drive_id == drive_id
    return (_wants_drives(call) and not change.left) or not change.drive_id


def _mask(call: Call, default: Mask) -> Mask:
    text = call.query.get("fields")
    try:
        return parse_mask(text) if text else default
    except (ValueError, LookupError) as error:
        raise _bad_fields(text or "") from error


def _page_size(call: Call) -> int:
    text = call.query.get("pageSize", "100")
    if not text.isdecimal() or not int(text):
        raise invalid("pageSize", f"Invalid value '{text}'.")
    return min(int(text), 1000)


def _check_abuse(call: Call, item: Item) -> None:
    """Refuse a flagged file unless that is acknowledged, and an acknowledgement for any other file."""
    is_flagged, is_acknowledged = bool(item.fields.get("abusive")), call.flag("acknowledgeAbuse")
    if is_flagged and not is_acknowledged:
        text = "This file has been identified as malware or spam and cannot be downloaded."
        raise Refusal(403, text, "cannotDownloadAbusiveFile")
    if is_acknowledged and not is_flagged:
        text = "This file has not been flagged for abuse."
        raise Refusal(403, text, "invalidAbuseAcknowledgment", location="acknowledgeAbuse")
