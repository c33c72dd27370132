"""Version 2 of the Drive API, as far as PyDrive2 reads files with it: a translation of version 3."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from cachedfs.sim.messages import Call, Refusal, Response

# v3 name of each simulated field -> its v2 name.
_SAME = """kind id mimeType version headRevisionId md5Checksum capabilities ownedByMe shared spaces driveId
resourceKey shortcutDetails parents"""
_FIELDS = {name: name for name in _SAME.split()} | {
    "name": "title",
    "size": "fileSize",
    "createdTime": "createdDate",
    "modifiedTime": "modifiedDate",
    "sharedWithMeTime": "sharedWithMeDate",
}
_TO_V3 = {v2: v3 for v3, v2 in _FIELDS.items()} | {"items": "files", "labels": "trashed"}


def to_v3(call: Call) -> Call:
    query = dict(call.query)
    if "revisionId" in query:
        raise Refusal(501, "The simulation has no revisions in version 2.")
    query["fields"] = re.sub(r"\w+", lambda m: _TO_V3.get(m[0], m[0]), query.get("fields", "*"))
    if "maxResults" in query:
        query["pageSize"] = query.pop("maxResults")
    if "q" in query:
        query["q"] = re.sub(r"('(?:[^'\\]|\\.)*')|\btitle\b", lambda m: m[1] or "name", query["q"])
    if query.get("corpora") == "default":
        del query["corpora"]
    return replace(call, path=call.path.replace("/v2/", "/v3/"), query=query)


def from_v3(kind: str, value: Response | dict[str, Any]) -> Response | dict[str, Any]:
    if isinstance(value, Response):
        return value
    if kind == "get":
        return _item(value)
    files = value.pop("files", None)
    return value | ({} if files is None else {"items": [_item(file) for file in files]})


def _item(file: dict[str, Any]) -> dict[str, Any]:
    out = {_FIELDS[name]: value for name, value in file.items() if name in _FIELDS}
    if "parents" in out:
        out["parents"] = [{"kind": "drive#parentReference", "id": id} for id in out["parents"]]
    return out | ({"labels": {"trashed": file["trashed"]}} if "trashed" in file else {})
