"""What a user may say about a Drive: how to sign in, which server, what deleting means."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import Any

from cachedfs.origins.drive.api import GOOGLE
from cachedfs.origins.drive.exports import wanted

__all__ = ["ANONYMOUS", "DEFAULT", "SIGN_IN", "DriveOptions", "refuse_live", "token_file"]

# PyDrive2's own names, and those of google-auth.
SIGN_IN = (
    "token",
    "credentials",
    "google_auth",
    "client_id",
    "client_secret",
    "client_json",
    "client_json_file_path",
    "client_user_email",
    "use_service_account",
    "profile",
)
ANONYMOUS, DEFAULT = "anon", "google_default"  # the tokens that are names


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DriveOptions:
    """The options of `drive://`; see `DriveFileSystem`."""

    sign_in: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    endpoint_url: str = GOOGLE
    trash_only: bool = True
    acknowledge_abuse: bool = False
    export: str | Mapping[str, str] | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> DriveOptions:
        """Return the options of these keywords; ValueError names one that is unknown, and the nearest."""
        own = {field.name for field in dataclasses.fields(cls)} - {"sign_in"}
        for name in given:
            if name not in own and name not in SIGN_IN:
                near = difflib.get_close_matches(name, [*own, *SIGN_IN], 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(
                    f"drive option {name!r} is unknown{hint} (known: {', '.join(sorted([*own, *SIGN_IN]))})"
                )
        values = {name: given[name] for name in own if given.get(name) is not None}
        if "endpoint_url" in values:
            values["endpoint_url"] = os.fspath(values["endpoint_url"]).rstrip("/")
        for name in ("trash_only", "acknowledge_abuse"):
            if isinstance(text := values.get(name), str):
                values[name] = _said(name, text)
        made = cls(
            sign_in={name: value for name, value in given.items() if name in SIGN_IN and value is not None},
            **values,
        )
        wanted(made.export)  # what is wrong with it is said here
        return made

    @property
    def exports(self) -> Mapping[str, str]:
        """The MIME types that documents are read as, by kind."""
        return wanted(self.export)


def _said(name: str, text: str) -> bool:
    """Return what a text of the environment means, where Python would take "False" for true."""
    for words, value in ((("true", "yes", "on", "1"), True), (("false", "no", "off", "0"), False)):
        if text.strip().lower() in words:
            return value
    raise ValueError(f"drive option {name}={text!r}: True or False is expected")


def refuse_live(options: Mapping[str, Any]) -> None:
    """Raise TypeError for a sign-in that is an object: it would not travel to another process, or its secret would."""
    for name in ("google_auth", "credentials"):
        if options.get(name) is not None:
            raise TypeError(
                f"drive option {name}=: a live {type(options[name]).__name__} cannot travel to another process; "
                "give what can: token= (a file's name, 'google_default'), or client_json_file_path="
            )


def token_file(token: Any) -> str | None:
    """Return the name of the file that `token=` names; None for what is a token itself, or names a way to sign in."""
    if not isinstance(token, (str, os.PathLike)):
        return None
    text: str = os.fspath(token).strip()
    is_file = isinstance(token, os.PathLike) or (text not in (ANONYMOUS, DEFAULT) and _is_file_name(text))
    return os.path.expanduser(text) if is_file else None


def _is_file_name(text: str) -> bool:
    """Return whether a string is meant as the name of a file: access tokens hold no `.json`, but may hold a `/`."""
    if text.startswith(("ya29.", "1//")) or len(text) > 1000:
        return False
    return text.endswith(".json") or text.startswith(("/", "~", "./", "../")) or os.path.isfile(text)
