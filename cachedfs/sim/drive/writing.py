"""Write requests of the simulated Drive: inserts, uploads, copies, moves, updates, trash and deletion."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cachedfs.sim.drive.call import V2, V3, Ask, invalid
from cachedfs.sim.drive.items import EXPORTS, FOLDER, SHORTCUT, Item, is_editors
from cachedfs.sim.drive.reading import DriveReading, can, forbidden
from cachedfs.sim.google import json_answer, take_chunk
from cachedfs.sim.messages import Call, Refusal, Response
from cachedfs.sim.network import Network

__all__ = ["BINARY", "DriveUpload", "DriveWriting"]

BINARY = "application/octet-stream"
_WRITABLE = {"title", "mimeType", "description", "labels", "properties", "appProperties", "modifiedDate"}
_WRITABLE |= {"folderColorRgb", "originalFilename", "writersCanShare", "copyRequiresWriterPermission"}


@dataclass(slots=True)
class DriveUpload:
    """An upload in progress."""

    item_id: str
    is_new: bool
    ask: Ask  # the request that started it
    fields: dict[str, Any]
    mime: str
    data: bytearray = field(default_factory=bytearray)
    result: Item | None = None


class DriveWriting(DriveReading):
    """Answers all requests that change something."""

    def __init__(self, network: Network, folder: Path | None = None) -> None:
        super().__init__(network, folder)
        self.uploads: dict[str, DriveUpload] = {}
        self._reserved: set[str] = set()  # ids issued by generateIds
        self.accepts: list[int] = []  # byte limits of the next chunks of uploads

    def _new_upload(self, ask: Ask, fields: dict[str, Any], mime: str, item_id: str = "") -> DriveUpload:
        given = item_id or fields.get("id") or self.items.new_id()
        return DriveUpload(given, not item_id, ask, fields, fields.get("mimeType") or mime)

    def _may_make(self, upload: DriveUpload) -> list[str]:
        """Return the parent of a new item. Raises Refusal if it may not be created."""
        fields = upload.fields
        if self.items.get(upload.item_id):
            raise Refusal(409, "A file already exists with the provided ID.", "fileIdInUse")
        if "id" in fields and upload.item_id not in self._reserved:
            raise Refusal(400, "The provided file ID is not usable.", location="id")
        if "id" in fields and is_editors(upload.mime):
            text = "Generated IDs are not supported for Docs Editors formats."
            raise Refusal(400, text, "generatedIdNotSupported", location="file.id")
        parents = _ids(fields.get("parents")) or ["root"]
        if len(parents) > 1:
            raise Refusal(400, "A file cannot be put into several folders.", location="parents")
        folder = self._folder(upload.ask, parents[0])
        if not can(folder, "canAddChildren"):
            raise forbidden(folder)
        return [folder.id]

    def _folder(self, ask: Ask, item_id: str) -> Item:
        """Return the folder with this id. Raises Refusal for an item that is not a folder."""
        folder = self._need(ask, item_id)
        if folder.mime != FOLDER:
            raise Refusal(
                403, "The specified parent is not a folder.", "parentNotAFolder", location="parents"
            )
        return folder

    def _new_item(self, upload: DriveUpload) -> Item:
        """Create the item of a request, without content."""
        parents = self._may_make(upload)
        title, mime = upload.fields.get("title") or "Untitled", upload.mime or BINARY
        return self.items.make(title, mime, parents, item_id=upload.item_id)

    def _insert(self, upload: DriveUpload) -> Response:
        """Create an item without media: a folder, shortcut, document or empty file."""
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

    def _upload(self, upload: DriveUpload, kind: str, data: bytes) -> Response:
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
        return Response(200, {"Location": at, "X-GUploader-UploadID": upload_id})

    def _save(self, upload: DriveUpload, data: bytes) -> Item:
        """Store the uploaded content and return the item."""
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

    def _resume(self, upload: DriveUpload | None, call: Call) -> Response:
        """Return the reply to one request of a resumable upload."""
        if upload is None:
            raise Refusal(404, "The upload session is unknown or has expired.", "notFound")
        if call.method == "DELETE":
            del self.uploads[call.query["upload_id"]]
            return Response(499)
        if upload.result:
            return self._file(upload.ask, upload.result)
        total = take_chunk(upload.data, call, self.accepts.pop() if call.body and self.accepts else None)
        if total == len(upload.data):
            upload.result = self._save(upload, bytes(upload.data))
            return self._file(upload.ask, upload.result)
        return Response(308, {"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {})

    def _may_edit(self, ask: Ask, item_id: str, *, is_content: bool = False) -> Item:
        item = self._need(ask, item_id)
        if not can(item, "canEdit"):
            raise forbidden(item)
        if is_content and item.head is None:
            raise Refusal(403, "The content of this file cannot be replaced.", "fileNotDownloadable")
        return item

    def _apply(self, item: Item, given: Mapping[str, Any]) -> None:
        """Set the writable fields in the body of a request, except the parents."""
        fields = {name: value for name, value in given.items() if name in _WRITABLE and value is not None}
        self.items.edit(item, fields)

    def _update(self, ask: Ask, item_id: str) -> Response:
        item = self._may_edit(ask, item_id)
        self._revise(ask, item, ask.body)
        return self._file(ask, item)

    def _revise(self, ask: Ask, item: Item, given: Mapping[str, Any]) -> None:
        """Apply the body and parameters of an update."""
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
        """Move an item as requested. Since 2020 an item has only one parent."""
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
        target = [self._folder(ask, p).id for p in added or parents]
        left = [p for p in item.parents if p not in {self.items.root if r == "root" else r for r in removed}]
        self.items.move(item, target or left)

    def _trash(self, ask: Ask, item_id: str, trashed: bool) -> Response:
        item = self._may_edit(ask, item_id)
        if not item.parents and "sharedWithMeDate" not in item.fields:
            raise forbidden(item)
        self.items.edit(item, {"labels": {"trashed": trashed}})
        self.items.touch(item)
        return self._file(ask, item)

    def _delete(self, ask: Ask, item_id: str) -> Response:
        item = self._need(ask, item_id)
        if item.id == self.items.root or item.id in self.items.drives or not can(item, "canDelete"):
            raise forbidden(item)
        self.items.remove(item)
        return Response(204)

    def details(self, target_id: str) -> dict[str, str]:
        """Return the shortcut details for a target; only the id if the target does not exist."""
        target = self.items.get(target_id)
        if target is None:
            return {"targetId": target_id}
        out = {"targetId": target.id, "targetMimeType": target.mime}
        key = target.fields.get("resourceKey")
        return out | ({"targetResourceKey": key} if key else {})

    def _copy(self, ask: Ask, item_id: str) -> Response:
        source, fields = self._need(ask, item_id), ask.body
        if source.mime == FOLDER or not can(source, "canCopy"):
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

    def _generate_ids(self, ask: Ask) -> Response:
        text = ask.query.get("maxResults" if ask.words is V2 else "count", "10")
        if not 1 <= int(text) <= 1000:
            raise invalid("maxResults" if ask.words is V2 else "count", f"Invalid value '{text}'.")
        ids = [self.items.new_id() for _ in range(int(text))]
        self._reserved.update(ids)
        return json_answer({"kind": "drive#generatedIds", "space": "drive", "ids": ids})


def _ids(parents: list[Any] | None) -> list[str]:
    """Return the ids in the parents of a body: references in v2, plain ids in v3."""
    return [parent["id"] if isinstance(parent, dict) else parent for parent in parents or ()]
