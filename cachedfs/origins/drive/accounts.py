"""Saved sign-ins to Google Drive, which `cachedfs login drive` makes: one JSON file for each account.

A file holds an authorized user as google-auth writes it, or the key of a service account. It contains secrets: only its
owner may read it, and no message quotes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import platformdirs

from cachedfs.common.atomic_files import write_private
from cachedfs.common.user_folders import found_folder
from cachedfs.errors import AccessDenied

CLIENT = ("client_id", "client_secret", "auth_uri", "token_uri")  # the fields of an OAuth client
_NEEDED = {
    "authorized_user": ("client_id", "client_secret", "refresh_token", "token_uri"),
    "service_account": ("client_email", "private_key", "token_uri"),
}
_LONGEST_NAME = 100
# A process keeps its default account, or data of one account could be cached under the name of another.
_defaults: dict[Path, str] = {}


def _folder() -> Path | None:
    """Return the folder of the sign-ins; None for a user without a home folder, who has no sign-in."""
    folder = found_folder(partial(platformdirs.user_config_dir, "cachedfs"))
    return None if folder is None else Path(folder, "drive")


def check_name(name: str) -> str:
    """Return the name of an account; raise ValueError if no file can be named after it."""
    is_plain = name.isprintable() and not name.startswith((".", "-", " ")) and not {*name} & {*"/\\:"}
    if not name or not is_plain or len(name) > _LONGEST_NAME:
        raise ValueError(f"account {name!r}: a name is at most {_LONGEST_NAME} characters without / \\ and :")
    return name


def path_of(name: str) -> Path:
    """Return the file of an account, which may not exist; raise AccessDenied if this user can have none."""
    check_name(name)
    if (folder := _folder()) is None:
        raise AccessDenied(
            "Google Drive: this user has no home folder, where sign-ins are saved: set HOME or XDG_CONFIG_HOME"
        )
    return folder / f"{name}.json"


def names() -> list[str]:
    """Return the names of the saved accounts, sorted."""
    if (folder := _folder()) is None:
        return []
    return sorted(path.stem for path in folder.glob("*.json") if not path.name.startswith("."))


def default_name() -> str | None:
    """Return the account that is used where none is named; None if no account is saved.

    Raises AccessDenied if several are saved and none of them was chosen.
    """
    folder, found = _folder(), names()
    if folder is None:
        return None
    if folder in _defaults:
        return _defaults[folder]
    with suppress(OSError):
        if (chosen := (folder / "default").read_text(encoding="utf-8").strip()) in found:
            return _defaults.setdefault(folder, chosen)
    if len(found) > 1:
        raise AccessDenied(
            f"Google Drive: the accounts {', '.join(found)} are saved, and none is the default: choose one with "
            "`cachedfs accounts --default NAME`, or pass account="
        )
    return _defaults.setdefault(folder, found[0]) if found else None


def set_default(name: str) -> None:
    """Use this account where none is named; raise AccessDenied if it is not saved."""
    load(name)
    folder = path_of(name).parent
    _write(folder / "default", name + "\n")
    _defaults.pop(folder, None)


def save(name: str, info: Mapping[str, Any]) -> Path:
    """Save a sign-in in place of an older one of this name; return its file. The first one becomes the default."""
    path, is_first = path_of(name), not names()
    _write(path, json.dumps(info, indent=1) + "\n")
    if is_first:
        set_default(name)
    return path


def load(name: str) -> dict[str, Any]:
    """Return a saved sign-in; raise AccessDenied if it is missing or damaged."""
    path, again = path_of(name), f"sign in with `cachedfs login drive --account {name}`"
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
        if all(isinstance(info[key], str) and info[key] for key in _NEEDED[info["type"]]):
            return dict(info)
    except FileNotFoundError:
        known = f"saved are {', '.join(names())}" if names() else "none is saved"
        raise AccessDenied(f"Google Drive: no account {name!r} is saved ({known}): {again}") from None
    except OSError as error:
        raise AccessDenied(f"Google Drive: {path} cannot be read ({error.strerror}): {again}") from None
    except (ValueError, LookupError, TypeError):
        pass  # not chained: a traceback may show the text
    raise AccessDenied(f"Google Drive: {path} is damaged: {again}")


def remove(name: str) -> None:
    """Remove a saved sign-in; if it is the default, there is none afterwards unless one account is left."""
    path = path_of(name)
    path.unlink(missing_ok=True)
    _defaults.pop(path.parent, None)


def _write(path: Path, text: str) -> None:
    """Replace a file, readable by its owner only and never half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.chmod(path.parent, 0o700)
    write_private(str(path), text)
