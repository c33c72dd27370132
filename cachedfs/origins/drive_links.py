"""Convert links to Google Drive, and other ways to write a Drive path, to one canonical path. No I/O.

The canonical path is `My Drive/...`, `Shared with me/...`, `shared:NAME/...` or `id:ID[,resourcekey=KEY]/...`. The cache
has one key for a file, however its path was written.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qs

NATIVE = "application/vnd.google-apps."  # begins the MIME types of Google's own documents

# Patterns are compiled when they are used: that takes a millisecond, which few programs need to spend.
_CANONICAL = ("My Drive", "Shared with me", "shared:", "id:")
# Google's ids, such as 1sTWaJ_j7PkjzaBWtNc3IzovK5hQf21FbOw9yLeeLPNQ, and 0AFpK3Xx8AmgsUk9PVA of a shared drive. Names
# that people choose rarely have this form.
_BARE_ID = r"(?=.*[0-9])(?=.*[A-Z])(?:[A-Za-z0-9_-]{25,44}|0A[A-Za-z0-9_-]{10,20}PVA)"
_ID = r"[A-Za-z0-9_-]{8,}"  # or a resource key, such as 0-a8Xq1ZkPq2mC5hJ3wKfL0A
_HOST = (
    r"(?i)[\s<]*(?:https?://)?((?:drive|drive\.usercontent|docs)\.google\.com|www\.googleapis\.com(?=/drive/))"
    r"(?=[/?#]|\\|$)"
)
# A company's domain, and the number of an account.
_PREFIX = r"(?:/a/[^/?\#]+)?(?:/drive)?(?:/mobile)?(?:/u/[0-9]+)?(?:/mobile)?"
# A link to a folder up to the names that follow it. Programs that add names do so behind the query.
_UP_TO_NAMES = r"[^?\#]*?/(?:folders/[^/?\#]+|my-drive|shared-with-me)(?:/?\?[^/\#]*)?(?=/[^?\#])"
_LEFT_OVER = " \t\r\n;,.>"  # what shells, e-mail and chat programs leave behind a link
_FOLDER = rf"""(?xs)
    {_PREFIX}/(?:folders/(?P<id>{_ID}) | (?P<view>my-drive|shared-with-me))
    /?(?P<query>\?[^\#]*)?(?:\#.*)?
    """
_FILE = rf"""(?xs)
    {_PREFIX}/(?:
      (?:file|document|spreadsheets|presentation|drawings)(?:/u/[0-9]+)?/d/(?P<id>{_ID})
        (?:/(?:view|preview|edit|copy|present|mobilebasic|htmlview))?
      | (?:open|uc|download|folderview|embeddedfolderview|thumbnail)(?=\?)
    )
    /?(?P<query>\?[^\#]*)?(?:\#.*)?
    """
_API = rf"(?:/download)?/drive/v[23]/files/(?P<id>{_ID})/?(?P<query>\?[^\#]*)?"
# What Colab and Google's desktop program call the places of a mounted Drive.
_MOUNTED = r"(?s)/?(?:content/g?drive/)?(?:My ?Drive|Shared ?drives/(?P<shared>[^/]+))(?P<names>/.*)?"
_VIEWS = {"my-drive": "My Drive", "shared-with-me": "Shared with me"}


def is_drive_link(url: str) -> bool:
    """Return whether a URL is read by the API of Google Drive, and not by HTTP.

    Other addresses at docs.google.com and googleapis.com, such as those of exports and published pages, are plain URLs.
    """
    found = re.match(_HOST, url)
    if found is None or "://" not in found[0]:
        return False
    return found[1].lower().startswith("drive") or _parts_of(url, found) is not None


def is_bare_link(text: str) -> bool:
    """Return whether a text is a link to Google Drive without `https://`, or an id alone.

    A local path may look the same.
    """
    found = re.match(_HOST, text)
    return re.fullmatch(_BARE_ID, text) is not None if found is None else "://" not in found[0]


def canonical_path(path: str) -> str:
    """Return the canonical form of a Drive path without protocol.

    A path that has another beginning is returned as it is. Raises ValueError for a link that is not understood.
    """
    if path.startswith(_CANONICAL):
        return path
    if (host := re.match(_HOST, path)) is not None:
        return _path_of_link(path, host)
    if (mounted := re.fullmatch(_MOUNTED, path)) is not None:
        return (f"shared:{mounted['shared']}" if mounted["shared"] else "My Drive") + (mounted["names"] or "")
    return f"id:{path}" if re.fullmatch(_BARE_ID, path) else path


def _parts_of(link: str, host: re.Match[str]) -> dict[str, str] | None:
    """Return the parts of a link: "id" or "view", "query", and the "names" that follow a folder."""
    head, names = link[host.end() :].rstrip("/"), ""
    if (found := re.match(_UP_TO_NAMES, head)) is not None:
        head, names = found[0], head[found.end() :]
    head = head.replace("\\", "").rstrip(_LEFT_OVER).rstrip("/")  # no link has a backslash
    at_api = host[1].lower().startswith("www.")
    forms = (_API,) if at_api else (_FOLDER, _FILE)
    match = next((match for form in forms if (match := re.fullmatch(form, head))), None)
    return None if match is None else {"names": names, **{k: v for k, v in match.groupdict().items() if v}}


def _path_of_link(link: str, host: re.Match[str]) -> str:
    parts = _parts_of(link, host) or {}
    query = parse_qs(parts.get("query", "?")[1:])
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
    return f"{top}{parts.get('names', '')}"
