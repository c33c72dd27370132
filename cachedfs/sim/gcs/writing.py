"""Write requests of the simulated GCS: uploads, copies, updates and deletions."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cachedfs.sim.gcs.reading import TEXT, GCSReading, check
from cachedfs.sim.gcs.show import FIELDS, resource
from cachedfs.sim.gcs.store import SimObject, checksums
from cachedfs.sim.google import split_related, take_chunk
from cachedfs.sim.messages import Call, Refusal, Response
from cachedfs.sim.network import Network


@dataclass(slots=True)
class GCSUpload:
    """A resumable upload in progress."""

    bucket: str
    key: str
    fields: dict[str, Any]
    query: dict[str, str]  # includes the preconditions
    data: bytearray = field(default_factory=bytearray)
    result: SimObject | None = None


class GCSWriting(GCSReading):
    """Answers all requests that change an object."""

    def __init__(self, network: Network, folder: Path | None = None) -> None:
        super().__init__(network, folder)
        self.uploads: dict[str, GCSUpload] = {}

    def _write(self, upload: GCSUpload, data: bytes) -> SimObject:
        self._need_bucket(upload.bucket)
        if not upload.key or len(upload.key.encode()) > 1024:
            raise Refusal(400, "Required: an object name of 1 to 1024 bytes.", "required")
        check(upload.query, self.store.get(upload.bucket, upload.key))
        fields = {k: v for k, v in upload.fields.items() if k in FIELDS or k == "metadata"}
        want = {k: v for k, v in upload.fields.items() if k in ("crc32c", "md5Hash") and v}
        if want and not want.items() <= checksums(data).items():
            raise Refusal(400, "Provided hash doesn't match calculated hash of the content.")
        return self.store.put(upload.bucket, upload.key, data, fields)

    def _upload(self, upload: GCSUpload, data: bytes, call: Call) -> Response | dict[str, Any]:
        if call.query["uploadType"] != "resumable":
            return resource(self._write(upload, data), call.host)
        bucket, key = upload.bucket, upload.key
        self._need_bucket(bucket)
        check(upload.query, self.store.get(bucket, key))
        upload_id = uuid.uuid4().hex
        self.uploads[upload_id] = upload
        path = f"/upload/storage/v1/b/{quote(bucket)}/o?uploadType=resumable&name={quote(key, '')}"
        location = f"http://{call.host}{path}&upload_id={upload_id}"
        return Response(200, {"Location": location, "X-GUploader-UploadID": upload_id})

    def _resume(self, upload: GCSUpload | None, call: Call) -> Response | dict[str, Any]:
        if upload is None:
            raise Refusal(404, "The upload session is unknown or has expired.")
        if call.method == "DELETE":
            del self.uploads[call.query["upload_id"]]
            return Response(499, dict(TEXT))
        if upload.result:
            return resource(upload.result, call.host)
        total = take_chunk(upload.data, call)
        if total is not None and len(upload.data) == total:
            upload.result = self._write(upload, bytes(upload.data))
            upload.data = bytearray()
            return resource(upload.result, call.host)
        headers = {"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {}
        return Response(308, headers)

    def _patch(self, call: Call, bucket: str, key: str) -> dict[str, Any]:
        stored = self._find(bucket, key, call.query)
        given = {k: v for k, v in call.json().items() if k in FIELDS or k == "metadata"}
        if given.get("metadata"):
            merged = {**stored.fields.get("metadata", {}), **given["metadata"]}
            given["metadata"] = {k: v for k, v in merged.items() if v is not None}
        fields = {k: v for k, v in {**stored.fields, **given}.items() if v is not None}
        return resource(self.store.update(stored, fields), call.host)

    def _delete(self, call: Call, bucket: str, key: str) -> Response:
        self._find(bucket, key, call.query)
        self.store.remove(bucket, key)
        return Response(204)

    def _move(self, call: Call, bucket: str, source: str, key: str) -> dict[str, Any]:
        made = self._copy(call, (bucket, source), (bucket, key))
        self.store.remove(bucket, source)
        return resource(made, call.host)

    def _rewrite(self, call: Call, source_bucket: str, source: str, bucket: str, key: str) -> dict[str, Any]:
        made = self._copy(call, (source_bucket, source), (bucket, key))
        done = {"kind": "storage#rewriteResponse", "done": True, "resource": resource(made, call.host)}
        return {**done, "totalBytesRewritten": str(made.size), "objectSize": str(made.size)}

    def _copy(self, call: Call, source: tuple[str, str], target: tuple[str, str]) -> SimObject:
        found = self._find(*source, {"generation": call.query.get("sourceGeneration", "")})
        given = call.json()
        fields = given if given.get("contentType") else {**found.fields, **given}
        return self._write(GCSUpload(*target, fields, call.query), found.content())


def begin(bucket: str, call: Call) -> tuple[GCSUpload, bytes]:
    """Return the upload that a request to the JSON API's upload URL starts, and the bytes it contains."""
    query, headers, data = call.query, call.headers, call.body
    kind, fields, content_type = query.get("uploadType"), dict[str, Any](), headers.get("content-type")
    if kind == "multipart":
        fields, content_type, data = split_related(call)
    elif kind == "resumable":
        fields, content_type = call.json(), headers.get("x-upload-content-type")
    elif kind != "media":
        raise Refusal(400, "Invalid value for uploadType.")
    if content_type:
        fields.setdefault("contentType", content_type)
    if "contentEncoding" in query:
        fields["contentEncoding"] = query["contentEncoding"]
    key = fields.get("name") or query.get("name", "")
    return GCSUpload(bucket, key, fields, query), data
