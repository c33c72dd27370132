"""Fingerprints of object versions, from what an origin states: generation, ETag, checksum or time.

A time proves a version only once it is older than its own resolution: until then, the next change may show the same
time. So evidence that is too recent gets a fingerprint that no later lookup repeats.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from cachedfs.origins.base import http_date

_HASHES = (
    *("md5", "md5Hash", "md5Checksum", "Content-MD5", "content-md5", "sha256", "sha1", "checksum"),
    *("blob_id", "xet_hash", "sha", "hex"),  # of the Hugging Face Hub, GitHub and a git repository
)
_EVIDENCE = (("generation", ("generation",)), ("etag", ("etag", "ETag", "e_tag")), ("hash", _HASHES))
_TIMES = ("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "modified", "created")
_MILLISECONDS = "modificationTime"  # of WebHDFS, since 1970

_SECONDS_S = 2.0  # resolution of a time without a fraction: one second, or two on FAT
_TICK_S = 0.02  # resolution of the times of local files: a tick of the kernel takes up to 10 ms
_ONCE = re.compile("~[0-9a-f]{16}$")


def fingerprint(info: Mapping[str, Any], now_s: float) -> str | None:
    """Return a text that changes whenever the bytes of a file may change, from fsspec's `info`.

    None without evidence, or if the size is unknown. `now_s` is the Unix time of the lookup, by the clock of the
    service where it states one. If the only evidence is a time that is too recent then, the text is unique.
    """
    evidence = evidence_of(info)
    if evidence is None or not evidence.startswith("time:"):
        return evidence
    modified_s, has_inode = _seconds(_time(info)), bool(info.get("ino"))
    is_too_recent = modified_s is not None and is_recent(modified_s, now_s, has_inode=has_inode)
    return unique_fingerprint(evidence) if is_too_recent else evidence


def evidence_of(info: Mapping[str, Any]) -> str | None:
    """Return the strongest evidence in fsspec's `info`, with the size; None without evidence or size.

    The text names its kind: generation, etag, content hash, or modification time.
    """
    size = info.get("size")
    if size is None:
        return None
    if isinstance(large := info.get("lfs"), Mapping):  # of the Hub: its hash is that of the bytes
        info = {**info, "sha256": large.get("sha256")}
    for kind, names in _EVIDENCE:
        if (value := _first(info, names)) is not None and not str(value).startswith("W/"):
            return f"{kind}:{value}-{size}"
    if (at := _time(info)) is None:
        return None
    # As seconds: a filesystem may return the same time as a datetime or as a number.
    moment = _seconds(at) if isinstance(at, datetime) else at
    number = info.get("ino") or info.get("fileId")
    inode = f"-{number}" if number else ""
    return f"time:{moment}-{size}{inode}"


def is_recent(modified_s: float, now_s: float, *, has_inode: bool = False) -> bool:
    """Return whether a change right after `now_s` could show the time `modified_s` again; both are Unix times.

    A time in the future counts as recent. `has_inode`: it is the time of a local file.
    """
    resolution_s = _TICK_S if has_inode else 0.0
    if modified_s == int(modified_s):
        resolution_s = _SECONDS_S
    return now_s - modified_s < resolution_s


def unique_fingerprint(evidence: str) -> str:
    """Return a fingerprint with this evidence that is equal to no other one."""
    return f"{evidence}~{os.urandom(8).hex()}"


def is_same_evidence(one: str | None, other: str | None) -> bool:
    """Return whether two fingerprints have the same evidence, recent or not."""
    return one == other or (one and _ONCE.sub("", one)) == (other and _ONCE.sub("", other))


def _time(info: Mapping[str, Any]) -> Any:
    """Return the time of the last change, or else of creation; None without one, for which archives state 1970."""
    at = _first(info, _TIMES)
    if at is None and isinstance(since := info.get(_MILLISECONDS), int):
        at = since / 1000
    seconds = _seconds(at)
    return None if seconds is not None and seconds <= 0 and not info.get("ino") else at


def _first(info: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((info[name] for name in names if info.get(name) not in (None, "")), None)


def _seconds(at: Any) -> float | None:
    """Return a time as Unix seconds: a datetime, a number or a text; None for anything else."""
    if isinstance(at, str):
        with suppress(ValueError):
            at = http_date(at) or datetime.fromisoformat(at)
    if isinstance(at, datetime):
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    return float(at) if isinstance(at, (int, float)) else None
