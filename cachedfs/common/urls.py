"""Conversion of URLs, paths and options, as a user gives them, to those of the target filesystem."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import fsspec
from fsspec.core import has_magic, split_protocol
from fsspec.registry import known_implementations
from fsspec.spec import AbstractFileSystem

from cachedfs.common.logging import without_secrets

GCS_PROTOCOLS = ("gs", "gcs")
LOCAL_PROTOCOLS = ("file", "local")
ORIGINS = {"cgs": "gs", "cdrive": "drive"}  # target protocols of our short protocols
_SCHEME = re.compile(r"[A-Za-z][\w+.-]*://")
# What to install for a protocol.
_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3", "hf": "hf", "drive": "drive"}
_USER = re.compile(r"(?<=://)(?!-[0-9a-f]{16}@)[^/?#]*@")
_SIGNED = r"(?i)(?:^|&)(?:sig|[^=&]*(?:signature|token|secret|passw|credential|auth|key|code|session|policy)[^=&]*)="
SLASH_NAMES = (*GCS_PROTOCOLS, "s3", "s3a")  # protocols where the name of an object may end in a slash
# Protocols whose paths are just names joined by slashes.
NAME_PROTOCOLS = (*GCS_PROTOCOLS, "drive", "obstore")


def target_of(
    fo: str | None, protocol: str | None, target_options: Mapping[str, Any] | None, options: dict[str, Any]
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the target's protocol, the target's options, and the options of cachedfs.

    `fo` is the target URL in an fsspec chain. Without `protocol`, it comes from `fo`, or from the name of the only
    option that is a dictionary. Raises ValueError if it remains unknown, or for options of another protocol.
    """
    if protocol is None and fo is not None and "://" in fo:
        protocol = fo.partition("://")[0]
    nested = {name: value for name, value in options.items() if isinstance(value, Mapping)}
    if protocol is None and len(nested) == 1:
        protocol = next(iter(nested))
    if protocol is None:
        raise ValueError(
            "cachedfs needs a target filesystem: write "
            'fsspec.filesystem("cachedfs", target_protocol="gs"), or '
            'fs, path = fsspec.core.url_to_fs("cachedfs::gs://bucket/key")'
        )
    names = GCS_PROTOCOLS if protocol in GCS_PROTOCOLS else (protocol,)
    if foreign := (nested.keys() & known_implementations.keys()) - {*names}:
        raise ValueError(
            f"options of {', '.join(sorted(foreign))}:// were given, but the target is {protocol}://: name the dictionary "
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
    remaining = {name: value for name, value in options.items() if name not in names}
    return protocol, merged, remaining


def without_slash(name: str) -> str:
    """Return a path without the slash at its end, which a complete URL and the root "/" keep."""
    return name if is_url(name) else name.rstrip("/") or name


def folder_of(path: str) -> str:
    """Return the folder whose listing contains `path`; "" at the top."""
    return path.rpartition("/")[0]


def is_url(name: str) -> bool:
    """Return whether a path is a complete URL, as HTTP paths are.

    A key in a bucket may contain "://" further on.
    """
    return _SCHEME.match(name) is not None


def cached_url(url: str) -> str:
    """Return the URL that reads a URL or a local path through the cache."""
    if not ("::" in url or is_url(url)):
        url = f"file://{os.path.abspath(os.path.expanduser(url))}"
    is_cached = url.startswith(("cachedfs::", *(f"{name}://" for name in ORIGINS)))
    return url if is_cached else f"cachedfs::{url}"


def stored_path(path: str) -> str:
    """Return a path as the cache stores it: in a complete URL, the user and a signed query are hashes of them.

    The stored path of a stored path is itself, and a path below a folder has the folder's stored path in front.
    """
    if not is_url(path):
        return path
    path = _USER.sub(lambda found: _hash(found[0]) + "@", path, count=1)
    head, mark, query = path.partition("?")
    return f"{head}?{_hash(query)}" if mark and re.search(_SIGNED, query) else path


def _hash(text: str) -> str:
    return "-" + hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def is_pattern(path: str) -> bool:
    """Return whether a path is a glob pattern.

    In a complete URL, `?` starts the query, as in fsspec's HTTP filesystem.
    """
    return bool(has_magic(path.replace("?", "") if is_url(path) else path))


def before_magic(path: str) -> str:
    """Return the deepest folder that contains all matches of a pattern.

    A path without wildcards is returned as is.
    """
    while is_pattern(path):
        path = path.rpartition("/")[0]
    return path


def protocols_of(protocol: str) -> set[str]:
    """Return all names of a protocol, including `protocol` itself: for "file" also "local"."""
    if protocol in NAME_PROTOCOLS:  # known without importing the filesystem, which may not be installed
        return set(GCS_PROTOCOLS) if protocol in GCS_PROTOCOLS else {protocol}
    names = filesystem_class(protocol).protocol
    return {protocol, *((names,) if isinstance(names, str) else names)}


def filesystem_class(protocol: str) -> Any:
    """Return fsspec's class for a protocol. Raises ImportError, or ValueError, that says what to install."""
    try:
        return fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise import_error(protocol, error) from error
    except ValueError as error:
        raise ValueError(
            f"no installed package knows the protocol {protocol}://; install the one that registers it with "
            'fsspec (for Google Cloud Storage: pip install "cachedfs[gcs]"), or correct the URL'
        ) from error


def filesystem_at(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return fsspec's filesystem and path for a URL. A package that cannot be imported is named with the reason."""
    # fsspec's own error hides the reason.
    filesystem_class(split_protocol(url.rpartition("::")[2])[0] or "file")
    found: tuple[Any, str] = fsspec.url_to_fs(url, **options)
    return found


def import_error(protocol: str, error: ImportError, package: str = "") -> ImportError:
    """Return an error that says what a protocol's package cannot import, why, and what to do."""
    package = package or known_implementations[protocol]["class"].partition(".")[0]
    if importlib.util.find_spec(package) is None:
        advice = f': pip install "cachedfs[{_EXTRAS[protocol]}]"' if protocol in _EXTRAS else ""
        return ImportError(f"{protocol}:// needs {package}, which is not installed ({error}){advice}")
    first: Any = error
    while isinstance(first.__cause__, ImportError):  # fsspec replaces the message
        first = first.__cause__
    return ImportError(
        f"{protocol}:// needs {package}, and its import failed: {first}. Another package may need a different "
        "version of that: `pip check` names both"
    )


# Option names that indicate a credential, in any filesystem.
_SECRET = (
    r"(?i)(?:^|[_-])"
    r"(token|password|passwd|passphrase|secret|credentials?|auth|authorization|signature|key|cookie|connection_string)"
    r"(?:$|[_-])"
)
# Values of `token` that are not secret.
_OPEN_TOKENS = frozenset({"anon", "google_default", "cloud", "cache", "browser"})


def _is_secret(name: Any, value: Any) -> bool:
    """Return whether an option may contain a secret, judging by its name.

    File names and modes of sign-in are not secret.
    """
    if not isinstance(name, str) or value is None or isinstance(value, bool):
        return False
    if name in ("client_json", "google_auth"):
        return True
    if not re.search(_SECRET, name) or name.endswith(("_path", "_file", "_uri", "_url")):
        return False
    return not (
        isinstance(value, str) and (value in _OPEN_TOKENS or (name == "token" and os.path.isfile(value)))
    )


def jsonable(value: Any, name: str, include_password: bool) -> Any:
    """Return an option in the form in which fsspec writes it to JSON.

    Unlike fsspec's own encoder, it accepts None. `name` is used in error messages. Without `include_password`, tokens,
    secrets and credentials are left out, at any depth, also from URLs. Raises TypeError for a live object, such as a
    credentials object.
    """
    if isinstance(value, str) and not include_password:
        return without_secrets(value)
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
        f"cachedfs: {name} is a {type(value).__name__} object, which cannot be written as JSON. For "
        "credentials, give the name of a token file, its content as a dictionary, 'anon', 'google_default' or 'cloud'"
    )
