"""`HTTPRequest`, an HTTP request before it is sent, and `Answer`, a response that was read to its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from cachedfs.common.types import Range, Suffix
from cachedfs.origins.base import describe

_GOOD = frozenset({200, 206, 416})


@dataclasses.dataclass(slots=True)
class HTTPRequest:
    """One request before it is sent; errors name its `subject` and its `purpose`."""

    url: str  # percent-encoded
    subject: str
    _: dataclasses.KW_ONLY
    params: Mapping[str, str] = dataclasses.field(default_factory=dict)
    doing: str = ""  # "": reading `want`
    want: Range | Suffix | None = None  # the bytes that its Range header names
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    as_stored: bool = False  # the body is an object's bytes: do not decompress it
    is_pinned: bool = False
    method: str = "GET"
    data: bytes | None = None  # the body to send
    within_s: float | None = None  # how long to wait for the answer; longer where answers usually take long
    kind: str = "download"  # as the rate limiter counts it
    good: frozenset[int] = _GOOD  # the statuses that are no failures
    follows_redirects: bool = True
    trusts_redirects: bool = False  # any answer of another host counts as the service's own

    @property
    def purpose(self) -> str:
        """The purpose of the request, as errors name it."""
        return self.doing or describe(self.want)


class Answer(NamedTuple):
    """A response that was read to its end."""

    status: int
    headers: Mapping[str, str]  # names in any case
    body: bytes
