"""Signatures: the examples of the S3 API reference, those of botocore on odd names, and wrong ones."""

from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

import hypothesis
import hypothesis.strategies as st
import pytest
from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from multidict import CIMultiDict

from cachedfs.server.s3_errors import S3Error
from cachedfs.server.s3_requests import query_of
from cachedfs.server.signatures import Keys, check_headers, check_query

# https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
KEYS = Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
AT = datetime(2013, 5, 24, tzinfo=UTC).timestamp()
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
HOST = "examplebucket.s3.amazonaws.com"
GET = "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
LIST = "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
PRESIGNED = "aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
TARGET = (
    "/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3"
    "%2Faws4_request&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host&X-Amz-Signature="
)


def headers_of(signature, names="host;x-amz-content-sha256;x-amz-date", **more):
    scope = "AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request"
    given = f"AWS4-HMAC-SHA256 Credential={scope},SignedHeaders={names},Signature={signature}"
    fixed = {"Host": HOST, "Authorization": given, "x-amz-content-sha256": EMPTY}
    return CIMultiDict({**fixed, "x-amz-date": "20130524T000000Z", **more})


def checked(target, headers, now=AT, method="GET", keys=KEYS):
    path, _, text = target.partition("?")
    check = check_headers if "Authorization" in headers else check_query
    check(keys, method, path, query_of(text), headers, now)


def code_of(*args, **options):
    with pytest.raises(S3Error) as refused:
        checked(*args, **options)
    return refused.value.code


def test_the_published_examples():
    names = "host;range;x-amz-content-sha256;x-amz-date"
    checked("/test.txt", headers_of(GET, names, Range="bytes=0-9"))
    checked("/?max-keys=2&prefix=J", headers_of(LIST))
    checked(TARGET + PRESIGNED, CIMultiDict({"Host": HOST}))


def test_what_differs_from_what_was_signed_is_refused():
    names, wrong = "host;range;x-amz-content-sha256;x-amz-date", "SignatureDoesNotMatch"
    assert code_of("/test.txt", headers_of(GET, names, Range="bytes=0-99")) == wrong
    assert code_of("/test2.txt", headers_of(GET, names, Range="bytes=0-9")) == wrong
    assert code_of("/?max-keys=3&prefix=J", headers_of(LIST)) == wrong
    assert code_of("/?max-keys=2&prefix=J", headers_of(LIST), method="HEAD") == wrong
    assert code_of("/?max-keys=2&prefix=J", headers_of("0" * 64)) == wrong
    assert code_of("/?max-keys=2&prefix=J", headers_of("ü\udcff")) == wrong
    assert code_of("/?max-keys=2&prefix=J", headers_of(LIST), keys=KEYS._replace(secret="other")) == wrong
    assert code_of(TARGET + "0" * 64, CIMultiDict({"Host": HOST})) == wrong
    assert code_of(f"{TARGET}{PRESIGNED}&prefix=a", CIMultiDict({"Host": HOST})) == wrong
    assert code_of(TARGET + PRESIGNED, CIMultiDict({"Host": "other.localhost"})) == wrong
    other = KEYS._replace(access="OTHER")
    assert code_of("/?max-keys=2&prefix=J", headers_of(LIST), keys=other) == "InvalidAccessKeyId"


@pytest.mark.parametrize("seconds", [-901, 901])
def test_a_clock_that_differs_is_refused(seconds):
    checked("/?max-keys=2&prefix=J", headers_of(LIST), now=AT + seconds * 899 / 901)
    assert code_of("/?max-keys=2&prefix=J", headers_of(LIST), now=AT + seconds) == "RequestTimeTooSkewed"


def test_a_presigned_url_expires():
    headers = CIMultiDict({"Host": HOST})
    checked(TARGET + PRESIGNED, headers, now=AT + 86_400)
    assert code_of(TARGET + PRESIGNED, headers, now=AT + 86_401) == "AccessDenied"
    assert code_of(TARGET + PRESIGNED, headers, now=AT - 901) == "AccessDenied"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Expires=86400", "Expires=604801"),
        ("Expires=86400", "Expires=x"),
        ("Expires=86400", "Expires=-1"),
        ("X-Amz-SignedHeaders=host", "a=b"),
        ("us-east-1%2Fs3", "us-east-1%2Fsts"),
        ("%2Faws4_request", ""),
    ],
)
def test_a_malformed_presigned_url_is_refused(old, new):
    target = (TARGET + PRESIGNED).replace(old, new)
    assert code_of(target, CIMultiDict({"Host": HOST})) == "AuthorizationHeaderMalformed"


def test_a_malformed_header_is_refused():
    headers = headers_of(LIST)
    headers["Authorization"] = "AWS4-HMAC-SHA256 Credential"
    assert code_of("/", headers) == "AuthorizationHeaderMalformed"
    assert code_of("/", headers_of(LIST, **{"x-amz-date": "yesterday"})) == "AccessDenied"
    assert code_of("/", headers_of(LIST, "x-amz-date")) == "AccessDenied"
    assert (
        code_of("/", headers_of(LIST, **{"x-amz-date": "20130523T235959Z"})) == "AuthorizationHeaderMalformed"
    )


@pytest.mark.parametrize("auth", [S3SigV4Auth, S3SigV4QueryAuth])
@hypothesis.given(
    key=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20),
    value=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
def test_all_names_that_botocore_signs(auth, key, value):
    url = f"http://127.0.0.1:9000/data/{quote(key)}?prefix={quote(value, safe='')}&empty="
    request = AWSRequest("GET", url, {"x-amz-meta-a": "  b   c "})
    auth(Credentials(*KEYS), "s3", "eu-west-1").add_auth(request)
    parts = urlsplit(request.url)
    headers = CIMultiDict({**dict(request.headers), "Host": "127.0.0.1:9000"})
    checked(f"{parts.path}?{parts.query}", headers, now=datetime.now(UTC).timestamp())


def test_a_blank_in_a_query_may_be_a_plus():
    """As readers that are written in Rust send it: they sign %20."""
    request = AWSRequest("GET", "http://127.0.0.1:9000/data?prefix=a%20b", {})
    S3SigV4Auth(Credentials(*KEYS), "s3", "eu-west-1").add_auth(request)
    headers = CIMultiDict({**dict(request.headers), "Host": "127.0.0.1:9000"})
    checked("/data?prefix=a+b", headers, now=datetime.now(UTC).timestamp())
