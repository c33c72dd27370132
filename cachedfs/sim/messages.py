"""What goes between a client and a simulated cloud, as the cloud's own code sees it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cachedfs.sim.objects import NO_BODY, Body

__all__ = ["Answer", "Call", "Refusal", "Request", "Route", "unauthorized"]

_REASONS = {400: "invalid", 401: "authError", 403: "forbidden", 404: "notFound", 409: "conflict"}
_REASONS |= {410: "gone", 412: "conditionNotMet", 416: "requestedRangeNotSatisfiable"}
_REASONS |= {429: "rateLimitExceeded", 501: "notImplemented"}
_OF_USAGE = {"userRateLimitExceeded", "rateLimitExceeded", "dailyLimitExceeded"}


@dataclass(slots=True)
class Request:
    """One request as the server saw it; header names in lower case, times in simulated seconds."""

    method: str
    path: str
    """As sent, percent-encoded, without the query."""
    query: dict[str, str]
    headers: dict[str, str]
    status: int = 0
    """Of the answer; 0: none was begun."""
    bytes_sent: int = 0
    """Of the answer's body, as far as it went out."""
    bytes_received: int = 0
    """Of the request's body."""
    kind: str = "other"
    """What was asked: "media" for bytes, "list", "upload"; other questions about an object are "metadata", or at Drive "get"."""
    key: str = ""
    """The object that it was about, or at Drive the item's id."""
    bucket: str = ""
    units: int = 0
    """What it cost of Drive's quota."""
    stalled: bool = False
    """True where its first byte came late by chance, as the profile has it."""
    started_s: float = 0.0
    ended_s: float | None = None
    """None: it is still running."""


class Refusal(Exception):
    """An error that the service answers with."""

    def __init__(
        self,
        status: int,
        message: str,
        reason: str = "",
        *,
        headers: Mapping[str, str] = {},
        location: str = "",  # the parameter that is to blame
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers)
        self.location = location
        self.reason = reason or _REASONS.get(status, "backendError")

    def to_json(self, **more: str) -> str:
        """Return Google's JSON for this error."""
        at = {"locationType": "parameter", "location": self.location} if self.location else {}
        domain = "usageLimits" if self.reason in _OF_USAGE else "global"
        item = {"message": self.message, "domain": domain, "reason": self.reason, **at, **more}
        error = {"code": self.status, "message": self.message, "errors": [item]}
        return json.dumps({"error": error}, indent=1)


def unauthorized(text: str, reason: str) -> Refusal:
    realm = {"WWW-Authenticate": 'Bearer realm="https://accounts.google.com/"'}
    return Refusal(401, text, reason, headers=realm)


@dataclass(slots=True)
class Call:
    """A request as a cloud's own code sees it; header names in lower case."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes = b""
    units: int = 0  # of a quota, that it has cost

    @property
    def host(self) -> str:
        return self.headers.get("host", "127.0.0.1")


@dataclass(slots=True)
class Answer:
    """A reply before it meets the network."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: Body = NO_BODY
    n_items: int = 0  # of a listing, for its latency
    is_chunked: bool = False  # no Content-Length


@dataclass(frozen=True, slots=True)
class Route:
    """What a request is about, and how to do it once its body is here."""

    kind: str
    act: Callable[[Call], Answer]
    bucket: str = ""
    key: str = ""
    style: str = "json"  # how errors are worded: json, text or xml
    units: int | None = None  # of a quota; None: what its kind costs
