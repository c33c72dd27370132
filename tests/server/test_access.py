"""Who may read: keys, hosts, pages of other origins."""

import pytest

from cachedfs.server.signatures import Keys
from tests.server.served import KEYS, basic


@pytest.fixture
def served(origin, serving):
    origin.put("b/top/a", b"1")
    return serving(
        {"data": "cachedfs::gs://b/top"}, domains=("localhost", "s3.example.com"), origins=("https://page",)
    )


def test_a_request_needs_the_keys(served):
    assert served.get("/data/a").body == b"1"
    refused = served.get("/data/a", signed=False)
    assert (refused.status, refused.code) == (403, "AccessDenied")
    for keys in (Keys("other", KEYS.secret), KEYS._replace(secret="other")):
        headers = served.sign("GET", "/data/a", {}, keys)
        assert served.get("/data/a", headers, signed=False).status == 403


def test_the_keys_are_user_and_password(served):
    assert served.get("/data/a", basic(":".join(KEYS)), signed=False).body == b"1"
    for text in (":", f"{KEYS.access}:", f"{KEYS.access}:other", f"{':'.join(KEYS)} ", "ü:ü"):
        refused = served.get("/data/a", basic(text), signed=False)
        assert (refused.status, refused.code) == (401, "AccessDenied")
    assert served.get("/data/a", {"Authorization": "Basic %"}, signed=False).status == 401
    refused = served.get("/data/a", {"Accept": "text/html,*/*"}, signed=False)
    assert (refused.status, refused.headers["WWW-Authenticate"].split()[0]) == (
        401,
        "Basic",
    )  # a browser asks


def test_a_signature_of_version_2_is_named(served):
    for target, headers in (
        ("/data/a?AWSAccessKeyId=x&Signature=y", {}),
        ("/data/a", {"Authorization": "AWS x:y"}),
    ):
        refused = served.get(target, headers, signed=False)
        assert (refused.status, refused.code) == (400, "InvalidRequest")
        assert b"AWS4-HMAC-SHA256" in refused.body


def test_two_signatures_are_refused(served):
    headers = served.sign("GET", "/data/a?X-Amz-Signature=0", {})
    assert served.get("/data/a?X-Amz-Signature=0", headers, signed=False).code == "InvalidRequest"


def test_hosts_that_are_ours(served):
    for host in ("127.0.0.1", "127.0.0.1:1", "localhost", "[::1]:9000", "10.0.0.7", "s3.example.com"):
        assert served.get("/data/a", {"Host": host}).body == b"1"
    assert served.get("/a", {"Host": "data.s3.example.com"}).body == b"1"


def test_a_name_that_leads_here_is_refused(served):
    """DNS rebinding: a page of evil.com asks its own server, whose address is now that of this machine."""
    names = ("evil.com", "evil.com:80", "localhost.evil.com", "127.0.0.1.evil.com", "evils3.example.com")
    for host in (*names, "", "[", "a b"):
        refused = served.get("/data/a", {"Host": host, **basic(":".join(KEYS))}, signed=False)
        assert (refused.status, refused.code) == (403, "AccessDenied")


def test_a_page_of_another_origin_is_refused(served):
    for page in ("https://evil.com", "null", "http://localhost", "https://page.evil.com", ""):
        refused = served.get("/data/a", {"Origin": page, **basic(":".join(KEYS))}, signed=False)
        assert (refused.status, refused.code) == (403, "AccessDenied")
        assert "Access-Control-Allow-Origin" not in refused.headers


def test_an_allowed_page_may_read(served):
    answer = served.get("/data/a", {"Origin": "https://page"})
    assert (answer.body, answer.headers["Access-Control-Allow-Origin"]) == (b"1", "https://page")
    assert served.get("/data/a", {"Origin": "https://page"}, signed=False).status == 403
    preflight = {"Origin": "https://page", "Access-Control-Request-Method": "GET"}
    allowed = served.ask("OPTIONS", "/data/a", preflight, signed=False)
    assert (allowed.status, allowed.headers["Access-Control-Allow-Methods"]) == (200, "GET, HEAD")
    assert served.ask("OPTIONS", "/data/a", signed=False).status == 403
    assert served.get("/data/a", {"Origin": served.url}).body == b"1"
    assert "Access-Control-Allow-Origin" not in served.get("/data/a").headers
