"""Origins by protocol: create one, its identity from its options, and its paths from URLs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from fsspec.config import conf
from fsspec.utils import stringify_path

from cachedfs.common.optional_imports import importing
from cachedfs.common.types import ObjectInfo
from cachedfs.common.urls import LOCAL_PROTOCOLS, NAME_PROTOCOLS, SLASH_NAMES, filesystem_class, without_slash
from cachedfs.origins.base import Origin, PathLock
from cachedfs.origins.drive_links import canonical_path, is_drive_link

_GCS = ("gs", "gcs")
_HTTP = ("http", "https")
_AWARE = "-versions"  # ends an identity whose paths may name a generation
_GENERATION = re.compile(r"(#|[?&]generation=)\d+$")  # gcsfs's pattern
_ALIASES = {"gcs": "gs", "local": "file"}
_HOSTS = ("endpoint_url", "endpoint", "host", "account_name")
_AZURE = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING")
_AWS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_PROFILE")
_PLACES = (
    {"hf": ("HF_ENDPOINT",)}
    | dict.fromkeys(("s3", "s3a"), _AWS)
    | dict.fromkeys(("abfs", "abfss", "az", "adl"), _AZURE)
)
_SECRET = r"(?i)token|secret|passw|credential|authorization|cookie|sas|signature|connection_string|^(key|auth|username|user)$"

# Redundant parts of a local path: the repeated "/" and the "/." of `a//b`, `a/./b` and `a/.`.
_NOTHING = re.compile(r"(?:/\.?)+(?=/|$)")


def open_origin(
    protocol: str,
    options: Mapping[str, Any],
    *,
    identity: str | None = None,
    loop: AbstractEventLoop,
    on_request: Callable[[], None],
    concurrency: int = 16,
    path_lock: PathLock | None = None,
    quota_meter: Callable[[], Any] | None = None,
) -> Origin:
    """Return the origin for `protocol`; its packages and credentials are loaded at the first request.

    `options` are the inner filesystem's own, and `identity` what `identity_of` returned for them. The origin's methods run
    on `loop`. It calls `on_request` there once for every request it sends, and has at most `concurrency` running requests
    that callers wait for.

    `path_lock` keeps other writers off a path. Google Drive needs it, because it would create two
    items of the same name. `quota_meter` returns the `QuotaMeter` of a Drive account.
    """
    given: dict[str, Any] = {"identity": identity or identity_of(protocol, options), "on_request": on_request}
    given["concurrency"] = concurrency
    with importing():
        if protocol == "obstore":
            from cachedfs.origins.obstore_origin import ObstoreOrigin

            return ObstoreOrigin(options, **given)
        given["loop"] = loop
        if protocol in _GCS:
            from cachedfs.origins.gcs.origin import GCSOrigin

            return GCSOrigin(options, **given)
        if protocol == "drive":
            from cachedfs.origins.drive.origin import DriveOrigin

            meter = quota_meter and quota_meter()
            given |= {"path_lock": path_lock, "meter": meter, "filesystem_over": _drive_filesystem}
            return DriveOrigin({**conf.get("drive", {}), **options}, **given)
        if protocol == "hf":
            from cachedfs.origins.hub_origin import HubOrigin

            return HubOrigin(protocol, options, **given)
        if protocol in _HTTP:
            from cachedfs.origins.http_origin import HTTPOrigin

            return HTTPOrigin(protocol, options, **given)
        from cachedfs.origins.fsspec_origin import FsspecOrigin

        return FsspecOrigin(protocol, options, **given)


def _drive_filesystem(origin: Any) -> Any:
    with importing():
        from cachedfs.origins.drive.filesystem import DriveFileSystem

    return DriveFileSystem.over(origin)


def check_options(protocol: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for options that the origin does not know, as far as that is known before it is opened."""
    if protocol == "drive":
        from cachedfs.origins.drive.options import DriveOptions

        DriveOptions.of(_given(protocol, options))


def _given(protocol: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with fsspec's configuration, because that also applies to the filesystem."""
    names = _GCS if protocol in _GCS else (protocol,)
    return {name: value for each in names for name, value in conf.get(each, {}).items()} | dict(options)


def identity_of(
    protocol: str,
    options: Mapping[str, Any],
    *,
    may_ask: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> str:
    """Return a text that identifies the data behind `protocol` and `options`.

    It is part of every block key. It contains no secrets, only whether there are any. `may_ask`: Drive may be asked
    whose credentials they are, once for each credential; that blocks.
    """
    given = _given(protocol, options)
    if protocol == "obstore":  # `cachedfs.obspec` computes it, once for each store
        return str(given["identity"])
    if protocol in _GCS:
        # With version_aware, gcsfs may read another object for the same path.
        aware = _AWARE if given.get("version_aware") else ""
        return f"gs|{_gcs_host(given, environ)}|{_gcs_account(given)}{aware}"
    if protocol == "drive":
        from cachedfs.origins.drive.account_key import account_key
        from cachedfs.origins.drive.options import DriveOptions

        drive = DriveOptions.of(given)
        account = account_key(drive.sign_in, drive.endpoint_url, may_ask=may_ask)
        return f"drive|{_host_of(drive.endpoint_url)}|{account}"
    given |= _places(protocol, given, environ)
    plain = _without_secrets({name: value for name, value in given.items() if value is not None})
    digest = _digest(plain) if plain else "-"
    host = next((str(given[name]) for name in _HOSTS if given.get(name)), "")
    return f"{_ALIASES.get(protocol, protocol)}|{_host_of(host)}|{digest}"


def identity_lasts_s(identity: str) -> float:
    """Return for how many seconds an identity may be used before it is computed again.

    Without a sign-in it changes at the next one. Where the credentials that options name are not there, nothing may be
    cached under it: they are looked for each time.
    """
    if not identity.startswith("drive|"):
        return math.inf
    return {"auth": 1.0, "none": 0.0}.get(identity.rpartition("|")[2], math.inf)


def names_a_version(identity: str, path: str) -> bool:
    """Return whether `path` may name one version of an object, which no listing contains."""
    if identity.startswith(("s3|", "s3a|")):
        return "?versionId=" in path
    return identity.startswith("gs|") and identity.endswith(_AWARE) and bool(_GENERATION.search(path))


def is_whole(identity: str, info: ObjectInfo) -> bool:
    """Return whether `info` has all metadata that a lookup gives.

    The headers of a GCS read have less.
    """
    return "bucket" in info.details or "generation" not in info.details or not identity.startswith("gs|")


def lookup_reads_names(folder: ObjectInfo) -> bool:
    """Return whether a lookup of the folder also reads the names in it, as that of a public folder at Drive does."""
    return "page_read_at" in folder.details


def with_known_details(info: ObjectInfo, known: ObjectInfo) -> ObjectInfo:
    """Return `info` from the headers of a read, with the details of `known` if they still apply.

    Metadata can change while the bytes stay: GCS counts these changes in `metageneration`.
    """
    is_same = info.fingerprint == known.fingerprint and (
        info.details.get("metageneration") == known.details.get("metageneration")
    )
    return dataclasses.replace(info, details=known.details) if is_same else info


def _gcs_host(options: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Return host and port as gcsfs chooses them.

    They come from the argument, the emulator or the universe domain.
    """
    emulator = environ.get("STORAGE_EMULATOR_HOST", "")
    endpoint = options.get("endpoint_url") or ("" if emulator == "default" else emulator)
    universe = environ.get("GOOGLE_CLOUD_UNIVERSE_DOMAIN", "googleapis.com")
    return _host_of(endpoint) or f"storage.{universe}"


def _gcs_account(options: Mapping[str, Any]) -> str:
    token = options.get("token")
    return "anon" if token == "anon" or type(token).__name__ == "AnonymousCredentials" else "auth"


def _places(protocol: str, options: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Return what says, in the environment or in a connection string of Azure, where the data is."""
    known = {name: environ[name] for name in _PLACES.get(protocol, ()) if environ.get(name)}
    text = options.get("connection_string") or known.pop("AZURE_STORAGE_CONNECTION_STRING", "")
    fields = dict(field.split("=", 1) for field in str(text).split(";") if "=" in field)
    return known | {name: fields[name] for name in ("AccountName", "BlobEndpoint") if name in fields}


def _digest(plain: Mapping[str, Any]) -> str:
    text = json.dumps(plain, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _host_of(endpoint: str) -> str:
    """Return `host:port` of a URL or host in lower case, without user name and password."""
    netloc = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}").netloc
    return netloc.rpartition("@")[2].lower()


def _without_secrets(value: Any) -> Any:
    """Return options as JSON values, without secrets.

    A secret becomes "given", an object the name of its type.
    """
    if isinstance(value, Mapping):
        return {
            str(name): "given" if re.search(_SECRET, str(name)) else _without_secrets(item)
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_without_secrets(item) for item in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return str(value) if isinstance(value, os.PathLike) else type(value).__qualname__


def strip(own: str, target: str | None, path: Any) -> str:
    """Return the target's path for a URL or path in any accepted form.

    `own`: our protocol, such as "cgs". `target`: the target's protocol, used for a path without one. Example:
    "cachedfs::gs://bucket/key" gives "bucket/key".
    """
    text: str = stringify_path(path)
    text = text.removeprefix(f"{own}::").removeprefix(f"{own}://").removeprefix("cachedfs::")
    protocol, scheme, rest = text.partition("://")
    if not scheme or "/" in protocol:  # otherwise "://" is part of a key that contains a URL
        protocol, rest = target or "", text
    elif target in (None, "drive") and is_drive_link(text):
        protocol, rest = "drive", text
    if protocol == "drive":
        return canonical_path(rest.strip("/"))
    if protocol in NAME_PROTOCOLS or not protocol:
        return rest.strip("/") if protocol else rest.rstrip("/")
    name = str(filesystem_class(protocol)._strip_protocol(text))
    if protocol in LOCAL_PROTOCOLS and ("//" in name or "/." in name):
        name = _NOTHING.sub("", name) or "/"
    return without_slash(name)


def strip_object(own: str, target: str | None, path: Any) -> str:
    """Return the target's path for an object: as `strip`, with the slashes that end the names of some objects.

    In Google Cloud Storage and S3, "bucket/a" and "bucket/a/" may be two objects.
    """
    name = strip(own, target, path)
    text: str = stringify_path(path)
    has_key = target in SLASH_NAMES and "/" in name
    return name + text[len(text.rstrip("/")) :] if has_key else name
