"""The Drive API v3: build requests and interpret successful answers, without I/O.

Written from the published discovery document and developers.google.com/workspace/drive/api/guides: search-files,
shortcuts, enable-shareddrives, manage-downloads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from unicodedata import normalize as _normal

from cachedfs.common.types import Change, ObjectInfo
from cachedfs.origins.drive_links import NATIVE
from cachedfs.origins.origin_errors import object_of, size_of, well_formed
from cachedfs.origins.retry import RetryableError, foreign

FOLDER, SHORTCUT = f"{NATIVE}folder", f"{NATIVE}shortcut"
ROOT = "root"  # the service's own name for the top of My Drive
SHARED_WITH_ME = "sharedWithMe"  # stands for the id that this view does not have
SHARED = "shared:"  # begins the paths of a shared drive, which its name follows
GOOGLE = "https://www.googleapis.com"
# Detail of a folder: when the public page that shows it was requested, in seconds since the epoch.
PAGE_READ_AT = "page_read_at"
ANY_DRIVE = {"supportsAllDrives": "true"}
EVERYWHERE = {**ANY_DRIVE, "includeItemsFromAllDrives": "true"}  # where listings and changes look
# Without `fields` an item is ten times as long.
_FIELDS = (
    "id,name,mimeType,size,md5Checksum,headRevisionId,createdTime,modifiedTime,driveId,resourceKey,"
    "parents,trashed,capabilities(canDownload,canReadRevisions,canListChildren),shortcutDetails"
)
# What `info` shows as it is.
_DETAILS = ("id", "mimeType", "md5Checksum", "headRevisionId", "driveId", "resourceKey", PAGE_READ_AT)
ITEM_FIELDS = f"kind,{_FIELDS}"
LIST_FIELDS = f"kind,nextPageToken,incompleteSearch,files({_FIELDS})"
ABOUT_FIELDS = "user(displayName,emailAddress,permissionId),storageQuota(limit,usage)"
CHANGE_FIELDS = (
    f"kind,nextPageToken,newStartPageToken,changes(changeType,fileId,driveId,removed,file({_FIELDS}))"
)
_THIRD_PARTY = f"{NATIVE}drive-sdk"  # a shortcut to an application of somebody else, whose number follows
_SLASH = "\uff0f"  # "／", as rclone shows it


# Names
def url_of(path: str) -> str:
    """Return the URL that errors show for a path."""
    return f"drive://{path}"


def shown(title: str) -> str:
    """Return the part of a path that names an item: its title, with "／" in place of each slash."""
    return title.replace("/", _SLASH)


def title_of(name: str) -> str:
    """Return the title of a new item: its name in the path, with each "／" turned back into a slash."""
    return name.replace(_SLASH, "/")


def looks_like(name: str, other: str) -> bool:
    return _normal("NFC", name) == _normal("NFC", other)


# Requests
def kind_of(method: str, address: str) -> str:
    """Return what a request for metadata counts as in the quota: get, list, edit or create."""
    last = address.rpartition("/")[2]
    if method != "GET":
        return "create" if method == "POST" and last in ("files", "copy") else "edit"
    return "list" if last in ("files", "drives", "changes", "revisions") else "get"


def key_headers(id: str | None, key: str | None) -> dict[str, str]:
    """Return the header that opens a link-shared item with its resource key."""
    return {"X-Goog-Drive-Resource-Keys": f"{id}/{key}"} if id and key else {}


def children_query(folder_id: str) -> str:
    """Return the query for everything in one folder.

    Never ask for several folders at once: Drive then leaves out items without an error.
    """
    where = "sharedWithMe = true" if folder_id == SHARED_WITH_ME else f"{_quoted(folder_id)} in parents"
    return f"{where} and trashed = false"


def child_query(folder_id: str, name: str) -> str:
    """Return the query for items of one name; Drive ignores case, so the caller must compare the names.

    Each "／" in the path may be a slash in the title, or itself. With more than one of them, this is the query for the
    whole folder. So it is for a name in single quotes, which Drive does not find by its name.
    """
    return children_query(folder_id) + (f" and {_named(name)}" if _is_found(name) else "")


def path_query(folder_id: str, names: Sequence[str]) -> str | None:
    """Return the query for items of a path: the first name in a folder, the others in any folder.

    The caller must check that each is in the one before. Return None if Drive would not find one of the names, or not tell two of them apart.
    """
    first, *others = names
    if not all(map(_is_found, names)) or len({_normal("NFC", name).lower() for name in names}) < len(names):
        return None
    return " or ".join(
        [f"({child_query(folder_id, first)})", *(f"(trashed = false and {_named(name)})" for name in others)]
    )


def _is_found(name: str) -> bool:
    bare = name.strip()
    return name.count(_SLASH) <= 1 and not (bare.startswith("'") and bare.endswith("'"))


def _named(name: str) -> str:
    titles = (name, title_of(name))
    # macOS writes ö as two characters: the caller warns of a name that only looks the same.
    forms = [form for title in titles for form in (title, _normal("NFC", title), _normal("NFD", title))]
    return "(" + " or ".join(f"name = {_quoted(form)}" for form in dict.fromkeys(forms)) + ")"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


# Items
def shortcut_target(item: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the details of a shortcut; None for any other item."""
    if item.get("mimeType") != SHORTCUT:
        return None
    details: Mapping[str, Any] = item.get("shortcutDetails") or {}
    return details


def is_folder(item: Mapping[str, Any]) -> bool:
    """Return whether an item is a folder or a shortcut to one."""
    return mime_of(item) == FOLDER


def mime_of(item: Mapping[str, Any]) -> str:
    """Return the type of an item; for a shortcut, that of its target."""
    target = shortcut_target(item)
    return str(item["mimeType"] if target is None else target.get("targetMimeType", ""))


def is_native(mime: str) -> bool:
    """Return whether a MIME type is Google's own and has no bytes: a document, a form, a folder."""
    return mime.startswith(NATIVE)


def takes_id(mime: str) -> bool:
    """Return whether a new item of this type accepts an id that Drive generated before: Google documents do not."""
    return not is_native(mime) or mime == FOLDER or mime.startswith(_THIRD_PARTY)


def is_trashed(item: Mapping[str, Any]) -> bool:
    """Return whether an item, or a folder it is in, is in the trash."""
    return bool(item.get("trashed"))


def may_list(item: Mapping[str, Any]) -> bool:
    """Return False for a folder or shared drive that the account may see and not open.

    Drive answers a search in such a folder with an empty list, and not with an error.
    """
    is_other = item.get("mimeType", FOLDER) != FOLDER  # and never has children
    return is_other or bool(item.get("capabilities", {}).get("canListChildren", True))


def item_info(item: Mapping[str, Any], path: str, *, via: Mapping[str, Any] | None = None) -> ObjectInfo:
    """Return the object or folder that an item describes; `via` is the shortcut that led to it."""
    details: dict[str, Any] = {name: item[name] for name in _DETAILS if item.get(name)}
    for name, at in (("modified", "modifiedTime"), ("created", "createdTime")):
        if item.get(at):
            details[name] = datetime.fromisoformat(item[at])
    if via is not None:
        details["shortcut"] = via["id"]
    may = item.get("capabilities", {})
    if item["mimeType"] == FOLDER:
        details["canListChildren"] = may_list(item)
        return ObjectInfo(path, "directory", id=item["id"], details=details)
    details |= {name: may.get(name, name == "canDownload") for name in ("canDownload", "canReadRevisions")}
    size = size_of(item["size"]) if "size" in item and not is_native(item["mimeType"]) else None
    # Never `version`: it moves when a comment is written.
    content = item.get("md5Checksum") or item.get("headRevisionId")
    fingerprint = None if size is None or not content else f"{item['id']}-{content}-{size}"
    return ObjectInfo(path, "file", size, fingerprint, id=item["id"], details=details)


def change_of(entry: Mapping[str, Any]) -> Change:
    """Return the change that an entry of the changes describes, with the item's present places."""
    item = entry.get("file")
    if not item:
        return Change(entry.get("fileId") or entry.get("driveId") or "")
    # Also what is in the trash has its place: it comes back with the folder that it was trashed in.
    places = tuple((parent, shown(item["name"])) for parent in item.get("parents", ()))
    is_gone = entry.get("removed") or is_trashed(item)
    return Change(item["id"], places, None if is_gone else item_info(item, ""))


def folder_info(path: str, id: str, **details: Any) -> ObjectInfo:
    """Return a folder that is known without its item: a view, or a shared drive."""
    return ObjectInfo(path, "directory", id=id, details={"id": id, **details})


def rank(item: Mapping[str, Any], *, for_folder: bool = False) -> tuple[bool, bool, float, str]:
    """Return the sort key of an item among items of the same name; the lowest is the one the name means.

    Folders and files with bytes come before Google documents. Within each group the last modified comes first, then the
    lowest id. `for_folder`: folders come first, because only they can contain names.
    """
    is_document, at = is_native(mime_of(item)) and not is_folder(item), item.get("modifiedTime")
    age = -datetime.fromisoformat(at).timestamp() if at else 0.0
    return for_folder and not is_folder(item), is_document, age, item["id"]


# Answers
def resource_of(
    status: int, body: bytes, kind: str | None, asked: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the resource of `kind` in a successful answer (None: no content); `asked` is what it has to have.

    Raises RetryableError for an answer that Drive does not give: it comes from a proxy, a load balancer or the sign-in
    page of a network. Each resource has its `kind`, and every request names it in `fields`. So `{}` is not an empty
    listing, while a list of the right kind without `files` is one.
    """
    if kind is None:
        if status != 204:
            raise RetryableError(f"the answer is not Drive's: {status} in place of 204")
        return {}
    found = object_of(body)
    with well_formed(f"the answer is not Drive's: no complete {kind}"):
        if found["kind"] != kind:
            raise ValueError(f"it is {found['kind']!r}")
        items = [found] if kind == "drive#file" else found.get("files", [])
        for item in (*items, *(entry["file"] for entry in found.get("changes", ()) if "file" in entry)):
            if not item["id"] or not all(isinstance(item[name], str) for name in ("id", "name", "mimeType")):
                raise ValueError("an item without id, name or type")
            item_info(item, "")  # fails on a size or a time that is none
    if found.get("incompleteSearch"):
        raise RetryableError("Drive searched only a part")
    for name, value in (asked or {}).items():
        if found.get(name) != value:
            raise foreign(f"the answer to a change has the {name} {found.get(name)!r} instead of {value!r}")
    return found
