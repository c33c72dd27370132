"""Routes of the simulated Google Drive: API versions 2 and 3 over one state, OAuth, public downloads.

Written from the published reference (developers.google.com/drive/api: v2 and v3 files, changes, drives,
search query terms, batches, resumable uploads, error codes, limits). The tests validate every reply against
the API's discovery documents. Differences from the documentation:

- Stricter: the quota per minute is a bucket of one second (`quota.py`). Requests put an item into one folder only.
  Queries have only the terms listed in `call.py`. A page token is valid only for the same query.
- More lenient: unknown parameters are ignored, as the service does. HEAD is answered. Every caller may do what an
  item's `capabilities` do not deny, and needs no token unless the server requires one. An API key, which is ignored
  beside a token, always makes a caller a mere reader of what is public. The storage quota is never used up. Tokens
  by default do not expire. Items are owned by the account or by somebody else, and public or not:
  no request changes permissions. Comments, labels, replies and channels do not exist (404).
- Undocumented, chosen here: `alt=media` costs as much as a download. Each request of an upload is charged, but only
  the first as an edit. An open-ended range is charged to a file's quota as the whole file. The changes feed has no
  delay and its tokens never expire, unless a test sets that. Media is never compressed with gzip. Without an account
  a listing has only the children of public folders that the query names, and everything but reading files is 401. Public downloads of
  folders, and of files that are infected or may not be downloaded, have pages of ours.
- Undocumented, as recorded: errors of callers without an account, and of `acknowledgeAbuse`; public downloads
  (`public.py`), whose exports of documents come without the redirect to another host.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl, unquote

from cachedfs.sim.drive.call import V2, V3, Ask, invalid
from cachedfs.sim.drive.feed import Feed
from cachedfs.sim.drive.public import PublicAccess
from cachedfs.sim.drive.query import parse_query
from cachedfs.sim.drive.show import to_v2
from cachedfs.sim.drive.writing import DriveWriting
from cachedfs.sim.google import split_related
from cachedfs.sim.messages import Call, Refusal, Response, Route
from cachedfs.sim.objects import DataBody

__all__ = ["DriveApi"]


class DriveApi(DriveWriting, Feed, PublicAccess):
    """Answers like www.googleapis.com/drive and oauth2.googleapis.com."""

    # Routing
    def route(self, call: Call) -> Route:
        if (route := self._oauth_route(call)) is not None:
            return route
        if re.fullmatch(r"/batch/drive/v[23]", call.path):
            return Route("batch", self.batch)
        found = re.fullmatch(r"(/upload|/resumable/upload)?/drive/(v[23])/(.+)", call.path)
        if not found:
            return self._route_public(call) or Route("other", lambda _: _no_such_address())
        if call.method == "POST" and (method := call.headers.get("x-http-method-override")):
            call.method = method
            if method == "GET":  # a query too long for a URL, sent as a form
                call.query.update(parse_qsl(call.body.decode(), True))
                call.body = b""
        ask, parts = Ask(call, V3 if found[2] == "v3" else V2), [unquote(p) for p in found[3].split("/")]
        if found[1]:
            return self._route_upload(ask, parts)
        if parts[0] == "files" and len(parts) > 1 and parts[1] != "generateIds":
            return self._route_file(ask, parts[1], parts[2:])
        match call.method, parts:
            case "GET", ["files"]:
                return self._route_list(ask)
            case "POST", ["files"]:
                upload = self._new_upload(ask, ask.body, "")
                return Route("create", lambda _: self._insert(upload), key=upload.item_id)
            case "GET", ["files", "generateIds"]:
                return Route("ids", lambda _: self._generate_ids(ask))
            case "GET", ["changes", "startPageToken"]:
                return Route("change", lambda _: self._start_token(ask), units=5)
            case "GET", ["changes"]:
                return Route("change", lambda _: self._list_changes(ask))
            case "GET", ["about"]:
                return Route("about", lambda _: self._about(ask))
            case "GET", [("drives" | "teamdrives") as which, *rest]:
                units = 5 if rest else None
                return Route("drives", lambda _: self._drives(ask, which, rest), units=units)
        return Route("other", lambda _: _no_such_address())

    def _route_file(self, ask: Ask, item_id: str, rest: list[str]) -> Route:
        item = self.items.get(item_id)
        key = item.id if item else item_id
        match ask.call.method, rest:
            case (("GET" | "HEAD"), []) if ask.query.get("alt") == "media":
                revision = ask.query.get("revisionId") if ask.words is V2 else None
                return Route("media", lambda _: self._media(ask, key, revision), key=key)
            case (("GET" | "HEAD"), []):
                return Route("get", lambda _: self._get(ask, key), key=key)
            case (("PATCH" | "PUT") as verb, []) if verb == "PATCH" or ask.words is V2:
                return Route("update", lambda _: self._update(ask, key), key=key)
            case "DELETE", []:
                return Route("delete", lambda _: self._delete(ask, key), key=key)
            case "POST", [("trash" | "untrash") as verb] if ask.words is V2:
                return Route("update", lambda _: self._trash(ask, key, verb == "trash"), key=key)
            case "POST", ["copy"]:
                return Route("copy", lambda _: self._copy(ask, key), key=key)
            case "GET", ["export"]:
                return Route("export", lambda _: self._export(ask, key), key=key)
            case "GET", ["revisions", revision] if ask.query.get("alt") == "media" and ask.words is V3:
                return Route("media", lambda _: self._media(ask, key, revision), key=key)
            case "DELETE", ["revisions", revision]:
                return Route("delete", lambda _: self._delete_revision(ask, key, revision), key=key)
            case "GET", ["revisions", *which]:
                units = 5 if which else None
                return Route("revisions", lambda _: self._revisions(ask, key, which), key=key, units=units)
            case "GET", ["permissions"]:
                return Route("permissions", lambda _: self._permissions(ask, key), key=key)
        return Route("other", lambda _: _no_such_address())

    def _route_list(self, ask: Ask) -> Route:
        text, query = ask.query.get("q"), None
        try:
            query = parse_query(text, ask.words.terms) if text else None
        except (ValueError, LookupError):
            return Route("list", lambda _: _refuse(invalid("q", "Invalid Value")))
        parents = (query.parents() if query else None) or [""]
        folder = self.items.get(parents[0])
        return Route("list", lambda _: self._list(ask, query), key=folder.id if folder else parents[0])

    def _route_upload(self, ask: Ask, parts: list[str]) -> Route:
        call, upload_id = ask.call, ask.query.get("upload_id")
        if upload_id is not None:
            session = self.uploads.get(upload_id)
            key = session.item_id if session else ""
            return Route("upload", lambda c: self._resume(session, c), key=key, units=5)
        if parts[0] != "files" or len(parts) != (1 if call.method == "POST" else 2):
            return Route("other", lambda _: _no_such_address())
        kind, fields, data = ask.query.get("uploadType"), dict[str, Any](), call.body
        mime = call.headers.get("content-type") or ""
        if kind == "multipart":
            fields, given, data = split_related(call)
            fields, mime = to_v2(fields) if ask.words is V3 else fields, given or ""
        elif kind == "resumable":
            fields, mime = ask.body, call.headers.get("x-upload-content-type", "")
        elif kind != "media":
            raise invalid("uploadType", "Invalid value for uploadType.")
        upload = self._new_upload(ask, fields, mime, *parts[1:])
        return Route("upload", lambda _: self._upload(upload, kind, data), key=upload.item_id)


def _no_such_address() -> Response:
    """Return the 404 page of Google's front end, which is not in the API's error format."""
    page = "<!DOCTYPE html>\n<html><title>Error 404 (Not Found)!!1</title><p><b>404.</b> That's an error.</html>\n"
    return Response(404, {"Content-Type": "text/html; charset=UTF-8"}, DataBody(page.encode()))


def _refuse(refusal: Refusal) -> Response:
    raise refusal
