"""Paths at the target, from the URLs and paths that users write."""

from __future__ import annotations

import re
from typing import Any

from fsspec.utils import stringify_path

from cachedfs.common.urls import LOCAL_PROTOCOLS, NAME_PROTOCOLS, SLASH_NAMES, filesystem_class, without_slash
from cachedfs.origins.drive.drive_links import canonical_path, is_drive_link

# Redundant parts of a local path: the repeated "/" and the "/." of `a//b`, `a/./b` and `a/.`.
_NOTHING = re.compile(r"(?:/\.?)+(?=/|$)")


def strip(own: str, target: str | None, path: Any) -> str:
    """Return the target's path for a URL or path in any accepted form.

    `own`: our protocol, such as "cgs". `target`: the target's protocol, used for a path without one. Example:
    "cachedfs::gs://bucket/key" gives "bucket/key".
    """
    text: str = stringify_path(path)
    text = text.removeprefix(f"{own}::").removeprefix(f"{own}://").removeprefix("cachedfs::")
    protocol, scheme, rest = text.partition("://")
    if not scheme or "/" in protocol:  # otherwise "://" is part of a key that contains a URL
        protocol, rest = target or "", text
    elif target in (None, "drive") and is_drive_link(text):
        protocol, rest = "drive", text
    if protocol == "drive":
        return canonical_path(rest.strip("/"))
    if protocol in NAME_PROTOCOLS or not protocol:
        return rest.strip("/") if protocol else rest.rstrip("/")
    name = str(filesystem_class(protocol)._strip_protocol(text))
    if protocol in LOCAL_PROTOCOLS and ("//" in name or "/." in name):
        name = _NOTHING.sub("", name) or "/"
    return without_slash(name)


def object_name(own: str, target: str | None, path: Any) -> str:
    """Return the target's path for an object: as `strip`, with the slashes that end the names of some objects.

    In Google Cloud Storage and S3, "bucket/a" and "bucket/a/" may be two objects.
    """
    name = strip(own, target, path)
    text: str = stringify_path(path)
    has_key = target in SLASH_NAMES and "/" in name
    return name + text[len(text.rstrip("/")) :] if has_key else name
