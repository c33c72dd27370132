"""The public download address of Google Drive: single public files, without an account.

Google does not document it. What is known is in gdown and yt-dlp: it takes ranges, answers 200 with a page where there is
a problem, and asks to confirm the download of a large file, which `confirm=t` does beforehand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC
from typing import Any
from urllib.parse import unquote

from cachedfs.errors import AccessDenied, CachedFSError, NotDownloadable, ObjectNotFound, QuotaExceeded
from cachedfs.origins.base import content_range, http_date, number
from cachedfs.origins.drive.api import GOOGLE
from cachedfs.origins.evidence import is_recent, unique_fingerprint
from cachedfs.origins.retry import RetryableError

GOOD = frozenset({200, 206, 302, 303, 403, 404, 416, 500})  # what `page_error` explains is among them
_HOST = "https://drive.usercontent.google.com"
_TITLE = re.compile(rb"<title>(?:Google Drive - )?([^<]*)</title>", re.IGNORECASE)
_ACCOUNT = "sign in (`cachedfs login drive`), or give an API key, drive={'api_key': '...'}"


def download_url(endpoint: str) -> str:
    """Return the address; the simulated Drive has it at its own endpoint."""
    return f"{_HOST if endpoint == GOOGLE else endpoint}/download"


def params_of(id: str, key: str | None) -> dict[str, str]:
    params = {"id": id, "export": "download", "confirm": "t"}
    return params | ({"resourcekey": key} if key else {})


def is_page(status: int, headers: Mapping[str, str]) -> bool:
    """Return whether an answer is a page for people, or leads to one, and not the file."""
    return status not in (200, 206, 416) or (
        status != 416 and "attachment" not in headers.get("Content-Disposition", "")
    )


def page_error(status: int, headers: Mapping[str, str], body: bytes, url: str) -> CachedFSError:
    """Return the error that a page means."""
    found = _TITLE.search(body)
    title = found[1].decode("utf-8", "replace").strip() if found else f"status {status}"
    if status in (302, 303) or title.startswith("Sign in"):
        return AccessDenied(
            f"{url}: this file is not public: ask its owner to share it with 'Anyone with the link', or {_ACCOUNT}"
        )
    if status == 404:
        return ObjectNotFound(f"{url}: there is no such file, or it is not public; check the id")
    if "Quota exceeded" in title or b"Too many users have viewed" in body:
        return QuotaExceeded(
            f"{url}: too many users have viewed or downloaded this file recently; Google allows more within 24 hours. "
            f"A copy of it in a Drive of your own has its own quota: {_ACCOUNT}"
        )
    if status == 500:
        return NotDownloadable(
            f"{url}: without an account only files and folders can be read, no documents: {_ACCOUNT}"
        )
    if status == 403 or "nfected" in title:
        return AccessDenied(f"{url}: Google does not give this file to everybody ({title}): {_ACCOUNT}")
    return CachedFSError(f"{url}: Google answered with a page ({title}) in place of the file; {_ACCOUNT}")


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
        return number(headers.get("Content-Range", "").rpartition("/")[2])
    return number(headers.get("Content-Length"))


def _name_in(headers: Mapping[str, str]) -> str:
    """Return the file name in `Content-Disposition`, in its UTF-8 form if there is one."""
    text = headers.get("Content-Disposition", "")
    if found := re.search(r"filename\*=UTF-8''([^;]+)", text, re.IGNORECASE):
        return unquote(found[1])
    found = re.search(r'filename="([^"]+)"', text)
    return found[1] if found else ""
