"""Names of objects as file names, and back.

A file system takes neither NUL, "." nor ".." in a name. Such a name is shown with these characters in percent-encoding;
a name that only looks so has its "%" encoded. All other names stay as they are.
"""

from __future__ import annotations

import re

__all__ = ["MAX_BYTES", "file_name", "object_name"]

MAX_BYTES = 255  # of a file name, in Linux and macOS
_CODES = {"%25": "%", "%00": "\0", "%2E": "."}
_CODE = re.compile("|".join(_CODES))


def file_name(name: str) -> str:
    """Return the file name of an object's name in its folder."""
    if not (_is_refused(name) or ("%" in name and _is_encoded(name))):
        return name
    encoded = name.replace("%", "%25").replace("\0", "%00")
    return encoded.replace(".", "%2E") if name in (".", "..") else encoded


def object_name(name: str) -> str:
    """Return the name of the object with this file name."""
    return _decoded(name) if "%" in name and _is_encoded(name) else name


def _is_refused(name: str) -> bool:
    return name in (".", "..") or "\0" in name


def _is_encoded(name: str) -> bool:
    decoded = _decoded(name)
    return decoded != name and (_is_refused(decoded) or _is_encoded(decoded))


def _decoded(name: str) -> str:
    return _CODE.sub(lambda code: _CODES[code[0]], name)
