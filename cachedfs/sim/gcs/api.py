"""Routes and commands of the simulated Google Cloud Storage.

Written from the published reference (cloud.google.com/storage/docs: json_api/v1, xml-api,
performing-resumable-uploads, transcoding, request-preconditions). Of the XML API
it has what obstore reads with. What is not in the table below, or not in `_xml_route`, does not exist (404).
"""

from __future__ import annotations

from functools import partial
from urllib.parse import unquote

from cachedfs.sim.gcs.writing import GCSWriting
from cachedfs.sim.google import match_path
from cachedfs.sim.messages import Call, Refusal, Route

# Method and path, kind of the request, and function. `bucket` and `key` are in the log.
_ROUTES = [
    ("GET", "/storage/v1/b", "bucket", "_list_buckets"),
    ("GET", "/storage/v1/b/{bucket}", "bucket", "_get_bucket"),
    ("GET", "/storage/v1/b/{bucket}/o", "list", "_list"),
    ("GET", "/storage/v1/b/{bucket}/o/{key}", "metadata", "_get_metadata"),
    ("GET", "/storage/v1/b/{bucket}/o/{key}", "media", "_media"),
    ("GET", "/download/storage/v1/b/{bucket}/o/{key}", "media", "_media"),
    ("PATCH", "/storage/v1/b/{bucket}/o/{key}", "metadata", "_patch"),
    ("DELETE", "/storage/v1/b/{bucket}/o/{key}", "delete", "_delete"),
    ("POST", "/storage/v1/b/{bucket}/o/{source}/moveTo/o/{key}", "copy", "_move"),
    ("POST", "/storage/v1/b/{source_bucket}/o/{source}/rewriteTo/b/{bucket}/o/{key}", "copy", "_rewrite"),
]
_CONDITIONAL = ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since")
_JSON = ("/storage/", "/download/", "/upload/", "/batch/")


class GCSService(GCSWriting):
    """Answers like storage.googleapis.com, and has the commands of `GCSServer`."""

    def do_put(
        self,
        bucket: str,
        key: str,
        data: bytes,
        content_encoding: str | None = None,
        content_type: str | None = None,
    ) -> int:
        """Store a new version of an object, without an API request; return its generation.

        Creates the bucket if it is missing.
        """
        given = {"contentEncoding": content_encoding, "contentType": content_type}
        fields = {name: value for name, value in given.items() if value is not None}
        return self.store.put(bucket, key, data, fields).generation

    def do_delete(self, bucket: str, key: str) -> bool:
        """Delete an object, without an API request; return False if it did not exist."""
        return self.store.remove(bucket, key)

    def do_make_bucket(self, bucket: str) -> None:
        """Create an empty bucket unless it exists."""
        self.store.make_bucket(bucket)

    def route(self, call: Call) -> Route:
        is_xml = not call.path.startswith(_JSON)
        conditions = [name for name in _CONDITIONAL if name in call.headers]
        if conditions and not (is_xml and conditions == ["if-match"]):
            raise Refusal(501, "The simulation has preconditions in parameters, and If-Match in the XML API.")
        if found := match_path("/upload/storage/v1/b/{bucket}/o", call.path):
            return self.upload_route(call, partial(self._begin_upload, call, found["bucket"]))
        is_media = call.query.get("alt") == "media" or call.path.startswith("/download/")
        for method, pattern, kind, name in _ROUTES:
            found = match_path(pattern, call.path)
            if found is not None and method == call.method and is_media == (kind == "media"):
                style, act = "text" if kind == "media" else "json", partial(getattr(self, name), **found)
                return Route(kind, act, found.get("bucket", ""), found.get("key", ""), style)
        if not is_xml:
            raise Refusal(404, "Not Found")
        return self._xml_route(call)

    def _xml_route(self, call: Call) -> Route:
        bucket, _, key = (unquote(part) for part in call.path.removeprefix("/").partition("/"))
        if call.method == "GET" and bucket and not key and call.query.get("list-type") == "2":
            return Route("list", lambda call: self._list_xml(call, bucket), bucket, style="xml")
        if call.method in ("GET", "HEAD") and key:
            kind = "media" if call.method == "GET" else "metadata"
            return Route(kind, lambda call: self._media(call, bucket, key), bucket, key, "xml")
        raise Refusal(404, "Not Found")
