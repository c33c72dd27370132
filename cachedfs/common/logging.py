"""Loggers, one for each package below `cachedfs`, whose records carry no secrets; and `WarnOnce`."""

from __future__ import annotations

import logging
import re

from cachedfs.errors import NAMED_PROTOCOLS, public_text

PACKAGES = (
    "cache", "cli", "core", "datasets", "events", "filesystem", "mount", "origins", "packing", "prefetch", "server", "shared",
)  # fmt: skip

_SECRETS = r"(?i)((?:token|secret|password|signature|sig|credential|assertion|code)=)[^&\s'\")]+|(bearer\s+)\S+|()ya29\.[\w.-]+"

logger = logging.getLogger("cachedfs.cache")
_NOTHING, _SLOWER, _NOT_STORED = range(3)


def public_url(url: str) -> str:
    """Return a URL without user name, password, query and fragment, which may be secret.

    A bare path is returned as is.
    """
    if "://" not in url:
        return url
    # Not with urlsplit, which rejects invalid host names, such as the first folder inside an archive may look like.
    scheme, _, rest = url.partition("://")
    visible = rest if scheme.endswith(NAMED_PROTOCOLS) else rest.partition("?")[0].partition("#")[0]
    netloc, slash, path = visible.partition("/")
    return f"{scheme}://{netloc.rpartition('@')[2]}{slash}{path}"


def without_secrets(text: str) -> str:
    """Return a library's message as by `public_text`, with tokens, signatures and passwords replaced by `***`."""
    return re.sub(_SECRETS, lambda found: f"{found[1] or found[2] or ''}***", public_text(text))


def has_secrets(error: BaseException | None) -> bool:
    """Return whether the text of an error, or of one that caused it, contains a secret."""
    seen: list[BaseException] = []
    while error is not None and not any(error is known for known in seen):
        if str(error) != without_secrets(str(error)):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def _without_secrets(record: logging.LogRecord) -> bool:
    # Errors contain the URL as the caller gave it, which may be a signed URL.
    record.msg, record.args = public_text(record.getMessage()), None
    return True


for _package in PACKAGES:
    logging.getLogger(f"cachedfs.{_package}").addFilter(_without_secrets)


class WarnOnce:
    """Log a warning for the first problem of one cache, and one more if it gets worse."""

    def __init__(self) -> None:
        self._worst = _NOTHING  # the worst problem logged so far

    def slower(self, problem: str) -> None:
        """Warn of a problem that only makes reads slower, unless one was logged before."""
        self._warn(_SLOWER, problem)

    def not_stored(self, problem: str) -> None:
        """Warn that blocks are not cached, unless that was logged already."""
        self._warn(_NOT_STORED, f"blocks are not cached: {problem}")

    def _warn(self, severity: int, problem: str) -> None:
        if self._worst < severity:
            self._worst = severity
            logger.warning("%s", problem)
