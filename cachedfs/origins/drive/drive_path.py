"""Paths of `drive://`: where they start, and their canonical form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cachedfs.errors import ObjectNotFound, RequestRejected
from cachedfs.origins.drive import api
from cachedfs.origins.drive_links import canonical_path

MY_DRIVE, SHARED_WITH_ME = "My Drive", "Shared with me"
ID = "id:"  # begins the paths of an item by its id
_KEY = ",resourcekey="  # as in Drive's own links


class DrivePath(NamedTuple):
    """A parsed path: where it starts, and the names after that."""

    top: str
    names: list[str]


def plain_path(path: str) -> str:
    """Return a path without protocol and without slashes around it, in its canonical form."""
    return canonical_path(path.removeprefix("drive://").removeprefix("drive::").strip("/"))


def place_of(path: str) -> DrivePath:
    """Return a parsed path; raise ValueError for a start that Drive does not have."""
    top, *names = path.split("/")
    named = (top.startswith(api.SHARED) and top != api.SHARED) or (top.startswith(ID) and top != ID)
    if not named and top not in ("", MY_DRIVE, SHARED_WITH_ME):
        spelled = (each for each in (MY_DRIVE, SHARED_WITH_ME) if each.lower() == top.lower())
        known = next(spelled, canonical_path(top))
        meant = f"{MY_DRIVE}/{path}" if known == top else "/".join([known, *names])
        raise ValueError(
            f"{api.url_of(path)}: a Drive path starts with one of 'My Drive', 'shared:NAME' (a shared drive), "
            f"'Shared with me' or 'id:ID' (any file or folder), as in drive://{meant}"
        )
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{api.url_of(path)!a}: a name is not UTF-8, as names in Drive are; rename it"
        ) from None
    if "" in names:
        raise ValueError(f"{api.url_of(path)}: a name is empty; write one slash between names")
    return DrivePath(top, names)


def name_of(path: str) -> str:
    return path.rpartition("/")[2]


def must_have_a_name(path: str, parents: Sequence[str] = ()) -> None:
    """Raise RequestRejected unless an item is in a folder: by its path, or as it says."""
    if place_of(path).names or parents:
        return
    raise RequestRejected(
        f"{api.url_of(path)}: a copy or move needs the name of an item in a folder; give its path, as in "
        f"{api.url_of(f'{MY_DRIVE}/folder/name')}"
    )


def id_and_key(top: str) -> tuple[str, str | None]:
    """Return the id in `id:ID`, and the resource key in `id:ID,resourcekey=KEY` if there is one."""
    id, _, key = top.removeprefix(ID).partition(_KEY)
    return id, key or None


def has_feed(top: str) -> bool:
    """Return whether Drive reports all changes below the start of a path: true for a drive, not for a view."""
    return top == MY_DRIVE or top.startswith(api.SHARED)


def must_be_there(path: str, item: dict[str, Any]) -> dict[str, Any]:
    """Return an item; raise ObjectNotFound if it is in the trash."""
    if api.is_trashed(item):
        raise missing(path, "it is in the trash")
    return item


def missing(path: str, why: str) -> ObjectNotFound:
    return ObjectNotFound(f"{api.url_of(path)}: no such file or folder: {why}")
