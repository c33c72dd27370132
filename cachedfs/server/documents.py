"""The XML of the S3 API, and the page of a folder for browsers. Pure functions."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from urllib.parse import quote

from cachedfs.server.conditions import etag_of
from cachedfs.server.key_pages import KeyPage, KeyTable
from cachedfs.server.s3_errors import S3Error

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
quoted = partial(quote, errors="surrogatepass")
_ESCAPES = {ord(letter): f"&#{ord(letter)};" for letter in "&<>\"'"} | {
    code: f"&#{code};" for code in (*range(32), 0x7F, 0xFFFE, 0xFFFF)
}


def _element(name: str, value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value).translate(_ESCAPES)
    return f"<{name}>{text}</{name}>"


def _document(root: str, *parts: str, namespace: bool = True) -> bytes:
    opened = f'{root} xmlns="{_NAMESPACE}"' if namespace else root
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{opened}>{"".join(parts)}</{root}>'
    return text.encode("utf-8", "surrogatepass")


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(at))


def error_document(error: S3Error, path: str) -> bytes:
    elements = {"Code": error.code, "Message": error.message, "Resource": path, **error.details}
    return _document("Error", *(_element(*each) for each in elements.items()), namespace=False)


def buckets_document(names: Iterable[str], created: float) -> bytes:
    rows = (
        f"<Bucket>{_element('Name', name)}{_element('CreationDate', _time(created))}</Bucket>"
        for name in names
    )
    owner = "<Owner><ID>cachedfs</ID><DisplayName>cachedfs</DisplayName></Owner>"
    return _document("ListAllMyBucketsResult", owner, f"<Buckets>{''.join(rows)}</Buckets>")


def location_document() -> bytes:
    """Return the answer to GetBucketLocation: us-east-1, which is written as nothing."""
    return _document("LocationConstraint")


def page_document(asked: dict[str, object], table: KeyTable, page: KeyPage, *, is_encoded: bool) -> bytes:
    """Return the answer to ListObjects or ListObjectsV2. `asked` are the elements about the request."""
    encoded: Callable[[str], str] = quoted if is_encoded else str
    texts = ("Prefix", "Delimiter", "StartAfter", "Marker", "NextMarker")
    fields = (_element(name, encoded(str(each)) if name in texts else each) for name, each in asked.items())
    groups = (f"<CommonPrefixes>{_element('Prefix', encoded(each))}</CommonPrefixes>" for each in page.groups)
    return _document("ListBucketResult", *fields, *_contents(table, page, encoded), *groups)


def _contents(table: KeyTable, page: KeyPage, encoded: Callable[[str], str]) -> Iterator[str]:
    for row in page.rows:
        fields = (
            _element("Key", encoded(table.keys[row])),
            _element("LastModified", _time(table.times[row])),
            _element("ETag", etag_of(table.fingerprints[row])),
            _element("Size", table.sizes[row]),
        )
        yield f"<Contents>{''.join(fields)}<StorageClass>STANDARD</StorageClass></Contents>"


def folder_page(title: str, names: Iterable[str]) -> bytes:
    """Return a page with a link to each name; those of folders end in a slash."""
    links = (f'<li><a href="{quoted(name)}">{html.escape(name)}</a></li>\n' for name in names)
    head = f'<!doctype html>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
    return f"{head}<h1>{html.escape(title)}</h1>\n<ul>\n{''.join(links)}</ul>\n".encode("utf-8", "replace")
