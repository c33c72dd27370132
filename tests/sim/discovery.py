"""Check requests and replies of Drive against Google's discovery documents.

The documents are part of google-api-python-client.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from cachedfs.sim import Request

_ROWS = 50  # items of a page that are checked: the others are made by the same code
_DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
_KINDS: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
}
# From the guides: upload sessions, and links in replies, are missing in the documents.
_OF_UPLOADS = {"uploadType", "upload_id"}
_OF_LINKS = {"source"}


class Api:
    """One version of the Drive API."""

    def __init__(self, version: str) -> None:
        spec = importlib.util.find_spec("googleapiclient")
        assert spec is not None
        assert spec.origin is not None
        at = Path(spec.origin).parent / "discovery_cache" / "documents" / f"drive.{version}.json"
        self.document: dict[str, Any] = json.loads(at.read_text())
        self.schemas: dict[str, Any] = self.document["schemas"]
        self._methods = list(self._all_methods(self.document["resources"]))

    def _all_methods(self, resources: Mapping[str, Any]) -> Iterator[tuple[str, re.Pattern[str], Any]]:
        for resource in resources.values():
            yield from self._all_methods(resource.get("resources", {}))
            for method in resource.get("methods", {}).values():
                paths = [f"/{self.document['servicePath']}{method['path']}"]
                protocols = method.get("mediaUpload", {}).get("protocols", {})
                paths += [protocol["path"] for protocol in protocols.values()]
                for path in paths:
                    pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(path))
                    yield method["httpMethod"], re.compile(pattern), method

    def method(self, verb: str, path: str) -> dict[str, Any] | None:
        """Return the method at an address, or None. Fixed path segments take precedence over parameters."""
        found = [m for v, pattern, m in self._methods if v == verb and pattern.fullmatch(path)]
        return min(found, key=lambda m: m["path"].count("{"), default=None)

    def request(self, verb: str, path: str, query: Mapping[str, str]) -> Iterator[str]:
        """Yield what is wrong with a request."""
        method = self.method(verb, path)
        if method is None:
            yield f"{verb} {path}: no such method"
            return
        is_upload = path.startswith(("/upload/", "/resumable/"))
        known = {**self.document["parameters"], **method.get("parameters", {})}
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

    def reply(self, verb: str, path: str, value: Any) -> Iterator[str]:
        """Yield what is wrong with the JSON reply of a method."""
        method = self.method(verb, path)
        if method is None:
            yield f"{verb} {path}: no such method"
        elif "response" in method:
            yield from self.value(method["response"], value, method["id"])
        else:
            yield f"{method['id']}: answers with nothing"

    def value(self, schema: Mapping[str, Any], value: Any, at: str) -> Iterator[str]:
        """Yield where a value differs from a schema: fields, types, formats."""
        if "$ref" in schema:
            schema = self.schemas[schema["$ref"]]
        kind = schema.get("type", "any")
        if kind == "any":
            return
        if not isinstance(value, _KINDS[kind]) or (kind == "integer" and isinstance(value, bool)):
            yield f"{at}: {value!r} is no {kind}"
        elif kind == "array":
            for row in value[:_ROWS]:
                yield from self.value(schema["items"], row, f"{at}[]")
        elif kind == "object":
            expected_kind = schema.get("properties", {}).get("kind", {}).get("default")
            if expected_kind and value.get("kind", expected_kind) != expected_kind:
                yield f"{at}: a {value['kind']} and no {expected_kind}"
            for name, inner in value.items():
                known = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
                yield from (self.value(known, inner, f"{at}.{name}") if known else [f"{at}: no field {name}"])
        elif kind == "string":
            yield from _of_text(at, schema, value)


def _of_text(at: str, schema: Mapping[str, Any], text: str) -> Iterator[str]:
    """Yield what is wrong with a string or a parameter."""
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


@functools.cache
def _api(version: str) -> Api:
    return Api(version)


def _api_of(path: str) -> Api | None:
    found = re.search(r"^(?:/upload|/resumable/upload)?/drive/(v[23])/", path)
    return _api(found[1]) if found else None


def problems_of_request(request: Request) -> list[str]:
    """Return what is undocumented in a request in the log of a simulated Drive."""
    if request.path == "/token":
        return []
    api, verb = _api_of(request.path), request.method
    if api is None:
        return [f"{verb} {request.path}: no such address"]
    if "upload_id" in request.query:  # the address that began the upload was checked
        return [] if verb in ("PUT", "POST", "DELETE") else [f"{verb}: not for an upload"]
    return list(api.request(verb, request.path, request.query))


def problems_of_reply(verb: str, target: str, status: int, kind: str, body: bytes) -> list[str]:
    """Return what is undocumented in a reply; nothing if it is not JSON of the API."""
    path, _, query = target.partition("?")
    if not kind.startswith("application/json") or "alt=media" in query or (api := _api_of(path)) is None:
        return []
    value = json.loads(body)
    if status >= 400:
        return list(_of_error(status, value))
    if "upload_id" in dict(parse_qsl(query)):
        verb = "PUT" if path.count("/") > 4 else "POST"
        verb = "PATCH" if (path.count("/"), "/v3/" in path) == (5, True) else verb
    return list(api.reply(verb, path, value))


def _of_error(status: int, value: Any) -> Iterator[str]:
    error = value["error"]
    least = {"code", "message", "errors"}
    if (
        not least <= error.keys() <= least | {"status", "details"}
        or error["code"] != status
        or not error["message"]
    ):
        yield f"an error of {status} is {error}"
    for row in error["errors"]:
        if not {"domain", "reason", "message"} <= row.keys() <= {
            "domain", "reason", "message", "location", "locationType",
        }:  # fmt: skip
            yield f"an error of {status} has {row}"
