"""Preconditions of a request on an object: generations, and customer-supplied encryption keys."""

from __future__ import annotations

import base64
import email.utils
import hashlib
from collections.abc import Mapping

from cachedfs.sim.messages import Refusal
from cachedfs.sim.objects import SimObject

__all__ = ["CONDITIONS", "UNMET", "check", "check_key", "given_key", "http_date", "source_query"]

CONDITIONS = {
    "x-goog-if-generation-match": "ifGenerationMatch",
    "x-goog-if-metageneration-match": "ifMetagenerationMatch",
}
UNMET = "At least one of the pre-conditions you specified did not hold."


def check(query: Mapping[str, str], stored: SimObject | None, *, reading: bool) -> None:
    """Raise Refusal unless all preconditions hold for the live object; a missing object has generation 0."""
    generation, metageneration = (stored.generation, stored.metageneration) if stored else (0, 0)
    for name, value in (("Generation", generation), ("Metageneration", metageneration)):
        match, differ = query.get(f"if{name}Match"), query.get(f"if{name}NotMatch")
        if match is not None and int(match) != value:
            raise Refusal(412, UNMET)
        if differ is not None and int(differ) == value:
            raise Refusal(304 if reading else 412, UNMET)


def source_query(query: Mapping[str, str]) -> dict[str, str]:
    """Return the preconditions on the source of a copy, under the usual parameter names."""
    out = {f"if{k[8:]}": v for k, v in query.items() if k.startswith("ifSource")}
    return out | ({"generation": query["sourceGeneration"]} if "sourceGeneration" in query else {})


def given_key(headers: Mapping[str, str], prefix: str = "x-goog-encryption-") -> str | None:
    """Return the SHA-256 of the customer-supplied encryption key of a request, None if it has none."""
    key, given = headers.get(f"{prefix}key"), headers.get(f"{prefix}key-sha256")
    if key is None:
        return None
    actual = base64.b64encode(hashlib.sha256(base64.b64decode(key)).digest()).decode()
    if given is not None and given != actual:
        raise Refusal(400, "Missing or incorrect SHA256 hash of the encryption key.")
    return actual


def check_key(stored: SimObject, headers: Mapping[str, str], prefix: str = "x-goog-encryption-") -> None:
    """Raise Refusal unless the request has the encryption key of the object."""
    given = given_key(headers, prefix)
    if given == stored.key_sha256:
        return
    if stored.key_sha256 is None:
        text, reason = "The target object is not encrypted by a customer-supplied key.", "Not"
    elif given is None:
        text, reason = "The target object is encrypted by a customer-supplied encryption key.", ""
    else:
        text = "The provided encryption key is incorrect."
        raise Refusal(400, text, "customerEncryptionKeyIsIncorrect")
    raise Refusal(400, text, f"resource{reason or 'Is'}EncryptedWithCustomerEncryptionKey")


def http_date(text: str) -> float:
    return email.utils.parsedate_to_datetime(text).timestamp()
