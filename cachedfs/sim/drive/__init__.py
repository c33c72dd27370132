"""A simulated Google Drive on a loopback port, and what a test does behind its API's back."""

from __future__ import annotations

import dataclasses
from typing import Any

from cachedfs.sim.drive.api import DriveApi
from cachedfs.sim.drive.items import DOCUMENT, FOLDER, SHORTCUT, Item, rfc3339
from cachedfs.sim.drive.show import show
from cachedfs.sim.drive.writing import BINARY
from cachedfs.sim.network import Profile
from cachedfs.sim.quota import Meter, Quota
from cachedfs.sim.server import SimServer, command

__all__ = ["DriveServer", "DriveService"]


class DriveService(DriveApi):
    """Google Drive with the commands of `DriveServer`."""

    # Items
    def do_put(
        self, /, path: str, data: bytes, *, parent: str = "root", new: bool = False, **fields: Any
    ) -> str:
        """Return the id of the newest file at a path, which has this content now; `new` makes another."""
        folder, title = self._folders(path, parent)
        known = [] if new else [i for i in self.items.named(folder, title) if i.head and not i.trashed]
        if not known:
            return self.do_add(title, data, parent=folder, **fields)
        self.items.write(known[0], data, len(data))
        return self.do_edit(known[0].id, **fields) if fields else known[0].id

    def do_add(self, /, name: str, data: bytes, *, parent: str = "root", **fields: Any) -> str:
        """Return the id of a new file, whose name is taken as it is."""
        item = self.items.make(name, fields.get("mimeType", BINARY), [parent] if parent else [])
        self.items.write(item, data, len(data))
        return self.do_edit(item.id, **fields) if fields else item.id

    def do_folder(self, path: str, *, parent: str = "root") -> str:
        """Return the id of the folder at a path, made when missing."""
        folder, title = self._folders(path, parent)
        return self._folder_in(folder, title)

    def do_shortcut(self, path: str, target_id: str, *, parent: str = "root") -> str:
        """Return the id of a new shortcut, whose target need not exist."""
        folder, title = self._folders(path, parent)
        item = self.items.make(title, SHORTCUT, [folder])
        item.fields["shortcutDetails"] = self.details(target_id)
        return item.id

    def do_document(self, path: str, text: str, *, parent: str = "root", mime: str = DOCUMENT) -> str:
        """Return the id of a new native document, exported in all formats as this text."""
        folder, title = self._folders(path, parent)
        item = self.items.make(title, mime, [folder])
        item.text = text.encode()
        return item.id

    def do_share_drive(self, name: str, *, member: bool = True) -> str:
        """Return the id of a new shared drive, which is a `parent` too; no member sees only what is shared with it."""
        return self.items.share_drive(name, member=member)

    def do_share(self, item_id: str) -> None:
        """Share an item with the account, and what lies in it."""
        self.do_edit(item_id, sharedWithMeDate=rfc3339(self.items.tick()))

    def do_shared_with_me(self, name: str, data: bytes | None = None) -> str:
        """Return the id of a new file, without data folder, of somebody else: it lies in no folder."""
        item = self.items.make(name, FOLDER if data is None else BINARY, [])
        item.fields["sharedWithMeDate"] = rfc3339(item.created_ms)
        if data is not None:
            self.items.write(item, data, len(data))
        return item.id

    def do_fill(self, folder_id: str, n: int, *, size: int = 16, prefix: str = "f") -> None:
        """Add n files `<prefix>000000` onwards, each of that size and with a content of its own."""
        self.items.fill(folder_id, n, size, prefix)

    def do_get(self, path: str, *, parent: str = "root") -> bytes:
        """Return the content of the newest file at a path that is not in the trash."""
        live = [item for item in self._all_at(path, parent) if item.head and not self.items.is_trashed(item)]
        if not live or not live[0].head:
            raise FileNotFoundError(path)
        return live[0].head.content()

    def do_find(self, path: str, *, parent: str = "root") -> list[dict[str, Any]]:
        """Return all items of exactly that name as v2 shows them, trashed ones too, newest first."""
        return [show(item, self.items, "127.0.0.1") for item in self._all_at(path, parent)]

    def do_item(self, item_id: str) -> dict[str, Any]:
        """Return an item as v2 shows it."""
        return show(self._item(item_id), self.items, "127.0.0.1")

    def do_edit(self, /, item_id: str, **fields: Any) -> str:
        """Set v2 fields, None to hide one; `abusive` and `resourceKey` also change what is served."""
        item = self._item(item_id)
        self.items.edit(item, fields)
        self.items.touch(item)
        return item.id

    def do_trash(self, item_id: str, trashed: bool = True) -> None:
        """Put an item into the trash, or take it out."""
        self.do_edit(item_id, labels={"trashed": trashed})

    def do_remove(self, item_id: str) -> None:
        """Delete an item for good, and what lies in it."""
        self.items.remove(self._item(item_id))

    # Quotas and tokens
    def do_account(self, token: str, user: str, project: str = "project") -> None:
        """Let what is asked with this token count for this user and project, and not for the one of all others."""
        self.accounts[token] = (user, project)

    def do_quota(self, quota: dict[str, Any]) -> None:
        self.meter = Meter(Quota(**quota))

    def do_expire_tokens(self) -> None:
        """Answer 401 to the tokens issued so far."""
        self.issued = dict.fromkeys(self.issued, -1.0)

    def do_token_life(self, life_s: float) -> None:
        """Let tokens that are issued from now on expire after so many simulated seconds; never, unless told."""
        self.token_life_s = life_s

    def do_refuse_tokens(self, refused: bool = True) -> None:
        """Let the token endpoint answer invalid_grant, or no longer."""
        self.refuses_tokens = refused

    # Traps
    def do_short_pages(self, n: int | None) -> None:
        """Let every other page of a listing, from the first, be empty, and the rest have n items at most."""
        self.short_page = n

    def do_drop_parents(self, n: int) -> None:
        """Let queries for the children of several folders silently leave out the last n folders."""
        self.n_dropped = n

    def do_delay_changes(self, delay_s: float) -> None:
        """Let the feed show a change when it is so many simulated seconds old; infinite: not before told otherwise."""
        self.items.change_delay_s = delay_s

    def do_expire_changes(self) -> None:
        """Reject the tokens of the changes feed given so far; the documentation says that they do not expire."""
        self.items.reject_tokens()

    def do_expire_pages(self) -> None:
        """Reject the page tokens given so far."""
        self.cursors.clear()

    def do_expire_uploads(self) -> None:
        """Forget the resumable uploads begun so far."""
        self.uploads.clear()

    def do_accept_only(self, n: int, times: int = 1) -> None:
        """Keep only n bytes of each of the next chunks, so many, of resumable uploads."""
        self.accepts = [n] * times

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

    room, service = "drive", DriveService

    def __init__(
        self, profile: Profile | str = "off", *, quota: Quota | str | None = None, **options: Any
    ) -> None:
        chosen = Profile.resolve(profile)
        if quota is not None:
            chosen = dataclasses.replace(chosen, quota=Quota.resolve(quota))
        super().__init__(chosen, **options)

    def quota(self, quota: Quota | str) -> None:
        """Meter by this quota, or the one of this name, from now on: nothing of it is used."""
        self._do("quota", quota=dataclasses.asdict(Quota.resolve(quota)))

    put = command(DriveService.do_put)
    add = command(DriveService.do_add)
    folder = command(DriveService.do_folder)
    shortcut = command(DriveService.do_shortcut)
    document = command(DriveService.do_document)
    share_drive = command(DriveService.do_share_drive)
    share = command(DriveService.do_share)
    shared_with_me = command(DriveService.do_shared_with_me)
    fill = command(DriveService.do_fill)
    get = command(DriveService.do_get)
    find = command(DriveService.do_find)
    item = command(DriveService.do_item)
    edit = command(DriveService.do_edit)
    trash = command(DriveService.do_trash)
    remove = command(DriveService.do_remove)
    account = command(DriveService.do_account)
    expire_tokens = command(DriveService.do_expire_tokens)
    token_life = command(DriveService.do_token_life)
    refuse_tokens = command(DriveService.do_refuse_tokens)
    short_pages = command(DriveService.do_short_pages)
    drop_parents = command(DriveService.do_drop_parents)
    delay_changes = command(DriveService.do_delay_changes)
    expire_changes = command(DriveService.do_expire_changes)
    expire_pages = command(DriveService.do_expire_pages)
    expire_uploads = command(DriveService.do_expire_uploads)
    accept_only = command(DriveService.do_accept_only)
