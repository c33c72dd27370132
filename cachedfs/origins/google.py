"""What Google's services have in common: how they word an error, and which ones pass. Pure."""

from __future__ import annotations

import json

__all__ = ["RATE_REASONS", "RETRIED", "error_of"]

RETRIED = frozenset({408, 429, 500, 502, 503, 504})
RATE_REASONS = frozenset({"rateLimitExceeded", "userRateLimitExceeded"})


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
    except (ValueError, TypeError, KeyError, AttributeError):
        return ("" if text.startswith("<") else text[:500]), set()
