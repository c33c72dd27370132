"""State of the simulated Google Drive: items in folders, revisions and the change log."""

from __future__ import annotations

import base64
import functools
import hashlib
import mimetypes
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cachedfs.sim.stored_objects import Content

BINARY = "application/octet-stream"
_APPS = "application/vnd.google-apps."
FOLDER, SHORTCUT, DOCUMENT = _APPS + "folder", _APPS + "shortcut", _APPS + "document"
_SHEET, _SLIDES = _APPS + "spreadsheet", _APPS + "presentation"
_OFFICE = "application/vnd.openxmlformats-officedocument."
# Export formats of native documents.
EXPORTS = {
    DOCUMENT: ("text/plain", "text/html", "application/pdf", _OFFICE + "wordprocessingml.document"),
    _SHEET: ("text/csv", "application/pdf", _OFFICE + "spreadsheetml.sheet"),
    _SLIDES: ("text/plain", "application/pdf", _OFFICE + "presentationml.presentation"),
}
# The permission of everybody who has the link.
ANYONE = {"kind": "drive#permission", "id": "anyoneWithLink", "type": "anyone", "role": "reader"}


@dataclass(slots=True, eq=False)
class Revision(Content):
    """One version of a file's content."""

    id: str
    data: bytes | Path
    size: int
    modified_ms: int
    mime: str
    _md5: str = ""

    def md5(self) -> str:
        self._md5 = self._md5 or hashlib.md5(self.content()).hexdigest()
        return self._md5


@dataclass(slots=True, eq=False)
class Item:
    """A file, folder, shortcut or native document."""

    id: str
    name: str
    mime: str
    parents: list[str]
    created_ms: int
    modified_ms: int
    version: int = 1
    trashed: bool = False  # the item itself; items below a trashed folder also count as trashed
    drive_id: str | None = None
    revisions: list[Revision] = field(default_factory=list)  # oldest first; empty unless the item is a file
    text: bytes = b""  # content of a native document
    fields: dict[str, Any] = field(default_factory=dict)  # set explicitly; None hides a field

    @property
    def head(self) -> Revision | None:
        return self.revisions[-1] if self.revisions else None


@dataclass(frozen=True, slots=True)
class ItemChange:
    """The latest change of an item."""

    number: int
    item_id: str
    drive_id: str | None
    at_ms: int
    noted_s: float  # simulated seconds
    left: bool = False  # the item left this shared drive; shown only in that drive's feed


class Tree:
    """Items by id, by folder, and by name in a folder."""

    def __init__(self) -> None:
        self.root = ""  # the id of My Drive
        self._items: dict[str, Item] = {}
        # Invariant: both indexes contain an item under each of its parents, and nowhere else.
        self._children: dict[str, dict[str, Item]] = {}
        self._names: dict[str, dict[str, list[Item]]] = {}

    def get(self, item_id: str) -> Item | None:
        """Return the item with this id or alias ("root"), None if there is none."""
        return self._items.get(self.root if item_id == "root" else item_id)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items.values())

    def children(self, parent_id: str) -> Iterable[Item]:
        return self._children.get(parent_id, {}).values()

    def alike(self, parent_id: str, name: str) -> list[Item]:
        """Return the children with this name, ignoring case."""
        return list(self._names.get(parent_id, {}).get(name.lower(), ()))

    def named(self, parent_id: str, name: str) -> list[Item]:
        """Return the children with exactly this name, newest first."""
        found = [item for item in self.alike(parent_id, name) if item.name == name]
        return sorted(found, key=lambda item: item.modified_ms, reverse=True)

    def is_in(self, item: Item, folder_id: str) -> bool:
        return (self.root if folder_id == "root" else folder_id) in item.parents

    def real(self, parents: list[str]) -> list[str]:
        """Return the ids of these folders with aliases resolved. Raises LookupError if one is missing."""
        found = [self.get(parent) for parent in parents]
        if missing := [parent for parent, item in zip(parents, found, strict=True) if item is None]:
            raise LookupError(f"no such folder: {missing[0]}")
        return [item.id for item in found if item]

    def _above(self, item_id: str) -> Iterator[str]:
        yield item_id
        for parent in self._items[item_id].parents:
            yield from self._above(parent)

    def _insert(self, item: Item) -> None:
        self._items[item.id] = item
        self._link(item)
        item.drive_id = self._drive_of(item) or item.drive_id

    def _drive_of(self, item: Item) -> str | None:
        return self._items[item.parents[0]].drive_id if item.parents else None

    def _enter(self, item: Item, drive_id: str | None) -> None:
        """Move an item and its descendants into a shared drive, or out of any."""
        if item.drive_id != drive_id:
            item.drive_id = drive_id
            for child in self.children(item.id):
                self._enter(child, drive_id)

    def _link(self, item: Item) -> None:
        for parent in item.parents:
            self._children.setdefault(parent, {})[item.id] = item
            self._names.setdefault(parent, {}).setdefault(item.name.lower(), []).append(item)

    def _unlink(self, item: Item) -> None:
        for parent in item.parents:
            del self._children[parent][item.id]
            self._names[parent][item.name.lower()].remove(item)


class Items(Tree):
    """All items of one account: what it sees of them, their changes, and how they are changed."""

    def __init__(self, seed: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self.change_delay_s = clock, 0.0
        self._first_token = 1  # smaller tokens are rejected
        self._rng, self._ms, self._n_changes = random.Random(seed), 0, 0
        self._changes: dict[str, ItemChange] = {}  # Invariant: in order of the change numbers
        self.drives: dict[str, str] = {}  # id -> name of shared drives
        self.foreign: set[str] = set()  # ids of shared drives of which the account is not a member
        self.limited: set[str] = set()  # ids of folders that the account sees and cannot open
        self.root = "0A" + self.new_id()[:12] + "Uk9PVA"
        now = self.tick()
        self._insert(Item(self.root, "My Drive", FOLDER, [], now, now))

    def new_id(self) -> str:
        return "1" + base64.urlsafe_b64encode(self._rng.randbytes(24)).decode()

    def tick(self) -> int:
        """Return the current time in ms, larger than every earlier result.

        So no two writes have the same time.
        """
        self._ms = max(self._ms + 1, time.time_ns() // 1_000_000)
        return self._ms

    # Queries

    def is_trashed(self, item: Item) -> bool:
        """Return True if an item, or every folder that contains it, is in the trash."""
        while len(item.parents) == 1 and not item.trashed:
            item = self._items[item.parents[0]]
        if item.trashed or not item.parents:
            return item.trashed
        return all(self.is_trashed(self._items[parent]) for parent in item.parents)

    def is_visible(self, item: Item, *, is_reader: bool = False) -> bool:
        """Return True if the account sees an item, or with `is_reader` a caller without an account.

        In a shared drive of which the account is not a member, and in a limited folder, it sees only items shared
        with it.
        """
        if is_reader:
            return self.is_public(item)
        if item.drive_id in self.foreign:
            return any(self._items[id].fields.get("sharedWithMeTime") for id in self._above(item.id))
        return not self.limited or not self._is_shut_away(item)

    def _is_shut_away(self, item: Item) -> bool:
        """Return True if every way to an item leads through a limited folder."""
        if item.fields.get("sharedWithMeTime") or not item.parents:
            return False
        return all(id in self.limited or self._is_shut_away(self._items[id]) for id in item.parents)

    def is_public(self, item: Item) -> bool:
        """Return True if an item, or a folder that contains it, is shared with anyone who has the link."""
        rows = [row for id in self._above(item.id) for row in self._items[id].fields.get("permissions") or ()]
        return any(row["type"] == "anyone" for row in rows) and not self.is_trashed(item)

    def changes(self, first: int | None = None) -> tuple[list[ItemChange], int]:
        """Return the changes from number `first` on, in order, and the number to continue from.

        Only the latest change of each item is kept, and shown once it is `change_delay_s` old. `first=None`
        returns no changes, only the current end. Raises ValueError for a number that was never issued or has
        expired.
        """
        if first is not None and not self._first_token <= first <= self._n_changes + 1:
            raise ValueError(f"no such token: {first}")
        seen_s, noted = self._clock() - self.change_delay_s, self._changes.values()
        end = next((change.number for change in noted if change.noted_s > seen_s), self._n_changes + 1)
        out = [] if first is None else [change for change in noted if first <= change.number < end]
        return out, max(end, first or self._first_token)

    def reject_tokens(self) -> None:
        self._n_changes += 1
        self._first_token = self._n_changes + 1

    # Modifications
    def make(self, name: str, mime: str, parents: list[str], *, item_id: str = "") -> Item:
        """Create an item without content. Raises LookupError if a parent is missing."""
        now = self.tick()
        item = Item(item_id or self.new_id(), name, mime, self.real(parents), now, now)
        self._insert(item)
        self._note(item)
        return item

    def write(self, item: Item, data: bytes | Path, size: int, mime: str = "") -> Revision:
        item.mime = mime or item.mime
        now = item.created_ms if not item.revisions else self.tick()
        item.revisions.append(Revision(self.new_id(), data, size, now, item.mime))
        item.modified_ms = now
        self.touch(item)
        return item.revisions[-1]

    def touch(self, item: Item) -> None:
        """Record a change that the caller made to an item."""
        item.version += 1
        self._note(item)

    def edit(self, item: Item, fields: Mapping[str, Any]) -> None:
        """Set fields of an item. A computed field keeps the given value until it is set to None."""
        for name, value in fields.items():
            match name:
                case "name":
                    self._unlink(item)
                    item.name = value
                    self._link(item)
                case "mimeType":
                    item.mime = value
                case "parents":
                    self.move(item, value)
                case "trashed":
                    item.trashed = value
                case "createdTime":
                    item.created_ms = _to_ms(value)
                case "modifiedTime":
                    item.modified_ms = _to_ms(value)
                case "capabilities":
                    item.fields[name] = {**item.fields.get(name, {}), **value}
                case _:
                    item.fields[name] = value

    def move(self, item: Item, parents: list[str]) -> None:
        """Move an item into these folders only.

        Raises LookupError if a folder is missing, or is the item itself or below it.
        """
        parents = self.real(parents)
        if item.id in {id for parent in parents for id in self._above(parent)}:
            raise LookupError("a folder cannot be put into itself")
        before = item.drive_id
        self._unlink(item)
        item.parents = parents
        self._link(item)
        self._enter(item, self._drive_of(item))
        if before and item.drive_id != before:
            self._note(item, left=before)

    def remove(self, item: Item) -> None:
        """Delete an item permanently, with all descendants that have no other parent, as a single change.

        Earlier changes of the descendants stay in the log, since those may concern another parent folder.
        """
        self._drop(item)
        self._note(item)

    def _drop(self, item: Item) -> None:
        for child in list(self.children(item.id)):
            if child.parents == [item.id]:
                self._drop(child)
            else:
                self.move(child, [parent for parent in child.parents if parent != item.id])
                self.touch(child)
        self._unlink(item)
        del self._items[item.id]

    def share_drive(self, name: str, *, member: bool = True) -> str:
        """Create a shared drive; return its id, which is also the id of its top folder.

        `member`: whether the account is a member.
        """
        drive_id = "0A" + self.new_id()[:12] + "Uk9PVA"
        now = self.tick()
        self.drives[drive_id] = name
        self.foreign |= set() if member else {drive_id}
        self._insert(Item(drive_id, "Drive", FOLDER, [], now, now, drive_id=drive_id))
        return drive_id

    def fill(self, parent_id: str, n: int, size: int, prefix: str) -> None:
        """Add `n` files with the same modification time, as fast as possible."""
        parents, now = self.real([parent_id]), self.tick()
        drive_id = self._items[parents[0]].drive_id
        for i in range(n):
            name = f"{prefix}{i:06d}"
            item = Item(self.new_id(), name, BINARY, parents, now, now, drive_id=drive_id)
            data = (f"{name}\n" * (size // (len(name) + 1) + 1))[:size].encode()
            item.revisions.append(Revision(self.new_id(), data, size, now, item.mime))
            self._insert(item)
            self._note(item)

    def load(self, folder: Path, parent_id: str) -> None:
        """Add a local folder recursively. File contents are read on demand."""
        for path in sorted(folder.iterdir()):
            if path.is_dir():
                self.load(path, self.make(path.name, FOLDER, [parent_id]).id)
            elif path.is_file():
                seen, mime = path.stat(), mimetypes.guess_type(path.name)[0] or BINARY
                item = self.make(path.name, mime, [parent_id])
                self.write(item, path, seen.st_size)
                item.modified_ms = seen.st_mtime_ns // 1_000_000

    def _note(self, item: Item, *, left: str | None = None) -> None:
        self._n_changes += 1
        key, drive_id = f"{item.id} {left}" if left else item.id, left or item.drive_id
        self._changes.pop(key, None)  # moves the entry to the end
        self._changes[key] = ItemChange(
            self._n_changes, item.id, drive_id, self._ms, self._clock(), left=left is not None
        )


@functools.lru_cache(1 << 12)
def rfc3339(at_ms: int) -> str:
    at = datetime.fromtimestamp(at_ms // 1000, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at_ms % 1000:03d}Z"


def _to_ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)
