"""What a request asks for, by its method, its raw path, its query and its Host."""

import re

import pytest

from cachedfs.server.s3_errors import S3Error
from cachedfs.server.s3_requests import S3Request, operation_of, query_of

DOMAINS = ("localhost", "s3.example.com")


def asked(target, method="GET", host="127.0.0.1:9000"):
    path, _, query = target.partition("?")
    return operation_of(method, path, query_of(query), host, DOMAINS)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/", S3Request("ListBuckets")),
        ("/data", S3Request("ListObjects", "data")),
        ("/data/", S3Request("ListObjects", "data")),
        ("/data?prefix=a&x-id=ListObjects", S3Request("ListObjects", "data")),
        ("/data/?list-type=2&prefix=a%20b", S3Request("ListObjectsV2", "data")),
        ("/data?location", S3Request("GetBucketLocation", "data")),
        ("/data/a/b.txt", S3Request("GetObject", "data", "a/b.txt")),
        ("/data/a%2Fb%20%C3%B6+%25", S3Request("GetObject", "data", "a/b ö+%")),
        ("/data//a//b/", S3Request("GetObject", "data", "/a//b/")),
        ("/data/a...b/.c/..d", S3Request("GetObject", "data", "a...b/.c/..d")),
        ("/data/%E4%BD%A0?versionId=null&x-id=GetObject", S3Request("GetObject", "data", "你")),
    ],
)
def test_path_style(target, expected):
    assert asked(target) == expected


@pytest.mark.parametrize("host", ["data.localhost:9000", "DATA.localhost", "data.s3.example.com:443"])
def test_virtual_hosts(host):
    assert asked("/a/b", host=host) == S3Request("GetObject", "data", "a/b")
    assert asked("/", host=host) == S3Request("ListObjects", "data")


@pytest.mark.parametrize("host", ["localhost:9000", "[::1]:9000", "s3.example.com", "x.example.com"])
def test_other_hosts_have_path_style(host):
    assert asked("/data/a", host=host) == S3Request("GetObject", "data", "a")


@pytest.mark.parametrize(
    "target",
    [
        "", "data", "*", "http://127.0.0.1/data", "/%2e%2e/data", "/data/..", "/data/../x", "/data/a/%2e%2e/b", "/data/a/.",
        "/data/a/..%2Fb", "/data/a%00b", "/data/%ff", "/data/%zz", "/data/%2",
    ],
)  # fmt: skip
def test_what_is_no_name_of_an_object_is_refused(target):
    with pytest.raises(S3Error) as refused:
        asked(target)
    assert refused.value.code == "InvalidURI"


@pytest.mark.parametrize(
    "target",
    [
        "/data?versions&prefix=a", "/data?uploads", "/data/a?tagging", "/data/a?acl=", "/data/a?versionId=1",
        "/data/a?attributes", "/data/a?response-content-type=text/html", "/data/a?partNumber=1",
    ],
)  # fmt: skip
def test_other_operations_are_named(target):
    name = re.split("[?&=]", target)[1]
    with pytest.raises(S3Error, match=rf"\?{name} is not implemented") as refused:
        asked(target)
    assert (refused.value.code, refused.value.status) == ("NotImplemented", 501)


def test_writes_are_refused():
    for method, target in (("PUT", "/data/a"), ("POST", "/data?delete"), ("DELETE", "/data"), ("PATCH", "/")):
        with pytest.raises(S3Error, match="read-only") as refused:
            asked(target, method)
        assert (refused.value.code, refused.value.status) == ("MethodNotAllowed", 405)


def test_a_query_of_too_many_parameters_is_refused():
    with pytest.raises(S3Error) as refused:
        query_of("&".join("a" * 200))
    assert refused.value.code == "InvalidRequest"
