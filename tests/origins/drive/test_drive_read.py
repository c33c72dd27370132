"""Reads of Drive files: one version per read, resumed bodies, and the number of requests."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import NamedTuple

import pytest

from cachedfs.common.types import ObjectInfo, Range, Suffix
from cachedfs.errors import ObjectChanged, OriginUnavailable, QuotaExceeded
from cachedfs.origins.drive.origin import DriveOrigin
from cachedfs.origins.drive.read import WHOLE, DriveMediaRead, proof_of
from cachedfs.origins.retry import RetryPolicy
from cachedfs.sim import DriveServer, Fault
from tests.origins.contract import read
from tests.support import until

OLD = b"".join(b"%07d\n" % i for i in range(8000))  # 64,000 bytes
NEW = OLD.swapcase().replace(b"0", b"x")
SPAN = Range(10, 60_000)


class File(NamedTuple):
    server: DriveServer
    name: str  # in My Drive
    path: str
    id: str
    want: Range | None

    def replace(self, data=NEW):
        self.server.put(self.name, data)

    @property
    def old(self):
        return OLD[self.want.start : self.want.stop] if self.want else OLD

    @property
    def new(self):
        return NEW[self.want.start : self.want.stop] if self.want else NEW


@pytest.fixture(params=["checksum", "revision", "second look"])
def proof(request):
    return str(request.param)


@pytest.fixture
def file(server, folder, root, proof):
    """A file and a read of it whose version must be proven in this way."""
    id = server.put(f"{folder}/a", OLD)
    if proof == "second look":
        server.edit(id, capabilities={"canReadRevisions": False})
    return File(server, f"{folder}/a", f"{root}/a", id, None if proof == "checksum" else SPAN)


def asked(server):
    return [(request.kind, request.headers.get("range")) for request in server.requests]


# Choice of the proof
@pytest.mark.parametrize(
    ("size", "span", "details", "proof"),
    [
        (9, (0, 9), {"md5Checksum": "m"}, "checksum"),
        (WHOLE, (0, WHOLE), {"md5Checksum": "m"}, "checksum"),
        (WHOLE + 1, (0, WHOLE + 1), {"md5Checksum": "m"}, "second look"),
        (9, (0, 8), {"md5Checksum": "m"}, "second look"),
        (9, (1, 9), {"md5Checksum": "m", "headRevisionId": "r", "canReadRevisions": True}, "revision"),
        (9, (1, 9), {"md5Checksum": "m", "canReadRevisions": True}, "second look"),
        (9, (1, 9), {"headRevisionId": "r", "canReadRevisions": False}, "second look"),
    ],
)
def test_how_a_version_is_proven(size, span, details, proof):
    assert proof_of(ObjectInfo("a", size=size, details=details), Range(*span)) == proof


# Cost in requests
async def test_a_pinned_read_is_one_request_and_a_second_lookup_one_more(origin, server, file, proof):
    pinned = await origin.lookup(file.path)
    server.reset()
    assert (await read(origin, file.path, file.want, pinned))[0] == file.old
    media, *others = sorted(server.requests, key=lambda request: request.kind != "media")
    assert [request.kind for request in others] == ["get"] * (proof == "second look")
    revision = f"/revisions/{pinned.details['headRevisionId']}" if proof == "revision" else ""
    assert media.path == f"/drive/v3/files/{pinned.id}{revision}"
    assert revision or media.query["supportsAllDrives"] == "true"
    assert media.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    ("want", "sent"),
    [
        (None, "bytes=0-63999"),
        (Range(5, 1 << 62), "bytes=5-63999"),
        (Suffix(10), "bytes=63990-63999"),
    ],
)
async def test_every_range_has_an_end(origin, server, folder, root, want, sent):
    server.put(f"{folder}/a", OLD)
    await read(origin, f"{root}/a", want)
    assert [headers for kind, headers in asked(server) if kind == "media"] == [sent]


# Replaced files
@pytest.mark.parametrize("size", [0, 30_000, 64_001])
async def test_a_file_replaced_by_a_shorter_or_longer_one(origin, server, looked_up_again, size):
    file = looked_up_again
    pinned = await origin.lookup(file.path)
    file.replace((NEW + NEW)[:size])
    server.reset()
    with pytest.raises(ObjectChanged):
        await read(origin, file.path, file.want, pinned)
    assert server.count("media") == 1
    assert (await read(origin, file.path, file.want))[0] == (NEW + NEW)[:size][10:60_000]


async def test_a_file_replaced_by_one_with_another_proof_before_its_first_byte(origin, server, folder, root):
    server.put(f"{folder}/a", OLD)
    large = bytes(WHOLE + 1)

    def replace_before_the_bytes():
        if server.count("list") == 2 and not server.count("media"):
            server.put(f"{folder}/a", large)

    server.reset()
    origin.on_request = replace_before_the_bytes
    assert (await read(origin, f"{root}/a"))[0] == large


async def test_a_file_replaced_while_its_body_is_resumed(origin, server, file, proof):
    pinned = await origin.lookup(file.path)
    server.fail(Fault(kind="media", close_after=20_000))
    server.fail(Fault(kind="media", nth=2, close_after=10_000))
    n_media, got = 0, b""

    def replace_at_the_third():
        nonlocal n_media
        n_media = server.count("media")
        if n_media == 2:
            file.replace()

    origin.on_request = replace_at_the_third
    with suppress(ObjectChanged):
        async with origin.read(file.path, file.want, pinned) as reply:
            async for piece in reply.body:
                got += piece
    assert n_media >= 2
    assert file.old.startswith(got)


@pytest.mark.parametrize("nth", range(1, 5))
async def test_an_unpinned_read_is_one_whole_version_at_any_time(origin, server, file, nth):
    await origin.lookup(file.path)
    inner = await origin.filesystem()
    n = 0

    def replace_at_the_nth():
        nonlocal n
        n += 1
        if n == nth:
            file.replace()

    origin.on_request = replace_at_the_nth
    span = {"start": 10, "end": 60_000} if file.want else {}
    assert await inner._cat_file(file.path, **span) in (file.old, file.new)
    n = 0
    file.replace(OLD)
    with suppress(ObjectChanged):
        data, info, _, _ = await read(origin, file.path, file.want)
        assert data in (file.old, file.new)
        assert info.fingerprint is not None


# Failed proofs
async def test_wrong_bytes_of_the_right_version_are_never_returned(origin, server, folder, root):
    server.put(f"{folder}/a", OLD)
    pinned = await origin.lookup(f"{root}/a")
    wrong = {"Content-Range": f"bytes 0-{len(OLD) - 1}/{len(OLD)}"}
    server.fail(Fault(kind="media", status=206, body=NEW.decode(), headers=wrong, times=2))
    server.reset()
    assert (await read(origin, f"{root}/a", None, pinned))[0] == OLD
    assert [kind for kind, _ in asked(server)] == ["media", "get", "media", "get", "media"]
    server.fail(Fault(kind="media", status=206, body=NEW.decode(), headers=wrong, times=None))
    server.reset()
    with pytest.raises(OriginUnavailable, match=f"drive://{root}/a.*6 tries.*MD5"):
        await read(origin, f"{root}/a", None, pinned)
    assert server.count("media") == 6


@pytest.mark.parametrize("proof", ["revision"], indirect=True)
@pytest.mark.parametrize("status", [403, 404])
async def test_an_unavailable_revision_is_replaced_by_a_second_lookup(origin, server, file, status):
    pinned = await origin.lookup(file.path)
    reason = "notFound" if status == 404 else "domainPolicy"
    server.fail(Fault(kind="media", status=status, reason=reason))
    server.reset()
    assert (await read(origin, file.path, file.want, pinned))[0] == file.old
    assert sorted(request.kind for request in server.requests) == ["get", "get", "media", "media"]
    last = [request for request in server.requests if request.kind == "media"][-1]
    assert "revisions" not in last.path
    # It is remembered: the next read asks for no revision.
    server.reset()
    assert (await read(origin, file.path, file.want, pinned))[0] == file.old
    assert sorted(request.kind for request in server.requests) == ["get", "media"]
    file.replace()
    with pytest.raises(ObjectChanged):
        await read(origin, file.path, file.want, pinned)


# The second lookup
@pytest.fixture
def looked_up_again(server, folder, root):
    id = server.put(f"{folder}/b", OLD)
    server.edit(id, capabilities={"canReadRevisions": False})
    return File(server, f"{folder}/b", f"{root}/b", id, SPAN)


async def assert_nothing_is_left(origin, before):
    assert asyncio.all_tasks() == before
    async with AsyncExitStack() as stack:
        for _ in range(3):
            await asyncio.wait_for(stack.enter_async_context(origin.account.media_slots.slot()), 60)


async def test_a_failed_second_lookup_is_the_error_and_leaves_nothing(make, server, looked_up_again):
    origin = make(concurrency=3)
    pinned = await origin.lookup(looked_up_again.path)
    before = asyncio.all_tasks()
    server.fail(Fault(kind="get", status=503, times=None))
    with pytest.raises(OriginUnavailable, match=f"drive://{looked_up_again.path}.*6 tries"):
        await read(origin, looked_up_again.path, SPAN, pinned)
    await assert_nothing_is_left(origin, before)
    server.heal()
    server.fail(Fault(kind="get", status=404))
    with pytest.raises(ObjectChanged, match="removed"):
        await read(origin, looked_up_again.path, SPAN, pinned)
    await assert_nothing_is_left(origin, before)


@pytest.mark.parametrize("data", [OLD, 50 * OLD], ids=["small", "large"])
async def test_no_byte_is_returned_before_the_second_lookup(make, server, looked_up_again, monkeypatch, data):
    origin, want, order = make(), Range(10, len(data)), []
    looked_up_again.replace(data)
    pinned, item = await origin.lookup(looked_up_again.path), origin.account.item

    async def slow(*args, **options):
        await asyncio.to_thread(until, server.bytes_sent)
        for _ in range(100):  # the bytes that were sent arrive meanwhile
            await asyncio.sleep(0)
        found = await item(*args, **options)
        order.append("lookup")
        return found

    monkeypatch.setattr(origin.account, "item", slow)
    got = b""
    async with origin.read(looked_up_again.path, want, pinned) as reply:
        async for piece in reply.body:
            order.append("piece")
            got += piece
    assert order.index("lookup") == 0
    assert got == data[10:]


async def test_a_read_cancelled_during_its_second_lookup_leaves_nothing(make, server, looked_up_again):
    origin = make(concurrency=3)
    pinned = await origin.lookup(looked_up_again.path)
    before = asyncio.all_tasks()
    server.fail(Fault(kind="get", stall_s=0.2, times=None))
    async with origin.read(looked_up_again.path, SPAN, pinned):
        pass
    await assert_nothing_is_left(origin, before)
    for n_steps in (1, 5, 20, 60):
        task = asyncio.ensure_future(read(origin, looked_up_again.path, SPAN, pinned))
        for _ in range(n_steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await assert_nothing_is_left(origin, before)


async def test_the_buffer_of_unproven_bytes_is_bounded(make, server, folder, root, monkeypatch):
    reads = []
    make_read = staticmethod(lambda *given: reads.append(DriveMediaRead(*given)) or reads[-1])
    monkeypatch.setattr(DriveOrigin, "_reads", make_read)
    origin = make(policy=RetryPolicy(stall_s=5))
    data = bytes(24 << 20)
    server.edit(server.put(f"{folder}/big", data), capabilities={"canReadRevisions": False})
    pinned = await origin.lookup(f"{root}/big")
    server.fail(Fault(kind="get", stall_s=0.4))
    total = 0
    async with origin.read(f"{root}/big", None, pinned) as reply:
        async for piece in reply.body:
            held = sum(map(len, reads[0]._held)) + len(piece)
            assert held <= (2 * WHOLE) + (1 << 20)
            total += len(piece)
    assert total == len(data)
    server.remove(server.find(f"{folder}/big")[0]["id"])


# Broken bodies
async def test_a_body_is_resumed_where_it_broke(origin, server, file, proof):
    pinned = await origin.lookup(file.path)
    server.reset()
    server.fail(Fault(kind="media", close_after=20_000))
    start, last = (0, 63_999) if file.want is None else (10, 59_999)
    server.fail(Fault(kind="media", nth=2, close_after=last - 99 - start - 20_000))
    assert (await read(origin, file.path, file.want, pinned))[0] == file.old
    ranges = [sent for kind, sent in asked(server) if kind == "media"]
    assert ranges == [f"bytes={at}-{last}" for at in (start, start + 20_000, last - 99)]
    assert server.bytes_sent() == len(file.old)


async def test_a_refusal_received_in_pieces_keeps_its_reason(origin, server, folder, root):
    server.put(f"{folder}/a", OLD)
    info = await origin.lookup(f"{root}/a")
    server.fail(Fault(kind="media", status=403, reason="userRateLimitExceeded", stall_after=60, stall_s=0.1))
    assert (await read(origin, f"{root}/a", pinned=info))[0] == OLD  # retried, and not denied for good
    server.fail(Fault(kind="media", status=403, reason="downloadQuotaExceeded", stall_after=60, stall_s=0.1))
    with pytest.raises(QuotaExceeded, match="the download quota of this file is used up"):
        await read(origin, f"{root}/a", pinned=info)


# Wrong answers
async def test_a_whole_body_instead_of_a_range_is_cut(origin, server, file):
    pinned = await origin.lookup(file.path)
    server.fail(Fault(kind="media", status=200, body=OLD.decode()))
    assert (await read(origin, file.path, file.want, pinned))[0] == file.old


async def test_an_html_page_is_never_taken_for_a_file(origin, server, file):
    pinned = await origin.lookup(file.path)
    server.fail(Fault(kind="media", status=200, body="?" * 64_001, times=2))
    assert (await read(origin, file.path, file.want, pinned))[0] == file.old
    server.heal()
    server.fail(Fault(kind="media", status=200, body="?" * 64_001, times=None))
    with pytest.raises(
        OriginUnavailable, match=f"drive://{file.path}.*6 tries.*64001 bytes, and the file 64000"
    ):
        await read(origin, file.path, file.want, pinned)


def partial(first, last, n_bytes):
    """Return an answer of `n_bytes` bytes with this Content-Range."""
    headers = {"Content-Range": f"bytes {first}-{last}/{len(OLD)}"}
    return {"status": 206, "body": "x" * n_bytes, "headers": headers}


@pytest.mark.parametrize(
    "answer",
    [
        {"status": 416},
        partial(10, 59_999, 59_980),
        partial(10, 59_999, 60_000),
        partial(11, 59_999, 59_989),
        partial(0, 5, 6),
        {"status": 206, "body": "x" * 59_990, "headers": {"Content-Range": ""}},
    ],
    ids=["416", "short", "long", "later", "other bytes", "no range"],
)
async def test_an_answer_of_other_bytes_than_asked_for_is_not_used(origin, server, looked_up_again, answer):
    pinned = await origin.lookup(looked_up_again.path)
    server.reset()
    server.fail(Fault(kind="media", **answer))
    assert (await read(origin, looked_up_again.path, SPAN, pinned))[0] == looked_up_again.old
    assert server.count("media") == 2
