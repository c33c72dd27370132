"""Representations of a Drive item in versions 2 and 3 of the API, field by field."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cachedfs.sim.drive.items import EXPORTS, FOLDER, Item, Items, Revision, rfc3339

__all__ = ["ME", "V2_FIELDS", "V3_FIELDS", "show", "show_v3", "to_v2", "user_v3"]

_CAN_ALL = ["canComment", "canCopy", "canDelete", "canDownload", "canEdit", "canModifyContent"]
_CAN_ALL += ["canRename", "canShare", "canTrash", "canUntrash"]
_CAN_READ = ("canDownload", "canListChildren")
_CAN_FOLDER = ("canAddChildren", "canListChildren", "canRemoveChildren")
ME: dict[str, Any] = {
    "kind": "drive#user",
    "displayName": "Sim User",
    "permissionId": "01",
    "emailAddress": "me@example.com",
}
ME |= {"isAuthenticatedUser": True}


def user_v3(user: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a v2 user to v3."""
    return {"me" if name == "isAuthenticatedUser" else name: value for name, value in user.items()}


@dataclass(frozen=True, slots=True)
class _Shown:
    """An item being rendered for a reply."""

    item: Item
    items: Items
    host: str
    is_reader: bool  # the caller only reads what is public, and has no account

    @property
    def user(self) -> dict[str, Any]:
        return {**ME, "isAuthenticatedUser": not self.is_reader}

    @property
    def link(self) -> str:
        return f"http://{self.host}/drive/v2/files/{self.item.id}"

    def parents(self) -> list[dict[str, Any]]:
        out = []
        for parent in self._parents_in_sight():
            link, is_root = f"http://{self.host}/drive/v2/files/{parent}", parent == self.items.root
            at = {"selfLink": f"{self.link}/parents/{parent}", "parentLink": link}
            out.append({"kind": "drive#parentReference", "id": parent, **at, "isRoot": is_root})
        return out

    def _parents_in_sight(self) -> list[str]:
        known = {parent: self.items.get(parent) for parent in self.item.parents}
        is_reader = self.is_reader
        return [id for id, item in known.items() if item and self.items.is_visible(item, is_reader=is_reader)]

    def labels(self) -> dict[str, bool]:
        out = dict.fromkeys(("starred", "hidden", "trashed", "restricted", "viewed", "modified"), False)
        out |= self.item.fields.get("labels", {})
        return out | {"trashed": self.items.is_trashed(self.item)}

    def capabilities(self) -> dict[str, bool]:
        is_folder = self.item.mime == FOLDER
        out = dict.fromkeys(_CAN_ALL, True) | dict.fromkeys(_CAN_FOLDER, is_folder)
        out |= {"canCopy": not is_folder, "canReadRevisions": not is_folder}
        out |= self.item.fields.get("capabilities", {})
        return {name: can and (name in _CAN_READ or not self.is_reader) for name, can in out.items()}

    def blob(self, read: Callable[[Revision], Any]) -> Any:
        """Return `read` of the current revision, or None if the item has no content."""
        return read(self.item.head) if self.item.head else None

    def exports(self) -> dict[str, str] | None:
        mimes = EXPORTS.get(self.item.mime, ())
        return {mime: f"{self.link}/export?mimeType={mime}" for mime in mimes} or None

    def extension(self) -> str | None:
        _, dot, rest = self.item.title.rpartition(".")
        return (rest if dot else "") if self.item.head else None

    def user_permission(self) -> dict[str, Any]:
        at = f"{self.link}/permissions/me"
        role = "reader" if self.is_reader else "owner"
        return {"kind": "drive#permission", "id": "me", "selfLink": at, "role": role, "type": "user"}


_Getter = Callable[[_Shown], Any]
# Getter of each v2 field; None omits the field.
_GETTERS: dict[str, _Getter] = {
    "kind": lambda s: "drive#file",
    "id": lambda s: s.item.id,
    "etag": lambda s: f'"{s.item.id}/{s.item.version}"',
    "selfLink": lambda s: s.link,
    "alternateLink": lambda s: f"https://drive.google.com/file/d/{s.item.id}/view?usp=drivesdk",
    "webContentLink": lambda s: s.blob(lambda _: f"http://{s.host}/uc?id={s.item.id}&export=download"),
    "downloadUrl": lambda s: s.blob(lambda _: f"{s.link}?alt=media&source=downloadUrl"),
    "exportLinks": lambda s: s.exports(),
    "title": lambda s: s.item.title,
    "mimeType": lambda s: s.item.mime,
    "labels": lambda s: s.labels(),
    "explicitlyTrashed": lambda s: s.item.trashed,
    "createdDate": lambda s: rfc3339(s.item.created_ms),
    "modifiedDate": lambda s: rfc3339(s.item.modified_ms),
    "modifiedByMeDate": lambda s: rfc3339(s.item.modified_ms),
    "version": lambda s: str(s.item.version),
    "parents": lambda s: s.parents(),
    "headRevisionId": lambda s: s.blob(lambda r: r.id),
    "fileSize": lambda s: s.blob(lambda r: str(r.size)),
    "quotaBytesUsed": lambda s: str(s.item.head.size if s.item.head else 0),
    "md5Checksum": lambda s: s.blob(lambda r: r.digest("md5")),
    "sha1Checksum": lambda s: s.blob(lambda r: r.digest("sha1")),
    "sha256Checksum": lambda s: s.blob(lambda r: r.digest("sha256")),
    "originalFilename": lambda s: s.blob(lambda _: s.item.title),
    "fileExtension": lambda s: s.extension(),
    "fullFileExtension": lambda s: s.extension(),
    "capabilities": lambda s: s.capabilities(),
    "canReadRevisions": lambda s: s.capabilities()["canReadRevisions"],
    "copyable": lambda s: s.capabilities()["canCopy"],
    "editable": lambda s: s.capabilities()["canEdit"],
    "userPermission": lambda s: s.user_permission(),
    "ownedByMe": lambda s: (
        None if s.item.drive_id else not s.is_reader and "sharedWithMeDate" not in s.item.fields
    ),
    "owners": lambda s: None if s.item.drive_id else [s.user],
    "ownerNames": lambda s: None if s.item.drive_id else [ME["displayName"]],
    "lastModifyingUser": lambda s: s.user,
    "lastModifyingUserName": lambda s: ME["displayName"],
    "shared": lambda s: "sharedWithMeDate" in s.item.fields or s.items.is_public(s.item),
    "spaces": lambda s: ["drive"],
    "driveId": lambda s: s.item.drive_id,
    "teamDriveId": lambda s: s.item.drive_id,
    "writersCanShare": lambda s: True,
    "copyRequiresWriterPermission": lambda s: False,
    "appDataContents": lambda s: False,
}
# Fields that exist only if set explicitly in an item's `fields`.
_GIVEN = """canComment clientEncryptionDetails contentRestrictions defaultOpenWithLink description embedLink
folderColorRgb hasAugmentedPermissions hasThumbnail iconLink imageMediaMetadata indexableText
inheritedPermissionsDisabled isAppAuthorized labelInfo lastViewedByMeDate linkShareMetadata
markedViewedByMeDate openWithLinks permissionIds permissions properties resourceKey shareable
sharedWithMeDate sharingUser shortcutDetails thumbnail thumbnailLink thumbnailVersion trashedDate
trashingUser videoMediaMetadata webViewLink"""
V2_FIELDS = (*_GETTERS, *_GIVEN.split())
_NOT_FOR_READERS = ("permissions", "permissionIds", "sharedWithMeDate", "sharingUser")
_MERGED = ("labels", "capabilities")  # fields merged from the computed value and the item's `fields`


def show(
    item: Item, items: Items, host: str, names: Iterable[str] = V2_FIELDS, *, is_reader: bool = False
) -> dict[str, Any]:
    """Return the named v2 fields of an item; omits fields that it lacks."""
    shown, own, out = _Shown(item, items, host, is_reader), item.fields, {}
    for name in names:
        if is_reader and name in _NOT_FOR_READERS:
            continue
        if name in own and name not in _MERGED:
            value = own[name]
        else:
            value = _GETTERS[name](shown) if name in _GETTERS else None
        if value is not None:
            out[name] = value
    return out


# v3 name -> v2 name, where they differ.
_RENAMED = {
    "name": "title",
    "size": "fileSize",
    "createdTime": "createdDate",
    "modifiedTime": "modifiedDate",
    "modifiedByMeTime": "modifiedByMeDate",
    "sharedWithMeTime": "sharedWithMeDate",
    "viewedByMeTime": "lastViewedByMeDate",
    "trashedTime": "trashedDate",
    "webViewLink": "alternateLink",
}
# v3 fields with another structure: source field in v2, and conversion.
_SHAPED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "parents": ("parents", lambda refs: [ref["id"] for ref in refs] or None),
    "trashed": ("labels", lambda labels: labels["trashed"]),
    "starred": ("labels", lambda labels: labels["starred"]),
    "viewedByMe": ("labels", lambda labels: labels["viewed"]),
    "owners": ("owners", lambda users: list(map(user_v3, users))),
    "lastModifyingUser": ("lastModifyingUser", user_v3),
    "sharingUser": ("sharingUser", user_v3),
    "trashingUser": ("trashingUser", user_v3),
    "properties": ("properties", lambda rows: {row["key"]: row["value"] for row in rows}),
}
_V3_ONLY = {"appProperties", "contentHints", "downloadRestrictions", "modifiedByMe", "viewersCanCopyContent"}
_V2_ONLY = """alternateLink appDataContents canComment canReadRevisions copyable createdDate defaultOpenWithLink
downloadUrl editable embedLink etag fileSize indexableText labels lastModifyingUserName lastViewedByMeDate
markedViewedByMeDate modifiedByMeDate modifiedDate openWithLinks ownerNames selfLink shareable
sharedWithMeDate thumbnail title trashedDate userPermission"""
_V3_NAMES = (set(V2_FIELDS) - set(_V2_ONLY.split())) | {*_RENAMED, *_SHAPED} | _V3_ONLY
V3_FIELDS = tuple(sorted(_V3_NAMES))


def show_v3(
    item: Item, items: Items, host: str, names: Iterable[str] = V3_FIELDS, *, is_reader: bool = False
) -> dict[str, Any]:
    """Return the named v3 fields of an item; omits fields that it lacks."""
    sources = {name: _SHAPED[name][0] if name in _SHAPED else _RENAMED.get(name, name) for name in names}
    given = show(item, items, host, dict.fromkeys(sources.values()), is_reader=is_reader)
    out = {name: given[source] for name, source in sources.items() if source in given}
    out |= {name: _SHAPED[name][1](value) for name, value in out.items() if name in _SHAPED}
    return {name: value for name, value in out.items() if value is not None}


def to_v2(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the body of a v3 request to v2."""
    out = {_RENAMED.get(name, name): value for name, value in body.items()}
    labels = {name: out.pop(name) for name in ("trashed", "starred") if name in out}
    if "properties" in out:
        pairs = (out["properties"] or {}).items()
        out["properties"] = [{"key": k, "value": v, "visibility": "PUBLIC"} for k, v in pairs]
    return out | ({"labels": labels} if labels else {})
