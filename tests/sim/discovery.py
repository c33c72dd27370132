"""Check requests to Drive against Google's discovery document of its API.

The document is part of google-api-python-client.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cachedfs.sim import Request

_DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
# From the guides: upload sessions, and links in replies, are missing in the document.
_OF_UPLOADS = {"uploadType", "upload_id"}
_OF_LINKS = {"source"}


def problems_of_request(request: Request) -> list[str]:
    """Return what is undocumented in a request in the log of a simulated Drive."""
    if request.path == "/token":
        return []
    if "upload_id" in request.query:  # the address that began the upload was checked
        return [] if request.method in ("PUT", "POST", "DELETE") else [f"{request.method}: not for an upload"]
    return list(_problems(request.method, request.path, request.query))


@functools.cache
def _document() -> dict[str, Any]:
    spec = importlib.util.find_spec("googleapiclient")
    assert spec is not None
    assert spec.origin is not None
    at = Path(spec.origin).parent / "discovery_cache" / "documents" / "drive.v3.json"
    document: dict[str, Any] = json.loads(at.read_text())
    return document


@functools.cache
def _methods() -> list[tuple[str, re.Pattern[str], Any]]:
    """Return verb, address and description of each method."""
    return list(_methods_of(_document()["resources"]))


def _methods_of(resources: Mapping[str, Any]) -> Iterator[tuple[str, re.Pattern[str], Any]]:
    for resource in resources.values():
        yield from _methods_of(resource.get("resources", {}))
        for method in resource.get("methods", {}).values():
            paths = [f"/{_document()['servicePath']}{method['path']}"]
            protocols = method.get("mediaUpload", {}).get("protocols", {})
            paths += [protocol["path"] for protocol in protocols.values()]
            for path in paths:
                pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(path))
                yield method["httpMethod"], re.compile(pattern), method


def _problems(verb: str, path: str, query: Mapping[str, str]) -> Iterator[str]:
    found = [method for v, pattern, method in _methods() if v == verb and pattern.fullmatch(path)]
    if not found:
        yield f"{verb} {path}: no such method"
        return
    method = min(found, key=lambda each: each["path"].count("{"))  # fixed parts of a path come first
    is_upload = path.startswith(("/upload/", "/resumable/"))
    known = {**_document()["parameters"], **method.get("parameters", {})}
    for name, value in query.items():
        if name in known and known[name].get("location") == "query":
            yield from _of_text(f"{method['id']}: {name}", known[name], value)
        elif name not in (_OF_UPLOADS if is_upload else _OF_LINKS if query.get("alt") == "media" else ()):
            yield f"{method['id']}: no parameter {name}"
    for name, parameter in known.items():
        if parameter.get("required") and parameter["location"] == "query" and name not in query:
            yield f"{method['id']}: {name} is missing"
    if query.get("alt") == "media" and not method.get("supportsMediaDownload"):
        yield f"{method['id']}: has no media"


def _of_text(at: str, schema: Mapping[str, Any], text: str) -> Iterator[str]:
    """Yield what is wrong with a parameter."""
    form, kind = schema.get("format"), schema.get("type")
    is_number = kind == "integer" or form in ("int64", "uint64", "int32", "uint32")
    if "enum" in schema and text not in schema["enum"]:
        yield f"{at}: {text!r} is not in the enumeration"
    if is_number and not re.fullmatch(r"-?\d+", text):
        yield f"{at}: {text!r} is no number"
    if form == "date-time" and not _DATE.fullmatch(text):
        yield f"{at}: {text!r} is no date"
    if kind == "boolean" and text not in ("true", "false"):
        yield f"{at}: {text!r} is neither true nor false"
    if "pattern" in schema and not re.fullmatch(schema["pattern"], text):
        yield f"{at}: {text!r} is not like {schema['pattern']}"
