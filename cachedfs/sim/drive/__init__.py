"""Server and test commands of the simulated Google Drive."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

from cachedfs.sim.drive.api import DriveApi
from cachedfs.sim.drive.fields import show
from cachedfs.sim.drive.items import ANYONE, BINARY, DOCUMENT, FOLDER, SHORTCUT, Item, rfc3339
from cachedfs.sim.drive.oauth import client_json
from cachedfs.sim.network import Profile
from cachedfs.sim.quota import Meter, Quota
from cachedfs.sim.server import SimServer, command

__all__ = ["DriveServer", "DriveService"]


class DriveCommands(DriveApi):
    """The commands of `DriveServer` that make, change and show items."""

    def do_put(
        self, /, path: str, data: bytes, *, parent: str = "root", new: bool = False, **fields: Any
    ) -> str:
        """Write the newest file at a path and return its id. Creates the file and its folders if missing.

        `new` always creates another file of this name. `fields` are fields of the API to set. `parent` is the id of
        the folder in which the path starts.
        """
        folder, name = self._place(path, parent)
        known = [] if new else [i for i in self.items.named(folder, name) if i.head and not i.trashed]
        if not known:
            return self.do_add(name, data, parent=folder, **fields)
        self.items.write(known[0], data, len(data))
        return self.do_edit(known[0].id, **fields) if fields else known[0].id

    def do_add(self, /, name: str, data: bytes, *, parent: str = "root", **fields: Any) -> str:
        """Create a file and return its id. The name is used as it is, including any slashes."""
        item = self.items.make(name, fields.get("mimeType", BINARY), [parent] if parent else [])
        self.items.write(item, data, len(data))
        return self.do_edit(item.id, **fields) if fields else item.id

    def do_folder(self, path: str, *, parent: str = "root") -> str:
        """Return the id of the folder at a path; create it if missing."""
        return self._place(f"{path}/", parent)[0]

    def do_shortcut(self, path: str, target_id: str, *, parent: str = "root") -> str:
        """Create a shortcut and return its id. The target need not exist."""
        folder, name = self._place(path, parent)
        item = self.items.make(name, SHORTCUT, [folder])
        item.fields["shortcutDetails"] = self.details(target_id)
        return item.id

    def do_document(self, path: str, text: str, *, parent: str = "root", mime: str = DOCUMENT) -> str:
        """Create a native document and return its id. It exports as this text in all formats."""
        folder, name = self._place(path, parent)
        item = self.items.make(name, mime, [folder])
        item.text = text.encode()
        return item.id

    def do_share_drive(self, name: str, *, member: bool = True) -> str:
        """Create a shared drive and return its id, which is also valid as `parent`.

        With `member=False` the account sees only the items of the drive that are shared with it.
        """
        return self.items.share_drive(name, member=member)

    def do_share(self, item_id: str) -> None:
        """Share an item, and everything in it, with the account."""
        self.do_edit(item_id, sharedWithMeTime=rfc3339(self.items.tick()))

    def do_limit(self, folder_id: str, limited: bool = True) -> None:
        """Limit the access to a folder, so that the account sees the folder but cannot open it, or stop doing so.

        Items in it that are shared with the account stay visible.
        """
        folder = self._item(folder_id)
        (self.items.limited.add if limited else self.items.limited.discard)(folder.id)
        capabilities = dict.fromkeys(("canAddChildren", "canListChildren", "canRemoveChildren"), not limited)
        self.do_edit(folder.id, capabilities=capabilities, inheritedPermissionsDisabled=limited or None)

    def do_publish(self, item_id: str, public: bool = True) -> None:
        """Share an item, and everything in it, with anyone who has the link, or stop doing so."""
        rows = self._item(item_id).fields.get("permissions") or []
        rows = [row for row in rows if row["type"] != "anyone"] + ([ANYONE] if public else [])
        self.do_edit(item_id, permissions=rows or None)

    def do_shared_with_me(self, name: str, data: bytes | None = None) -> str:
        """Create a file of another user, shared with the account; return its id.

        Without data it is a folder. It has no parent folder.
        """
        item = self.items.make(name, FOLDER if data is None else BINARY, [])
        item.fields["sharedWithMeTime"] = rfc3339(item.created_ms)
        if data is not None:
            self.items.write(item, data, len(data))
        return item.id

    def do_fill(self, folder_id: str, n: int, *, size: int = 16, prefix: str = "f") -> None:
        """Add `n` files named `<prefix>000000` onward, each of `size` bytes with different content."""
        self.items.fill(folder_id, n, size, prefix)

    def do_get(self, path: str, *, parent: str = "root") -> bytes:
        """Return the content of the newest file at a path that is not in the trash.

        Raises FileNotFoundError if there is none.
        """
        live = [item for item in self._all_at(path, parent) if item.head and not self.items.is_trashed(item)]
        if not live or not live[0].head:
            raise FileNotFoundError(path)
        return live[0].head.content()

    def do_find(self, path: str, *, parent: str = "root") -> list[dict[str, Any]]:
        """Return all items at exactly this path as resources of the API, newest first; includes trashed ones."""
        return [show(item, self.items) for item in self._all_at(path, parent)]

    def do_item(self, item_id: str) -> dict[str, Any]:
        """Return an item as a resource of the API. Raises LookupError if there is none."""
        return show(self._item(item_id), self.items)

    def do_edit(self, /, item_id: str, **fields: Any) -> str:
        """Set fields of an item; None hides a field. Returns the id.

        `abusive` and `resourceKey` also change how the item is served.
        """
        item = self._item(item_id)
        self.items.edit(item, fields)
        self.items.touch(item)
        return item.id

    def do_trash(self, item_id: str, trashed: bool = True) -> None:
        """Move an item into the trash, or out of it."""
        self.do_edit(item_id, trashed=trashed)

    def do_remove(self, item_id: str) -> None:
        """Delete an item, and everything in it, permanently."""
        self.items.remove(self._item(item_id))

    def _item(self, item_id: str) -> Item:
        item = self.items.get(item_id)
        if item is None:
            raise LookupError(f"no such item: {item_id}")
        return item

    def _place(self, path: str, parent: str, *, makes: bool = True) -> tuple[str, str]:
        """Return the parent folder's id and the name of a path; make missing folders, or return "" for the id."""
        *folders, name = path.split("/")
        parent = self._item(parent).id
        for folder in folders:
            named = [
                item for item in self.items.named(parent, folder) if item.mime == FOLDER and not item.trashed
            ]
            if not named and not makes:
                return "", name
            parent = (named[0] if named else self.items.make(folder, FOLDER, [parent])).id
        return parent, name

    def _all_at(self, path: str, parent: str) -> list[Item]:
        """Return all items at a path, newest first, including those in the trash."""
        return self.items.named(*self._place(path, parent, makes=False))


class DriveService(DriveCommands):
    """The simulated Google Drive, with all commands of `DriveServer`."""

    # Quotas and tokens
    def do_account(self, token: str, user: str, project: str = "project") -> None:
        """Charge requests with this token to this user and project instead of the default ones."""
        self.accounts[token] = (user, project)

    def do_api_key(self) -> str:
        """Return a new API key: it identifies a project without an account, which sees only public items."""
        key = "AIzaSyS" + uuid.uuid4().hex
        self.keys.add(key)
        return key

    def do_quota(self, quota: dict[str, Any]) -> None:
        self.meter = Meter(Quota(**quota))

    def do_expire_tokens(self) -> None:
        """Answer 401 to all tokens issued so far."""
        self.issued = dict.fromkeys(self.issued, False)

    def do_refuse_tokens(self, refused: bool = True) -> None:
        """Make the token endpoint answer invalid_grant, or stop doing so."""
        self.refuses_tokens = refused

    # Unusual behavior
    def do_short_pages(self, n: int | None) -> None:
        """Make pages of listings short; None restores normal pages.

        Every other page, starting with the first, is empty. The others have at most `n` items.
        """
        self.short_page = n

    def do_delay_changes(self, delay_s: float) -> None:
        """Delay each change in the changes feed by this many simulated seconds.

        An infinite delay hides changes until this is called again.
        """
        self.items.change_delay_s = delay_s

    def do_scan_limit(self, n_bytes: int) -> None:
        """Warn before public downloads of files larger than this; the default is 100 MiB."""
        self.scan_limit = n_bytes

    def do_page_limit(self, n: int | None) -> None:
        """Show at most `n` names on the public page of a folder; None shows all."""
        self.page_limit = n

    def do_expire_changes(self) -> None:
        """Reject all tokens of the changes feed issued so far. By the documentation they do not expire."""
        self.items.reject_tokens()

    def do_accept_only(self, n: int, times: int = 1) -> None:
        """Accept only the first `n` bytes of each of the next `times` chunks of resumable uploads."""
        self.accepts = [n] * times


class DriveServer(SimServer):
    """A simulated Google Drive on a port of 127.0.0.1. See SimServer for the other parameters.

    `quota` is a Quota or a name in `QUOTAS`, by default that of the profile. The methods change the state
    directly, without an API request, and are not in the request log.
    """

    room, service = "drive", DriveService

    def __init__(
        self, profile: Profile | str = "off", *, quota: Quota | str | None = None, **options: Any
    ) -> None:
        chosen = Profile.resolve(profile)
        if quota is not None:
            chosen = dataclasses.replace(chosen, quota=Quota.resolve(quota))
        super().__init__(chosen, **options)

    def quota(self, quota: Quota | str) -> None:
        """Use this quota, or the one of this name, from now on, with nothing of it used."""
        self._do("quota", quota=dataclasses.asdict(Quota.resolve(quota)))

    def client_json(self) -> dict[str, Any]:
        """Return the JSON of an OAuth client whose sign-ins go to this server, as Google's console makes it."""
        return client_json(self.endpoint_url)

    put = command(DriveCommands.do_put)
    add = command(DriveCommands.do_add)
    folder = command(DriveCommands.do_folder)
    shortcut = command(DriveCommands.do_shortcut)
    document = command(DriveCommands.do_document)
    share_drive = command(DriveCommands.do_share_drive)
    share = command(DriveCommands.do_share)
    limit = command(DriveCommands.do_limit)
    publish = command(DriveCommands.do_publish)
    shared_with_me = command(DriveCommands.do_shared_with_me)
    fill = command(DriveCommands.do_fill)
    get = command(DriveCommands.do_get)
    find = command(DriveCommands.do_find)
    item = command(DriveCommands.do_item)
    edit = command(DriveCommands.do_edit)
    trash = command(DriveCommands.do_trash)
    remove = command(DriveCommands.do_remove)
    account = command(DriveService.do_account)
    api_key = command(DriveService.do_api_key)
    expire_tokens = command(DriveService.do_expire_tokens)
    refuse_tokens = command(DriveService.do_refuse_tokens)
    short_pages = command(DriveService.do_short_pages)
    delay_changes = command(DriveService.do_delay_changes)
    scan_limit = command(DriveService.do_scan_limit)
    page_limit = command(DriveService.do_page_limit)
    expire_changes = command(DriveService.do_expire_changes)
    accept_only = command(DriveService.do_accept_only)
