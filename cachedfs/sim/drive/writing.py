"""Write requests of the simulated Drive: creation, uploads, copies, moves, updates and deletion."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cachedfs.sim.drive.items import BINARY, FOLDER, Item
from cachedfs.sim.drive.reading import DriveReading, can, forbidden
from cachedfs.sim.google import Uploads, UploadSession
from cachedfs.sim.messages import Call, Refusal, Response
from cachedfs.sim.network import Network

_WRITABLE = {"name", "mimeType", "description", "starred", "trashed", "properties", "appProperties"}
_WRITABLE |= {"modifiedTime", "folderColorRgb", "originalFilename", "writersCanShare"}
_WRITABLE |= {"copyRequiresWriterPermission"}


class DriveWriting(DriveReading, Uploads):
    """Answers all requests that change something."""

    def __init__(self, network: Network, folder: Path | None = None) -> None:
        super().__init__(network, folder)
        self._reserved: set[str] = set()  # ids issued by generateIds

    # New items
    def _generate_ids(self, call: Call) -> dict[str, Any]:
        ids = [self.items.new_id() for _ in range(int(call.query.get("count", "10")))]
        self._reserved.update(ids)
        return {"kind": "drive#generatedIds", "space": "drive", "ids": ids}

    def _create(self, call: Call, item_id: str) -> dict[str, Any]:
        """Create a folder, the only kind of item that is created without media here."""
        given = call.json()
        if given.get("mimeType") != FOLDER:
            raise Refusal(501, "The simulation creates only folders without media.")
        item = self._new_item(call, item_id, given, FOLDER)
        self._apply(item, given)
        return self._file(call, item)

    def _copy(self, call: Call, item_id: str) -> dict[str, Any]:
        source, given = self._need(call, item_id), call.json()
        if source.mime == FOLDER or not can(source, "canCopy"):
            raise Refusal(403, "This file cannot be copied by the user.", "cannotCopyFile")
        given = {"parents": source.parents, "name": f"Copy of {source.name}", **given}
        new_id = given.get("id") or self.items.new_id()
        item = self._new_item(call, new_id, given, given.get("mimeType") or source.mime)
        item.text = source.text
        item.fields |= {name: value for name, value in source.fields.items() if name in _WRITABLE}
        if source.head:
            self.items.write(item, source.head.data, source.head.size)
        self._apply(item, given)
        return self._file(call, item)

    def _new_item(self, call: Call, item_id: str, given: Mapping[str, Any], mime: str) -> Item:
        parents = self._may_create(call, item_id, given)
        if call.query.get("uploadType") != "resumable":  # those are counted when they begin
            self._count_create(call)
        return self.items.make(given.get("name") or "Untitled", mime, parents, item_id=item_id)

    def _may_create(self, call: Call, item_id: str, given: Mapping[str, Any]) -> list[str]:
        """Return the parent of a new item. Raises Refusal if it may not be created."""
        if self.items.get(item_id):
            raise Refusal(409, "A file already exists with the provided ID.", "fileIdInUse")
        if "id" in given and item_id not in self._reserved:
            raise Refusal(400, "The provided file ID is not usable.", location="id")
        parents = given.get("parents") or ["root"]
        if len(parents) > 1:
            raise Refusal(400, "A file cannot be put into several folders.", location="parents")
        folder = self._need(call, parents[0])
        if folder.mime != FOLDER or not can(folder, "canAddChildren"):
            raise forbidden(folder)
        return [folder.id]

    def details(self, target_id: str) -> dict[str, str]:
        """Return the shortcut details for a target; only the id if the target does not exist."""
        target = self.items.get(target_id)
        if target is None:
            return {"targetId": target_id}
        out = {"targetId": target.id, "targetMimeType": target.mime}
        key = target.fields.get("resourceKey")
        return out | ({"targetResourceKey": key} if key else {})

    # Uploads
    def _begin_upload(
        self, call: Call, item_id: str | None, fields: dict[str, Any], mime: str | None
    ) -> UploadSession:
        """Return the upload that a request begins. `item_id` is None for a new item."""
        id = item_id or fields.get("id") or self.items.new_id()
        return UploadSession(
            call, id, fields, fields.get("mimeType") or mime or BINARY, is_new=item_id is None
        )

    def check(self, upload: UploadSession) -> None:
        if upload.is_new:
            self._may_create(upload.call, upload.key, upload.fields)
            self._count_create(upload.call)
        else:
            self._may_edit(upload.call, upload.key, is_content=True)

    def save(self, upload: UploadSession, data: bytes) -> dict[str, Any]:
        call, given, mime = upload.call, upload.fields, upload.mime or BINARY
        if upload.is_new:
            item = self._new_item(call, upload.key, given, mime)
            self.items.write(item, data, len(data))
            self._apply(item, given)
        else:
            item = self._may_edit(call, upload.key, is_content=True)
            self.items.write(item, data, len(data), mime)
            self._revise(call, item, given)
        return self._file(call, item)

    # Changes
    def _may_edit(self, call: Call, item_id: str, *, is_content: bool = False) -> Item:
        item = self._need(call, item_id)
        if not can(item, "canEdit"):
            raise forbidden(item)
        if is_content and item.head is None:
            raise Refusal(403, "The content of this file cannot be replaced.", "fileNotDownloadable")
        return item

    def _apply(self, item: Item, given: Mapping[str, Any]) -> None:
        fields = {name: value for name, value in given.items() if name in _WRITABLE and value is not None}
        self.items.edit(item, fields)

    def _update(self, call: Call, item_id: str) -> dict[str, Any]:
        item = self._may_edit(call, item_id)
        self._revise(call, item, call.json())
        return self._file(call, item)

    def _revise(self, call: Call, item: Item, given: Mapping[str, Any]) -> None:
        """Apply the body and parameters of an update."""
        if "parents" in given:
            text = "The parents field is not directly writable in update requests."
            raise Refusal(403, text, "fieldNotWritable")
        self._move(call, item)
        if not given.get("modifiedTime"):
            item.modified_ms = self.items.tick()
        self._apply(item, given)
        self.items.touch(item)

    def _move(self, call: Call, item: Item) -> None:
        """Move an item as requested. Since 2020 an item has only one parent."""
        added = [id for id in call.query.get("addParents", "").split(",") if id]
        removed = [
            self.items.root if id == "root" else id for id in call.query.get("removeParents", "").split(",")
        ]
        if len(added) > 1:
            raise Refusal(403, "A file cannot be put into several folders.", "multipleParentsNotAllowed")
        left = [id for id in item.parents if id not in removed]
        if added or left != item.parents:
            self.items.move(item, [self._need(call, id).id for id in added] or left)

    def _delete(self, call: Call, item_id: str) -> Response:
        item = self._need(call, item_id)
        if item.id == self.items.root or item.id in self.items.drives or not can(item, "canDelete"):
            raise forbidden(item)
        self.items.remove(item)
        return Response(204)

    def _delete_revision(self, call: Call, item_id: str, revision_id: str) -> Response:
        """Delete a revision of a file; if it was the newest, the previous one becomes current.

        The only revision of a file cannot be deleted.
        """
        item = self._need(call, item_id, in_any_drive=True)  # this method has no supportsAllDrives parameter
        if not can(item, "canEdit"):
            raise forbidden(item)
        revision = self._revision(call, item, revision_id)
        if item.revisions == [revision]:
            raise Refusal(403, "The last revision cannot be deleted.", "cannotDeleteOnlyRevision")
        item.revisions.remove(revision)
        self.items.touch(item)
        return Response(204)
