"""A simulated Google Cloud Storage: the JSON and XML interfaces that its clients use.

Written from the published reference (cloud.google.com/storage/docs: json_api/v1, xml-api,
performing-resumable-uploads, transcoding, encryption/customer-supplied-keys, request-preconditions).
"""

from __future__ import annotations

import base64
import email.utils
import gzip
import hashlib
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

import google_crc32c

from cachedfs.sim.google import GoogleService, body_of, json_answer, span_of, split_related, take_chunk
from cachedfs.sim.messages import Answer, Call, Refusal, Route
from cachedfs.sim.network import Network
from cachedfs.sim.objects import DataBody, FolderStore, Store, StoredObject, list_page
from cachedfs.sim.server import SimServer
from cachedfs.sim.service import Service

__all__ = ["GCSServer", "GCSService"]

_XML = {"Content-Type": "application/xml; charset=UTF-8"}
_TEXT = {"Content-Type": "text/html; charset=UTF-8"}
# An object's editable properties: the JSON API's name, the XML API's header.
_FIELDS = {
    "contentType": "content-type",
    "contentEncoding": "content-encoding",
    "cacheControl": "cache-control",
    "contentDisposition": "content-disposition",
    "contentLanguage": "content-language",
    "storageClass": "x-goog-storage-class",
    "customTime": "x-goog-custom-time",
}
_CONDITIONS = {
    "x-goog-if-generation-match": "ifGenerationMatch",
    "x-goog-if-metageneration-match": "ifMetagenerationMatch",
}
_NO_BUCKET = "The specified bucket does not exist."
_UNMET = "At least one of the pre-conditions you specified did not hold."
_XML_CODES = {400: "InvalidArgument", 401: "AuthenticationRequired", 403: "AccessDenied"}
_XML_CODES |= {412: "PreconditionFailed", 416: "InvalidRange", 503: "ServiceUnavailable"}


@dataclass(slots=True)
class _Upload:
    """A resumable or multipart upload on its way."""

    bucket: str
    key: str
    fields: dict[str, Any]
    query: dict[str, str]  # with the preconditions
    key_sha256: str | None
    data: bytearray = field(default_factory=bytearray)
    parts: dict[int, bytes] = field(default_factory=dict)
    result: StoredObject | None = None


class GCSService(GoogleService):
    """Answers as storage.googleapis.com does."""

    def __init__(self, network: Network, folder: Path | None = None) -> None:
        super().__init__(network)
        self.store = FolderStore(folder) if folder else Store()
        self._uploads: dict[str, _Upload] = {}

    def do_put(self, bucket: str, key: str, data: bytes, encoding: str | None, type: str | None) -> int:
        given = {"contentEncoding": encoding, "contentType": type}
        fields = {name: value for name, value in given.items() if value is not None}
        return self.store.put(bucket, key, data, fields).generation

    def do_delete(self, bucket: str, key: str) -> bool:
        return self.store.remove(bucket, key)

    def do_make_bucket(self, bucket: str) -> None:
        self.store.make_bucket(bucket)

    def render(self, style: str, refusal: Refusal) -> Answer:
        status, headers = refusal.status, refusal.headers
        if style == "text":
            return Answer(status, {**_TEXT, **headers}, DataBody(refusal.message.encode()))
        if style == "json":
            return super().render(style, refusal)
        code = "NoSuchBucket" if refusal.message == _NO_BUCKET else "NoSuchKey"
        code = code if status == 404 else _XML_CODES.get(status, "InternalError")
        return _xml("Error", {"Code": code, "Message": refusal.message}, status, headers)

    # Which address means what
    def route(self, call: Call) -> Route:
        head, _, rest = call.path.lstrip("/").partition("/storage/v1")
        parts = [unquote(part) for part in rest.split("/")[1:]]
        if call.path.startswith("/storage/v1/"):
            return self._route_json([unquote(p) for p in call.path.split("/")[3:]], call)
        match head, parts:
            case "download", ["b", bucket, "o", key] if call.method in ("GET", "HEAD"):
                return Route("media", lambda c: self._media(bucket, key, c), bucket, key, "text")
            case "upload" | "resumable/upload", ["b", bucket, "o", *_]:
                return self._route_upload(bucket, call)
            case "batch", []:
                return Route("batch", self.batch)
        return self._route_xml(call)

    def _route_json(self, parts: list[str], call: Call) -> Route:
        method = call.headers.get("x-http-method-override", call.method)
        match method, parts:
            case "GET", ["b"]:
                return Route("bucket", self._list_buckets)
            case "POST", ["b"]:
                return Route("bucket", self._insert_bucket)
            case (("GET" | "DELETE" | "PATCH" | "PUT"), ["b", bucket]):
                act = self._delete_bucket if method == "DELETE" else self._get_bucket
                return Route("bucket", lambda call: act(bucket), bucket)
            case "GET", ["b", bucket, "storageLayout"]:
                return Route("bucket", lambda call: self._get_layout(bucket), bucket)
            case "GET", ["b", bucket, "o"]:
                return Route("list", lambda call: self._list_json(bucket, call), bucket)
            case (("GET" | "HEAD"), ["b", bucket, "o", key]) if call.query.get("alt") == "media":
                return Route("media", lambda c: self._media(bucket, key, c), bucket, key, "text")
            case "GET", ["b", bucket, "o", key]:
                act_on = self._get_metadata
            case (("PATCH" | "PUT"), ["b", bucket, "o", key]):
                act_on = self._patch
            case "DELETE", ["b", bucket, "o", key]:
                return Route("delete", lambda c: self._delete(bucket, key, c), bucket, key)
            case "POST", ["b", bucket, "o", key, "compose"]:
                return Route("compose", lambda c: self._compose(bucket, key, c), bucket, key)
            case "POST", ["b", b, "o", k, ("rewriteTo" | "copyTo") as verb, "b", bucket, "o", key]:
                return Route("copy", lambda c: self._copy((b, k), (bucket, key), verb, c), bucket, key)
            case "POST", ["b", bucket, "o", k, "moveTo", "o", key]:
                return Route(
                    "copy", lambda c: self._copy((bucket, k), (bucket, key), "moveTo", c), bucket, key
                )
            case _:
                raise Refusal(404, "Not Found")
        return Route("metadata", lambda call: act_on(bucket, key, call), bucket, key)

    def _route_upload(self, bucket: str, call: Call) -> Route:
        if "upload_id" in call.query:
            session = self._uploads.get(call.query["upload_id"])
            key = session.key if session else ""
            return Route("upload", lambda call: self._resume(session, call), bucket, key)
        upload, data = _begin(bucket, call)
        return Route("upload", lambda call: self._upload(upload, data, call), bucket, upload.key)

    def _route_xml(self, call: Call) -> Route:
        bucket, _, rest = call.path.lstrip("/").partition("/")
        bucket, key = unquote(bucket), unquote(rest)
        query = {name: call.headers[header] for header, name in _CONDITIONS.items() if header in call.headers}
        call.query.update(query)
        match call.method, bool(key):
            case "GET", False if bucket:
                return Route("list", lambda c: self._list_xml(bucket, c), bucket, style="xml")
            case (("HEAD" | "PUT"), False) if bucket:
                return Route("bucket", lambda c: self._bucket_xml(bucket, c), bucket, style="xml")
            case "GET", True:
                return Route("media", lambda c: self._media(bucket, key, c), bucket, key, "xml")
            case "HEAD", True:
                return Route("metadata", lambda c: self._media(bucket, key, c), bucket, key, "xml")
            case "DELETE", True if "uploadId" not in call.query:
                return Route("delete", lambda c: self._delete(bucket, key, c), bucket, key, "xml")
            case (("PUT" | "POST" | "DELETE"), True):
                kind = "copy" if "x-goog-copy-source" in call.headers else "upload"
                return Route(kind, lambda c: self._write_xml(bucket, key, c), bucket, key, "xml")
        raise Refusal(404, "Not Found")

    # Buckets
    def _need_bucket(self, bucket: str) -> None:
        if bucket not in self.store.buckets():
            raise Refusal(404, _NO_BUCKET)

    def _bucket(self, name: str) -> dict[str, Any]:
        place = {"location": "US-CENTRAL1", "locationType": "region", "storageClass": "STANDARD"}
        link, at = f"https://www.googleapis.com/storage/v1/b/{quote(name)}", _rfc3339(0)
        out = {"kind": "storage#bucket", "id": name, "name": name, "selfLink": link, "projectNumber": "1"}
        return {**out, **place, "metageneration": "1", "etag": "CAE=", "timeCreated": at, "updated": at}

    def _list_buckets(self, call: Call) -> Answer:
        names = [n for n in self.store.buckets() if n.startswith(call.query.get("prefix", ""))]
        return json_answer({"kind": "storage#buckets", "items": [self._bucket(n) for n in names]})

    def _insert_bucket(self, call: Call) -> Answer:
        name = body_of(call).get("name")
        if not name:
            raise Refusal(400, "Required parameter: name", "required")
        if name in self.store.buckets():
            raise Refusal(409, "Your previous request to create the named bucket succeeded.")
        self.store.make_bucket(name)
        return json_answer(self._bucket(name))

    def _get_bucket(self, bucket: str) -> Answer:
        self._need_bucket(bucket)
        return json_answer(self._bucket(bucket))

    def _get_layout(self, bucket: str) -> Answer:
        self._need_bucket(bucket)
        layout = {"kind": "storage#storageLayout", "bucket": bucket, "location": "US-CENTRAL1"}
        return json_answer({**layout, "locationType": "region", "hierarchicalNamespace": {}})

    def _delete_bucket(self, bucket: str) -> Answer:
        self._need_bucket(bucket)
        if self.store.names(bucket):
            raise Refusal(409, "The bucket you tried to delete is not empty.")
        self.store.remove_bucket(bucket)
        return Answer(204)

    def _bucket_xml(self, bucket: str, call: Call) -> Answer:
        if call.method == "PUT":
            self.store.make_bucket(bucket)
        self._need_bucket(bucket)
        return Answer(200, dict(_XML))

    # Listings
    def _list_json(self, bucket: str, call: Call) -> Answer:
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
        out |= {"items": [_resource(o, call.host) for o in found if o]} if found else {}
        answer = json_answer(out)
        answer.n_items = len(page.names) + len(page.prefixes)
        return answer

    def _list_xml(self, bucket: str, call: Call) -> Answer:
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
                    "LastModified": _rfc3339(stored.updated_s),
                    "ETag": _xml_etag(stored),
                    "Size": str(stored.size),
                }
                for stored in found
            ],
            "CommonPrefixes": [{"Prefix": prefix} for prefix in page.prefixes],
        }
        if page.resume is not None:
            rows["NextContinuationToken"] = _to_token(page.resume)
        answer = _xml("ListBucketResult", rows)
        answer.n_items = len(page.names) + len(page.prefixes)
        return answer

    # Reading
    def _find(self, bucket: str, key: str, query: Mapping[str, str], *, reading: bool = True) -> StoredObject:
        """Return the object that a request names; Refusal when it may not be had so."""
        self._need_bucket(bucket)
        stored = self.store.get(bucket, key)
        wanted = query.get("generation")
        if stored is None or (wanted and wanted != str(stored.generation)):
            raise Refusal(404, f"No such object: {bucket}/{key}")
        _check(query, stored, reading=reading)
        return stored

    def _get_metadata(self, bucket: str, key: str, call: Call) -> Answer:
        stored = self._find(bucket, key, call.query)
        out = _resource(stored, call.host)
        if stored.key_sha256 and _given_key(call.headers) != stored.key_sha256:
            out = {name: value for name, value in out.items() if name not in ("md5Hash", "crc32c")}
        return json_answer(out)

    def _media(self, bucket: str, key: str, call: Call) -> Answer:
        stored = self._find(bucket, key, call.query)
        _check_key(stored, call.headers)
        tag, changed_s, headers = _xml_etag(stored), int(stored.updated_s), call.headers
        if "if-match" in headers and headers["if-match"] != "*" and tag not in headers["if-match"]:
            raise Refusal(412, _UNMET)
        if "if-unmodified-since" in headers and changed_s > _http_date(headers["if-unmodified-since"]):
            raise Refusal(412, _UNMET)
        if known := headers.get("if-none-match"):
            is_known = known == "*" or tag in known
        else:
            since = headers.get("if-modified-since")
            is_known = since is not None and changed_s <= _http_date(since)
        return Answer(304, {"ETag": tag}) if is_known else _media_answer(stored, call)

    # Writing
    def _write(self, upload: _Upload, data: bytes, *, n_components: int | None = None) -> StoredObject:
        self._need_bucket(upload.bucket)
        if not upload.key or len(upload.key.encode()) > 1024:
            raise Refusal(400, "Required: an object name of 1 to 1024 bytes.", "required")
        _check(upload.query, self.store.get(upload.bucket, upload.key), reading=False)
        fields = {k: v for k, v in upload.fields.items() if k in _FIELDS or k == "metadata"}
        want = {k: v for k, v in upload.fields.items() if k in ("crc32c", "md5Hash") and v}
        if any(v != _hashes(data)[k] for k, v in want.items()):
            raise Refusal(400, "Provided hash doesn't match calculated hash of the content.")
        try:
            return self.store.put(
                upload.bucket,
                upload.key,
                data,
                fields,
                key_sha256=upload.key_sha256,
                n_components=n_components,
            )
        except OSError as error:  # a folder cannot hold both `a` and `a/b`
            raise Refusal(400, str(error)) from error

    def _upload(self, upload: _Upload, data: bytes, call: Call) -> Answer:
        if call.query["uploadType"] != "resumable":
            return json_answer(_resource(self._write(upload, data), call.host))
        bucket, key = upload.bucket, upload.key
        self._need_bucket(bucket)
        _check(upload.query, self.store.get(bucket, key), reading=False)
        upload_id = uuid.uuid4().hex
        self._uploads[upload_id] = upload
        path = f"/upload/storage/v1/b/{quote(bucket)}/o?uploadType=resumable&name={quote(key, '')}"
        location = f"http://{call.host}{path}&upload_id={upload_id}"
        return Answer(200, {"Location": location, "X-GUploader-UploadID": upload_id})

    def _resume(self, upload: _Upload | None, call: Call) -> Answer:
        """Return the reply to one request of a resumable upload."""
        if upload is None:
            raise Refusal(404, "The upload session is unknown or has expired.")
        if call.method == "DELETE":
            del self._uploads[call.query["upload_id"]]
            return Answer(499, dict(_TEXT))
        if upload.result:
            return json_answer(_resource(upload.result, call.host))
        total = take_chunk(upload.data, call)
        upload.fields |= _goog_hashes(call.headers)
        if total is not None and len(upload.data) == total:
            upload.result = self._write(upload, bytes(upload.data))
            upload.data = bytearray()
            return json_answer(_resource(upload.result, call.host))
        headers = {"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {}
        if call.headers.get("x-guploader-no-308") == "yes":  # Google's Go client asks for this
            return Answer(200, {**headers, "X-HTTP-Status-Code-Override": "308"})
        return Answer(308, headers)

    def _patch(self, bucket: str, key: str, call: Call) -> Answer:
        stored = self._find(bucket, key, call.query, reading=False)
        given = {k: v for k, v in body_of(call).items() if k in _FIELDS or k == "metadata"}
        fields = dict(stored.fields) if call.method != "PUT" else {}
        if call.method != "PUT" and given.get("metadata"):
            given["metadata"] = {**fields.get("metadata", {}), **given["metadata"]}
        fields |= given
        if fields.get("metadata"):
            fields["metadata"] = {k: v for k, v in fields["metadata"].items() if v is not None}
        kept = {k: v for k, v in fields.items() if v is not None}
        return json_answer(_resource(self.store.update(stored, kept), call.host))

    def _delete(self, bucket: str, key: str, call: Call) -> Answer:
        self._find(bucket, key, call.query, reading=False)
        self.store.remove(bucket, key)
        return Answer(204)

    def _compose(self, bucket: str, key: str, call: Call) -> Answer:
        body, pieces, n_components = body_of(call), list[bytes](), 0
        sources = body.get("sourceObjects", [])
        if not 1 <= len(sources) <= 32:
            raise Refusal(400, "The number of source components must be between 1 and 32.")
        for source in sources:
            query = dict(source.get("objectPreconditions") or {})
            query |= {"generation": source["generation"]} if source.get("generation") else {}
            query = {name: str(value) for name, value in query.items()}
            stored = self._find(bucket, source["name"], query, reading=False)
            _check_key(stored, call.headers)
            pieces.append(stored.content())
            n_components += stored.n_components or 1
        fields = dict(body.get("destination") or {})
        upload = _Upload(bucket, key, fields, call.query, _given_key(call.headers))
        made = self._write(upload, b"".join(pieces), n_components=n_components)
        return json_answer(_resource(made, call.host))

    def _copy(self, source: tuple[str, str], target: tuple[str, str], verb: str, call: Call) -> Answer:
        found = self._find(*source, _source_query(call.query), reading=False)
        _check_key(found, call.headers, "x-goog-copy-source-encryption-")
        given = body_of(call) if verb != "moveTo" else {}
        fields = given if given.get("contentType") else {**found.fields, **given}
        upload = _Upload(*target, dict(fields), call.query, _given_key(call.headers))
        made = self._write(upload, found.content(), n_components=found.n_components)
        if verb == "moveTo":
            self.store.remove(*source)
        out, size = _resource(made, call.host), str(made.size)
        if verb != "rewriteTo":
            return json_answer(out)
        done = {"kind": "storage#rewriteResponse", "done": True, "resource": out}
        return json_answer({**done, "totalBytesRewritten": size, "objectSize": size})

    def _write_xml(self, bucket: str, key: str, call: Call) -> Answer:
        headers, query, method = call.headers, call.query, call.method
        fields: dict[str, Any] = {k: headers[h] for k, h in _FIELDS.items() if h in headers}
        fields["metadata"] = {k[12:]: v for k, v in headers.items() if k[:12] == "x-goog-meta-"}
        upload = _Upload(bucket, key, fields, query, _given_key(headers))
        if "x-goog-copy-source" in headers:
            b, _, k = unquote(headers["x-goog-copy-source"]).lstrip("/").partition("/")
            named = {"generation": headers.get("x-goog-copy-source-generation", "")}
            source = self._find(b, k, named, reading=False)
            upload.fields = dict(source.fields)
            made = self._write(upload, source.content(), n_components=source.n_components)
            rows = {"ETag": _xml_etag(made), "LastModified": _rfc3339(made.updated_s)}
            return _xml("CopyObjectResult", rows, 200, _object_headers(made))
        if method == "POST" and "uploads" in query:
            self._need_bucket(bucket)
            upload_id = uuid.uuid4().hex
            self._uploads[upload_id] = upload
            rows = {"Bucket": bucket, "Key": key, "UploadId": upload_id}
            return _xml("InitiateMultipartUploadResult", rows)
        if "uploadId" not in query:
            if method != "PUT":
                raise Refusal(400, "Unsupported POST.")
            upload.fields |= _goog_hashes(headers)
            made = self._write(upload, call.body)
            return Answer(200, _object_headers(made))
        pending = self._uploads.get(query["uploadId"])
        if pending is None:
            raise Refusal(404, "The requested upload was not found.")
        if method == "PUT":
            pending.parts[int(query["partNumber"])] = call.body
            return Answer(200, {"ETag": f'"{hashlib.md5(call.body).hexdigest()}"'})
        del self._uploads[query["uploadId"]]
        if method == "DELETE":
            return Answer(204)
        numbers = [int(e.text or 0) for e in ET.fromstring(call.body).iter() if _is_number(e)]
        if missing := [n for n in numbers if n not in pending.parts]:
            raise Refusal(400, f"One or more of the specified parts could not be found: {missing}")
        data = b"".join(pending.parts[n] for n in numbers)
        made = self._write(pending, data, n_components=len(numbers))
        rows = {"Bucket": bucket, "Key": key, "ETag": _xml_etag(made)}
        return _xml("CompleteMultipartUploadResult", rows, 200, _object_headers(made))


class GCSServer(SimServer):
    """A simulated Google Cloud Storage on a loopback port."""

    room = "gcs"

    def _make_service(self, network: Network, folder: Path | None) -> Service:
        return GCSService(network, folder)

    def put(
        self,
        bucket: str,
        key: str,
        data: bytes,
        content_encoding: str | None = None,
        content_type: str | None = None,
    ) -> int:
        """Return the generation of a new version, made behind the back of the API and its log."""
        given = {"encoding": content_encoding, "type": content_type}
        return int(self._do("put", data, bucket=bucket, key=key, **given))

    def delete(self, bucket: str, key: str) -> bool:
        """Return whether there was such an object; behind the back of the API."""
        return bool(self._do("delete", bucket=bucket, key=key))

    def make_bucket(self, bucket: str) -> None:
        """Make an empty bucket unless it exists."""
        self._do("make_bucket", bucket=bucket)


def _check(query: Mapping[str, str], stored: StoredObject | None, *, reading: bool) -> None:
    """Raise Refusal unless all preconditions hold for the live object; none is generation 0."""
    generation, metageneration = (stored.generation, stored.metageneration) if stored else (0, 0)
    for name, value in (("Generation", generation), ("Metageneration", metageneration)):
        match, differ = query.get(f"if{name}Match"), query.get(f"if{name}NotMatch")
        if match is not None and int(match) != value:
            raise Refusal(412, _UNMET)
        if differ is not None and int(differ) == value:
            raise Refusal(304 if reading else 412, _UNMET)


def _source_query(query: Mapping[str, str]) -> dict[str, str]:
    """Return the conditions on the source of a copy, under their usual names."""
    out = {f"if{k[8:]}": v for k, v in query.items() if k.startswith("ifSource")}
    return out | ({"generation": query["sourceGeneration"]} if "sourceGeneration" in query else {})


def _given_key(headers: Mapping[str, str], prefix: str = "x-goog-encryption-") -> str | None:
    """Return the hash of the customer-supplied encryption key that came with a request."""
    key, given = headers.get(f"{prefix}key"), headers.get(f"{prefix}key-sha256")
    if key is None:
        return None
    actual = base64.b64encode(hashlib.sha256(base64.b64decode(key)).digest()).decode()
    if given is not None and given != actual:
        raise Refusal(400, "Missing or incorrect SHA256 hash of the encryption key.")
    return actual


def _check_key(stored: StoredObject, headers: Mapping[str, str], prefix: str = "x-goog-encryption-") -> None:
    """Raise Refusal unless the object's own encryption key came with the request."""
    given = _given_key(headers, prefix)
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


def _media_answer(stored: StoredObject, call: Call) -> Answer:
    """Return the bytes that a request asks for: as stored, or unpacked for who takes no gzip."""
    headers = {**_object_headers(stored), "Accept-Ranges": "bytes"}
    names = {h: stored.fields[k] for k, h in _FIELDS.items() if k in stored.fields}
    headers |= {h.title(): value for h, value in names.items()}
    headers |= {f"x-goog-meta-{k}": v for k, v in (stored.fields.get("metadata") or {}).items()}
    if stored.fields.get("contentEncoding") == "gzip":
        headers["Vary"] = "Accept-Encoding"
        keep = "no-transform" in stored.fields.get("cacheControl", "")
        if not keep and "gzip" not in call.headers.get("accept-encoding", ""):
            del headers["Content-Encoding"], headers["Accept-Ranges"]
            headers["Warning"] = "214 UploadServer gunzipped"
            return Answer(200, headers, DataBody(gzip.decompress(stored.content())), 0, True)
    span = span_of(call.headers.get("range"), stored.size)
    if span is None:
        return Answer(200, headers, stored.body(0, stored.size))
    headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{stored.size}"
    return Answer(206, headers, stored.body(*span))


def _object_headers(stored: StoredObject) -> dict[str, str]:
    """Return what every XML reply about an object, and every media reply, says of it."""
    md5 = f",md5={base64.b64encode(stored.md5).decode()}" if stored.md5 else ""
    hashes = f"crc32c={stored.crc32c}{md5}" if stored.crc32c else md5[1:]
    headers = {
        "ETag": _xml_etag(stored),
        "Last-Modified": email.utils.formatdate(stored.updated_s, usegmt=True),
        "x-goog-generation": str(stored.generation),
        "x-goog-metageneration": str(stored.metageneration),
        "x-goog-stored-content-encoding": stored.fields.get("contentEncoding", "identity"),
        "x-goog-stored-content-length": str(stored.size),
        "x-goog-storage-class": stored.fields.get("storageClass", "STANDARD"),
    }
    if hashes:
        headers["x-goog-hash"] = hashes
    if stored.n_components:
        headers["x-goog-component-count"] = str(stored.n_components)
    if stored.key_sha256:
        headers["x-goog-encryption-algorithm"] = "AES256"
        headers["x-goog-encryption-key-sha256"] = stored.key_sha256
    return headers


def _resource(stored: StoredObject, host: str) -> dict[str, Any]:
    """Return an object as the JSON API shows it."""
    path = f"b/{quote(stored.bucket)}/o/{quote(stored.name, '')}"
    generation, created = str(stored.generation), _rfc3339(stored.created_s)
    download = f"http://{host}/download/storage/v1/{path}?generation={generation}&alt=media"
    names = {"kind": "storage#object", "id": f"{stored.bucket}/{stored.name}/{generation}"}
    names |= {"name": stored.name, "bucket": stored.bucket, "storageClass": "STANDARD"}
    names |= {"selfLink": f"http://{host}/storage/v1/{path}", "mediaLink": download}
    version = {"generation": generation, "metageneration": str(stored.metageneration), "etag": stored.etag}
    times = dict.fromkeys(("timeCreated", "timeStorageClassUpdated", "timeFinalized"), created)
    out: dict[str, Any] = {**names, **version, **times, "updated": _rfc3339(stored.updated_s)}
    out |= {"size": str(stored.size)} | ({"crc32c": stored.crc32c} if stored.crc32c else {})
    out |= {name: value for name, value in stored.fields.items() if value}
    if stored.md5:
        out["md5Hash"] = base64.b64encode(stored.md5).decode()
    if stored.n_components:
        out["componentCount"] = stored.n_components
    if stored.key_sha256:
        out["customerEncryption"] = {"encryptionAlgorithm": "AES256", "keySha256": stored.key_sha256}
    return out


def _xml(root: str, rows: Any, status: int = 200, headers: Mapping[str, str] = {}) -> Answer:
    text = f"<?xml version='1.0' encoding='UTF-8'?><{root}>{_xml_rows(rows)}</{root}>"
    return Answer(status, {**_XML, **headers}, DataBody(text.encode()))


def _xml_rows(rows: Mapping[str, Any]) -> str:
    out = []
    for name, value in rows.items():
        for item in value if isinstance(value, list) else [value]:
            inner = _xml_rows(item) if isinstance(item, dict) else escape(item)
            out.append(f"<{name}>{inner}</{name}>")
    return "".join(out)


def _xml_etag(stored: StoredObject) -> str:
    return f'"{stored.md5.hex() if stored.md5 else stored.etag}"'


def _is_number(element: ET.Element) -> bool:
    return element.tag.rpartition("}")[2] == "PartNumber"


def _begin(bucket: str, call: Call) -> tuple[_Upload, bytes]:
    """Return what a request to the JSON API's upload address begins, and the bytes it carries."""
    query, headers, data = call.query, call.headers, call.body
    kind, fields, content_type = query.get("uploadType"), dict[str, Any](), headers.get("content-type")
    if kind == "multipart":
        fields, content_type, data = split_related(call)
    elif kind == "resumable":
        fields, content_type = body_of(call), headers.get("x-upload-content-type")
    elif kind == "media":
        fields = dict(_goog_hashes(headers))
    else:
        raise Refusal(400, "Invalid value for uploadType.")
    if content_type:
        fields.setdefault("contentType", content_type)
    if "contentEncoding" in query:
        fields["contentEncoding"] = query["contentEncoding"]
    key = fields.get("name") or query.get("name", "")
    return _Upload(bucket, key, fields, query, _given_key(headers)), data


def _goog_hashes(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the checksums that came with an upload, under their JSON names."""
    pairs = [p.strip().partition("=") for p in headers.get("x-goog-hash", "").split(",")]
    names = {"crc32c": "crc32c", "md5": "md5Hash"}
    out = {names[name]: value for name, _, value in pairs if name in names}
    return out | ({"md5Hash": headers["content-md5"]} if "content-md5" in headers else {})


def _hashes(data: bytes) -> dict[str, str]:
    crc = google_crc32c.value(data).to_bytes(4, "big")
    md5 = hashlib.md5(data).digest()
    return {"crc32c": base64.b64encode(crc).decode(), "md5Hash": base64.b64encode(md5).decode()}


def _to_token(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


def _from_token(token: str) -> str:
    return base64.b64decode(token, b"-_", validate=True).decode()


def _rfc3339(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _http_date(text: str) -> float:
    return email.utils.parsedate_to_datetime(text).timestamp()
