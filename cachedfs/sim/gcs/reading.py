"""Read requests of the simulated GCS: buckets, listings, metadata and media, with their preconditions."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cachedfs.sim.gcs.show import media_answer, resource, rfc3339, xml, xml_etag
from cachedfs.sim.gcs.store import Page, SimObject, Store, list_page
from cachedfs.sim.messages import Call, Refusal, Response
from cachedfs.sim.network import Network
from cachedfs.sim.service import Service

_NO_BUCKET = "The specified bucket does not exist."
_XML_CODES = {400: "InvalidArgument", 401: "AuthenticationRequired", 403: "AccessDenied"}
_XML_CODES |= {412: "PreconditionFailed", 416: "InvalidRange", 503: "ServiceUnavailable"}
_UNMET = "At least one of the pre-conditions you specified did not hold."
_NOT_SIMULATED = ("matchGlob", "includeTrailingDelimiter", "versions", "softDeleted")
# Headers of the upload server.
TEXT = {"Content-Type": "text/html; charset=UTF-8", "X-GUploader-UploadID": "sim"}


class GCSReading(Service):
    """Answers requests about buckets, and all requests that change no object."""

    def __init__(self, network: Network, folder: Path | None = None) -> None:
        super().__init__(network)
        self.store = Store(folder)

    def render(self, style: str, refusal: Refusal) -> Response:
        status, headers = refusal.status, refusal.headers
        if style == "text":
            return Response(status, {**TEXT, **headers}, refusal.message.encode())
        if style == "json":
            return super().render(style, refusal)
        code = "NoSuchBucket" if refusal.message == _NO_BUCKET else "NoSuchKey"
        code = code if status == 404 else _XML_CODES.get(status, "InternalError")
        return xml("Error", {"Code": code, "Message": refusal.message}, status, headers)

    # Buckets
    def _need_bucket(self, bucket: str) -> None:
        if bucket not in self.store.buckets():
            raise Refusal(404, _NO_BUCKET)

    def _bucket(self, name: str) -> dict[str, Any]:
        place = {"location": "US-CENTRAL1", "locationType": "region", "storageClass": "STANDARD"}
        link, at = f"https://www.googleapis.com/storage/v1/b/{quote(name)}", rfc3339(0)
        out = {"kind": "storage#bucket", "id": name, "name": name, "selfLink": link, "projectNumber": "1"}
        return {**out, **place, "metageneration": "1", "etag": "CAE=", "timeCreated": at, "updated": at}

    def _list_buckets(self, call: Call) -> dict[str, Any]:
        names = [n for n in self.store.buckets() if n.startswith(call.query.get("prefix", ""))]
        return {"kind": "storage#buckets", "items": [self._bucket(n) for n in names]}

    def _get_bucket(self, call: Call, bucket: str) -> dict[str, Any]:
        self._need_bucket(bucket)
        return self._bucket(bucket)

    # Listings
    def _list(self, call: Call, bucket: str) -> dict[str, Any]:
        query = call.query
        if unknown := [name for name in _NOT_SIMULATED if name in query]:
            raise Refusal(501, f"The simulation has no {unknown[0]}.")
        token, limit = query.get("pageToken", ""), query.get("maxResults")
        page, found = self._page(call, bucket, resume=_from_token(token), limit=limit)
        out: dict[str, Any] = {"kind": "storage#objects"}
        if page.resume is not None:
            out["nextPageToken"] = _to_token(page.resume)
        out |= {"prefixes": page.prefixes} if page.prefixes else {}
        return out | ({"items": [resource(stored, call.host) for stored in found]} if found else {})

    def _list_xml(self, call: Call, bucket: str) -> Response:
        query = call.query
        token, after = query.get("continuation-token", ""), query.get("start-after", "")
        resume = _from_token(token) if token else after and after + "\0"
        page, found = self._page(call, bucket, resume=resume, limit=query.get("max-keys"))
        rows: dict[str, Any] = {
            "Name": bucket,
            "Prefix": query.get("prefix", ""),
            "IsTruncated": "false" if page.resume is None else "true",
            "KeyCount": str(len(page.names) + len(page.prefixes)),
            "Contents": [
                {
                    "Key": stored.name,
                    "Generation": str(stored.generation),
                    "MetaGeneration": str(stored.metageneration),
                    "LastModified": rfc3339(stored.updated_s),
                    "ETag": xml_etag(stored),
                    "Size": str(stored.size),
                }
                for stored in found
            ],
            "CommonPrefixes": [{"Prefix": prefix} for prefix in page.prefixes],
        }
        if page.resume is not None:
            rows["NextContinuationToken"] = _to_token(page.resume)
        answer = xml("ListBucketResult", rows)
        answer.n_items = len(page.names) + len(page.prefixes)
        return answer

    def _page(
        self, call: Call, bucket: str, *, resume: str, limit: str | None
    ) -> tuple[Page, list[SimObject]]:
        self._need_bucket(bucket)
        query = call.query
        page = list_page(
            self.store.names(bucket),
            prefix=query.get("prefix", ""),
            delimiter=query.get("delimiter", ""),
            resume=resume,
            start=query.get("startOffset", ""),
            end=query.get("endOffset", ""),
            limit=min(int(limit or 1000), 1000),
        )
        found = [self.store.get(bucket, name) for name in page.names]
        return page, [stored for stored in found if stored]

    # Objects
    def _find(self, bucket: str, key: str, query: Mapping[str, str]) -> SimObject:
        """Return the object of a request. Raises Refusal if it is missing or a precondition fails."""
        self._need_bucket(bucket)
        stored = self.store.get(bucket, key)
        wanted = query.get("generation")
        if stored is None or (wanted and wanted != str(stored.generation)):
            raise Refusal(404, f"No such object: {bucket}/{key}")
        check(query, stored)
        return stored

    def _get_metadata(self, call: Call, bucket: str, key: str) -> dict[str, Any]:
        return resource(self._find(bucket, key, call.query), call.host)

    def _media(self, call: Call, bucket: str, key: str) -> Response:
        stored = self._find(bucket, key, call.query)
        if call.headers.get("if-match", xml_etag(stored)) != xml_etag(stored):
            raise Refusal(412, _UNMET)
        return media_answer(stored, call)


def check(query: Mapping[str, str], stored: SimObject | None) -> None:
    """Raise Refusal unless the precondition holds for the live object; a missing object has generation 0."""
    if unknown := [name for name in query if name.startswith("if") and name != "ifGenerationMatch"]:
        raise Refusal(501, f"The simulation has no {unknown[0]}.")
    generation = stored.generation if stored else 0
    if int(query.get("ifGenerationMatch", generation)) != generation:
        raise Refusal(412, _UNMET)


def _to_token(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


def _from_token(token: str) -> str:
    return base64.b64decode(token, b"-_", validate=True).decode()
