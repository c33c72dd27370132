"""Write requests of the simulated GCS: uploads, copies, updates and deletions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cachedfs.sim.gcs.reading import GCSReading, check
from cachedfs.sim.gcs.show import FIELDS, resource
from cachedfs.sim.gcs.store import SimObject, checksums
from cachedfs.sim.google import Uploads, UploadSession
from cachedfs.sim.messages import Call, Refusal, Response


class GCSWriting(GCSReading, Uploads):
    """Answers all requests that change an object."""

    def _begin_upload(
        self, call: Call, bucket: str, fields: dict[str, Any], mime: str | None
    ) -> UploadSession:
        if mime:
            fields.setdefault("contentType", mime)
        if "contentEncoding" in call.query:
            fields["contentEncoding"] = call.query["contentEncoding"]
        return UploadSession(call, fields.get("name") or call.query.get("name", ""), fields, mime, bucket)

    def check(self, upload: UploadSession) -> None:
        self._need_bucket(upload.bucket)
        check(upload.call.query, self.store.get(upload.bucket, upload.key))

    def save(self, upload: UploadSession, data: bytes) -> dict[str, Any]:
        self.check(upload)
        return resource(self._write(upload.bucket, upload.key, upload.fields, data), upload.call.host)

    def _write(self, bucket: str, key: str, fields: Mapping[str, Any], data: bytes) -> SimObject:
        if not key or len(key.encode()) > 1024:
            raise Refusal(400, "Required: an object name of 1 to 1024 bytes.", "required")
        want = {k: v for k, v in fields.items() if k in ("crc32c", "md5Hash") and v}
        if want and not want.items() <= checksums(data).items():
            raise Refusal(400, "Provided hash doesn't match calculated hash of the content.")
        kept = {k: v for k, v in fields.items() if k in FIELDS or k == "metadata"}
        return self.store.put(bucket, key, data, kept)

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
        self._need_bucket(target[0])
        check(call.query, self.store.get(*target))
        given = call.json()
        fields = given if given.get("contentType") else {**found.fields, **given}
        return self._write(*target, fields, found.content())
