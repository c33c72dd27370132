"""What Google's services have in common: how they word an error, and which ones pass. Pure."""

from __future__ import annotations

import json

__all__ = ["RATE_REASONS", "RETRIED", "error_of"]

RETRIED = frozenset({408, 429, 500, 502, 503, 504})
RATE_REASONS = frozenset({"rateLimitExceeded", "userRateLimitExceeded"})


def error_of(body: bytes) -> tuple[str, set[str]]:
    """Return Google's own message and reasons from the body of an error: JSON, or short text (of media)."""
    text = body.decode("utf-8", "replace").strip()
    try:
        error = json.loads(text)["error"]
        reasons = {str(item.get("reason")) for item in error.get("errors", ())}
        return str(error.get("message", "")), reasons
    except (ValueError, TypeError, KeyError, AttributeError):
        return ("" if text.startswith("<") else text[:500]), set()
