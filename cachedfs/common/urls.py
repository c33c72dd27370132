"""URLs, paths and options: what a user writes, as the target filesystem takes it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import fsspec
from fsspec.core import has_magic
from fsspec.registry import known_implementations
from fsspec.spec import AbstractFileSystem
from fsspec.utils import stringify_path

__all__ = [
    "GCS_PROTOCOLS",
    "ORIGINS",
    "before_magic",
    "is_pattern",
    "is_url",
    "jsonable",
    "protocols_of",
    "strip",
    "target_of",
]

GCS_PROTOCOLS = ("gs", "gcs")
ORIGINS = {"cgs": "gs", "cdrive": "drive"}  # what is behind our protocols of one word
_SCHEME = re.compile(r"[A-Za-z][\w+.-]*://")
_LOCAL = ("file", "local")
# Of a path of files: what leads nowhere, in `a//b`, `a/./b` and `a/.`.
_NOTHING = re.compile(r"(?:/\.?)+(?=/|$)")
_SLASHED = (*GCS_PROTOCOLS, "drive")  # whose paths are names with slashes between, and nothing else


def target_of(
    fo: str | None, protocol: str | None, target_options: Mapping[str, Any] | None, options: dict[str, Any]
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the target's protocol and options, and what is left: options of ours."""
    if protocol is None and fo is not None and "://" in fo:
        protocol = fo.partition("://")[0]
    nested = {name: value for name, value in options.items() if isinstance(value, Mapping)}
    if protocol is None and len(nested) == 1:
        protocol = next(iter(nested))
    if protocol is None:
        raise ValueError(
            "cachedfs needs to know what it fronts: a URL such as 'cachedfs::gs://bucket/key', or target_protocol='gs'"
        )
    names = GCS_PROTOCOLS if protocol in GCS_PROTOCOLS else (protocol,)
    if strangers := (nested.keys() & known_implementations.keys()) - {*names}:
        raise ValueError(
            f"options of {', '.join(sorted(strangers))}:// were given, and what is read is {protocol}://: name the dictionary "
            f"like the protocol, {protocol}={{...}}"
        )
    for name in names:
        if options.get(name) is not None and name not in nested:
            raise ValueError(
                f"cachedfs option {name}={options[name]!r}: expected a dictionary of options of {protocol}://, "
                f"such as {name}={{'token': 'anon'}}"
            )
    merged = dict(target_options or {})
    for name in names:
        merged.update(nested.pop(name, {}))
    left = {name: value for name, value in options.items() if name not in names}
    return protocol, merged, left


def strip(own: str, target: str | None, path: Any) -> str:
    """Return the target's path of any of our forms of URL."""
    text: str = stringify_path(path)
    text = text.removeprefix(f"{own}::").removeprefix(f"{own}://").removeprefix("cachedfs::")
    protocol, scheme, rest = text.partition("://")
    if not scheme or "/" in protocol:  # else a key may hold a URL
        protocol, rest = target or "", text
    if protocol in _SLASHED or not protocol:
        return rest.strip("/") if protocol else rest.rstrip("/")
    name = str(_rule_of(protocol)(text))
    if protocol in _LOCAL and ("//" in name or "/." in name):
        name = _NOTHING.sub("", name) or "/"
    # The slash at the end of a URL is part of it, and the root has no other name.
    return name if is_url(name) else name.rstrip("/") or name


def is_url(name: str) -> bool:
    """Return whether a name is a whole URL, as those of web pages are; one of a bucket may hold "://" further on."""
    return _SCHEME.match(name) is not None


def is_pattern(path: str) -> bool:
    """Return whether a path may match many; where paths are URLs, `?` begins a query, as fsspec's HTTP filesystem has it."""
    return bool(has_magic(path.replace("?", "") if is_url(path) else path))


def before_magic(path: str) -> str:
    """Return the folder that holds all that a pattern can match; a path without magic itself."""
    while is_pattern(path):
        path = path.rpartition("/")[0]
    return path


def protocols_of(protocol: str) -> set[str]:
    """Return all names that a protocol goes by, its own among them: `file` is `local`, too."""
    if protocol in _SLASHED:  # nothing needs to be installed to know these
        return set(GCS_PROTOCOLS) if protocol in GCS_PROTOCOLS else {protocol}
    names = fsspec.get_filesystem_class(protocol).protocol
    return {protocol, *((names,) if isinstance(names, str) else names)}


def _rule_of(protocol: str) -> Callable[[str], str]:
    rule: Callable[[str], str] = fsspec.get_filesystem_class(protocol)._strip_protocol
    return rule


# Options that prove who asks, of any filesystem: names in which one of these words stands.
_SECRET = re.compile(
    r"(?i)(?:^|[_-])(token|password|passwd|passphrase|secret|credentials?|authorization|key|cookie)(?:$|[_-])"
)
# Words, and names of files, that tell nobody a secret.
_OPEN_TOKENS = frozenset({"anon", "google_default", "cloud", "cache", "browser"})


def _is_secret(name: Any, value: Any) -> bool:
    """Return whether an option may hold a secret: by its name, but for a sign-in that is a word or the name of a file."""
    if not isinstance(name, str) or value is None or isinstance(value, bool):
        return False
    if name in ("client_json", "google_auth"):
        return True
    if not _SECRET.search(name) or name.endswith(("_path", "_file", "_uri", "_url")):
        return False
    return not (
        isinstance(value, str) and (value in _OPEN_TOKENS or (name == "token" and os.path.isfile(value)))
    )


def jsonable(value: Any, name: str, include_password: bool) -> Any:
    """Return an option as fsspec writes it into JSON, and None too, which fsspec's own encoder refuses.

    Without `include_password` also without tokens, secrets and credentials, wherever they are nested.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {
            key: jsonable(item, f"{name}[{key!r}]", include_password)
            for key, item in value.items()
            if include_password or not _is_secret(key, item)
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item, f"{name}[...]", include_password) for item in value]
    if isinstance(value, PurePath):
        return {"cls": f"{type(value).__module__}.{type(value).__name__}", "str": str(value)}
    if isinstance(value, AbstractFileSystem):
        return value.to_dict(include_password=include_password)
    raise TypeError(
        f"cachedfs: {name} is a live {type(value).__name__}, which cannot be written as JSON; give what can travel: "
        "for credentials the name of a token file, its content as a dictionary, 'anon', 'google_default' or 'cloud'"
    )
