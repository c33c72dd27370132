"""Loggers, one for each package below `cachedfs`, whose records carry no secrets; and `WarnOnce`."""

from __future__ import annotations

import logging
import re

__all__ = ["WarnOnce", "PACKAGES", "public_text", "public_url"]


PACKAGES = (
    *(
        "cache",
        "cli",
        "datasets",
        "events",
        "fetch",
        "filesystem",
        "metadata",
        "origins",
        "packing",
        "prefetch",
        "read",
    ),
    "snapshot",
)

_NAMES = re.compile(r"(?<=://)[^\s/?#@'\"]*@")
_NAMED = ("gs", "gcs", "drive", "file")  # where "?" and "#" are letters of a name
_QUERY = re.compile("(" + "".join(f"(?<!{each})" for each in _NAMED) + r"://[^\s?#'\"]*)[?#]\S*[^\s'\":;,.)]")


def public_url(url: str) -> str:
    """Return an address without what may be secret in it: who asks, query and fragment. A bare path stays as it is."""
    if "://" not in url:
        return url
    # By hand: urlsplit refuses names that are no host's, as the first folder of an archive may be.
    scheme, _, rest = url.partition("://")
    kept = rest if scheme.endswith(_NAMED) else rest.partition("?")[0].partition("#")[0]
    netloc, slash, path = kept.partition("/")
    return f"{scheme}://{netloc.rpartition('@')[2]}{slash}{path}"


def public_text(text: str) -> str:
    """Return a message with its addresses as `public_url` has them; where a query was, it says so."""
    return _QUERY.sub(r"\1?...", _NAMES.sub("", text)) if "://" in text else text


def _without_secrets(record: logging.LogRecord) -> bool:
    # An error names what was read by the address that its reader gave, and that may be a signed one.
    record.msg, record.args = public_text(record.getMessage()), None
    return True


for _package in PACKAGES:
    logging.getLogger(f"cachedfs.{_package}").addFilter(_without_secrets)


log = logging.getLogger("cachedfs.cache")

_NOTHING, _SLOWER, _NOT_STORED = range(3)


class WarnOnce:
    """Warns of the first trouble of one cache, and once more when it gets worse."""

    def __init__(self) -> None:
        self._said = _NOTHING  # the worst so far

    def slower(self, trouble: str | None) -> None:
        """Warn of what makes us slower and no more, unless that or worse was said before; None: there is no trouble."""
        if trouble is not None:
            self._say(_SLOWER, trouble)

    def not_stored(self, trouble: str) -> None:
        """Warn that blocks are not cached, unless that was said before."""
        self._say(_NOT_STORED, f"blocks are not cached: {trouble}")

    def _say(self, how_bad: int, trouble: str) -> None:
        if self._said < how_bad:
            self._said = how_bad
            log.warning("%s", trouble)
