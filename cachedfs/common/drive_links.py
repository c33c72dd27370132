"""Convert links to Google Drive, and other ways to write a Drive path, to one canonical path. No I/O.

The canonical path is `My Drive/...`, `Shared with me/...`, `shared:NAME/...` or `id:ID[,resourcekey=KEY]/...`. The cache
has one key for a file, however its path was written.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qs

__all__ = ["canonical_path", "is_drive_link"]

_CANONICAL = ("My Drive", "Shared with me", "shared:", "id:")
# Google's ids, such as 1sTWaJ_j7PkjzaBWtNc3IzovK5hQf21FbOw9yLeeLPNQ, and 0AFpK3Xx8AmgsUk9PVA of a shared drive. Names
# that people choose rarely have this form.
_BARE_ID = re.compile(r"(?=.*[0-9])(?=.*[A-Z])(?:[A-Za-z0-9_-]{25,44}|0A[A-Za-z0-9_-]{10,20}PVA)")
_ID = r"[A-Za-z0-9_-]{8,}"  # or a resource key, such as 0-a8Xq1ZkPq2mC5hJ3wKfL0A
_HOST = re.compile(r"(?:https?://)?(drive|drive\.usercontent|docs)\.google\.com(?=[/?#]|$)")
# A company's domain, and the number of an account.
_PREFIX = r"(?:/a/[^/?\#]+)?(?:/drive)?(?:/mobile)?(?:/u/[0-9]+)?"
_FOLDER = re.compile(
    rf"""
    {_PREFIX}/(?:folders/(?P<id>{_ID}) | (?P<view>my-drive|shared-with-me))
    /?(?P<query>\?[^/\#]*)?(?:\#.* | (?P<names>/.*))?  # programs that add names to a link do so behind its query
    """,
    re.VERBOSE | re.DOTALL,
)
_FILE = re.compile(
    rf"""
    {_PREFIX}/(?:
      (?:file|document|spreadsheets|presentation|drawings)(?:/u/[0-9]+)?/d/(?P<id>{_ID})
        (?:/(?:view|preview|edit|copy|present|mobilebasic|htmlview))?
      | (?:open|uc|download|folderview|embeddedfolderview)(?=\?)
    )
    /?(?P<query>\?[^\#]*)?(?:\#.*)?
    """,
    re.VERBOSE | re.DOTALL,
)
# What Colab and Google's desktop program call the places of a mounted Drive.
_MOUNTED = re.compile(
    r"/?(?:content/g?drive/)?(?:My ?Drive|Shared ?drives/(?P<shared>[^/]+))(?P<names>/.*)?", re.DOTALL
)
_VIEWS = {"my-drive": "My Drive", "shared-with-me": "Shared with me"}


def is_drive_link(url: str) -> bool:
    """Return whether a URL is read by the API of Google Drive, and not by HTTP.

    Other addresses at docs.google.com, such as those of exports and published pages, are plain URLs.
    """
    host = _HOST.match(url) if url.startswith("http") else None
    return host is not None and (host[1] != "docs" or _FILE.fullmatch(url, host.end()) is not None)


def canonical_path(path: str) -> str:
    """Return the canonical form of a Drive path without protocol; raise ValueError for a link that is not understood.

    A path that has another beginning is returned as it is.
    """
    if path.startswith(_CANONICAL):
        return path
    if (host := _HOST.match(path)) is not None:
        return _path_of_link(path, host.end())
    if (mounted := _MOUNTED.fullmatch(path)) is not None:
        return (f"shared:{mounted['shared']}" if mounted["shared"] else "My Drive") + (mounted["names"] or "")
    return f"id:{path}" if _BARE_ID.fullmatch(path) else path


def _path_of_link(link: str, at: int) -> str:
    link = link.rstrip("/")
    found = _FOLDER.fullmatch(link, at) or _FILE.fullmatch(link, at)
    parts = found.groupdict() if found else {}
    query = parse_qs((parts.get("query") or "?")[1:])
    id, key = (query.get(name, [""])[0] for name in ("id", "resourcekey"))
    if view := parts.get("view"):
        top = _VIEWS[view]
    elif re.fullmatch(_ID, id := parts.get("id") or id):
        top = f"id:{id},resourcekey={key}" if re.fullmatch(_ID, key) else f"id:{id}"
    else:
        raise ValueError(
            f"{link}: this link names no file or folder that is understood. These do: https://drive.google.com/file/d/ID, "
            "/open?id=ID, /uc?id=ID, /drive/folders/ID, /drive/my-drive and /drive/shared-with-me, and "
            "https://docs.google.com/document/d/ID (or spreadsheets, presentation), which is read as the type in the "
            "option export, as in drive={'export': 'docx'}"
        )
    return f"{top}{parts.get('names') or ''}"
