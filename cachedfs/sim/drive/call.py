"""One call to the Drive API, with the parameter and field names of its API version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cachedfs.sim.drive.items import FOLDER, Item
from cachedfs.sim.drive.query import Mask, parse_mask
from cachedfs.sim.drive.show import V2_FIELDS, V3_FIELDS, show, show_v3, to_v2
from cachedfs.sim.google import body_of
from cachedfs.sim.messages import Call, Refusal

__all__ = ["V2", "V3", "Ask", "Words", "bad_fields", "invalid", "ordered"]


@dataclass(frozen=True, slots=True)
class Words:
    """Names and defaults of one version of the API."""

    files: str  # key of the items in a listing
    page_size: str  # name of the page size parameter
    show: Callable[..., dict[str, Any]]
    fields: tuple[str, ...]
    terms: frozenset[str]  # terms allowed in a query
    orders: Mapping[str, Callable[[Item], Any]]  # sort keys of a listing
    list_mask: Mask
    file_mask: Mask
    change_mask: Mask


def _orders(title: str, modified: str, created: str) -> dict[str, Callable[[Item], Any]]:
    by_title: Callable[[Item], Any] = lambda item: item.title.lower()  # noqa: E731
    out = {"folder": lambda item: item.mime != FOLDER, title: by_title, f"{title}_natural": by_title}
    return {**out, modified: lambda item: item.modified_ms, created: lambda item: item.created_ms}


_TERMS = frozenset(("mimeType", "trashed", "starred", "sharedWithMe"))
V2 = Words(
    files="items",
    page_size="maxResults",
    show=show,
    fields=V2_FIELDS,
    terms=_TERMS | {"title", "modifiedDate"},
    orders=_orders("title", "modifiedDate", "createdDate"),
    list_mask={},
    file_mask={},
    change_mask={},
)
_V3_FILE = parse_mask("kind,id,name,mimeType,resourceKey,driveId,teamDriveId")
V3 = Words(
    files="files",
    page_size="pageSize",
    show=show_v3,
    fields=V3_FIELDS,
    terms=_TERMS | {"name", "modifiedTime", "createdTime"},
    orders=_orders("name", "modifiedTime", "createdTime"),
    list_mask={**parse_mask("kind,incompleteSearch,nextPageToken"), "files": _V3_FILE},
    file_mask=_V3_FILE,
    change_mask={
        **parse_mask("kind,nextPageToken,newStartPageToken"),
        "changes": {**parse_mask("kind,type,changeType,time,removed,fileId"), "file": _V3_FILE},
    },
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One call, and the API version it uses."""

    call: Call
    words: Words

    @property
    def query(self) -> dict[str, str]:
        return self.call.query

    @property
    def body(self) -> dict[str, Any]:
        """JSON body of the call, converted to v2 names."""
        return to_v2(body_of(self.call)) if self.words is V3 else body_of(self.call)

    @property
    def knows_drives(self) -> bool:
        return self.flag("supportsAllDrives") or self.flag("supportsTeamDrives")

    @property
    def wants_drives(self) -> bool:
        wants = self.flag("includeItemsFromAllDrives") or self.flag("includeTeamDriveItems")
        return wants and self.knows_drives

    @property
    def drive_id(self) -> str | None:
        return self.query.get("driveId") or self.query.get("teamDriveId") or None

    def flag(self, name: str) -> bool:
        return self.query.get(name, "").lower() == "true"

    def mask(self, default: Mask) -> Mask:
        """Return the mask of fields that the caller wants in the reply."""
        text = self.query.get("fields")
        try:
            return parse_mask(text) if text else default
        except (ValueError, LookupError) as error:
            raise bad_fields(text or "") from error

    def page_size(self) -> int:
        text = self.query.get(self.words.page_size, "100")
        if not text.isdecimal() or not int(text):
            raise invalid(self.words.page_size, f"Invalid value '{text}'.")
        return min(int(text), 1000)


def invalid(parameter: str, text: str) -> Refusal:
    return Refusal(400, text, "invalid", location=parameter)


def bad_fields(text: str) -> Refusal:
    return Refusal(400, f"Invalid field selection {text}", "invalidParameter", location="fields")


def ordered(items: list[Item], ask: Ask) -> list[Item]:
    """Return items in the order requested by `orderBy`."""
    for part in reversed([p for p in ask.query.get("orderBy", "").split(",") if p]):
        name, _, direction = part.strip().partition(" ")
        key = ask.words.orders.get(name)
        if key is None or direction not in ("", "desc"):
            raise invalid("orderBy", f"Invalid value '{part}'.")
        items = sorted(items, key=key, reverse=direction == "desc")
    return items
