"""Routes of the simulated Google Drive: its API, OAuth and public downloads.

Written from the published reference (developers.google.com/drive/api: files, changes, drives, search query terms,
resumable uploads, error codes, limits). The tests validate every reply against the API's discovery documents.
What is not in the table below does not exist (404). Differences from the documentation:

- Stricter: requests put an item into one folder only.
  Queries have only the terms in `query.py`. A page token is valid only for the same query.
- More lenient: unknown parameters are ignored, as the service does. Every caller may do what an item's
  `capabilities` do not deny, and needs no token unless the server requires one. An API key, which is ignored
  beside a token, always makes a caller a mere reader of what is public. The storage quota is never used up. Tokens
  by default do not expire. Items are owned by the account or by somebody else, and public or not.
- Undocumented, chosen here: `alt=media` costs as much as a download. A minute of the quota is any 60 s, or one
  of the clock (`quota.py`). Each request of an upload is charged, but only
  the first as an edit. The changes feed has no
  delay and its tokens never expire, unless a test sets that. Media is never compressed with gzip. Without an account
  a listing has only the children of public folders that the query names, and everything but reading files is 401.
  A caller sees nothing of a folder that it cannot list but what is shared with it. Public downloads of folders, and
  of files that may not be downloaded, have pages of ours, and so has the public page of an item that is no folder.
  Only folders are created without media.
- Undocumented, as recorded: a name in single quotes is not found by a query for it; errors of callers without an
  account, and of `acknowledgeAbuse`; public downloads; the public page of a folder.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial

from cachedfs.sim.drive import v2
from cachedfs.sim.drive.public import PublicDownloads
from cachedfs.sim.drive.reading import query_of
from cachedfs.sim.drive.writing import DriveWriting
from cachedfs.sim.google import match_path
from cachedfs.sim.messages import Call, Refusal, Response, Route

# Method and path below /drive/v3/, kind of request, quota units, and function. The documentation does not say whether
# `alt=media` is a download.
_ROUTES = [
    ("GET", "about", "about", 5, "_about"),
    ("GET", "changes", "change", 100, "_list_changes"),
    ("GET", "changes/startPageToken", "change", 5, "_start_token"),
    ("GET", "drives", "drives", 100, "_drives"),
    ("GET", "files", "list", 100, "_list"),
    ("POST", "files", "create", 50, "_create"),
    ("GET", "files/generateIds", "ids", 5, "_generate_ids"),
    ("GET", "files/{item_id}", "get", 5, "_get"),
    ("GET", "files/{item_id}", "media", 200, "_media"),
    ("PATCH", "files/{item_id}", "update", 50, "_update"),
    ("DELETE", "files/{item_id}", "delete", 50, "_delete"),
    ("POST", "files/{item_id}/copy", "copy", 50, "_copy"),
    ("GET", "files/{item_id}/export", "export", 200, "_export"),
    ("GET", "files/{item_id}/revisions", "revisions", 100, "_revisions"),
    ("GET", "files/{item_id}/revisions/{revision_id}", "media", 200, "_media"),
    ("DELETE", "files/{item_id}/revisions/{revision_id}", "delete", 50, "_delete_revision"),
]
_OF_V2 = ("list", "get", "media")


class DriveApi(DriveWriting, PublicDownloads):
    """Answers like www.googleapis.com/drive, oauth2.googleapis.com and the public pages of Drive."""

    def route(self, call: Call) -> Route:
        if (route := self._oauth_route(call)) is not None:
            return route
        if call.path == "/download":
            return Route("media", self._download, key=call.query.get("id", ""), style="html")
        if call.path == "/embeddedfolderview":
            return Route("page", self._folder_page, key=call.query.get("id", ""), style="html")
        for pattern in ("/upload/drive/v3/files", "/upload/drive/v3/files/{item_id}"):
            if (found := match_path(pattern, call.path)) is not None:
                item_id = found.get("item_id")
                if "upload_id" not in call.query and call.method != ("PATCH" if item_id else "POST"):
                    return Route("other", _no_such_address)
                return self.upload_route(call, partial(self._begin_upload, call, item_id), units=50)
        if call.path.startswith("/drive/v3/"):
            return self._api_route(call, call.path.removeprefix("/drive/v3/"))
        if call.path.startswith("/drive/v2/"):
            asked = v2.to_v3(call)
            route = self._api_route(asked, call.path.removeprefix("/drive/v2/"))
            if route.kind in _OF_V2:
                act = route.act
                return replace(route, act=lambda _: v2.from_v3(route.kind, act(asked)))
        return Route("other", _no_such_address)

    def _api_route(self, call: Call, path: str) -> Route:
        is_media = call.query.get("alt") == "media"
        for method, pattern, kind, units, name in _ROUTES:
            found = match_path(pattern, path)
            if found is not None and method == call.method and is_media == (kind == "media"):
                if kind == "create":
                    found["item_id"] = call.json().get("id") or self.items.new_id()
                key = self._list_key(call) if kind == "list" else found.get("item_id", "")
                if item := self.items.get(key):
                    key = item.id  # of an alias
                return Route(kind, partial(getattr(self, name), **found), key=key, units=units)
        return Route("other", _no_such_address)

    def _list_key(self, call: Call) -> str:
        with contextlib.suppress(Refusal):  # of an invalid query, when it is executed
            query = query_of(call)
            return query.parents[0] if query and query.parents else ""
        return ""


def _no_such_address(call: Call) -> Response:
    """Return the 404 page of Google's front end, which is not in the API's error format."""
    page = "<!DOCTYPE html>\n<html><title>Error 404 (Not Found)!!1</title><p><b>404.</b> That's an error.</html>\n"
    return Response(404, {"Content-Type": "text/html; charset=UTF-8"}, page.encode())
