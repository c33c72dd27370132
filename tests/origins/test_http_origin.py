"""A web server as an origin: the contract, servers that answer in other ways, and the options of fsspec."""

import functools
import gzip
import itertools
from email.utils import formatdate

import aiohttp
import pytest
from fsspec.config import conf

from cachedfs.common.types import Range, Suffix
from cachedfs.errors import (
    AccessDenied,
    CachedFSError,
    ObjectChanged,
    ObjectNotFound,
    OriginUnavailable,
    RequestRejected,
)
from cachedfs.origins.http_answers import answer_of, compared
from cachedfs.origins.retry import RetryPolicy
from tests.origins.contract import DATA, OriginContract, names, read
from tests.web_world import OLD_S, WebWorld

OLD = formatdate(OLD_S, usegmt=True)


@pytest.fixture
def world():
    world = WebWorld()
    yield world
    world.close()


@pytest.fixture
async def origin(opened):
    """An origin that repeats no request after a failure."""
    return opened("http", RetryPolicy(tries=1))


class TestWebServer(OriginContract):
    missing_folder_is_an_error = True

    # A page has any bytes, and links may name any objects: there are no folders.
    test_lookup_of_a_folder_is_a_directory = None
    test_a_folder_cannot_be_read = None

    async def test_awkward_names(self, origin, world):
        world.change = lambda answer: setattr(answer, "status", 402)
        for name, sent in {
            "a b.bin": "a%20b.bin", "100%.bin": "100%25.bin", "a%20b": "a%20b", "a+b=c&d.bin": "a+b=c&d.bin",
            "größe-日本.bin": "gr%C3%B6%C3%9Fe-%E6%97%A5%E6%9C%AC.bin", "x/~y/[z].bin": "x/~y/%5Bz%5D.bin",
            "page?b=2&a=%2F": "page?b=2&a=/",
        }.items():  # fmt: skip
            with pytest.raises(CachedFSError):
                await origin.lookup(f"{world.root}/{name}")
            assert world.log.pop()[1] == f"/root/{sent}"

    async def test_the_fingerprint_is_the_same_from_lookup_list_and_read(self, origin, path):
        assert (await read(origin, path, Range(0, 10)))[1] == await origin.lookup(path)

    async def test_writes_are_seen_at_once(self, origin, world):
        await origin.call("pipe_file", f"{world.root}/new.bin", b"new")
        assert world.get("new.bin") == b"new"
        assert (await origin.lookup(f"{world.root}/new.bin")).size == 3

    async def test_list_returns_children_once(self, origin, world, path):
        for name in ("a/c.bin", "a/sub/d.bin", "a/sub/e.bin", "other/f.bin"):
            world.put(name, b"x")
        for folder in (f"{world.root}/a", f"{world.root}/a/"):
            found = await names(origin.list(folder))
            files = {(path, "file"), (f"{world.root}/a/c.bin", "file")}
            assert found == files | {(f"{world.root}/a/sub/", "directory")}

    async def test_a_deep_list_returns_all_objects_below(self, origin, world, path):
        world.put("a/sub/d.bin", b"x")
        found = await names(origin.list(f"{world.root}/a/", deep=True))
        assert {(path, "file"), (f"{world.root}/a/sub/d.bin", "file")} <= found


# Sizes
@pytest.mark.parametrize("want", [None, Range(5, 50), Suffix(7)])
async def test_no_head_is_asked(origin, world, want):
    path = world.put("x", DATA)
    info = await origin.lookup(path)
    assert (await read(origin, path, want))[1].size == info.size == len(DATA)
    assert world.log[0] == ("GET", "/root/x", "bytes=0-0")
    assert [method for method, _, _ in world.log] == ["GET", "GET"]


def nameless_total(answer):
    if answer.status == 206:
        answer.headers["Content-Range"] = answer.headers["Content-Range"].partition("/")[0] + "/*"


def short(answer):
    if answer.status == 206:
        start = int(answer.headers["Content-Range"][6:].partition("-")[0])
        answer.of(start, min(start + 1000, len(answer.data)))


def wide(answer):
    if answer.status == 206:
        start, _, stop = answer.headers["Content-Range"][6:].partition("/")[0].partition("-")
        answer.of(int(start) // 64 * 64, min((int(stop) // 64 + 1) * 64, len(answer.data)))


def no_suffix(answer, status):
    if (answer.request["Range"] or "").startswith("bytes=-"):
        answer.status, answer.body = status, b""


SERVERS = {
    "whole": lambda answer: answer.whole(),
    "whole, chunked": lambda answer: (answer.whole(), answer.chunked()),
    "chunked": lambda answer: answer.chunked(),
    "encoded": lambda answer: answer.encoded(),
    "encoded, chunked": lambda answer: (answer.encoded(), answer.chunked()),
    "nameless total": nameless_total,
    "no suffix, 416": functools.partial(no_suffix, status=416),
    "no suffix, 400": functools.partial(no_suffix, status=400),
    "short": short,
    "short, chunked": lambda answer: (short(answer), answer.chunked()),
    "wide": wide,
}
OF_UNKNOWN_SIZE = ("whole, chunked", "encoded", "encoded, chunked", "nameless total")
WANTS = [
    (None, 0, 10_240), (Range(0, 20_000), 0, 10_240), (Range(100, 5_000), 100, 5_000), (Range(7, 7), 7, 7),
    (Range(20_000, 20_010), 10_240, 10_240), (Suffix(1_500), 8_740, 10_240),
]  # fmt: skip


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.filterwarnings("ignore:.*does not say when an object has changed")
async def test_every_way_to_answer_gives_the_same_bytes(origin, world, server):
    path, world.change = world.put("x", DATA), SERVERS[server]
    _, info, _, _ = await read(origin, path)
    for pinned, (want, start, stop) in itertools.product((None, info), WANTS):
        if want == Range(7, 7) and server in OF_UNKNOWN_SIZE:
            continue  # no bytes, of an object of unknown size
        data, found, *span = await read(origin, path, want, pinned)
        assert (data, span) == (DATA[start:stop], [start, stop])
        assert found.size == len(DATA)


async def test_a_broken_body_is_resumed_in_the_same_version(world, opened):
    path, origin = world.put("x", DATA), opened("http", RetryPolicy(base_s=0.0))
    n_cut, n_replaced = 1, 0

    def cut(answer):
        nonlocal n_cut, n_replaced
        if n_cut:
            n_cut -= 1
            answer.headers["Content-Length"] = str(len(answer.body))
            answer.body = answer.body[:7_000]
            if n_replaced:
                world.put("x", DATA[::-1])

    world.change = cut
    assert (await read(origin, path))[0] == DATA
    assert world.ranges() == [None, "bytes=7000-10239"]
    n_cut = n_replaced = 1
    with pytest.raises(ObjectChanged, match=r"root/x.*replaced while it was read"):
        await read(origin, path)


@pytest.mark.parametrize("range_", ["bytes 100-99/10240", "bytes 0-9/5", "pages 1-2/3"])
async def test_without_a_usable_content_range_the_whole_object_is_read(origin, world, range_):
    path = world.put("x", DATA)
    world.change = lambda answer: answer.headers.update({"Content-Range": range_})
    assert (await origin.lookup(path)).size == len(DATA)
    world.ranges()
    assert (await read(origin, path, Range(100, 110)))[0] == DATA[100:110]
    assert world.ranges() == ["bytes=100-109", None]


async def test_the_content_range_of_other_bytes_is_never_used(origin, world):
    path = world.put("x", DATA)
    world.change = lambda answer: answer.headers.update({"Content-Range": "bytes 50-59/10240"})
    with pytest.raises(OriginUnavailable, match="root/x"):
        await read(origin, path, Range(100, 110))


def unknown_part(answer):
    answer.of(0, 100)
    answer.headers["Content-Range"] = "bytes 0-99/*"


@pytest.mark.parametrize(
    ("change", "want", "why"),
    [
        (unknown_part, None, "a part of unknown size"),
        (lambda answer: setattr(answer, "body", answer.body[:-1]), Range(100, 110), "9 bytes instead of 10"),
        (lambda answer: setattr(answer, "status", 416), None, "takes a whole object for a wrong range"),
    ],
)
async def test_an_answer_that_proves_no_bytes_is_never_used(origin, world, change, want, why):
    path, world.change = world.put("x", DATA), change
    with pytest.raises(OriginUnavailable, match=why):
        await read(origin, path, want)


async def test_an_answer_without_content_is_an_empty_object(origin, world):
    path = world.put("x", b"")
    world.change = lambda answer: setattr(answer, "status", 204)
    assert (await origin.lookup(path)).size == 0


async def test_an_encoding_that_needs_a_package_is_an_error_that_names_it(world, monkeypatch, opened):
    """A second try, after a wait, would not help."""
    monkeypatch.setattr("aiohttp.http_parser.HAS_BROTLI", False)
    path, origin = world.put("x", DATA), opened("http")
    world.change = lambda answer: answer.headers.update({"Content-Encoding": "br"})
    with pytest.raises(OriginUnavailable, match=r"after 1 try.*Can not decode .*brotli.*Install Brotli"):
        await read(origin, path)
    assert len(world.log) == 1


# Versions
def answered(headers, size=3, now_s=OLD_S + 60):
    given = {"Content-Length": str(size), **headers}
    return answer_of("http://h/x", 200, given, "http://h/x", now_s).info


HEX = f"{OLD_S:x}"
EPOCH = formatdate(0, usegmt=True)
RECENT = {"Last-Modified": OLD, "Date": formatdate(OLD_S + 1, usegmt=True)}


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"ETag": '"a"', "Last-Modified": OLD}, 'etag:"a"-3'),
        ({"ETag": 'W/"a"', "Last-Modified": OLD}, f"time:{OLD_S}.0-3"), ({"ETag": 'W/"a"'}, None), ({}, None),
        ({"ETag": f'"{HEX}-3"', "Last-Modified": OLD}, f"time:{OLD_S}.0-3"),
        ({"ETag": f'"{HEX}-3"'}, f'etag:"{HEX}-3"-3'), ({"Last-Modified": "yesterday"}, None),
        ({"Last-Modified": EPOCH}, None), ({"ETag": '""'}, None), ({"ETag": '"a"', "Content-Encoding": "gzip"}, None),
        ({"ETag": '"a"', "Content-Encoding": "utf-8"}, 'etag:"a"-3'),
    ],
)  # fmt: skip
def test_only_evidence_of_a_version_is_a_fingerprint(headers, expected):
    assert answered(headers).fingerprint == expected


@pytest.mark.parametrize("etag", [{}, {"ETag": 'W/"a"'}, {"ETag": f'"{HEX}-3"'}])
@pytest.mark.parametrize(("date_s", "is_once"), [(0, True), (1, True), (2, False), (-5, True)])
def test_a_time_of_the_last_seconds_by_the_clock_of_the_server_is_evidence_once(etag, date_s, is_once):
    headers = {"Last-Modified": OLD, "Date": formatdate(OLD_S + date_s, usegmt=True), **etag}
    one, other = answered(headers), answered(headers)
    assert (one.fingerprint != other.fingerprint) == is_once
    assert compared(one, other) == "same"
    without_date = {"Last-Modified": OLD, **etag}
    now_s = OLD_S + date_s
    assert (answered(without_date, now_s=now_s) != answered(without_date, now_s=now_s)) == is_once


@pytest.mark.parametrize(
    ("known", "now", "expected"),
    [
        ({"ETag": '"a"'}, {"ETag": '"a"', "Last-Modified": OLD}, "same"),
        ({"ETag": '"a"', "Last-Modified": OLD}, {"ETag": '"b"', "Last-Modified": OLD}, "unreliable etag"),
        ({"ETag": '"a"', **RECENT}, {"ETag": '"b"', "Last-Modified": OLD}, "other evidence"),
        ({"ETag": '"a"', "Last-Modified": OLD}, {"ETag": '"b"', **RECENT}, "other evidence"),
        ({"ETag": '"a"', "Last-Modified": EPOCH}, {"ETag": '"b"', "Last-Modified": EPOCH}, "other evidence"),
        ({"ETag": '"a"'}, {"ETag": '"b"'}, "other evidence"),
        ({"ETag": '"a"'}, {"ETag": '"b"', "Last-Modified": OLD}, "other"),
        ({"ETag": 'W/"a"'}, {"ETag": 'W/"b"'}, "same"), ({"ETag": 'W/"a"'}, {"ETag": '"a"'}, "other"), ({"ETag": 'W/"a"'}, {"ETag": 'W/"a"'}, "same"),
        ({"Last-Modified": OLD}, {}, "other"), ({}, {}, "same"), ({"ETag": '"a"'}, {}, "other"),
    ],
)  # fmt: skip
def test_answers_are_compared_by_evidence_and_then_by_time(known, now, expected):
    assert compared(answered(known), answered(now)) == expected
    assert compared(answered(known), answered(now, size=4)) == "other"


@pytest.mark.parametrize(
    ("known", "now", "expected"),
    [
        ('"a"', '"b"', "other"), ('"a"', '"a-gzip"', "same"), ('"a;gzip"', '"a"', "same"), ('"a--gzip"', '"a-br"', "same"),
        ('W/"a"', 'W/"b"', "same"),
    ],
)  # fmt: skip
def test_an_encoded_body_of_another_strong_etag_is_of_another_version(known, now, expected):
    """Its size is not known, so its time proves nothing against its ETag."""
    encoded = {"Content-Encoding": "gzip", "Last-Modified": OLD}
    assert compared(answered(encoded | {"ETag": known}), answered(encoded | {"ETag": now})) == expected


def edges(answer, etags=None):
    answer.headers["ETag"] = f'"edge{next(etags)}"'


UNRELIABLE = "its ETag differs from answer to answer"


@pytest.mark.parametrize("etags", [itertools.count, lambda: itertools.cycle([1, 2])])
async def test_an_etag_that_differs_with_each_answer_is_no_evidence(origin, world, etags):
    path, world.change = world.put("x", DATA), functools.partial(edges, etags=etags())
    pinned = await origin.lookup(path)
    assert pinned.fingerprint
    with pytest.warns(UserWarning, match=UNRELIABLE):
        assert (await read(origin, path, Range(3, 9), pinned))[0] == DATA[3:9]
    data, info, _, _ = await read(origin, path, Range(0, 10))  # a second warning would be an error
    assert (data, info.fingerprint) == (DATA[:10], None)
    assert (await read(origin, path, Range(20, 30), info))[0] == DATA[20:30]
    assert (await origin.lookup(path)).fingerprint is None
    world.put("x", DATA[::-1])
    with pytest.raises(ObjectChanged, match="root/x"):
        await read(origin, path, Range(20, 30), info)


async def test_without_a_time_an_etag_that_differs_is_another_version(origin, world):
    etags = itertools.count()

    def no_time(answer):
        edges(answer, etags)
        del answer.headers["Last-Modified"]

    path, world.change = world.put("x", DATA), no_time
    pinned = await origin.lookup(path)
    with pytest.warns(UserWarning, match=UNRELIABLE), pytest.raises(ObjectChanged):
        await read(origin, path, Range(3, 9), pinned)
    info = await origin.lookup(path)
    assert info.fingerprint is None
    assert (await read(origin, path))[0] == DATA  # in one answer
    with pytest.raises(ObjectChanged, match='it was ETag "edge4", and is ETag "edge6"'):
        await read(origin, path, Range(3, 9), info)


async def test_without_evidence_there_is_one_warning_and_the_size_is_compared(origin, world):
    def nothing(answer):
        for name in ("ETag", "Last-Modified"):
            answer.headers.pop(name, None)

    path, world.change = world.put("x", DATA), nothing
    with pytest.warns(UserWarning, match="root/x.*nothing of it can be cached safely"):
        pinned = await origin.lookup(path)
    assert (await read(origin, path, Range(3, 9), pinned))[0] == DATA[3:9]
    world.put("x", DATA + b"more")
    with pytest.raises(ObjectChanged, match="10240 bytes, and has 10244"):
        await read(origin, path, Range(3, 9), pinned)


# Failures
@pytest.mark.parametrize(
    ("status", "error"),
    [
        (404, ObjectNotFound), (410, ObjectNotFound), (401, AccessDenied), (403, AccessDenied), (400, RequestRejected),
        (405, RequestRejected), (402, CachedFSError), (429, OriginUnavailable), (500, OriginUnavailable),
        (503, OriginUnavailable),
    ],
)  # fmt: skip
async def test_only_404_and_410_are_absences_and_no_error_shows_a_signature(origin, world, status, error):
    path = world.put("x", DATA) + "?X-Amz-Signature=SECRET"
    info = await origin.lookup(path)
    world.change = lambda answer: setattr(answer, "status", status)
    for asked in (origin.lookup(path), read(origin, path, Range(0, 9))):
        with pytest.raises(error, match="root/x") as caught:
            await asked
        assert "SECRET" not in str(caught.value)
        assert isinstance(caught.value, FileNotFoundError) == (error is ObjectNotFound)
    with pytest.raises(ObjectChanged if error is ObjectNotFound else error):
        await read(origin, path, Range(0, 9), info)


# Redirects
@pytest.fixture
def other(world):
    """Another server, to which the first one redirects."""
    other = WebWorld()
    other.put("x", DATA)

    def redirect(answer):
        answer.status, answer.body = 302, b""
        answer.headers["Location"] = f"{other.root}/x?sig=SECRET"

    world.put("x", b"not this")
    world.change = redirect
    yield other
    other.close()


async def test_redirects_lead_to_other_hosts(origin, world, other):
    path = f"{world.root}/x"
    data, info, _, _ = await read(origin, path, Range(3, 9))
    assert (data, info.path, info.size) == (DATA[3:9], path, len(DATA))
    assert info.details["url"].startswith(f"{other.root}/x")
    assert "SECRET" not in info.details["url"]
    other.delete("x")
    with pytest.raises(ObjectNotFound, match="root/x"):
        await read(origin, path)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
async def test_credentials_of_the_session_stay_with_the_host(world, other, opened):
    origin = opened("http", client_kwargs={"auth": aiohttp.BasicAuth("me", "pw"), "cookies": {"c": "2"}})
    path = f"{world.root}/x"
    assert (await read(origin, path))[0] == DATA
    sent = [[each["Authorization"], each["Cookie"]] for each in (world.asked[0], other.asked[0])]
    assert sent == [[aiohttp.BasicAuth("me", "pw").encode(), "c=2"], [None, None]]
    await read(origin, path.replace("//", "//you:pw2@"))  # the user of a URL comes first, as in a session
    assert world.asked[1]["Authorization"] == aiohttp.BasicAuth("you", "pw2").encode()


# Options
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # by aiohttp, not yet by its users
async def test_the_options_of_fsspec_are_sent(world, opened):
    path, login = world.put("x", DATA), aiohttp.BasicAuth("me", "pw")
    session = {"headers": {"X-Two": "4"}, "cookies": {"d": "5"}, "timeout": aiohttp.ClientTimeout(total=60)}
    request = {"headers": {"X-One": "1"}, "cookies": {"c": "2"}, "params": {"p": "3"}, "auth": login}
    origin = opened("http", client_kwargs=session, **request)
    await origin.lookup(path)
    await read(origin, path, Range(0, 9))
    for sent in world.asked:
        assert (sent["X-One"], sent["X-Two"], sent["Cookie"]) == ("1", "4", "c=2; d=5")
        assert sent["Authorization"] == login.encode()
        assert sent["Accept-Encoding"] == "identity"
    assert {path for _, path, _ in world.log} == {"/root/x?p=3"}


async def test_a_proxy_and_the_way_to_make_a_session_are_options(world, opened):
    path, made = world.put("x", DATA), []

    async def get_client(**options):
        made.append(aiohttp.ClientSession(**options))
        return made[-1]

    origin = opened("http", get_client=get_client, proxy=world.url)
    with pytest.raises(ObjectNotFound):
        await origin.lookup(path.replace(world.url, "http://elsewhere.example"))
    assert world.log[0][1] == "http://elsewhere.example/root/x"
    assert len(made) == 1
    await origin.aclose()
    assert made[0].closed


@pytest.mark.parametrize("is_configured", [False, True])
async def test_a_connector_of_the_user_stays_open(world, opened, monkeypatch, is_configured):
    path, connector = world.put("x", DATA), aiohttp.TCPConnector()
    options = {"client_kwargs": {"connector": connector}}
    if is_configured:
        monkeypatch.setitem(conf, "http", options)
    for _ in range(2):
        origin = opened("http", **({} if is_configured else options))
        await origin.call("pipe_file", path, DATA)  # in a session of fsspec's
        await origin.lookup(path)
        await origin.aclose()
        assert not connector.closed
    await connector.close()


async def test_an_encoded_url_is_sent_as_it_is_and_the_error_is_ours(world, opened):
    origin = opened("http", encoded=True, raise_for_status=True)
    with pytest.raises(ObjectNotFound):
        await origin.lookup(f"{world.root}/a%2Fb?x=%2F")
    assert world.log[0][1] == "/root/a%2Fb?x=%2F"


@pytest.mark.parametrize(
    "options",
    [{"auto_decompress": False}, {"client_kwargs": {"auto_decompress": False}}],
    ids=["request", "session"],
)
async def test_a_user_may_ask_for_the_stored_bytes(world, options, opened):
    path = world.put("x", DATA)
    world.change = lambda answer: answer.encoded()
    origin, stored = opened("http", **options), gzip.compress(DATA, mtime=0)
    data, info, _, _ = await read(origin, path, Range(3, 9))
    assert (data, info.size) == (stored[3:9], len(stored))
    assert info.fingerprint
    assert (await read(origin, path, None, info))[0] == stored


@pytest.mark.filterwarnings("ignore:.*does not say when an object has changed")
async def test_a_user_may_ask_for_compression(world, opened):
    path = world.put("x", DATA)
    world.change = lambda answer: answer.encoded() if "gzip" in answer.request["Accept-Encoding"] else None
    origin = opened("http", client_kwargs={"headers": {"accept-encoding": "gzip"}})
    assert (await read(origin, path, Range(3, 9)))[0] == DATA[3:9]
    assert world.asked[0].get_all("Accept-Encoding") == ["gzip"]
