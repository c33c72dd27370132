"""The public page of a Drive folder: names and ids in it, without an account or an API key.

Google makes the page for embedding into other pages and does not document it. Its markup is known from gdown and other
programs that read it. It shows no sizes and no versions. Whether it shows all names is not known, so a name that is not
on it may exist all the same.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from html.parser import HTMLParser
from typing import Any, NamedTuple

from cachedfs.common.drive_links import canonical_path
from cachedfs.common.types import ObjectInfo
from cachedfs.errors import AccessDenied, CachedFSError
from cachedfs.origins.drive import api

_HOST = "https://drive.google.com"
_ID_AND_KEY = re.compile(r"id:([^,/]+)(?:,resourcekey=(.+))?")
_ID = re.compile(r"entry-([\w-]{8,})", re.ASCII)
_MIME = re.compile(r"/type/([\w.+-]+/[\w.+-]+)$")
_EDITOR = re.compile(r"https://docs\.google\.com/(\w+)/")
_NATIVE = "application/vnd.google-apps."  # begins the type of what an editor opens; its link has the same word, or "s" more
_ANY = "application/octet-stream"
_MOST_ITEMS = 200_000  # on all pages that are remembered
_REMEDY = "an API key lists all of the folder, drive={'api_key': '...'}, and so does signing in (`cachedfs login drive`)"


class NoFolderPage(AccessDenied):
    """There is no folder of this id, or it is not public; never an absence of the names in it."""


class FolderPage(NamedTuple):
    """The title of a folder and the items in it, as far as its page shows them; `at` is when it was requested."""

    title: str
    items: list[dict[str, Any]]
    at: float


def page_url(endpoint: str) -> str:
    """Return the address of the pages; the simulated Drive has them at its own endpoint."""
    return f"{_HOST if endpoint == api.GOOGLE else endpoint}/embeddedfolderview"


def not_listed(path: str) -> AccessDenied:
    """Return the error for a name that the page of its folder does not show."""
    return AccessDenied(
        f"{api.url_of(path)}: the public page of its folder does not show this name, and it may leave out names: {_REMEDY}"
    )


def page_of(status: int, body: bytes, id: str, url: str, at: float) -> FolderPage:
    """Return the page of the folder `id` from its answer; raise AccessDenied, or CachedFSError for a page of another form."""
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


class FolderPages:
    """The public pages that were read, the last ones in memory. Event loop thread only."""

    def __init__(self, read: Callable[[str, str | None, str, bool], Awaitable[tuple[int, bytes]]]) -> None:
        """Create it; `read(id, resource key, path, is_known)` requests a page and returns its status and body.

        A page of a folder that is known to be public (`is_known`) is requested again after a passing trouble.
        """
        self._read = read
        self._reading: dict[str, tuple[float, asyncio.Task[FolderPage]]] = {}
        self._pages: OrderedDict[str, FolderPage] = OrderedDict()

    def is_folder(self, id: str) -> bool:
        """Return whether this was a public folder when it was last looked up."""
        return id in self._pages

    async def folder(self, id: str, key: str | None, path: str) -> dict[str, Any]:
        """Return the item of a folder, from its page as it is now."""
        page = await self._request(id, key, path, self.is_folder(id))
        item = {
            "kind": "drive#file",
            "id": id,
            "name": page.title,
            "mimeType": api.FOLDER,
            api.PAGE_READ_AT: page.at,
        }
        return item | ({"resourceKey": key} if key else {})

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
                self._request(id, folder.details.get("resourceKey"), folder.path, True)
            )
            self._reading[id] = now, task
            task.add_done_callback(lambda done: self._finished(id, done))
        return (await asyncio.shield(task)).items

    async def _request(self, id: str, key: str | None, path: str, is_known: bool) -> FolderPage:
        at = time.time()
        status, body = await self._read(id, key, path, is_known)
        page = await asyncio.to_thread(page_of, status, body, id, api.url_of(path), at)
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
    of_drive = link.startswith(f"{_HOST}/")
    found = _ID_AND_KEY.fullmatch(canonical_path(link)) if of_drive else _ID.fullmatch(id)
    if found is None:
        raise ValueError(f"an entry leads to {link[:60]!r}")
    item: dict[str, Any] = {"kind": "drive#file", "id": found[1], "name": name}
    if of_drive and "/folders/" in link:
        item |= {"mimeType": api.FOLDER, api.PAGE_READ_AT: at}
    elif editor := _EDITOR.match(link):
        item["mimeType"] = mime or _NATIVE + editor[1].removesuffix("s")
    else:
        item["mimeType"] = _ANY if mime in ("", api.SHORTCUT, api.FOLDER) else mime
    return item | ({"resourceKey": found[2]} if of_drive and found[2] else {})
