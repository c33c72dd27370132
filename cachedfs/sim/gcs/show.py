"""Representations of an object in the simulated GCS: JSON resource, headers, XML and bytes."""

from __future__ import annotations

import base64
import email.utils
import gzip
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape

from cachedfs.sim.gcs.store import SimObject
from cachedfs.sim.google import ranged
from cachedfs.sim.messages import Call, Response

_XML = {"Content-Type": "application/xml; charset=UTF-8"}
# Editable properties of an object: name in the JSON API -> header in the XML API.
FIELDS = {
    "contentType": "content-type",
    "contentEncoding": "content-encoding",
    "cacheControl": "cache-control",
    "contentDisposition": "content-disposition",
    "contentLanguage": "content-language",
    "storageClass": "x-goog-storage-class",
    "customTime": "x-goog-custom-time",
}


def resource(stored: SimObject, host: str) -> dict[str, Any]:
    path = f"b/{quote(stored.bucket)}/o/{quote(stored.name, '')}"
    generation, created = str(stored.generation), rfc3339(stored.created_s)
    download = f"http://{host}/download/storage/v1/{path}?generation={generation}&alt=media"
    names = {"kind": "storage#object", "id": f"{stored.bucket}/{stored.name}/{generation}"}
    names |= {"name": stored.name, "bucket": stored.bucket, "storageClass": "STANDARD"}
    names |= {"selfLink": f"http://{host}/storage/v1/{path}", "mediaLink": download}
    version = {"generation": generation, "metageneration": str(stored.metageneration), "etag": stored.etag}
    times = dict.fromkeys(("timeCreated", "timeStorageClassUpdated", "timeFinalized"), created)
    out: dict[str, Any] = {**names, **version, **times, "updated": rfc3339(stored.updated_s)}
    out |= {"size": str(stored.size), **stored.checksums}
    return out | {name: value for name, value in stored.fields.items() if value}


def media_answer(stored: SimObject, call: Call) -> Response:
    """Return the requested bytes: as stored, or decompressed if the client does not accept gzip."""
    fields, hashes = stored.fields, stored.checksums
    headers = {
        "Accept-Ranges": "bytes",
        "ETag": xml_etag(stored),
        "Last-Modified": email.utils.formatdate(stored.updated_s, usegmt=True),
        "x-goog-generation": str(stored.generation),
        "x-goog-metageneration": str(stored.metageneration),
        "x-goog-stored-content-encoding": fields.get("contentEncoding", "identity"),
        "x-goog-stored-content-length": str(stored.size),
        "x-goog-storage-class": "STANDARD",
    }
    headers |= {header.title(): fields[name] for name, header in FIELDS.items() if name in fields}
    headers |= {f"x-goog-meta-{name}": text for name, text in (fields.get("metadata") or {}).items()}
    if hashes:
        headers["x-goog-hash"] = ",".join(f"{n.removesuffix('Hash')}={text}" for n, text in hashes.items())
    if fields.get("contentEncoding") == "gzip":
        headers["Vary"] = "Accept-Encoding"
        keep = "no-transform" in fields.get("cacheControl", "")
        if not keep and "gzip" not in call.headers.get("accept-encoding", ""):
            del headers["Content-Encoding"], headers["Accept-Ranges"]
            headers["Warning"] = "214 UploadServer gunzipped"
            return Response(200, headers, gzip.decompress(stored.content()), 0, True)
    return ranged(call, headers, stored)


def xml(root: str, rows: Any, status: int = 200, headers: Mapping[str, str] = {}) -> Response:
    text = f"<?xml version='1.0' encoding='UTF-8'?><{root}>{_xml_rows(rows)}</{root}>"
    return Response(status, {**_XML, **headers}, text.encode())


def _xml_rows(rows: Mapping[str, Any]) -> str:
    out = []
    for name, value in rows.items():
        for item in value if isinstance(value, list) else [value]:
            inner = _xml_rows(item) if isinstance(item, dict) else escape(item)
            out.append(f"<{name}>{inner}</{name}>")
    return "".join(out)


def xml_etag(stored: SimObject) -> str:
    md5 = stored.checksums.get("md5Hash")
    return f'"{base64.b64decode(md5).hex() if md5 else stored.etag}"'


def rfc3339(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
