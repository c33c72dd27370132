"""Read requests of the simulated GCS: buckets, listings, metadata and media."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cachedfs.sim.gcs.conditions import UNMET, check, check_key, given_key, http_date
from cachedfs.sim.gcs.show import XML, media_answer, resource, rfc3339, xml, xml_etag
from cachedfs.sim.google import GoogleService, body_of, json_answer
from cachedfs.sim.messages import Call, Refusal, Response
from cachedfs.sim.network import Network
from cachedfs.sim.objects import DataBody, FolderStore, SimObject, Store, list_page

__all__ = ["TEXT", "GCSReading"]

NO_BUCKET = "The specified bucket does not exist."
_XML_CODES = {400: "InvalidArgument", 401: "AuthenticationRequired", 403: "AccessDenied"}
_XML_CODES |= {412: "PreconditionFailed", 416: "InvalidRange", 503: "ServiceUnavailable"}
TEXT = {
    "Content-Type": "text/html; charset=UTF-8",
    "X-GUploader-UploadID": "sim",
}  # headers of the upload server


class GCSReading(GoogleService):
    """Answers requests about buckets, and all requests that change no object."""

    def __init__(self, network: Network, folder: Path | None = None) -> None:
        super().__init__(network)
        self.store = FolderStore(folder) if folder else Store()

    def render(self, style: str, refusal: Refusal) -> Response:
        status, headers = refusal.status, refusal.headers
        if style == "text":
            return Response(status, {**TEXT, **headers}, DataBody(refusal.message.encode()))
        if style == "json":
            return super().render(style, refusal)
        code = "NoSuchBucket" if refusal.message == NO_BUCKET else "NoSuchKey"
        code = code if status == 404 else _XML_CODES.get(status, "InternalError")
        return xml("Error", {"Code": code, "Message": refusal.message}, status, headers)

    # Buckets
    def _need_bucket(self, bucket: str) -> None:
        if bucket not in self.store.buckets():
            raise Refusal(404, NO_BUCKET)

    def _bucket(self, name: str) -> dict[str, Any]:
        place = {"location": "US-CENTRAL1", "locationType": "region", "storageClass": "STANDARD"}
        link, at = f"https://www.googleapis.com/storage/v1/b/{quote(name)}", rfc3339(0)
        out = {"kind": "storage#bucket", "id": name, "name": name, "selfLink": link, "projectNumber": "1"}
        return {**out, **place, "metageneration": "1", "etag": "CAE=", "timeCreated": at, "updated": at}

    def _list_buckets(self, call: Call) -> Response:
        names = [n for n in self.store.buckets() if n.startswith(call.query.get("prefix", ""))]
        return json_answer({"kind": "storage#buckets", "items": [self._bucket(n) for n in names]})

    def _insert_bucket(self, call: Call) -> Response:
        name = body_of(call).get("name")
        if not name:
            raise Refusal(400, "Required parameter: name", "required")
        if name in self.store.buckets():
            raise Refusal(409, "Your previous request to create the named bucket succeeded.")
        self.store.make_bucket(name)
        return json_answer(self._bucket(name))

    def _get_bucket(self, bucket: str) -> Response:
        self._need_bucket(bucket)
        return json_answer(self._bucket(bucket))

    def _get_layout(self, bucket: str) -> Response:
        self._need_bucket(bucket)
        layout = {"kind": "storage#storageLayout", "bucket": bucket, "location": "US-CENTRAL1"}
        return json_answer({**layout, "locationType": "region", "hierarchicalNamespace": {}})

    def _delete_bucket(self, bucket: str) -> Response:
        self._need_bucket(bucket)
        if self.store.names(bucket):
            raise Refusal(409, "The bucket you tried to delete is not empty.")
        self.store.remove_bucket(bucket)
        return Response(204)

    def _bucket_xml(self, bucket: str, call: Call) -> Response:
        if call.method == "PUT":
            self.store.make_bucket(bucket)
        self._need_bucket(bucket)
        return Response(200, dict(XML))

    # Listings
    def _list_json(self, bucket: str, call: Call) -> Response:
        self._need_bucket(bucket)
        query = call.query
        if "matchGlob" in query:
            raise Refusal(501, "The simulation has no matchGlob.")
        page = list_page(
            self.store.names(bucket),
            prefix=query.get("prefix", ""),
            delimiter=query.get("delimiter", ""),
            resume=_from_token(query.get("pageToken", "")),
            start=query.get("startOffset", ""),
            end=query.get("endOffset", ""),
            limit=min(int(query.get("maxResults") or 1000), 1000),
            with_trailing=query.get("includeTrailingDelimiter", "").lower() == "true",
        )
        out: dict[str, Any] = {"kind": "storage#objects"}
        if page.resume is not None:
            out["nextPageToken"] = _to_token(page.resume)
        found = [self.store.get(bucket, name) for name in page.names]
        out |= {"prefixes": page.prefixes} if page.prefixes else {}
        out |= {"items": [resource(o, call.host) for o in found if o]} if found else {}
        answer = json_answer(out)
        answer.n_items = len(page.names) + len(page.prefixes)
        return answer

    def _list_xml(self, bucket: str, call: Call) -> Response:
        self._need_bucket(bucket)
        query = call.query
        if query.get("list-type") != "2":
            raise Refusal(501, "The simulation has only version 2 of this listing.")
        token, after = query.get("continuation-token", ""), query.get("start-after", "")
        resume = _from_token(token) if token else after and after + "\0"
        page = list_page(
            self.store.names(bucket),
            prefix=query.get("prefix", ""),
            delimiter=query.get("delimiter", ""),
            resume=resume,
            limit=min(int(query.get("max-keys") or 1000), 1000),
        )
        found = [o for o in (self.store.get(bucket, name) for name in page.names) if o]
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

    # Objects
    def _find(self, bucket: str, key: str, query: Mapping[str, str], *, reading: bool = True) -> SimObject:
        """Return the object of a request. Raises Refusal if it is missing or a precondition fails."""
        self._need_bucket(bucket)
        stored = self.store.get(bucket, key)
        wanted = query.get("generation")
        if stored is None or (wanted and wanted != str(stored.generation)):
            raise Refusal(404, f"No such object: {bucket}/{key}")
        check(query, stored, reading=reading)
        return stored

    def _get_metadata(self, bucket: str, key: str, call: Call) -> Response:
        stored = self._find(bucket, key, call.query)
        out = resource(stored, call.host)
        if stored.key_sha256 and given_key(call.headers) != stored.key_sha256:
            out = {name: value for name, value in out.items() if name not in ("md5Hash", "crc32c")}
        return json_answer(out)

    def _media(self, bucket: str, key: str, call: Call) -> Response:
        stored = self._find(bucket, key, call.query)
        check_key(stored, call.headers)
        tag, changed_s, headers = xml_etag(stored), int(stored.updated_s), call.headers
        if "if-match" in headers and headers["if-match"] != "*" and tag not in headers["if-match"]:
            raise Refusal(412, UNMET)
        if "if-unmodified-since" in headers and changed_s > http_date(headers["if-unmodified-since"]):
            raise Refusal(412, UNMET)
        if known := headers.get("if-none-match"):
            is_known = known == "*" or tag in known
        else:
            since = headers.get("if-modified-since")
            is_known = since is not None and changed_s <= http_date(since)
        return Response(304, {"ETag": tag}) if is_known else media_answer(stored, call)


def _to_token(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


def _from_token(token: str) -> str:
    return base64.b64decode(token, b"-_", validate=True).decode()
