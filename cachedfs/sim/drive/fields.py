"""The resource of a Drive item in the API, field by field."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from cachedfs.sim.drive.items import FOLDER, Item, Items, rfc3339

_CAN_ALL = ["canComment", "canCopy", "canDelete", "canDownload", "canEdit", "canModifyContent"]
_CAN_ALL += ["canRename", "canShare", "canTrash", "canUntrash"]
_CAN_READ = ("canDownload", "canListChildren")
_CAN_FOLDER = ("canAddChildren", "canListChildren", "canRemoveChildren")
ME = {"kind": "drive#user", "displayName": "Sim User", "permissionId": "01", "emailAddress": "me@example.com", "me": True}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Shown:
    """An item being rendered for a reply."""

    item: Item
    items: Items
    is_reader: bool  # the caller only reads what is public, and has no account

    def parents(self) -> list[str] | None:
        known = {id: self.items.get(id) for id in self.item.parents}
        is_reader = self.is_reader
        return [
            id for id, item in known.items() if item and self.items.is_visible(item, is_reader=is_reader)
        ] or None

    def capabilities(self) -> dict[str, bool]:
        is_folder = self.item.mime == FOLDER
        out = dict.fromkeys(_CAN_ALL, True) | dict.fromkeys(_CAN_FOLDER, is_folder)
        out |= {"canCopy": not is_folder, "canReadRevisions": not is_folder}
        out |= self.item.fields.get("capabilities", {})
        return {name: can and (name in _CAN_READ or not self.is_reader) for name, can in out.items()}

    def owners(self) -> list[dict[str, Any]] | None:
        return None if self.item.drive_id else [{**ME, "me": not self.is_reader}]

    def is_mine(self) -> bool | None:
        is_shared = self.is_reader or "sharedWithMeTime" in self.item.fields
        return None if self.item.drive_id else not is_shared


# Fields that every item has, or every item of a kind; None omits the field.
_COMPUTED: dict[str, Callable[[_Shown], Any]] = {
    "kind": lambda s: "drive#file",
    "id": lambda s: s.item.id,
    "name": lambda s: s.item.name,
    "mimeType": lambda s: s.item.mime,
    "trashed": lambda s: s.items.is_trashed(s.item),
    "starred": lambda s: False,
    "createdTime": lambda s: rfc3339(s.item.created_ms),
    "modifiedTime": lambda s: rfc3339(s.item.modified_ms),
    "version": lambda s: str(s.item.version),
    "parents": lambda s: s.parents(),
    "headRevisionId": lambda s: s.item.head and s.item.head.id,
    "size": lambda s: s.item.head and str(s.item.head.size),
    "md5Checksum": lambda s: s.item.head and s.item.head.md5(),
    "capabilities": lambda s: s.capabilities(),
    "ownedByMe": lambda s: s.is_mine(),
    "owners": lambda s: s.owners(),
    "shared": lambda s: "sharedWithMeTime" in s.item.fields or s.items.is_public(s.item),
    "spaces": lambda s: ["drive"],
    "driveId": lambda s: s.item.drive_id,
}
# All others of the discovery document: an item has them only if they were set.
_OTHERS = """appProperties clientEncryptionDetails contentHints contentRestrictions copyRequiresWriterPermission description
downloadRestrictions explicitlyTrashed exportLinks fileExtension folderColorRgb fullFileExtension
hasAugmentedPermissions hasThumbnail iconLink imageMediaMetadata inheritedPermissionsDisabled isAppAuthorized
labelInfo lastModifyingUser linkShareMetadata modifiedByMe modifiedByMeTime originalFilename permissionIds
permissions properties quotaBytesUsed resourceKey sha1Checksum sha256Checksum sharedWithMeTime sharingUser
shortcutDetails teamDriveId thumbnailLink thumbnailVersion trashedTime trashingUser videoMediaMetadata viewedByMe
viewedByMeTime viewersCanCopyContent webContentLink webViewLink writersCanShare"""
FIELDS = (*_COMPUTED, *_OTHERS.split())
_NOT_FOR_READERS = ("permissions", "permissionIds", "sharedWithMeTime", "sharingUser")


def show(
    item: Item, items: Items, names: Iterable[str] = FIELDS, *, is_reader: bool = False
) -> dict[str, Any]:
    """Return the named fields of an item; omits fields that it lacks."""
    shown, own, out = _Shown(item, items, is_reader), item.fields, dict[str, Any]()
    for name in names:
        if is_reader and name in _NOT_FOR_READERS:
            continue
        if name in own and name != "capabilities":  # those are merged
            value = own[name]
        else:
            value = _COMPUTED[name](shown) if name in _COMPUTED else None
        if value is not None:
            out[name] = value
    return out
