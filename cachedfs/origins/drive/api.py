"""The Drive API v3: build requests and interpret answers, without I/O.

Written from the published discovery document and developers.google.com/workspace/drive/api/guides: search-files,
handle-errors, shortcuts, enable-shareddrives, manage-downloads.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any
from unicodedata import normalize as _normal

from cachedfs.common.types import Change, ObjectInfo
from cachedfs.errors import (
    AccessDenied,
    CachedFSError,
    NotDownloadable,
    ObjectChanged,
    ObjectNotFound,
    QuotaExceeded,
    RequestRejected,
    SignInRefused,
)
from cachedfs.origins.origin_errors import error_of, object_of, size_of, trouble_of, well_formed
from cachedfs.origins.retry import RetryableError, RetryReason, foreign

if TYPE_CHECKING:
    from cachedfs.origins.http import HTTPRequest

__all__ = [
    "ANY_DRIVE", "CHANGE_FIELDS", "EVERYWHERE", "FOLDER", "GOOGLE", "ITEM_FIELDS", "LIST_FIELDS", "ROOT", "SHARED",
    "SHARED_WITH_ME", "SHORTCUT", "DriveAbusiveFile", "DriveAnonymous", "DriveOutOfSight", "change_of", "child_query",
    "children_query", "failure", "folder_info", "is_folder", "is_native", "is_trashed", "item_info", "key_headers", "kind_of",
    "looks_like", "may_list", "rank", "resource_of", "shortcut_target", "shown", "takes_id", "title_of", "url_of",
]  # fmt: skip

FOLDER = "application/vnd.google-apps.folder"
SHORTCUT = "application/vnd.google-apps.shortcut"
ROOT = "root"  # the service's own name for the top of My Drive
SHARED_WITH_ME = "sharedWithMe"  # stands for the id that this view does not have
SHARED = "shared:"  # begins the paths of a shared drive, which its name follows
GOOGLE = "https://www.googleapis.com"
ANY_DRIVE = {"supportsAllDrives": "true"}
EVERYWHERE = {**ANY_DRIVE, "includeItemsFromAllDrives": "true"}  # where listings and changes look
# Without `fields` an item is ten times as long.
_FIELDS = (
    "id,name,mimeType,size,md5Checksum,headRevisionId,createdTime,modifiedTime,driveId,resourceKey,"
    "parents,trashed,capabilities(canDownload,canReadRevisions,canListChildren),shortcutDetails"
)
ITEM_FIELDS = f"kind,{_FIELDS}"
LIST_FIELDS = f"kind,nextPageToken,incompleteSearch,files({_FIELDS})"
CHANGE_FIELDS = (
    f"kind,nextPageToken,newStartPageToken,changes(changeType,fileId,driveId,removed,file({_FIELDS}))"
)
_NATIVE = "application/vnd.google-apps."
_THIRD_PARTY = f"{_NATIVE}drive-sdk"  # a shortcut to an application of somebody else, whose number follows
_SLASH = "\uff0f"  # "／", as rclone shows it
_NOT_DRIVE = (
    "See whether a proxy or the sign-in page of a network answers in its place, and check endpoint_url"
)


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
    """Return whether two names look the same."""
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
    bare = name.strip()
    if name.count(_SLASH) > 1 or (bare.startswith("'") and bare.endswith("'")):
        return children_query(folder_id)
    titles = (name, title_of(name))
    # macOS writes ö as two characters: the caller warns of a name that only looks the same.
    forms = [form for title in titles for form in (title, _normal("NFC", title), _normal("NFD", title))]
    names = " or ".join(f"name = {_quoted(form)}" for form in dict.fromkeys(forms))
    return f"{children_query(folder_id)} and ({names})"


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
    return _mime_of(item) == FOLDER


def _mime_of(item: Mapping[str, Any]) -> str:
    target = shortcut_target(item)
    return str(item["mimeType"] if target is None else target.get("targetMimeType", ""))


def is_native(mime: str) -> bool:
    """Return whether a MIME type is Google's own and has no bytes: a document, a form, a folder."""
    return mime.startswith(_NATIVE)


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
    details: dict[str, Any] = {
        name: item[name]
        for name in ("id", "mimeType", "md5Checksum", "headRevisionId", "driveId", "resourceKey")
        if item.get(name)
    }
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
    is_document, at = is_native(_mime_of(item)) and not is_folder(item), item.get("modifiedTime")
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
            raise RetryableError(RetryReason(f"the answer is not Drive's: {status} in place of 204"))
        return {}
    found = object_of(body)
    with well_formed(f"the answer is not Drive's: no complete {kind}"):
        if found["kind"] != kind:
            raise ValueError(f"it is {found['kind']!r}")
        _check_types(found)
        items = [found] if kind == "drive#file" else found.get("files", [])
        for item in (*items, *(entry["file"] for entry in found.get("changes", ()) if "file" in entry)):
            if not item["id"] or "name" not in item:
                raise ValueError("an item without id or name")
            item_info(item, "")  # fails on a size or a time that is none
    if found.get("incompleteSearch"):
        raise RetryableError(RetryReason("Drive searched only a part"))
    for name, value in (asked or {}).items():
        if found.get(name) != value:
            raise RetryableError(
                foreign(f"the answer to a change has the {name} {found.get(name)!r} instead of {value!r}")
            )
    return found


_TYPES: dict[str, type] = {
    **dict.fromkeys(
        ("id", "name", "mimeType", "size", "md5Checksum", "headRevisionId", "resourceKey", "driveId"), str
    ),
    **dict.fromkeys(("targetId", "targetMimeType", "targetResourceKey", "fileId"), str),
    **dict.fromkeys(("nextPageToken", "newStartPageToken", "startPageToken"), str),
    **dict.fromkeys(("files", "drives", "changes", "ids", "parents"), list),
    **dict.fromkeys(("file", "capabilities", "shortcutDetails"), dict),
}


def _check_types(found: Mapping[str, Any]) -> None:
    """Raise TypeError for a resource whose fields are not of the documented types."""
    for name, value in found.items():
        if not isinstance(value, _TYPES.get(name, object)):
            raise TypeError(f"{name} is {value!r:.40}")
        for below in value if isinstance(value, list) else (value,):
            if isinstance(below, dict):
                _check_types(below)


# Failures
class DriveFileExists(CachedFSError, FileExistsError):
    """Drive has an item with this id already."""

    code = errno.EEXIST


class DriveOutOfSight(AccessDenied):
    """The account is not a member of the shared drive; items of it that were shared with the account still exist."""


class DriveAnonymous(AccessDenied):
    """Google refuses requests without an account or an API key, even for public files."""


class DriveAbusiveFile(AccessDenied):
    """Google takes the file for malware; its owner may read it all the same."""


def failure(
    request: HTTPRequest,
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    now: datetime,
    account: str = "the account that signs in",
    remedy: str = "sign in again or pass another",
) -> RetryReason | Exception:
    """Return what an error response means: a reason to retry, or the exception to raise.

    `account` is who signed in, and `remedy` what to do when the token is refused.

    An error is Drive's own only if it has a reason: a 404 without one says nothing about the file. A 401 counts from
    any server, because it never means that something is absent.
    """
    url, doing = request.subject, request.doing
    text, reasons = error_of(body)
    said = f"{status}: {text}" if text else str(status)
    if (trouble := trouble_of(status, reasons, said, headers, now)) is not None:
        return trouble
    if 300 <= status < 400:
        return RetryReason(f"the answer is not Drive's: it redirects ({said})", remedy=_NOT_DRIVE)
    if status != 401 and not reasons:
        return RetryReason(f"the answer is not Drive's ({said})", remedy=_NOT_DRIVE)
    what = f"{doing}: {said}"
    if status == 404 and "notFound at driveId" in reasons:
        return DriveOutOfSight(
            f"{url}: this account is no member of the shared drive ({what}). Ask for that, or have a folder of it "
            f"shared with {account}: it is under drive://Shared with me then"
        )
    if status == 404 and "notFound" in reasons:
        if request.is_pinned:
            return ObjectChanged(
                f"{url}: the file was removed while it was read, or hidden from you ({doing}); open it again"
            )
        return ObjectNotFound(
            f"{url}: not found ({what}). Check the name; Drive says the same of what this account may not see: ask the "
            f"owner to share it with {account}; the file of a link with resourcekey= in it is drive://id:ID,resourcekey=KEY"
        )
    if status == 400 and "API key not valid" in text:
        return SignInRefused(f"{url}: Google does not accept the API key ({what}): {remedy}")
    if status == 400:
        return RequestRejected(f"{url}: Drive did not accept the request ({what})")
    if status == 409:
        return DriveFileExists(f"{url}: exists already ({what})")
    if status == 401:
        return SignInRefused(
            f"{url}: access denied; the token of {account} is not accepted ({what}): {remedy}"
        )
    if status == 403:
        return _permanent_error(reasons, what, url, account, remedy)
    return CachedFSError(f"{url}: Drive answered in a way that is not understood ({what})")


def _permanent_error(reasons: set[str], what: str, url: str, account: str, remedy: str) -> CachedFSError:
    """Return the error for a 403 that does not pass with time."""
    if refused := [found for reason, found in _REFUSED.items() if reason in reasons]:
        kind, why = refused[0]
        return kind(f"{url}: {why} ({what})")
    if "forbidden" in reasons and any(text in what for text in _ANONYMOUS):
        return DriveAnonymous(f"{url}: Google answers no anonymous requests ({what}): {remedy}")
    if "insufficientPermissions" in reasons and "scopes" in what:
        return AccessDenied(
            f"{url}: access denied; {account} may not do this, for example because the sign-in is for reading only "
            f"({what}): sign in again for reading and writing (`cachedfs login drive` without --read-only)"
        )
    return AccessDenied(
        f"{url}: access denied to {account}; check that the item is shared with it, and that the credentials cover "
        f"the scope https://www.googleapis.com/auth/drive ({what})"
    )


_ANONYMOUS = ("unregistered callers", "missing a valid API key", "Unauthenticated")
_FULL = "the storage of this account is full: empty the trash, or get more"
_DOWNLOADS = (
    "the download quota of this file is used up, for up to 24 hours. Cached data can still be read; a copy of the file in "
    "your own Drive has its own quota"
)
_NO_BYTES = "this has no bytes to download; export it from Drive as a file"
# Reasons of a 403; where an error has several, the first one here counts.
_REFUSED: dict[str, tuple[type[CachedFSError], str]] = {
    "downloadQuotaExceeded": (QuotaExceeded, _DOWNLOADS),
    "quotaExceeded at quota.download": (QuotaExceeded, _DOWNLOADS),
    "dailyLimitExceeded": (
        QuotaExceeded,
        "the project's requests of this day are used up; it ends at midnight, Pacific time",
    ),
    "dailyLimitExceededUnreg": (QuotaExceeded, "Google allows no anonymous requests: sign in"),
    "sharingRateLimitExceeded": (QuotaExceeded, "the limit of sharing is reached; it ends within 24 hours"),
    "quotaExceeded": (QuotaExceeded, _FULL),
    "storageQuotaExceeded": (QuotaExceeded, _FULL),
    "teamDriveFileLimitExceeded": (QuotaExceeded, "the shared drive holds as many items as it may"),
    "numChildrenInNonRootLimitExceeded": (
        QuotaExceeded,
        "the folder holds 500,000 items, as many as it may: use several, or pack",
    ),
    "activeItemCreationLimitExceeded": (QuotaExceeded, "the account has created as many items as it may"),
    "uploadLimitExceeded": (QuotaExceeded, "750 GB were uploaded within a day, as much as Drive takes"),
    "cannotDownloadAbusiveFile": (
        DriveAbusiveFile,
        'Google takes this file for malware or spam. Its owner can read it with drive={"acknowledge_abuse": True}',
    ),
    "exportSizeLimitExceeded": (
        NotDownloadable,
        "Google does not export it, as it would be more than 10 MB; download it from its menu in Drive, and put it into Drive",
    ),
    "fileNotDownloadable": (NotDownloadable, _NO_BYTES),
    "fileNotExportable": (NotDownloadable, _NO_BYTES),
}
