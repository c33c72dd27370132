"""Names of objects as file names, and back.

A file system takes neither NUL, "." nor ".." in a name. Such a name is shown with these characters in percent-encoding;
a name that only looks so has its "%" encoded. All other names stay as they are.

In Google Drive, several items of a folder may have one name. All but one are shown with their ids.
"""

from __future__ import annotations

import re

MAX_BYTES = 255  # of a file name, in Linux and macOS
_CODES = {"%25": "%", "%00": "\0", "%2E": "."}
_CODE = re.compile("|".join(_CODES))
_STEM_AND_SUFFIX = re.compile(r"(.+?)(\.[^. ]*)?", re.DOTALL)
_WITH_ID = re.compile(r"(.+) \(id ([\w-]+)\)(\.[^. ]*)?", re.DOTALL)


def file_name(name: str) -> str:
    """Return the file name of an object's name in its folder."""
    if not (_is_refused(name) or ("%" in name and _is_encoded(name))):
        return name
    encoded = name.replace("%", "%25").replace("\0", "%00")
    return encoded.replace(".", "%2E") if name in (".", "..") else encoded


def object_name(name: str) -> str:
    """Return the name of the object with this file name."""
    return _decoded(name) if "%" in name and _is_encoded(name) else name


def with_id(name: str, id: str, *, is_folder: bool) -> str:
    """Return the name of an item with its id, as in "photo (id 1AbC).jpg"; for a folder the id comes last."""
    found = None if is_folder else _STEM_AND_SUFFIX.fullmatch(name)
    stem, suffix = found.groups("") if found else (name, "")
    return f"{stem} (id {id}){suffix}"


def without_id(name: str) -> tuple[str, str] | None:
    """Return the name and the id in a name that `with_id` may have made, else None."""
    found = _WITH_ID.fullmatch(name)
    return None if found is None else (found[1] + (found[3] or ""), found[2])


def moved(path: str, source: str, target: str) -> str:
    """Return where a path is after `source` was moved to `target`."""
    return target + path[len(source) :] if path == source or path.startswith(f"{source}/") else path


def _is_refused(name: str) -> bool:
    return name in (".", "..") or "\0" in name


def _is_encoded(name: str) -> bool:
    decoded = _decoded(name)
    return decoded != name and (_is_refused(decoded) or _is_encoded(decoded))


def _decoded(name: str) -> str:
    return _CODE.sub(lambda code: _CODES[code[0]], name)
