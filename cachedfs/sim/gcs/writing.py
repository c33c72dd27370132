"""Write requests of the simulated GCS: uploads, copies, compositions, updates and deletions."""

from __future__ import annotations

import base64
import hashlib
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import google_crc32c

from cachedfs.sim.gcs.conditions import check, check_key, given_key, source_query
from cachedfs.sim.gcs.reading import TEXT, GCSReading
from cachedfs.sim.gcs.show import FIELDS, object_headers, resource, rfc3339, xml, xml_etag
from cachedfs.sim.google import body_of, json_answer, split_related, take_chunk
from cachedfs.sim.messages import Call, Refusal, Response
from cachedfs.sim.network import Network
from cachedfs.sim.objects import SimObject

__all__ = ["GCSUpload", "GCSWriting", "begin"]


@dataclass(slots=True)
class GCSUpload:
    """A resumable or multipart upload in progress."""

    bucket: str
    key: str
    fields: dict[str, Any]
    query: dict[str, str]  # includes the preconditions
    key_sha256: str | None
    data: bytearray = field(default_factory=bytearray)
    parts: dict[int, bytes] = field(default_factory=dict)
    result: SimObject | None = None


class GCSWriting(GCSReading):
    """Answers all requests that change an object."""

    def __init__(self, network: Network, folder: Path | None = None) -> None:
        super().__init__(network, folder)
        self._uploads: dict[str, GCSUpload] = {}

    def _write(self, upload: GCSUpload, data: bytes, *, n_components: int | None = None) -> SimObject:
        self._need_bucket(upload.bucket)
        if not upload.key or len(upload.key.encode()) > 1024:
            raise Refusal(400, "Required: an object name of 1 to 1024 bytes.", "required")
        check(upload.query, self.store.get(upload.bucket, upload.key), reading=False)
        fields = {k: v for k, v in upload.fields.items() if k in FIELDS or k == "metadata"}
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
        except OSError as error:  # a local folder cannot hold both `a` and `a/b`
            raise Refusal(400, str(error)) from error

    def _upload(self, upload: GCSUpload, data: bytes, call: Call) -> Response:
        if call.query["uploadType"] != "resumable":
            return json_answer(resource(self._write(upload, data), call.host))
        bucket, key = upload.bucket, upload.key
        self._need_bucket(bucket)
        check(upload.query, self.store.get(bucket, key), reading=False)
        upload_id = uuid.uuid4().hex
        self._uploads[upload_id] = upload
        path = f"/upload/storage/v1/b/{quote(bucket)}/o?uploadType=resumable&name={quote(key, '')}"
        location = f"http://{call.host}{path}&upload_id={upload_id}"
        return Response(200, {"Location": location, "X-GUploader-UploadID": upload_id})

    def _resume(self, upload: GCSUpload | None, call: Call) -> Response:
        """Return the reply to one request of a resumable upload."""
        if upload is None:
            raise Refusal(404, "The upload session is unknown or has expired.")
        if call.method == "DELETE":
            del self._uploads[call.query["upload_id"]]
            return Response(499, dict(TEXT))
        if upload.result:
            return json_answer(resource(upload.result, call.host))
        total = take_chunk(upload.data, call)
        upload.fields |= _goog_hashes(call.headers)
        if total is not None and len(upload.data) == total:
            upload.result = self._write(upload, bytes(upload.data))
            upload.data = bytearray()
            return json_answer(resource(upload.result, call.host))
        headers = {"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {}
        if call.headers.get("x-guploader-no-308") == "yes":  # sent by Google's Go client
            return Response(200, {**headers, "X-HTTP-Status-Code-Override": "308"})
        return Response(308, headers)

    def _patch(self, bucket: str, key: str, call: Call) -> Response:
        stored = self._find(bucket, key, call.query, reading=False)
        given = {k: v for k, v in body_of(call).items() if k in FIELDS or k == "metadata"}
        fields = dict(stored.fields) if call.method != "PUT" else {}
        if call.method != "PUT" and given.get("metadata"):
            given["metadata"] = {**fields.get("metadata", {}), **given["metadata"]}
        fields |= given
        if fields.get("metadata"):
            fields["metadata"] = {k: v for k, v in fields["metadata"].items() if v is not None}
        kept = {k: v for k, v in fields.items() if v is not None}
        return json_answer(resource(self.store.update(stored, kept), call.host))

    def _delete(self, bucket: str, key: str, call: Call) -> Response:
        self._find(bucket, key, call.query, reading=False)
        self.store.remove(bucket, key)
        return Response(204)

    def _compose(self, bucket: str, key: str, call: Call) -> Response:
        body, pieces, n_components = body_of(call), list[bytes](), 0
        sources = body.get("sourceObjects", [])
        if not 1 <= len(sources) <= 32:
            raise Refusal(400, "The number of source components must be between 1 and 32.")
        for source in sources:
            query = dict(source.get("objectPreconditions") or {})
            query |= {"generation": source["generation"]} if source.get("generation") else {}
            query = {name: str(value) for name, value in query.items()}
            stored = self._find(bucket, source["name"], query, reading=False)
            check_key(stored, call.headers)
            pieces.append(stored.content())
            n_components += stored.n_components or 1
        fields = dict(body.get("destination") or {})
        upload = GCSUpload(bucket, key, fields, call.query, given_key(call.headers))
        made = self._write(upload, b"".join(pieces), n_components=n_components)
        return json_answer(resource(made, call.host))

    def _copy(self, source: tuple[str, str], target: tuple[str, str], verb: str, call: Call) -> Response:
        found = self._find(*source, source_query(call.query), reading=False)
        check_key(found, call.headers, "x-goog-copy-source-encryption-")
        given = body_of(call) if verb != "moveTo" else {}
        fields = given if given.get("contentType") else {**found.fields, **given}
        upload = GCSUpload(*target, dict(fields), call.query, given_key(call.headers))
        made = self._write(upload, found.content(), n_components=found.n_components)
        if verb == "moveTo":
            self.store.remove(*source)
        out, size = resource(made, call.host), str(made.size)
        if verb != "rewriteTo":
            return json_answer(out)
        done = {"kind": "storage#rewriteResponse", "done": True, "resource": out}
        return json_answer({**done, "totalBytesRewritten": size, "objectSize": size})

    def _write_xml(self, bucket: str, key: str, call: Call) -> Response:
        headers, query, method = call.headers, call.query, call.method
        fields: dict[str, Any] = {k: headers[h] for k, h in FIELDS.items() if h in headers}
        fields["metadata"] = {k[12:]: v for k, v in headers.items() if k[:12] == "x-goog-meta-"}
        upload = GCSUpload(bucket, key, fields, query, given_key(headers))
        if "x-goog-copy-source" in headers:
            b, _, k = unquote(headers["x-goog-copy-source"]).lstrip("/").partition("/")
            named = {"generation": headers.get("x-goog-copy-source-generation", "")}
            source = self._find(b, k, named, reading=False)
            upload.fields = dict(source.fields)
            made = self._write(upload, source.content(), n_components=source.n_components)
            rows = {"ETag": xml_etag(made), "LastModified": rfc3339(made.updated_s)}
            return xml("CopyObjectResult", rows, 200, object_headers(made))
        if method == "POST" and "uploads" in query:
            self._need_bucket(bucket)
            upload_id = uuid.uuid4().hex
            self._uploads[upload_id] = upload
            rows = {"Bucket": bucket, "Key": key, "UploadId": upload_id}
            return xml("InitiateMultipartUploadResult", rows)
        if "uploadId" not in query:
            if method != "PUT":
                raise Refusal(400, "Unsupported POST.")
            upload.fields |= _goog_hashes(headers)
            made = self._write(upload, call.body)
            return Response(200, object_headers(made))
        pending = self._uploads.get(query["uploadId"])
        if pending is None:
            raise Refusal(404, "The requested upload was not found.")
        if method == "PUT":
            pending.parts[int(query["partNumber"])] = call.body
            return Response(200, {"ETag": f'"{hashlib.md5(call.body).hexdigest()}"'})
        del self._uploads[query["uploadId"]]
        if method == "DELETE":
            return Response(204)
        numbers = [int(e.text or 0) for e in ET.fromstring(call.body).iter() if _is_number(e)]
        if missing := [n for n in numbers if n not in pending.parts]:
            raise Refusal(400, f"One or more of the specified parts could not be found: {missing}")
        data = b"".join(pending.parts[n] for n in numbers)
        made = self._write(pending, data, n_components=len(numbers))
        rows = {"Bucket": bucket, "Key": key, "ETag": xml_etag(made)}
        return xml("CompleteMultipartUploadResult", rows, 200, object_headers(made))


def _is_number(element: ET.Element) -> bool:
    return element.tag.rpartition("}")[2] == "PartNumber"


def begin(bucket: str, call: Call) -> tuple[GCSUpload, bytes]:
    """Return the upload that a request to the JSON API's upload URL starts, and the bytes it contains."""
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
    return GCSUpload(bucket, key, fields, query, given_key(headers)), data


def _goog_hashes(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the checksums sent with an upload, under their JSON names."""
    pairs = [p.strip().partition("=") for p in headers.get("x-goog-hash", "").split(",")]
    names = {"crc32c": "crc32c", "md5": "md5Hash"}
    out = {names[name]: value for name, _, value in pairs if name in names}
    return out | ({"md5Hash": headers["content-md5"]} if "content-md5" in headers else {})


def _hashes(data: bytes) -> dict[str, str]:
    crc = google_crc32c.value(data).to_bytes(4, "big")
    md5 = hashlib.md5(data).digest()
    return {"crc32c": base64.b64encode(crc).decode(), "md5Hash": base64.b64encode(md5).decode()}
