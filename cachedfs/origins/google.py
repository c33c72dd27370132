"""What Google's services have in common: how they word answers and errors, and which ones pass. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from cachedfs.origins.retry import Failed, Trouble, retry_after_s

__all__ = ["error_of", "object_of", "token_server_away", "trouble_of"]

_RETRIED = frozenset({408, 429, 500, 502, 503, 504})
_RATE_REASONS = frozenset({"rateLimitExceeded", "userRateLimitExceeded"})
_TOO_MANY = "Too many requests: lower concurrency=, or wait a minute; others may use the same quota"


def trouble_of(
    status: int, reasons: set[str], said: str, headers: Mapping[str, str], now: datetime
) -> Trouble | None:
    """Return the trouble that an answer tells of, where another try may succeed; None where none will."""
    is_rate = status == 429 or (status == 403 and bool(reasons & _RATE_REASONS))
    if status not in _RETRIED and status <= 504 and not is_rate:
        return None
    trouble = Trouble(f"the service answered {said}", retry_after_s(headers.get("retry-after"), now))
    return replace(trouble, remedy=_TOO_MANY, is_rate=True) if is_rate else trouble


def error_of(body: bytes) -> tuple[str, set[str]]:
    """Return Google's own message and reasons from the body of an error: JSON, or short text (of media).

    A reason that names a place is there twice: by itself, and as "reason at place".
    """
    text = body.decode("utf-8", "replace").strip()
    try:
        error = json.loads(text)["error"]
        items = error.get("errors", ())
        reasons = {str(item.get("reason")) for item in items}
        places = {f"{item.get('reason')} at {item['location']}" for item in items if item.get("location")}
        return str(error.get("message", "")), reasons | places
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ("" if text.startswith("<") else text[:500]), set()


def token_server_away(error: Exception) -> Exception | None:
    """Return the error of google-auth that says that who gives tokens is away or in trouble; None where it says anything else.

    It may be behind `error`: of a metadata server, google-auth makes a refusal of whatever is in the way.
    """
    from google.auth.exceptions import TransportError

    away = next((each for each in (error, error.__cause__) if isinstance(each, TransportError)), None)
    return None if away is None or _is_answered(away) else away


def _is_answered(error: Exception) -> bool:
    """Return whether a metadata server is there, and says that it has no such credentials: nobody has signed in yet."""
    status = getattr(error.args[1] if len(error.args) > 1 else None, "status", None)
    return isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)


def object_of(text: bytes) -> dict[str, Any]:
    """Return the object that an answer is in JSON; raises Failed: any other value is something's on the way."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Failed(Trouble("the answer is not JSON")) from error
    if not isinstance(found, dict):
        raise Failed(Trouble("the answer is JSON of no object"))
    return found
