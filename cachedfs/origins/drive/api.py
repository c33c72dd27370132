"""The Drive API v3: build requests and interpret answers, without I/O.

Written from the published discovery document and developers.google.com/workspace/drive/api/guides: search-files,
handle-errors, shortcuts, enable-shareddrives, manage-downloads.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from itertools import chain, product
from typing import Any
from unicodedata import is_normalized
from unicodedata import normalize as _normal
from urllib.parse import quote

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
from cachedfs.origins.origin_errors import error_of, object_of, size_of, text_of, trouble_of, well_formed
from cachedfs.origins.retry import RetryableError, RetryReason, foreign

__all__ = [
    "ANY_DRIVE",
    "CHANGE_FIELDS",
    "FIELDS",
    "FOLDER",
    "GOOGLE",
    "ITEM_FIELDS",
    "LIST_FIELDS",
    "ROOT",
    "SHARED",
    "SHARED_WITH_ME",
    "SHORTCUT",
    "DriveAbusiveFile",
    "DriveAnonymous",
    "DriveNotAbusive",
    "DriveOutOfSight",
    "age",
    "change_of",
    "changes_params",
    "changes_url",
    "child_query",
    "children_query",
    "confirm",
    "dangling_info",
    "drive_of",
    "drive_params",
    "failure",
    "file_url",
    "files_url",
    "folder_info",
    "form_of",
    "is_native",
    "is_trashed",
    "item_info",
    "key_headers",
    "kind_of",
    "looks_like",
    "multipart",
    "rank",
    "resource_of",
    "revision_url",
    "shortcut_target",
    "shown",
    "takes_id",
    "title_of",
    "upload_url",
    "url_of",
]

FOLDER = "application/vnd.google-apps.folder"
SHORTCUT = "application/vnd.google-apps.shortcut"
ROOT = "root"  # the service's own name for the top of My Drive
SHARED_WITH_ME = "sharedWithMe"  # stands for the id that this view does not have
SHARED = "shared:"  # begins the paths of a shared drive, which its name follows
GOOGLE = "https://www.googleapis.com"
ANY_DRIVE = {"supportsAllDrives": "true"}
# Without `fields` an item is ten times as long.
FIELDS = (
    "id,name,mimeType,size,md5Checksum,headRevisionId,createdTime,modifiedTime,driveId,resourceKey,"
    "parents,trashed,capabilities(canDownload,canReadRevisions),shortcutDetails"
)
ITEM_FIELDS = f"kind,{FIELDS}"
LIST_FIELDS = f"kind,nextPageToken,incompleteSearch,files({FIELDS})"
CHANGE_FIELDS = (
    f"kind,nextPageToken,newStartPageToken,changes(changeType,fileId,driveId,removed,file({FIELDS}))"
)
_NATIVE = "application/vnd.google-apps."
_THIRD_PARTY = f"{_NATIVE}drive-sdk"  # a shortcut to an application of somebody else, whose number follows
_SLASH = "\uff0f"  # "／", as rclone shows it
_MOST_SIGNS = 4  # of a slash in one name that are told from slashes one by one
_NOT_DRIVE = (
    "See whether a proxy or the sign-in page of a network answers in its place, and check endpoint_url"
)
_OUT_OF_SIGHT = "notFound at driveId"
_NOT_RIGHTS = frozenset({"fileNotDownloadable", "fileNotExportable"})
_UNREGISTERED = frozenset({"forbidden", "dailyLimitExceededUnreg"})
_ANONYMOUS = ("unregistered callers", "missing a valid API key", "Unauthenticated")
_DOWNLOADS = frozenset({"downloadQuotaExceeded", "quotaExceeded at quota.download"})
_USED_UP = {
    "dailyLimitExceeded": "the project's requests of this day are used up; it ends at midnight, Pacific time",
    "dailyLimitExceededUnreg": "Google allows no anonymous requests: sign in",
    "sharingRateLimitExceeded": "the limit of sharing is reached; it ends within 24 hours",
    "quotaExceeded": "the storage of this account is full: empty the trash, or get more",
    "storageQuotaExceeded": "the storage of this account is full: empty the trash, or get more",
    "teamDriveFileLimitExceeded": "the shared drive holds as many items as it may",
    "numChildrenInNonRootLimitExceeded": "the folder holds 500,000 items, as many as it may: use several, or pack",
    "activeItemCreationLimitExceeded": "the account has created as many items as it may",
    "uploadLimitExceeded": "750 GB were uploaded within a day, as much as Drive takes",
}


# Names
def url_of(path: str) -> str:
    """Return the URL that errors show for a path."""
    return f"drive://{path}"


def shown(title: str) -> str:
    """Return the part of a path that names an item: its title, with "／" in place of each slash."""
    return title.replace("/", _SLASH)


def title_of(name: str) -> tuple[str, ...]:
    """Return the titles that a part of a path may stand for; the last one has a slash for every "／".

    Each "／" in the path may be a slash or itself, and each doubles the number of titles in a query. Where there are
    more than four, only the last one is returned.
    """
    parts = name.split(_SLASH)
    n_signs = len(parts) - 1
    if n_signs > _MOST_SIGNS:
        return (name.replace(_SLASH, "/"),)
    return tuple(
        "".join(chain.from_iterable(zip(parts, (*signs, ""), strict=True)))
        for signs in product((_SLASH, "/"), repeat=n_signs)
    )


def form_of(name: str) -> str:
    """Return the Unicode normalization form of a name."""
    return next((form for form in ("NFC", "NFD") if is_normalized(form, name)), "mixed forms")


def looks_like(name: str, other: str) -> bool:
    """Return whether two names look the same."""
    return _normal("NFC", name) == _normal("NFC", other)


# Addresses
def files_url(base: str) -> str:
    """Return the address of the files. `base` is `https://host`, here and below."""
    return f"{base}/drive/v3/files"


def file_url(base: str, id: str) -> str:
    return f"{files_url(base)}/{quote(id, safe='')}"


def changes_url(base: str) -> str:
    return f"{base}/drive/v3/changes"


def changes_params(drive_id: str) -> dict[str, str]:
    """Return the query for the changes of one shared drive, or ("") of everything the account owns.

    The latter includes shared drives: otherwise Drive does not report what moves there.
    """
    params = {**ANY_DRIVE, "includeItemsFromAllDrives": "true"}
    return params | ({"driveId": drive_id} if drive_id else {})


def revision_url(base: str, id: str, revision: str) -> str:
    return f"{file_url(base, id)}/revisions/{quote(revision, safe='')}"


def upload_url(base: str, id: str | None) -> str:
    """Return the address to send bytes to: for a new item, or as new content of the item `id`."""
    address = f"{base}/upload/drive/v3/files"
    return address if id is None else f"{address}/{quote(id, safe='')}"


def kind_of(method: str, address: str) -> str:
    """Return what a request for metadata counts as in the quota: get, list, edit or create."""
    last = address.rpartition("/")[2]
    if method != "GET":
        return "create" if method == "POST" and last in ("files", "copy") else "edit"
    return "list" if last in ("files", "drives", "changes", "revisions") else "get"


def key_headers(keys: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the header that opens link-shared items, from pairs of id and resource key."""
    text = ",".join(f"{id}/{key}" for id, key in keys)
    return {"X-Goog-Drive-Resource-Keys": text} if text else {}


def drive_of(folder: ObjectInfo) -> str | None:
    """Return the shared drive that a listing of `folder` searches; None if its path does not begin with the drive.

    Only members can search the drive. A folder of it that was shared with others is listed like one outside any drive.
    """
    return folder.details.get("driveId") if folder.path.startswith(SHARED) else None


def drive_params(drive_id: str | None) -> dict[str, str]:
    """Return where a listing searches: one shared drive, or everything the account sees."""
    params = {**ANY_DRIVE, "includeItemsFromAllDrives": "true"}
    return params | ({"corpora": "drive", "driveId": drive_id} if drive_id else {})


def children_query(folder_id: str) -> str:
    """Return the query for everything in one folder.

    Never ask for several folders at once: Drive then leaves out items without an error.
    """
    where = "sharedWithMe = true" if folder_id == SHARED_WITH_ME else f"{_quoted(folder_id)} in parents"
    return f"{where} and trashed = false"


def child_query(folder_id: str, name: str) -> str:
    """Return the query for items of one name; Drive ignores case, so the caller must compare the names.

    A name with many slashes has too many possible titles to ask for: this is then the query for the whole folder.
    """
    if name.count(_SLASH) > _MOST_SIGNS:
        return children_query(folder_id)
    titles = " or ".join(f"name = {_quoted(title)}" for title in _look_alikes(title_of(name)))
    return f"{children_query(folder_id)} and ({titles})"


def _look_alikes(titles: Iterable[str]) -> Iterable[str]:
    """Return the titles in all Unicode normalization forms: macOS writes ö as two characters."""
    return dict.fromkeys(
        form for title in titles for form in (title, _normal("NFC", title), _normal("NFD", title))
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


# Items
def shortcut_target(item: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the details of a shortcut; None for any other item."""
    if item.get("mimeType") != SHORTCUT:
        return None
    details: Mapping[str, Any] = item.get("shortcutDetails") or {}
    return details


def is_native(mime: str) -> bool:
    """Return whether a MIME type is Google's own and has no bytes: a document, a form, a folder."""
    return mime.startswith(_NATIVE)


def takes_id(mime: str) -> bool:
    """Return whether a new item of this type accepts an id that Drive generated before: Google documents do not."""
    return not is_native(mime) or mime == FOLDER or mime.startswith(_THIRD_PARTY)


def is_trashed(item: Mapping[str, Any]) -> bool:
    """Return whether an item, or a folder it is in, is in the trash."""
    return bool(item.get("trashed"))


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
    if item["mimeType"] == FOLDER:
        return ObjectInfo(path, "directory", id=item["id"], details=details)
    capabilities = item.get("capabilities") or {}
    details["canDownload"] = bool(capabilities.get("canDownload", True))
    details["canReadRevisions"] = bool(capabilities.get("canReadRevisions", False))
    size = size_of(item["size"]) if "size" in item and not is_native(item["mimeType"]) else None
    return ObjectInfo(path, "file", size, _fingerprint(item, size), id=item["id"], details=details)


def change_of(entry: Mapping[str, Any]) -> Change:
    """Return the change that an entry of the changes describes, with the item's present places."""
    item = entry.get("file")
    if not item:
        return Change(entry.get("fileId") or entry.get("driveId") or "")
    # Also what is in the trash has its place: it comes back with the folder that it was trashed in.
    places = tuple((parent, shown(item["name"])) for parent in item.get("parents", ()))
    is_gone = entry.get("removed") or is_trashed(item)
    return Change(item["id"], places, None if is_gone else item_info(item, ""))


def dangling_info(shortcut: Mapping[str, Any], path: str) -> ObjectInfo:
    """Return a shortcut whose target is gone or not shared with this account: a file that cannot be read."""
    return ObjectInfo(
        path, "file", details={"mimeType": SHORTCUT, "shortcut": shortcut["id"], "dangling": True}
    )


def _fingerprint(item: Mapping[str, Any], size: int | None) -> str | None:
    # Never `version`: it moves when a comment is written.
    content = item.get("md5Checksum") or item.get("headRevisionId")
    return None if size is None or not content else f"{item['id']}-{content}-{size}"


def folder_info(path: str, id: str, **details: Any) -> ObjectInfo:
    """Return a folder that is known without its item: a view, or a shared drive."""
    return ObjectInfo(path, "directory", id=id, details={"id": id, **details})


def rank(item: Mapping[str, Any], *, for_folder: bool = False) -> tuple[bool, bool, float, str]:
    """Return the sort key of an item among items of the same name; the lowest is the one the name means.

    Folders and files with bytes come before Google documents. Within each group the last modified comes first, then the
    lowest id. `for_folder`: folders come first, because only they can contain names.
    """
    target = shortcut_target(item)
    mime = item["mimeType"] if target is None else target.get("targetMimeType", "")
    is_folder = mime == FOLDER
    return for_folder and not is_folder, is_native(mime) and not is_folder, *age(item)


def age(item: Mapping[str, Any]) -> tuple[float, str]:
    """Return a sort key that puts the last modified item first and the oldest last."""
    at = item.get("modifiedTime")
    return (-datetime.fromisoformat(at).timestamp() if at else 0.0), item["id"]


# Answers
def resource_of(status: int, body: bytes, kind: str | None) -> dict[str, Any]:
    """Return the resource of `kind` in a successful answer (None: no content).

    Raises RetryableError if the answer is not Drive's. Drive answers in one of three ways, and never with a redirect:

    - A resource: a JSON object with the `kind` of the method, such as "drive#fileList". In the discovery document the
      kind is a constant of each resource, and every request names it in `fields`. So `{}` is not an empty listing,
      while a list of the right kind without `files` is one. A file also has an `id`.
    - 204 without a body, to a DELETE.
    - An error: a JSON object such as {"error": {"code": 404, "errors": [{"reason": "notFound"}]}}, which `failure`
      parses.

    Any other answer comes from a proxy, a load balancer or the sign-in page of a network. It is retried, and then
    raises OriginUnavailable.
    """
    if kind is None:
        if status != 204:
            raise RetryableError(RetryReason(f"the answer is not Drive's: {status} in place of 204"))
        return {}
    found = object_of(body)
    with well_formed(f"the answer is not Drive's: no complete {kind}"):
        if found["kind"] != kind:
            raise ValueError(f"it is {found['kind']!r}")
        if kind in _CHECKS:
            _CHECKS[kind](found)
    return found


def confirm(item: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the item in the answer to a change; raise RetryableError unless it is as it was `asked` to be."""
    for name, value in asked.items():
        if item.get(name) != value:
            raise RetryableError(
                foreign(f"the answer to a change has the {name} {item.get(name)!r} instead of {value!r}")
            )
    return dict(item)


def _check_item(item: Mapping[str, Any]) -> None:
    """Raise ValueError, TypeError or the like for an item that Drive never sends, as do the four below."""
    for text in (item["id"], item["name"], item["mimeType"], item.get("md5Checksum") or ""):
        text_of(text)
    if item["id"] == "":
        raise ValueError("an item without id")
    for parent in item.get("parents", ()):
        text_of(parent)
    item_info(item, "")
    rank(item)
    is_trashed(item)
    for name in ("targetId", "targetMimeType", "targetResourceKey"):
        text_of((shortcut_target(item) or {}).get(name, ""))


def _check_drives(page: Mapping[str, Any]) -> None:
    for drive in page.get("drives", ()):
        text_of(drive["id"]), text_of(drive["name"])
    text_of(page.get("nextPageToken", ""))


def _check_items(page: Mapping[str, Any]) -> None:
    for item in page.get("files", ()):
        _check_item(item)
    text_of(page.get("nextPageToken", ""))


def _check_changes(page: Mapping[str, Any]) -> None:
    for entry in page.get("changes", ()):
        if entry.get("file"):
            _check_item(entry["file"])
        text_of(change_of(entry).id)
    text_of(page["newStartPageToken"] if "newStartPageToken" in page else page["nextPageToken"])


def _check_ids(found: Mapping[str, Any]) -> None:
    if not [text_of(id) for id in found["ids"] if id]:
        raise ValueError("no ids")


_CHECKS: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "drive#file": _check_item,
    "drive#fileList": _check_items,
    "drive#driveList": _check_drives,
    "drive#changeList": _check_changes,
    "drive#startPageToken": lambda found: text_of(found["startPageToken"]),
    "drive#generatedIds": _check_ids,
}


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


class DriveNotAbusive(AccessDenied):
    """Google no longer takes the file for malware, so that it must not be acknowledged."""


def failure(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    url: str,
    doing: str,
    pinned: bool,
    now: datetime,
    account: str = "the account that signs in",
    remedy: str = "sign in again or pass another",
) -> RetryReason | Exception:
    """Return what an error response means: a reason to retry, or the exception to raise.

    `account` is who signed in, and `remedy` what to do when the token is refused.

    An error is Drive's own only if it has a reason: a 404 without one says nothing about the file. A 401 counts from
    any server, because it never means that something is absent.
    """
    text, reasons = error_of(body)
    said = f"{status}: {text}" if text else str(status)
    if (trouble := trouble_of(status, reasons, said, headers, now)) is not None:
        return trouble
    if 300 <= status < 400:
        return RetryReason(f"the answer is not Drive's: it redirects ({said})", remedy=_NOT_DRIVE)
    if status != 401 and not reasons:
        return RetryReason(f"the answer is not Drive's ({said})", remedy=_NOT_DRIVE)
    if status == 404 and _OUT_OF_SIGHT in reasons:
        return DriveOutOfSight(
            f"{url}: this account is no member of the shared drive ({doing}: {said}). Ask for that, or have a folder of it "
            f"shared with {account}: it is under drive://Shared with me then"
        )
    is_gone = status == 404 and "notFound" in reasons
    if is_gone and pinned:
        return ObjectChanged(
            f"{url}: the file was removed while it was read, or hidden from you ({doing}); open it again"
        )
    if is_gone:
        return ObjectNotFound(
            f"{url}: not found ({doing}: {said}). Check the name; Drive says the same of what this account may not see: "
            f"ask the owner to share it with {account}; the file of a link with resourcekey= in it is "
            "drive://id:ID,resourcekey=KEY"
        )
    if status == 400 and "API key not valid" in text:
        return SignInRefused(f"{url}: Google does not accept the API key ({doing}: {said}): {remedy}")
    if status == 400:
        return RequestRejected(f"{url}: Drive did not accept the request ({doing}: {said})")
    if status == 409:
        return DriveFileExists(f"{url}: exists already ({doing}: {said})")
    if status == 401:
        return SignInRefused(
            f"{url}: access denied; the token of {account} is not accepted ({doing}: {said}): {remedy}"
        )
    if status == 403:
        return _permanent_error(reasons, f"{doing}: {said}", url, account, remedy)
    return CachedFSError(f"{url}: Drive answered in a way that is not understood ({doing}: {said})")


def _permanent_error(reasons: set[str], what: str, url: str, account: str, remedy: str) -> CachedFSError:
    """Return the error for a 403 that does not pass with time."""
    if reasons & _DOWNLOADS:
        return QuotaExceeded(
            f"{url}: the download quota of this file is used up, for up to 24 hours ({what}). Cached data can "
            "still be read; a copy of the file in your own Drive has its own quota"
        )
    if used_up := [remedy for reason, remedy in _USED_UP.items() if reason in reasons]:
        return QuotaExceeded(f"{url}: {used_up[0]} ({what})")
    if _UNREGISTERED & reasons and any(text in what for text in _ANONYMOUS):
        return DriveAnonymous(f"{url}: Google answers no anonymous requests ({what}): {remedy}")
    if "invalidAbuseAcknowledgment" in reasons:
        return DriveNotAbusive(f"{url}: Google does not accept the acknowledgement ({what})")
    if "cannotDownloadAbusiveFile" in reasons:
        return DriveAbusiveFile(
            f"{url}: Google takes this file for malware or spam ({what}). Its owner can read it with "
            'drive={"acknowledge_abuse": True}'
        )
    if "insufficientPermissions" in reasons and "scopes" in what:
        return AccessDenied(
            f"{url}: access denied; {account} may not do this, for example because the sign-in is for reading only ({what}): "
            "sign in again for reading and writing (`cachedfs login drive` without --read-only)"
        )
    if "exportSizeLimitExceeded" in reasons:
        return NotDownloadable(
            f"{url}: Google does not export it, as it would be more than 10 MB ({what}); download it as a file from its menu "
            "in Drive, and put that file into Drive"
        )
    if reasons & _NOT_RIGHTS:
        return NotDownloadable(
            f"{url}: this has no bytes to download ({what}); export it from Drive as a file"
        )
    return AccessDenied(
        f"{url}: access denied to {account}; check that the item is shared with it, and that the credentials cover "
        f"the scope https://www.googleapis.com/auth/drive ({what})"
    )


def multipart(resource: Mapping[str, Any], data: bytes, mime: str, boundary: str) -> bytes:
    """Return the body of an upload in one request: metadata and bytes."""
    head = (
        f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n"
        f"{json.dumps(resource, ensure_ascii=False)}\r\n--{boundary}\r\nContent-Type: {mime}\r\n\r\n"
    )
    return b"".join((head.encode(), data, f"\r\n--{boundary}--\r\n".encode()))
