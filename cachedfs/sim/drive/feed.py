"""Other read requests of the simulated Drive: changes, shared drives, revisions and the account."""

from __future__ import annotations

from typing import Any

from cachedfs.sim.drive.call import V2, V3, Ask, invalid
from cachedfs.sim.drive.items import ANYONE, FOLDER, ItemChange, rfc3339
from cachedfs.sim.drive.query import project
from cachedfs.sim.drive.reading import DriveReading, can, can_read_revisions, forbidden
from cachedfs.sim.drive.show import ME, user_v3
from cachedfs.sim.google import json_answer
from cachedfs.sim.messages import Refusal, Response

__all__ = ["Feed"]

_KINDS = {"drives": ("drive#drive", "drives"), "teamdrives": ("drive#teamDrive", "teamDrives")}


class Feed(DriveReading):
    """Answers requests about changes, shared drives, the account, revisions and permissions."""

    def _start_token(self, ask: Ask) -> Response:
        self._check_drive(ask)
        text = str(self.items.changes()[1])
        return json_answer(project({"kind": "drive#startPageToken", "startPageToken": text}, ask.mask({})))

    def _list_changes(self, ask: Ask) -> Response:
        self._check_drive(ask)
        is_v3, limit = ask.words is V3, ask.page_size()
        rest, resume = self._feed(ask)
        mask = ask.mask(ask.words.change_mask)
        with_removed = ask.query.get("includeRemoved" if is_v3 else "includeDeleted", "true") == "true"
        shown = self._shows(ask, mask.get("changes" if is_v3 else "items", {}).get("file", {}))
        rows = list[dict[str, Any]]()
        for change in rest[:limit]:
            item = None if change.left else self.items.get(change.item_id)
            if item and not self.items.is_visible(item):
                continue
            if _is_in_feed(change, ask) and (item or with_removed):
                rows.append(_change(change, shown(item) if item else None, is_v3=is_v3))
        out: dict[str, Any] = {"kind": "drive#changeList", "changes" if is_v3 else "items": rows}
        if len(rest) > limit:
            out["nextPageToken"] = str(rest[limit].number)
        else:
            out["newStartPageToken"] = str(resume)
        if not is_v3:
            out["largestChangeId"] = str(resume - 1)
        answer = json_answer(project(out, mask))
        answer.n_items = len(rows)
        return answer

    def _feed(self, ask: Ask) -> tuple[list[ItemChange], int]:
        """Return the changes since the caller's token, and the token to continue from."""
        token = ask.query.get("pageToken")
        if ask.words is V2:
            token = token or ask.query.get("startChangeId", "1")
        if not token:
            raise Refusal(400, "Required parameter: pageToken", "required", location="pageToken")
        try:
            return self.items.changes(int(token))
        except ValueError as error:
            raise invalid("pageToken", "Invalid Value") from error

    def _about(self, ask: Ask) -> Response:
        user = self._account(ask.call)[0]
        me = ME if user == "user" else {**ME, "permissionId": user, "emailAddress": f"{user}@example.com"}
        if ask.words is V3:
            if "fields" not in ask.query:
                text = "The 'fields' parameter is required for this method."
                raise Refusal(400, text, "required", location="fields")
            quota = {"limit": str(15 << 30), "usage": "0", "usageInDrive": "0", "usageInDriveTrash": "0"}
            return json_answer(
                project({"kind": "drive#about", "user": user_v3(me), "storageQuota": quota}, ask.mask({}))
            )
        out = {"kind": "drive#about", "name": me["displayName"], "user": me, "quotaType": "LIMITED"}
        out |= {"quotaBytesTotal": str(15 << 30), "quotaBytesUsed": "0", "rootFolderId": self.items.root}
        out |= {"largestChangeId": str(self.items.changes()[1] - 1), "permissionId": me["permissionId"]}
        return json_answer(project(out, ask.mask({})))

    def _drives(self, ask: Ask, which: str, rest: list[str]) -> Response:
        kind, key = _KINDS[which]
        names = {id: name for id, name in self.items.drives.items() if id not in self.items.foreign}
        rows = [{"kind": kind, "id": i, "name": n} for i, n in names.items() if not rest or [i] == rest]
        if rest:
            if not rows:
                raise Refusal(404, f"Shared drive not found: {rest[0]}", "notFound", location="driveId")
            return json_answer(project(rows[0], ask.mask({})))
        out = {"kind": f"{kind}List", key if ask.words is V3 else "items": rows}
        return json_answer(project(out, ask.mask({})))

    def _revisions(self, ask: Ask, item_id: str, which: list[str]) -> Response:
        item, is_v3 = self._need(ask, item_id, in_any_drive=True), ask.words is V3
        if item.mime == FOLDER or not can_read_revisions(ask, item):
            raise forbidden(item)
        rows = []
        for revision in [self._revision(ask, item, which[0])] if which else item.revisions:
            at, size = rfc3339(revision.modified_ms), str(revision.size)
            row = {"kind": "drive#revision", "id": revision.id, "mimeType": revision.mime}
            row |= {"originalFilename": item.title, "md5Checksum": revision.digest("md5")}
            row |= {"modifiedTime": at, "size": size} if is_v3 else {"modifiedDate": at, "fileSize": size}
            rows.append(row)
        if which:
            return json_answer(project(rows[0], ask.mask({})))
        out = {"kind": "drive#revisionList", "revisions" if is_v3 else "items": rows}
        return json_answer(project(out, ask.mask({})))

    def _delete_revision(self, ask: Ask, item_id: str, revision_id: str) -> Response:
        """Delete a revision of a file; if it was the newest, the previous one becomes current.

        The only revision of a file cannot be deleted.
        """
        item = self._need(ask, item_id, in_any_drive=True)  # this method has no supportsAllDrives parameter
        if not can(item, "canEdit"):
            raise forbidden(item)
        revision = self._revision(ask, item, revision_id)
        if item.revisions == [revision]:
            raise Refusal(403, "The last revision cannot be deleted.", "cannotDeleteOnlyRevision")
        item.revisions.remove(revision)
        self.items.touch(item)
        return Response(204)

    def _permissions(self, ask: Ask, item_id: str) -> Response:
        item = self._need(ask, item_id)
        row = {"kind": "drive#permission", "id": ME["permissionId"], "role": "owner", "type": "user"}
        row |= {"emailAddress": ME["emailAddress"]}
        key = "permissions" if ask.words is V3 else "items"
        return json_answer(
            project(
                {
                    "kind": "drive#permissionList",
                    key: [row, *([ANYONE] if self.items.is_public(item) else [])],
                },
                ask.mask({}),
            )
        )


def _change(change: ItemChange, shown: dict[str, Any] | None, *, is_v3: bool) -> dict[str, Any]:
    """Return a change as an API resource. For a deleted item it has only the item's id."""
    at = rfc3339(change.at_ms)
    out: dict[str, Any] = {"kind": "drive#change", "type": "file", "changeType": "file"}
    out |= {"fileId": change.item_id, "removed" if is_v3 else "deleted": shown is None}
    out |= {"time": at} if is_v3 else {"id": str(change.number), "modificationDate": at}
    return out | ({"file": shown} if shown is not None else {})


def _is_in_feed(change: ItemChange, ask: Ask) -> bool:
    if ask.drive_id:
        return change.drive_id == ask.drive_id
    wants = ask.wants_drives and not ask.flag("restrictToMyDrive")
    return (wants and not change.left) or not change.drive_id
