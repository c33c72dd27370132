"""Requests, replies and errors of a simulated cloud."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cachedfs.sim.stored_objects import Body

JSON = {"Content-Type": "application/json; charset=UTF-8"}
_REASONS = {400: "invalid", 401: "authError", 403: "forbidden", 404: "notFound", 409: "conflict"}
_REASONS |= {410: "gone", 412: "conditionNotMet", 416: "requestedRangeNotSatisfiable"}
_REASONS |= {429: "rateLimitExceeded", 501: "notImplemented"}
_OF_USAGE = {"userRateLimitExceeded", "rateLimitExceeded", "dailyLimitExceeded"}


@dataclass(slots=True)
class Request:
    """One request as logged by the server. Header names are in lower case, times in simulated seconds."""

    method: str
    path: str
    """Path as sent, percent-encoded and without the query."""
    query: dict[str, str]
    headers: dict[str, str]
    status: int = 0
    """Status of the reply; 0 if none was started."""
    bytes_sent: int = 0
    """Bytes of the reply's body that were sent."""
    bytes_received: int = 0
    """Bytes of the request's body that were received."""
    kind: str = "other"
    """Kind of the request.

    "media" reads bytes, "list" lists and "upload" uploads; "page" is the public page of a folder at Drive. Other
    requests about an object are "metadata", or "get" at Drive.
    """
    key: str = ""
    """Name of the object, or id of the item at Drive."""
    bucket: str = ""
    units: int = 0
    """Cost in units of Drive's quota."""
    started_s: float = 0.0
    ended_s: float | None = None
    """Time of completion; None while the request is in progress."""


class Refusal(Exception):
    """An error reply of the service."""

    def __init__(
        self,
        status: int,
        message: str,
        reason: str = "",
        *,
        headers: Mapping[str, str] = {},
        location: str = "",  # name of the invalid parameter
        short: str = "",  # message of the row in `errors`, if it is another
        more: Mapping[str, Any] = {},  # other fields of the error
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers)
        self._location, self._short, self._more = location, short, more
        self.reason = reason or _REASONS.get(status, "backendError")

    def to_json(self) -> str:
        """Return the error in Google's JSON format."""
        location = self._location or ("Authorization" if self.status == 401 else "")
        kind = "parameter" if self._location else "header"
        at = {"locationType": kind, "location": location} if location else {}
        domain = "usageLimits" if self.reason in _OF_USAGE else "global"
        row = {"message": self._short or self.message, "domain": domain, "reason": self.reason, **at}
        error = {"code": self.status, "message": self.message, "errors": [row], **self._more}
        return json.dumps({"error": error}, indent=1)


def unauthorized(text: str, reason: str, **options: Any) -> Refusal:
    realm = {"WWW-Authenticate": 'Bearer realm="https://accounts.google.com/"'}
    return Refusal(401, text, reason, headers=realm, **options)


@dataclass(slots=True)
class Call:
    """A request as passed to the code of a cloud. Header names are in lower case."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes = b""
    units: int = 0  # quota units charged for it

    @property
    def host(self) -> str:
        return self.headers.get("host", "127.0.0.1")

    def flag(self, name: str) -> bool:
        return self.query.get(name, "").lower() == "true"

    def json(self) -> dict[str, Any]:
        """Return the JSON object in the body, or an empty dict. Raises ValueError for invalid JSON."""
        value = json.loads(self.body or b"{}")
        return value if isinstance(value, dict) else {}


@dataclass(slots=True)
class Response:
    """A reply before network delays and faults are applied."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: Body = b""
    n_items: int = 0  # items of a listing, which add to its latency
    is_chunked: bool = False  # sent without Content-Length


@dataclass(frozen=True, slots=True)
class Route:
    """The function that answers a request, and what the request is logged and charged as."""

    kind: str
    act: Callable[[Call], Response | dict[str, Any]]  # a dict becomes a reply in JSON
    bucket: str = ""
    key: str = ""
    style: str = "json"  # format of error replies: json, text, xml or html
    units: int = 5  # of Drive's quota
