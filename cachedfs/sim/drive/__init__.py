"""A simulated Google Drive on a loopback port, and what a test does behind its API's back."""

from __future__ import annotations

import base64
import dataclasses
from pathlib import Path
from typing import Any

from cachedfs.sim.drive.api import BINARY, DriveApi
from cachedfs.sim.drive.items import DOCUMENT, FOLDER, SHORTCUT, Item, rfc3339
from cachedfs.sim.drive.show import show
from cachedfs.sim.network import Network, Profile
from cachedfs.sim.quota import Meter, Quota
from cachedfs.sim.server import Service, SimServer

__all__ = ["DriveServer", "DriveService"]


class DriveService(DriveApi):
    """Google Drive with the commands of `DriveServer`."""

    def do_put(self, path: str, data: bytes, parent: str, new: bool, fields: dict[str, Any]) -> str:
        folder, title = self._folders(path, parent)
        known = [] if new else [i for i in self.items.named(folder, title) if i.head and not i.trashed]
        if not known:
            return self.do_add(title, folder, fields, data)
        self.items.write(known[0], data, len(data))
        return self.do_edit(known[0].id, fields) if fields else known[0].id

    def do_add(self, name: str, parent: str | None, fields: dict[str, Any], data: bytes = b"") -> str:
        item = self.items.make(name, fields.get("mimeType", BINARY), [parent] if parent else [])
        self.items.write(item, data, len(data))
        return self.do_edit(item.id, fields) if fields else item.id

    def do_folder(self, path: str, parent: str) -> str:
        folder, title = self._folders(path, parent)
        return self._folder_in(folder, title)

    def do_shortcut(self, path: str, target_id: str, parent: str) -> str:
        folder, title = self._folders(path, parent)
        item = self.items.make(title, SHORTCUT, [folder])
        item.fields["shortcutDetails"] = self.details(target_id)
        return item.id

    def do_document(self, path: str, parent: str, mime: str, data: bytes = b"") -> str:
        folder, title = self._folders(path, parent)
        item = self.items.make(title, mime, [folder])
        item.text = data
        return item.id

    def do_share_drive(self, name: str) -> str:
        return self.items.share_drive(name)

    def do_shared_with_me(self, name: str, is_folder: bool, data: bytes = b"") -> str:
        item = self.items.make(name, FOLDER if is_folder else BINARY, [])
        item.fields["sharedWithMeDate"] = rfc3339(item.created_ms)
        if not is_folder:
            self.items.write(item, data, len(data))
        return item.id

    def do_get(self, path: str, parent: str) -> str:
        live = [item for item in self._all_at(path, parent) if item.head and not self.items.is_trashed(item)]
        if not live or not live[0].head:
            raise FileNotFoundError(path)
        return base64.b64encode(live[0].head.content()).decode()

    def do_find(self, path: str, parent: str) -> list[dict[str, Any]]:
        return [show(item, self.items, "127.0.0.1") for item in self._all_at(path, parent)]

    def do_item(self, item_id: str) -> dict[str, Any]:
        return show(self._item(item_id), self.items, "127.0.0.1")

    def do_remove(self, item_id: str) -> None:
        self.items.remove(self._item(item_id))

    def do_trash(self, item_id: str, trashed: bool) -> None:
        self.do_edit(item_id, {"labels": {"trashed": trashed}})

    def do_edit(self, item_id: str, fields: dict[str, Any]) -> str:
        item = self._item(item_id)
        self.items.edit(item, fields)
        self.items.touch(item)
        return item.id

    def do_fill(self, folder_id: str, n: int, size: int, prefix: str) -> None:
        self.items.fill(folder_id, n, size, prefix)

    def do_short_pages(self, n: int | None) -> None:
        self.short_page = n

    def do_drop_parents(self, n: int) -> None:
        self.n_dropped = n

    def do_delay_changes(self, delay_s: float) -> None:
        self.items.change_delay_s = delay_s

    def do_expire_changes(self) -> None:
        self.items.reject_tokens()

    def do_expire_pages(self) -> None:
        self.cursors.clear()

    def do_expire_uploads(self) -> None:
        self.uploads.clear()

    def do_accept_only(self, n: int) -> None:
        self.accept_only = n

    def do_expire_tokens(self) -> None:
        self.expired |= self.issued
        self.issued.clear()

    def do_refuse_tokens(self, refused: bool) -> None:
        self.refuses_tokens = refused

    def do_account(self, token: str, user: str, project: str) -> None:
        self.accounts[token] = (user, project)

    def do_quota(self, quota: dict[str, Any]) -> None:
        self.meter = Meter(Quota(**quota))

    def _item(self, item_id: str) -> Item:
        item = self.items.get(item_id)
        if item is None:
            raise LookupError(f"no such item: {item_id}")
        return item

    def _folders(self, path: str, parent: str) -> tuple[str, str]:
        """Return the folder's id and the title of a path, with the folders in between made."""
        *folders, title = path.split("/")
        for name in folders:
            parent = self._folder_in(parent, name)
        return self._item(parent).id, title

    def _folder_in(self, parent: str, name: str) -> str:
        parent = self._item(parent).id
        found = [i for i in self.items.named(parent, name) if i.mime == FOLDER and not i.trashed]
        return found[0].id if found else self.items.make(name, FOLDER, [parent]).id

    def _all_at(self, path: str, parent: str) -> list[Item]:
        """Return all items at a path, trashed ones too, newest first."""
        *folders, title = path.split("/")
        parent = self._item(parent).id
        for name in folders:
            found = [i for i in self.items.named(parent, name) if i.mime == FOLDER and not i.trashed]
            if not found:
                return []
            parent = found[0].id
        return self.items.named(parent, title)


class DriveServer(SimServer):
    """A simulated Google Drive on a loopback port; all below happens behind the back of the API."""

    room = "drive"

    def __init__(
        self, profile: Profile | str = "off", *, quota: Quota | str | None = None, **options: Any
    ) -> None:
        chosen = Profile.resolve(profile)
        if quota is not None:
            chosen = dataclasses.replace(chosen, quota=Quota.resolve(quota))
        super().__init__(chosen, **options)

    def _make_service(self, network: Network, folder: Path | None) -> Service:
        return DriveService(network, folder)

    # Items
    def put(self, path: str, data: bytes, *, parent: str = "root", new: bool = False, **fields: Any) -> str:
        """Return the id of the newest file at a path, which has this content now; `new` makes another."""
        return str(self._do("put", data, path=path, parent=parent, new=new, fields=fields))

    def add(self, name: str, data: bytes, *, parent: str = "root", **fields: Any) -> str:
        """Return the id of a new file, whose name is taken as it is."""
        return str(self._do("add", data, name=name, parent=parent, fields=fields))

    def folder(self, path: str, *, parent: str = "root") -> str:
        """Return the id of the folder at a path, made when missing."""
        return str(self._do("folder", path=path, parent=parent))

    def shortcut(self, path: str, target_id: str, *, parent: str = "root") -> str:
        """Return the id of a new shortcut, whose target need not exist."""
        return str(self._do("shortcut", path=path, target_id=target_id, parent=parent))

    def document(self, path: str, text: str, *, parent: str = "root", mime: str = DOCUMENT) -> str:
        """Return the id of a new native document, exported in all formats as this text."""
        return str(self._do("document", text.encode(), path=path, parent=parent, mime=mime))

    def share_drive(self, name: str) -> str:
        """Return the id of a new shared drive, which is a `parent` too."""
        return str(self._do("share_drive", name=name))

    def shared_with_me(self, name: str, data: bytes | None = None) -> str:
        """Return the id of a new file, without data folder, of somebody else: it lies in no folder."""
        return str(self._do("shared_with_me", data or b"", name=name, is_folder=data is None))

    def fill(self, folder_id: str, n: int, *, size: int = 16, prefix: str = "f") -> None:
        """Add n files `<prefix>000000` onwards, each of that size and with a content of its own."""
        self._do("fill", folder_id=folder_id, n=n, size=size, prefix=prefix)

    def get(self, path: str, *, parent: str = "root") -> bytes:
        """Return the content of the newest file at a path that is not in the trash."""
        return base64.b64decode(self._do("get", path=path, parent=parent))

    def find(self, path: str, *, parent: str = "root") -> list[dict[str, Any]]:
        """Return all items of exactly that name as v2 shows them, trashed ones too, newest first."""
        return list(self._do("find", path=path, parent=parent))

    def item(self, item_id: str) -> dict[str, Any]:
        """Return an item as v2 shows it."""
        return dict(self._do("item", item_id=item_id))

    def edit(self, item_id: str, **fields: Any) -> None:
        """Set v2 fields, None to hide one; `abusive` and `resourceKey` also change what is served."""
        self._do("edit", item_id=item_id, fields=fields)

    def trash(self, item_id: str, trashed: bool = True) -> None:
        """Put an item into the trash, or take it out."""
        self._do("trash", item_id=item_id, trashed=trashed)

    def remove(self, item_id: str) -> None:
        """Delete an item for good, and what lies in it."""
        self._do("remove", item_id=item_id)

    # Quotas
    def account(self, token: str, user: str, project: str = "project") -> None:
        """Let what is asked with this token count for this user and project, and not for the one of all others."""
        self._do("account", token=token, user=user, project=project)

    def quota(self, quota: Quota | str) -> None:
        """Meter by this quota, or the one of this name, from now on: nothing of it is used."""
        self._do("quota", quota=dataclasses.asdict(Quota.resolve(quota)))

    # Traps
    def short_pages(self, n: int | None) -> None:
        """Let every other page of a listing, from the first, be empty, and the rest have n items at most."""
        self._do("short_pages", n=n)

    def drop_parents(self, n: int) -> None:
        """Let queries for the children of several folders silently leave out the last n folders."""
        self._do("drop_parents", n=n)

    def delay_changes(self, delay_s: float) -> None:
        """Let the feed show a change when it is so many simulated seconds old; infinite: not before told otherwise."""
        self._do("delay_changes", delay_s=delay_s)

    def expire_changes(self) -> None:
        """Reject the tokens of the changes feed given so far; the documentation says that they do not expire."""
        self._do("expire_changes")

    def expire_pages(self) -> None:
        """Reject the page tokens given so far."""
        self._do("expire_pages")

    def expire_uploads(self) -> None:
        """Forget the resumable uploads begun so far."""
        self._do("expire_uploads")

    def accept_only(self, n: int) -> None:
        """Keep only n bytes of the next chunk of a resumable upload."""
        self._do("accept_only", n=n)

    def expire_tokens(self) -> None:
        """Answer 401 to the tokens issued so far."""
        self._do("expire_tokens")

    def refuse_tokens(self, refused: bool = True) -> None:
        """Let the token endpoint answer invalid_grant, or no longer."""
        self._do("refuse_tokens", refused=refused)
