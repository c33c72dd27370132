"""The generic origin: the contract over memory and local files, fingerprints, misbehaving filesystems."""

import asyncio
import gc
import os
import sys
import uuid
import weakref

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from cachedfs.common.types import Range
from cachedfs.common.urls import filesystem_at
from cachedfs.errors import CachedFSError, ObjectChanged
from cachedfs.origins.inner_filesystem import AsyncOnce, close_session, make_private
from cachedfs.origins.registry import identity_of, strip
from tests.origins.contract import DATA, OriginContract, folder_of, read
from tests.support import make_old


class TestOverMemory(OriginContract):
    missing_folder_is_an_error = True

    @pytest.fixture
    def world(self):
        fs, root = MemoryFileSystem(), f"/{uuid.uuid4().hex}"
        yield folder_of(fs, root)
        fs.rm(root, recursive=True) if fs.exists(root) else None

    @pytest.fixture
    async def origin(self, opened):
        return opened("memory")


class TestOverLocalFiles(OriginContract):
    missing_folder_is_an_error = True

    @pytest.fixture
    def world(self, tmp_path):
        def put(name, data):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name("temporary")
            temporary.write_bytes(data)
            make_old(temporary)
            os.replace(temporary, path)  # another inode, even if the clock of the disk is coarse

        (root := tmp_path / "root").mkdir()
        return folder_of(LocalFileSystem(), str(root))._replace(put=put)

    @pytest.fixture
    async def origin(self, opened):
        return opened("file")


# filesystems that misbehave
class _Strange(MemoryFileSystem):
    """A memory filesystem whose answers a test changes."""

    protocol = "strange"
    cachable = False
    store = {}
    pseudo_dirs = [""]

    def info(self, path, **kwargs):
        info = super().info(path, **kwargs)
        return {"name": info["name"], "type": info["type"], **self.evidence(info)}

    def evidence(self, info):
        return {"size": info["size"], "etag": str(info.get("created")), "raw": (b"x",)}

    def cat_file(self, path, start=None, end=None, **kwargs):
        return bytes(self.answer(path, start, end))

    def answer(self, path, start, end):
        return bytes(super().cat_file(path, start, end))


@pytest.fixture
def strange(monkeypatch):
    fsspec.register_implementation("strange", _Strange, clobber=True)
    monkeypatch.setattr(_Strange, "store", {})
    monkeypatch.setattr(_Strange, "pseudo_dirs", [""])
    _Strange().pipe_file("/x", DATA)
    return _Strange


@pytest.fixture
async def origin(strange, opened):
    return opened("strange")


async def test_without_evidence_there_is_no_fingerprint_and_one_warning(origin, strange, monkeypatch):
    monkeypatch.setattr(strange, "evidence", lambda self, info: {"size": info["size"]})
    with pytest.warns(UserWarning, match="nothing of it can be cached safely"):
        known = await origin.lookup("/x")
    assert (await read(origin, "/x"))[0] == DATA  # a second warning would be an error
    data, info, _, _ = await read(origin, "/x", Range(3, 5), known)
    assert (data, info.fingerprint) == (DATA[3:5], None)


@pytest.mark.parametrize("evidence", [{}, {"etag": "x"}])
async def test_an_object_of_unknown_size_is_read_until_it_changes(origin, strange, monkeypatch, evidence):
    monkeypatch.setattr(strange, "evidence", lambda self, info: {"size": None, **evidence})
    monkeypatch.setattr(strange, "answer", lambda self, path, start, end: self.store[path].getvalue())
    with pytest.warns(UserWarning, match="strange:///x"):
        data, pinned, start, stop = await read(origin, "/x", Range(3, 50_000))
    assert (data, start, stop) == (DATA[3:], 3, len(DATA))
    assert (pinned.size, pinned.fingerprint) == (len(DATA), None)
    assert (await read(origin, "/x", Range(3, 9), pinned))[0] == DATA[3:9]
    if evidence:
        evidence["etag"] = "y"
    else:
        strange().pipe_file("/x", DATA + b"more")
    with pytest.raises(ObjectChanged):
        await read(origin, "/x", Range(3, 9), pinned)


async def test_a_whole_body_instead_of_a_range_is_cut_and_a_short_one_refused(origin, strange, monkeypatch):
    monkeypatch.setattr(strange, "answer", lambda self, path, start, end: DATA)
    assert (await read(origin, "/x", Range(3, 50)))[0] == DATA[3:50]
    monkeypatch.setattr(strange, "answer", lambda self, path, start, end: b"short")
    with pytest.raises(ObjectChanged, match="5 bytes came instead of 47"):
        await read(origin, "/x", Range(3, 50))


async def test_an_error_of_a_filesystem_that_no_caller_made_is_ours(origin, strange, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(strange, "evidence", lambda self, info: {"size": -5, "etag": "x"})
        with pytest.raises(CachedFSError, match=r"strange:///x: the origin failed.*a size of -5"):
            await origin.lookup("/x")
    pinned = await origin.lookup("/x")

    def broken(self, path, start, end):
        raise TypeError("a mistake of its own")

    monkeypatch.setattr(strange, "answer", broken)
    with pytest.raises(CachedFSError, match="a mistake of its own") as caught:
        await read(origin, "/x", Range(3, 9), pinned)
    assert not isinstance(caught.value, ObjectChanged)
    strange().pipe_file("/x", DATA[::-1])  # which explains the error
    with pytest.raises(ObjectChanged):
        await read(origin, "/x", Range(3, 9), pinned)


async def test_a_replacement_during_a_read_is_read_again_once(origin, strange, monkeypatch):
    honest, new = strange.answer, DATA[::-1]

    def answer(self, path, start, end):
        data = honest(self, path, start, end)
        self.pipe_file(path, new)
        monkeypatch.setattr(strange, "answer", honest)
        return bytes(data)

    monkeypatch.setattr(strange, "answer", answer)
    assert (await read(origin, "/x"))[0] == new
    monkeypatch.setattr(strange, "answer", answer)
    strange().pipe_file("/x", DATA)
    pinned = await origin.lookup("/x")
    with pytest.raises(ObjectChanged):
        await read(origin, "/x", None, pinned)


async def test_a_file_replaced_within_its_time_is_seen_at_the_next_lookup(origin, strange, monkeypatch):
    now_s = 1767312000.5
    monkeypatch.setattr("cachedfs.origins.fsspec_origin.time.time", lambda: now_s)
    monkeypatch.setattr(strange, "evidence", lambda self, info: {"size": info["size"], "mtime": 1767312000})
    known = await origin.lookup("/x")
    assert (await read(origin, "/x", Range(3, 9), known))[0] == DATA[3:9]  # nothing tells of a change
    assert (await read(origin, "/x"))[1].fingerprint != known.fingerprint
    now_s += 2
    old = await origin.lookup("/x")
    assert (await read(origin, "/x"))[1].fingerprint == old.fingerprint


async def test_a_large_object_is_read_in_pieces_each_verified(origin, strange, monkeypatch):
    monkeypatch.setattr("cachedfs.origins.fsspec_origin._PIECE", 1000)
    assert (await read(origin, "/x"))[0] == DATA
    async with origin.read("/x", None, None) as reply:
        assert await anext(reply.body) == DATA[:1000]
        strange().pipe_file("/x", DATA[::-1])
        with pytest.raises(ObjectChanged):
            await anext(reply.body)


# making the filesystem
@pytest.mark.parametrize(
    ("protocol", "package", "advice"),
    [("abfs", "adlfs", "adlfs"), ("s3", "s3fs", r"pip install .cachedfs\[s3\]")],
)
async def test_a_missing_package_is_an_import_error_that_names_it(
    monkeypatch, protocol, package, advice, opened
):
    for name in (package, f"{package}.core"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(_registry, protocol, raising=False)  # imported by another test
    with pytest.raises(
        ImportError, match=rf"{protocol}:// needs {package}, which is not installed .*{advice}"
    ):
        await opened(protocol).lookup("x")
    with pytest.raises(ImportError, match=advice):
        strip("cachedfs", protocol, "b/k")


async def test_a_failed_import_in_a_package_is_named(monkeypatch, tmp_path, opened):
    """An older google-cloud-storage, which another package requires, breaks the import of gcsfs."""
    (tmp_path / "gcsfs.py").write_text("import google.newer\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("gcsfs", "gcsfs.core", "cachedfs.origins.gcs.checked_gcsfs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delitem(_registry, "gs", raising=False)
    message = r"gs:// needs gcsfs, and its import failed: No module named 'google.newer'\. .*`pip check`"
    with pytest.raises(ImportError, match=message):
        filesystem_at("cachedfs::gs://b/k", {})
    with pytest.raises(ImportError, match=message):
        await opened("gs").lookup("b/k")


async def test_a_failed_creation_is_raised_by_all_callers_and_retried_later():
    n_made = 0

    async def make():
        nonlocal n_made
        n_made += 1
        await asyncio.sleep(0)
        if n_made == 1:
            raise OSError("once")
        return n_made

    once = AsyncOnce(make)
    first, second = await asyncio.gather(once.get(), once.get(), return_exceptions=True)
    assert isinstance(first, OSError)
    assert first is second
    assert await asyncio.gather(once.get(), once.get()) == [2, 2]
    assert (once.take(), once.take()) == (2, None)


async def test_clients_of_adlfs_are_closed_once_and_not_at_the_end_of_the_process(strange):
    closed, inner = [], strange()

    class Client:
        async def close(self):
            closed.append("client")

    inner.service_client = Client()
    finalizer = weakref.finalize(inner, closed.append, "finalizer")
    await close_session(inner)
    assert (closed, finalizer.alive) == (["client"], False)


def test_wrapped_filesystems_are_private_too():
    given = {"fo": "x", "target_protocol": "dir", "target_options": {"target_protocol": "memory"}}
    private = make_private(given)
    assert private["target_options"]["skip_instance_cache"]
    assert private["target_options"]["target_options"] == {"skip_instance_cache": True}
    assert given == {"fo": "x", "target_protocol": "dir", "target_options": {"target_protocol": "memory"}}


# identity
@pytest.mark.parametrize(
    ("protocol", "options", "environ", "expected"),
    [
        ("gs", {}, {}, "gs|storage.googleapis.com|auth"),
        ("gcs", {"token": "anon"}, {}, "gs|storage.googleapis.com|anon"),
        ("gs", {}, {"STORAGE_EMULATOR_HOST": "http://Me:99/"}, "gs|me:99|auth"),
        ("gs", {}, {"STORAGE_EMULATOR_HOST": "localhost:99"}, "gs|localhost:99|auth"),
        ("gs", {}, {"STORAGE_EMULATOR_HOST": "default"}, "gs|storage.googleapis.com|auth"),
        ("gs", {"endpoint_url": "https://x.y:1/"}, {"STORAGE_EMULATOR_HOST": "z"}, "gs|x.y:1|auth"),
        ("gs", {}, {"GOOGLE_CLOUD_UNIVERSE_DOMAIN": "u.com"}, "gs|storage.u.com|auth"),
        ("memory", {}, {}, "memory||-"),
        ("local", {}, {}, "file||-"),
    ],
)
def test_identity(protocol, options, environ, expected):
    assert identity_of(protocol, options, environ=environ) == expected


def azure(account, key, endpoint="http://h:1"):
    return f"DefaultEndpointsProtocol=http;AccountName={account};AccountKey={key}==;BlobEndpoint={endpoint};"


@pytest.mark.parametrize(
    ("protocol", "same", "others"),
    [
        ("s3", [{"key": "k", "secret": "s"}, {"key": "k2", "secret": "s2"}], [{}, {"anon": True}]),
        ("s3", [{"session": object()}, {"session": object()}], [{}]),
        ("s3", [{"endpoint_url": "http://u:pw@h:1"}, {"endpoint_url": "http://u:pw@h:1"}], [{"endpoint_url": "http://b"}]),
        (
            "s3",
            [{"client_kwargs": {"region_name": "a", "aws_session_token": token}} for token in "12"],
            [{"client_kwargs": {"region_name": "b", "aws_session_token": "1"}}],
        ),
        (
            "abfs",
            [{"connection_string": azure("a", "k")}, {"connection_string": azure("a", "other")}],
            [{"connection_string": azure("b", "k")}, {"connection_string": azure("a", "k", "http://h:2")}],
        ),
    ],
)  # fmt: skip
def test_identity_distinguishes_places_and_contains_no_secret(protocol, same, others):
    first, *rest = (identity_of(protocol, options, environ={}) for options in [*same, *others])
    assert rest[: len(same) - 1] == [first] * (len(same) - 1)
    assert len({first, *rest[len(same) - 1 :]}) == 1 + len(others)
    assert "pw" not in first


@pytest.mark.parametrize(
    ("protocol", "variable", "values"),
    [
        ("s3", "AWS_ENDPOINT_URL", "ab"), ("s3a", "AWS_ENDPOINT_URL_S3", "ab"), ("s3", "AWS_PROFILE", "ab"),
        ("az", "AZURE_STORAGE_ACCOUNT_NAME", "ab"),
        ("abfs", "AZURE_STORAGE_CONNECTION_STRING", [azure("a", "k"), azure("b", "k")]),
    ],
)  # fmt: skip
def test_identity_distinguishes_places_named_by_the_environment(protocol, variable, values):
    found = {
        identity_of(protocol, {}, environ=each) for each in ({}, *({variable: value} for value in values))
    }
    assert len(found) == 3


def test_identity_includes_fsspec_configuration(monkeypatch):
    monkeypatch.setitem(fsspec.config.conf, "gcs", {"token": "anon"})
    assert identity_of("gs", {}, environ={}).endswith("|anon")
    assert identity_of("gs", {"token": None}, environ={}).endswith("|auth")


async def test_an_error_of_a_shared_attempt_is_freed_with_its_callers():
    class Failure(Exception):
        pass

    async def fail():
        raise Failure

    once = AsyncOnce(fail)

    async def failed():
        try:
            await once.get()
        except Failure as error:
            return weakref.ref(error)

    left = [await failed() for _ in range(2)]
    await asyncio.sleep(0)  # callbacks of the attempts run
    gc.collect()
    assert [ref() for ref in left] == [None, None]
