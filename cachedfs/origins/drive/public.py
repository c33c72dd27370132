"""Read Drive without an account or an API key: public files, and the pages of public folders.

Google documents neither address. What is known is in gdown, yt-dlp and other programs. The download address takes ranges,
answers 200 with a page where there is a problem, and asks to confirm the download of a large file, which `confirm=t` does
beforehand. The page of a folder is made for embedding into other pages. It shows no sizes and no versions, and perhaps not
all names. So a name that is not on it may exist all the same.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC
from html.parser import HTMLParser
from typing import Any, NamedTuple
from urllib.parse import unquote

from cachedfs.common.types import ObjectInfo, Range
from cachedfs.errors import AccessDenied, CachedFSError, NotDownloadable, ObjectNotFound
from cachedfs.origins.base import content_range, http_date, int_of, range_header
from cachedfs.origins.drive import api
from cachedfs.origins.drive.connection import DriveConnection
from cachedfs.origins.drive.failures import page_failure
from cachedfs.origins.drive_links import NATIVE, canonical_path
from cachedfs.origins.evidence import is_recent, unique_fingerprint
from cachedfs.origins.http_request import Answer, HTTPRequest
from cachedfs.origins.retry import RetryableError

GOOD = frozenset({200, 206, 302, 303, 403, 404, 416, 500})  # what `page_failure` explains is among them
_DOWNLOADS, _PAGES = "https://drive.usercontent.google.com", "https://drive.google.com"
_ID_AND_KEY = re.compile(r"id:([^,/]+)(?:,resourcekey=(.+))?")
_ID = re.compile(r"entry-([\w-]{8,})", re.ASCII)
_MIME = re.compile(r"/type/([\w.+-]+/[\w.+-]+)$")
_EDITOR = re.compile(r"https://docs\.google\.com/(\w+)/")
_ANY = "application/octet-stream"
_MOST_ITEMS = 200_000  # on all pages that are remembered
_REMEDY = "an API key lists all of the folder, drive={'api_key': '...'}, and so does signing in (`cachedfs login drive`)"


# Files
def is_page(status: int, headers: Mapping[str, str]) -> bool:
    """Return whether an answer is a page for people, or leads to one, and not the file."""
    return status not in (200, 206, 416) or (
        status != 416 and "attachment" not in headers.get("Content-Disposition", "")
    )


def item_of(id: str, key: str | None, status: int, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the item of a file, as the API would, from the answer to a request for its first byte.

    The time of the last change stands for the revision, which this address does not tell. It has no fraction: while it
    is recent by the clock of the answer, another change may show it again, and the revision equals no other one.
    """
    try:
        size = content_range(headers["Content-Range"])[2] if status == 206 else _size_of(status, headers)
    except (KeyError, ValueError):
        size = None
    if size is None:
        raise RetryableError("the answer does not say how large the file is")
    item: dict[str, Any] = {
        "kind": "drive#file",
        "id": id,
        "name": _name_in(headers) or id,
        "mimeType": headers.get("Content-Type", "application/octet-stream").partition(";")[0].strip(),
        "size": str(size),
        "capabilities": {"canDownload": True, "canReadRevisions": False},
    }
    if key:
        item["resourceKey"] = key
    if (at := http_date(headers.get("Last-Modified", ""))) is not None:
        item["modifiedTime"] = at.astimezone(UTC).isoformat().replace("+00:00", "Z")
        revision, now = f"modified-{at.timestamp():.0f}", http_date(headers.get("Date"))
        is_final = now is not None and not is_recent(at.timestamp(), now.timestamp())
        item["headRevisionId"] = revision if is_final else unique_fingerprint(revision)
    return item


def _size_of(status: int, headers: Mapping[str, str]) -> int | None:
    if status == 416:  # no byte of an empty file is in any range
        return int_of(headers.get("Content-Range", "").rpartition("/")[2])
    return int_of(headers.get("Content-Length"))


def _name_in(headers: Mapping[str, str]) -> str:
    """Return the file name in `Content-Disposition`, in its UTF-8 form if there is one."""
    text = headers.get("Content-Disposition", "")
    if found := re.search(r"filename\*=UTF-8''([^;]+)", text, re.IGNORECASE):
        return unquote(found[1])
    found = re.search(r'filename="([^"]+)"', text)
    return found[1] if found else ""


# Folders
class NoFolderPage(AccessDenied):
    """There is no folder of this id, or it is not public; never an absence of the names in it."""


class FolderPage(NamedTuple):
    """The title of a folder and the items in it, as far as its page shows them; `at` is when it was requested."""

    title: str
    items: list[dict[str, Any]]
    at: float


def not_listed(path: str) -> AccessDenied:
    """Return the error for a name that the page of its folder does not show."""
    return AccessDenied(
        f"{api.url_of(path)}: the public page of its folder does not show this name, and it may leave out names: {_REMEDY}"
    )


def page_of(status: int, body: bytes, id: str, url: str, at: float) -> FolderPage:
    """Return the page of the folder `id` from its answer.

    Raises AccessDenied, or CachedFSError for a page of another form.
    """
    if status != 200:
        kind = NoFolderPage if status == 404 else AccessDenied
        raise kind(
            f"{url}: there is no public page of this folder (status {status}): ask its owner to share it with 'Anyone with "
            f"the link', or {_REMEDY}"
        )
    parser = _PageParser()
    parser.feed(body.decode("utf-8", "replace"))
    parser.close()
    try:
        if not parser.is_folder:
            raise ValueError("it lists no folder")
        if not parser.entries and any(id not in link for link in parser.links):
            raise ValueError("its links are in no entries")
        items = [_item_of(entry, at) for entry in parser.entries]
    except ValueError as error:
        raise CachedFSError(
            f"{url}: Google's public page of a folder has another form than is known ({parser.title[:60]!r}: {error}); {_REMEDY}"
        ) from None
    return FolderPage(parser.title, list({item["id"]: item for item in items}.values()), at)


class PublicDrive:
    """Reads public files and folders; the last pages of folders are in memory. Event loop thread only."""

    def __init__(self, connection: DriveConnection) -> None:
        self._to = connection
        self._reading: dict[str, tuple[float, asyncio.Task[FolderPage]]] = {}
        self._pages: OrderedDict[str, FolderPage] = OrderedDict()

    async def uses_pages(self, path: str) -> bool:
        """Return whether a folder is listed by its public page: nobody has signed in, and there is no API key."""
        await self._to.clients()
        return self._to.is_public and path.startswith("id:")

    async def has_new_sign_in(self) -> bool:
        """Return whether there is a new sign-in, where there was none: then folders are listed by the API."""
        was_missing = (await self._to.signed_in()).is_missing
        return not self._to.is_public or (was_missing and not await self._to.is_missing())

    # Items
    async def item(self, id: str, path: str, key: str | None, *, is_pinned: bool) -> dict[str, Any]:
        """Return the item of a file (`is_pinned`: it is one), or of a folder, which only its page tells apart."""
        if is_pinned:
            return await self._file(id, path, key, is_pinned=True)
        if id in self._pages:
            return await self._folder(id, key, path)
        try:
            return await self._file(id, path, key, tries=1)
        except (AccessDenied, NotDownloadable, ObjectNotFound) as error:
            not_a_file = error
        try:
            return await self._folder(id, key, path)
        except CachedFSError as error:
            # Only a second 404 means that there is nothing.
            is_hidden = isinstance(not_a_file, ObjectNotFound) and not isinstance(error, NoFolderPage)
            has_failed = isinstance(not_a_file, NotDownloadable) and not isinstance(error, AccessDenied)
            if is_hidden or has_failed:
                raise
        if not isinstance(not_a_file, NotDownloadable):
            raise not_a_file
        return await self._file(id, path, key, tries=1)  # its trouble may have passed

    async def version(self, item: dict[str, Any], path: str) -> dict[str, Any]:
        """Return an item of a folder's page with the size and version that its own answer states."""
        if api.is_native(item["mimeType"]):
            return item
        try:
            found = await self._file(item["id"], path, item.get("resourceKey"))
        except ObjectNotFound as error:  # the page shows it: it is no proof that there is no such file
            raise AccessDenied(f"{error.message}; the public page of its folder shows it") from None
        return {**found, "name": item["name"]}

    async def items(self, folder: ObjectInfo) -> list[dict[str, Any]]:
        """Return the items on the page of a folder, at least as new as the folder's metadata.

        Concurrent callers share a request.
        """
        id, now = str(folder.id), time.time()
        since = folder.details.get(api.PAGE_READ_AT, now)
        if (known := self._pages.get(id)) is not None and since <= known.at <= now:
            self._pages.move_to_end(id)
            return known.items
        began, task = self._reading.get(id, (now, None))
        if task is None or not since <= began <= now:
            task = asyncio.ensure_future(
                self._page(id, folder.details.get("resourceKey"), folder.path, is_known=True)
            )
            self._reading[id] = now, task
            task.add_done_callback(lambda done: self._finished(id, done))
        return (await asyncio.shield(task)).items

    # Requests
    def _address(self, host: str, name: str) -> str:
        """Return an address at a host of Google's; the simulated Drive has it at its own endpoint."""
        return f"{host if self._to.base == api.GOOGLE else self._to.base}/{name}"

    def request(self, id: str, key: str | None, path: str, want: Range, *, is_pinned: bool) -> HTTPRequest:
        """Return the request for bytes of a file."""
        return self._to.request(
            self._address(_DOWNLOADS, "download"),
            path,
            "",
            want=want,
            params={"id": id, "export": "download", "confirm": "t", **_key_param(key)},
            headers={"Accept-Encoding": "identity", "Range": range_header(want) or ""},
            as_stored=True,
            is_pinned=is_pinned,
            kind="download",
            good=GOOD,
        )

    async def _file(
        self, id: str, path: str, key: str | None, *, is_pinned: bool = False, tries: int = 2
    ) -> dict[str, Any]:
        request = self.request(id, key, path, Range(0, 1), is_pinned=is_pinned)
        n_failed = itertools.count(1)

        def item_in(answer: Answer) -> dict[str, Any]:
            # The answer for a folder or a document, or a passing trouble.
            if answer.status == 500 and next(n_failed) < tries:
                raise RetryableError("the public address answered 500")
            if is_page(answer.status, answer.headers):
                raise page_failure(request, answer.status, answer.body)
            return item_of(id, key, answer.status, answer.headers)

        return await self._to.answered(request, item_in)

    async def _folder(self, id: str, key: str | None, path: str) -> dict[str, Any]:
        """Return the item of a folder, from its page as it is now."""
        page = await self._page(id, key, path, is_known=id in self._pages)
        item = {"kind": "drive#file", "id": id, "name": page.title, "mimeType": api.FOLDER}
        return item | {api.PAGE_READ_AT: page.at} | ({"resourceKey": key} if key else {})

    async def _page(self, id: str, key: str | None, path: str, *, is_known: bool) -> FolderPage:
        """Request a page; that of a folder that is known to be public again after a passing trouble."""
        params = {"id": id, **_key_param(key)}
        request = self._to.request(
            self._address(_PAGES, "embeddedfolderview"),
            path,
            "reading its public page",
            params=params,
            kind="download",
            good=GOOD,
        )

        def checked(answer: Answer) -> Answer:
            if answer.status == 500 and is_known:
                raise RetryableError("the public page of the folder answered 500")
            return answer

        at = time.time()
        answer = await self._to.answered(request, checked)
        page = await asyncio.to_thread(page_of, answer.status, answer.body, id, request.subject, at)
        self._pages.pop(id, None)
        self._pages[id] = page
        n_items = sum(len(each.items) + 1 for each in self._pages.values())
        while n_items > _MOST_ITEMS and len(self._pages) > 1:
            n_items -= len(self._pages.popitem(last=False)[1].items) + 1
        return page

    def _finished(self, id: str, task: asyncio.Task[FolderPage]) -> None:
        if self._reading.get(id, (0.0, None))[1] is task:
            del self._reading[id]
        if not task.cancelled():
            task.exception()  # whoever waited has had it


def _key_param(key: str | None) -> dict[str, str]:
    return {"resourcekey": key} if key else {}


class _PageParser(HTMLParser):
    """Collects the entries of a page: link, title and type of each."""

    def __init__(self) -> None:
        super().__init__()
        self.title, self.is_folder = "", False
        self.entries: list[dict[str, str]] = []
        self.links: list[str] = []
        self._into: tuple[str, str] | None = None  # tag and field of the text that is being read

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        classes = found.get("class", "").split()
        self.is_folder |= "flip-entries" in classes
        if "flip-entry" in classes:
            self.entries.append({"id": found.get("id", "")})
        elif tag == "title":
            self._into = tag, "title"
        elif self.entries and "flip-entry-title" in classes:
            self._into = tag, "name"
        elif tag == "a":
            self.links.append(link := found.get("href", ""))
            if self.entries:
                self.entries[-1].setdefault("link", link)
        elif self.entries and tag == "img" and (mime := _MIME.search(found.get("src", ""))):
            self.entries[-1].setdefault("mime", mime[1])

    def handle_endtag(self, tag: str) -> None:
        if self._into is not None and self._into[0] == tag:
            self._into = None

    def handle_data(self, data: str) -> None:
        if self._into is None:
            return
        if self._into[1] == "title":
            self.title += data
        else:
            self.entries[-1]["name"] = self.entries[-1].get("name", "") + data


def _item_of(entry: Mapping[str, str], at: float) -> dict[str, Any]:
    """Return an entry as an item, as the API would, without size and version; raise ValueError if a part is missing."""
    id, link, name, mime = (entry.get(part, "") for part in ("id", "link", "name", "mime"))
    if not link or not name:
        raise ValueError("an entry has no link or no name")
    # Others lead to the page of an editor, which has the id of the entry.
    of_drive = link.startswith(f"{_PAGES}/")
    found = _ID_AND_KEY.fullmatch(canonical_path(link)) if of_drive else _ID.fullmatch(id)
    if found is None:
        raise ValueError(f"an entry leads to {link[:60]!r}")
    item: dict[str, Any] = {"kind": "drive#file", "id": found[1], "name": name}
    if of_drive and "/folders/" in link:
        item |= {"mimeType": api.FOLDER, api.PAGE_READ_AT: at}
    elif editor := _EDITOR.match(link):
        # The type of what an editor opens has the word in its link, which may have one "s" more.
        item["mimeType"] = mime or NATIVE + editor[1].removesuffix("s")
    else:
        item["mimeType"] = _ANY if mime in ("", api.SHORTCUT, api.FOLDER) else mime
    return item | ({"resourceKey": found[2]} if of_drive and found[2] else {})
