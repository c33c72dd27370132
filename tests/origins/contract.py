"""The contract of an origin, one test for each promise: test classes subclass `OriginContract`."""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import NamedTuple

import pytest

from cachedfs.common.types import Range, Suffix
from cachedfs.errors import CachedFSError, IsAFolder, ObjectChanged, ObjectNotFound

CONCURRENCY = 3
DATA = bytes(range(256)) * 40
AWKWARD = [
    "a b.bin",
    "100%.bin",
    "50%25.bin",
    "a#b.bin",
    "who?.bin",
    "a+b=c&d.bin",
    "größe-日本.bin",
    "x/~y/[z].bin",
]


async def read(origin, path, want=None, pinned=None):
    """Return bytes, info, start and stop of a read."""
    async with origin.read(path, want, pinned) as reply:
        pieces = [piece async for piece in reply.body]
    assert all(isinstance(piece, bytes) and piece for piece in pieces)
    return b"".join(pieces), reply.info, reply.start, reply.stop


async def names(listing):
    found = [(info.path, info.kind) async for info in listing]
    assert len(found) == len(set(found))
    return set(found)


class World(NamedTuple):
    """A bucket or folder that tests change without the origin."""

    root: str
    put: Callable[[str, bytes], object]
    delete: Callable[[str], object]


def folder_of(fs, root):
    """Return a folder of a filesystem, as a world."""
    return World(
        root,
        lambda name, data: fs.pipe_file(f"{root}/{name}", data),
        lambda name: fs.rm_file(f"{root}/{name}"),
    )


class OriginContract:
    """Subclasses give the fixtures `world` and `origin`; the origin has CONCURRENCY slots."""

    missing_folder_is_an_error = False  # whether the origin can distinguish it from an empty one
    folder_read: type[CachedFSError] = IsAFolder
    keeps_versions = False  # whether a replaced version can still be read; its bytes are right then

    @pytest.fixture
    def path(self, world):
        world.put("a/b.bin", DATA)
        return f"{world.root}/a/b.bin"

    # lookup
    async def test_lookup_of_an_object_returns_size_and_version(self, origin, path):
        info = await origin.lookup(path)
        assert (info.path, info.kind, info.size) == (path, "file", len(DATA))
        assert info.fingerprint

    async def test_lookup_of_a_folder_is_a_directory(self, origin, world, path):
        for name in (f"{world.root}/a", f"{world.root}/a/"):
            info = await origin.lookup(name)
            assert (info.path, info.kind, info.fingerprint) == (f"{world.root}/a", "directory", None)

    async def test_a_missing_object_or_bucket_is_object_not_found(self, origin, world, path):
        for wrong in (f"{world.root}-no-such/key", f"{world.root}/a/no-such"):
            for asked in (origin.lookup(wrong), read(origin, wrong), read(origin, wrong, Range(0, 10))):
                with pytest.raises(ObjectNotFound, match=r"://.*no-such"):
                    await asked

    async def test_details_are_json_values_and_datetimes(self, origin, path):
        info = await origin.lookup(path)
        _, reply_info, _, _ = await read(origin, path)
        for details in (info.details, reply_info.details):
            assert not {"name", "size", "type"} & set(details)
            json.dumps(details, default=lambda v: v.isoformat() if isinstance(v, datetime) else 1 / 0)

    # read
    async def test_ranges_are_clipped(self, origin, path):
        size, known = len(DATA), await origin.lookup(path)
        for want, start, stop in (
            (None, 0, size), (Range(100, 300), 100, 300), (Range(10_000, 20_000), 10_000, size), (Range(size, size + 5), size, size),
            (Range(20_000, 20_010), size, size), (Range(7, 7), 7, 7), (Suffix(100), size - 100, size), (Suffix(20_000), 0, size),
        ):  # fmt: skip
            for pinned in (None, known):
                data, info, *span = await read(origin, path, want, pinned)
                assert (data, span) == (DATA[start:stop], [start, stop])
                assert info == known

    async def test_an_empty_object_is_read_as_empty(self, origin, world):
        world.put("empty", b"")
        for want in (None, Range(0, 100), Range(5, 9), Suffix(10)):
            assert (await read(origin, f"{world.root}/empty", want))[0::2] == (b"", 0)
        assert (await origin.lookup(f"{world.root}/empty")).size == 0

    async def test_awkward_names(self, origin, world):
        for name in AWKWARD:
            world.put(name, b"!" + name.encode())
            path = f"{world.root}/{name}"
            assert (await origin.lookup(path)).path == path
            assert (await read(origin, path, Range(1, 1000)))[0] == name.encode()
        found = await names(origin.list(world.root, deep=True))
        assert {(f"{world.root}/{name}", "file") for name in AWKWARD} <= found

    async def test_a_folder_cannot_be_read(self, origin, world, path):
        with pytest.raises(self.folder_read):
            await read(origin, f"{world.root}/a")

    # versions
    async def test_the_fingerprint_is_the_same_from_lookup_list_and_read(self, origin, world, path):
        listed = {info.path: info async for info in origin.list(f"{world.root}/a")}
        _, read_info, _, _ = await read(origin, path, Range(0, 10))
        assert listed[path] == read_info == await origin.lookup(path)

    async def test_the_fingerprint_differs_after_a_replacement_of_the_same_size(self, origin, world, path):
        before = await origin.lookup(path)
        world.put("a/b.bin", DATA[::-1])
        data, after, _, _ = await read(origin, path)
        assert data == DATA[::-1]
        assert after.size == before.size
        assert after.fingerprint != before.fingerprint

    @pytest.mark.parametrize("want", [None, Range(5, 50), Range(7, 7), Range(20_000, 20_001)])
    async def test_a_pinned_read_of_a_replaced_object_is_object_changed(self, origin, world, path, want):
        pinned = await origin.lookup(path)
        before = (await read(origin, path, want, pinned))[0]
        world.put("a/b.bin", DATA[::-1])
        if not self.keeps_versions:
            with pytest.raises(ObjectChanged, match=r"a/b\.bin"):
                await read(origin, path, want, pinned)
            return
        with suppress(ObjectChanged):
            data, info, _, _ = await read(origin, path, want, pinned)
            assert (data, info.fingerprint) == (before, pinned.fingerprint)

    async def test_a_pinned_read_of_a_deleted_object_is_object_changed(self, origin, world, path):
        pinned = await origin.lookup(path)
        world.delete("a/b.bin")
        with pytest.raises(ObjectChanged, match=r"a/b\.bin"):
            await read(origin, path, Range(0, 10), pinned)

    # list
    async def test_list_returns_children_once(self, origin, world, path):
        for name in ("a/c.bin", "a/sub/d.bin", "a/sub/e.bin", "other/f.bin"):
            world.put(name, b"x")
        root = world.root
        for folder in (f"{root}/a", f"{root}/a/"):
            assert await names(origin.list(folder)) == {
                (f"{root}/a/b.bin", "file"),
                (f"{root}/a/c.bin", "file"),
                (f"{root}/a/sub", "directory"),
            }

    async def test_a_deep_list_returns_all_objects_below(self, origin, world, path):
        for name in ("a/sub/d.bin", "a/sub/deeper/e.bin", "other/f.bin"):
            world.put(name, b"x")
        found = await names(origin.list(f"{world.root}/a", deep=True))
        files = {path for path, kind in found if kind == "file"}
        assert files == {f"{world.root}/a/{n}" for n in ("b.bin", "sub/d.bin", "sub/deeper/e.bin")}
        assert found - {(path, "file") for path in files} <= {
            (f"{world.root}/a/{n}", "directory") for n in ("sub", "sub/deeper")
        }

    async def test_an_object_has_no_children(self, origin, path):
        assert await names(origin.list(path)) == set()

    async def test_list_of_a_missing_folder_returns_nothing(self, origin, world, path):
        if self.missing_folder_is_an_error:
            with pytest.raises(ObjectNotFound, match="nowhere"):
                await names(origin.list(f"{world.root}/nowhere"))
        else:
            assert await names(origin.list(f"{world.root}/nowhere")) == set()
        assert await names(origin.list(f"{world.root}/nowhere", deep=True)) == set()

    # Concurrent requests
    async def test_leaving_a_read_early_frees_its_slot(self, origin, world):
        world.put("big", DATA * 400)
        path = f"{world.root}/big"
        for _ in range(5 * CONCURRENCY):
            async with origin.read(path, None, None) as reply:
                async for _ in reply.body:
                    break
        for _ in range(2 * CONCURRENCY):
            with pytest.raises(ConnectionResetError, match="the reader's own"):
                async with origin.read(path, None, None):
                    raise ConnectionResetError("the reader's own")
        assert (await read(origin, path, Range(0, 4)))[0] == DATA[:4]

    async def test_a_cancelled_read_frees_its_slot(self, origin, path):
        for steps in range(3 * CONCURRENCY):
            task = asyncio.ensure_future(read(origin, path))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):  # it may have been complete
                await task
        assert (await read(origin, path))[0] == DATA

    async def test_many_reads_at_once(self, origin, path):
        wants = [Range(i * 10, i * 10 + 500) for i in range(8 * CONCURRENCY)]
        replies = await asyncio.gather(*(read(origin, path, want) for want in wants))
        assert [r[0] for r in replies] == [DATA[w.start : w.stop] for w in wants]

    # Calls of the inner filesystem
    async def test_writes_are_seen_at_once(self, origin, world, path):
        root = world.root
        assert await names(origin.list(f"{root}/a")) == {(path, "file")}
        await origin.call("pipe_file", f"{root}/a/new.bin", b"new")
        assert (await read(origin, f"{root}/a/new.bin"))[0] == b"new"
        assert (await origin.lookup(f"{root}/a/new.bin")).size == 3
        assert (f"{root}/a/new.bin", "file") in await names(origin.list(f"{root}/a"))
        await origin.call("cp_file", path, f"{root}/a/copy.bin")
        assert (await read(origin, f"{root}/a/copy.bin"))[0] == DATA
        await origin.call("rm", [f"{root}/a/copy.bin", f"{root}/a/new.bin"])
        with pytest.raises(ObjectNotFound):
            await origin.lookup(f"{root}/a/copy.bin")
        assert await names(origin.list(f"{root}/a")) == {(path, "file")}

    async def test_errors_of_calls_are_cachedfs_errors(self, origin, world, path):
        with pytest.raises(ObjectNotFound, match="none"):
            await origin.call("cat_file", f"{world.root}/a/none")

    async def test_the_inner_filesystem_can_be_used_from_threads(self, origin, world, path):
        inner, again = await asyncio.gather(origin.filesystem(), origin.filesystem())
        assert inner is again
        assert await asyncio.to_thread(inner.cat_file, path) == DATA

    async def test_requests_are_counted(self, origin, path):
        n_requests = 0

        def count():
            nonlocal n_requests
            n_requests += 1

        folder = await origin.lookup(path.rpartition("/")[0])
        origin.on_request = count
        await origin.lookup(path, folder)
        assert n_requests == 1
