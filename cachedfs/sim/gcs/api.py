"""Routes of the simulated Google Cloud Storage: the JSON and XML APIs as far as its clients use them.

Written from the published reference (cloud.google.com/storage/docs: json_api/v1, xml-api,
performing-resumable-uploads, transcoding, encryption/customer-supplied-keys, request-preconditions).
"""

from __future__ import annotations

from urllib.parse import unquote

from cachedfs.sim.gcs.conditions import CONDITIONS
from cachedfs.sim.gcs.writing import GCSWriting, begin
from cachedfs.sim.messages import Call, Refusal, Route

__all__ = ["GCSApi"]


class GCSApi(GCSWriting):
    """Answers like storage.googleapis.com."""

    # Routing
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
        upload, data = begin(bucket, call)
        return Route("upload", lambda call: self._upload(upload, data, call), bucket, upload.key)

    def _route_xml(self, call: Call) -> Route:
        bucket, _, rest = call.path.lstrip("/").partition("/")
        bucket, key = unquote(bucket), unquote(rest)
        query = {name: call.headers[header] for header, name in CONDITIONS.items() if header in call.headers}
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
