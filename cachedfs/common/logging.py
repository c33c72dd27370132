"""Loggers, one for each package below `cachedfs`, whose records carry no secrets; and `WarnOnce`."""

from __future__ import annotations

import logging
import re

__all__ = ["PACKAGES", "WarnOnce", "public_text", "public_url"]


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
_NAMED = ("gs", "gcs", "drive", "file")  # protocols whose paths may contain "?" and "#"
_QUERY = re.compile("(" + "".join(f"(?<!{each})" for each in _NAMED) + r"://[^\s?#'\"]*)[?#]\S*[^\s'\":;,.)]")

log = logging.getLogger("cachedfs.cache")
_NOTHING, _SLOWER, _NOT_STORED = range(3)


def public_url(url: str) -> str:
    """Return a URL without user name, password, query and fragment, which may be secret.

    A bare path is returned as is.
    """
    if "://" not in url:
        return url
    # Not with urlsplit, which rejects invalid host names, such as the first folder inside an archive may look like.
    scheme, _, rest = url.partition("://")
    kept = rest if scheme.endswith(_NAMED) else rest.partition("?")[0].partition("#")[0]
    netloc, slash, path = kept.partition("/")
    return f"{scheme}://{netloc.rpartition('@')[2]}{slash}{path}"


def public_text(text: str) -> str:
    """Return a message whose URLs are stripped as by `public_url`.

    A removed query or fragment shows as "?...".
    """
    return _QUERY.sub(r"\1?...", _NAMES.sub("", text)) if "://" in text else text


def _without_secrets(record: logging.LogRecord) -> bool:
    # Errors contain the URL as the caller gave it, which may be a signed URL.
    record.msg, record.args = public_text(record.getMessage()), None
    return True


for _package in PACKAGES:
    logging.getLogger(f"cachedfs.{_package}").addFilter(_without_secrets)


class WarnOnce:
    """Log a warning for the first problem of one cache, and one more if it gets worse."""

    def __init__(self) -> None:
        self._said = _NOTHING  # the worst problem logged so far

    def slower(self, trouble: str | None) -> None:
        """Warn once of a problem that only makes reads slower; None means no problem.

        Nothing is logged if this problem or a worse one was logged before.
        """
        if trouble is not None:
            self._say(_SLOWER, trouble)

    def not_stored(self, trouble: str) -> None:
        """Warn that blocks are not cached, unless that was logged already."""
        self._say(_NOT_STORED, f"blocks are not cached: {trouble}")

    def _say(self, how_bad: int, trouble: str) -> None:
        if self._said < how_bad:
            self._said = how_bad
            log.warning("%s", trouble)
