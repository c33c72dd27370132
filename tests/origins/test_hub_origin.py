"""The Hugging Face Hub as an origin: the contract, commits, requests, errors, and reads through the cache."""

import fsspec
import pytest

from cachedfs.common.types import Range
from cachedfs.errors import (
    AccessDenied,
    CachedFSError,
    IsAFolder,
    ObjectChanged,
    ObjectNotFound,
    OriginUnavailable,
    RequestRejected,
)
from cachedfs.origins.hub_origin import HubPath
from cachedfs.origins.registry import identity_of
from cachedfs.origins.retry import RetryPolicy
from tests.hub_world import HubWorld
from tests.origins.contract import DATA, OriginContract, names, read
from tests.support import forget

pytest.importorskip("huggingface_hub")


@pytest.fixture
def world():
    world = HubWorld()
    yield world
    world.close()


@pytest.fixture
def configured(world, monkeypatch):
    """`hf` is configured to use the stand-in."""
    monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": world.endpoint, "token": "hf_secret"})
    return world


@pytest.fixture
async def origin(configured, opened):
    """An origin that repeats no request after a failure."""
    return opened("hf", RetryPolicy(tries=1))


class TestHub(OriginContract):
    missing_folder_is_an_error = True
    keeps_versions = True

    # Nothing is removed from the commit that was looked up.
    test_a_pinned_read_of_a_deleted_object_is_object_changed = None

    async def test_writes_are_seen_at_once(self, origin, world, path):
        await origin.call("pipe_file", f"{world.root}/a/new.txt", b"new")
        assert world.get("a/new.txt") == b"new"
        assert (await origin.lookup(f"{world.root}/a/new.txt")).size == 3
        assert (f"{world.root}/a/new.txt", "file") in await names(origin.list(f"{world.root}/a"))
        await origin.call("rm", f"{world.root}/a/new.txt")
        with pytest.raises(ObjectNotFound):
            await origin.lookup(f"{world.root}/a/new.txt")


# Paths
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("me/model/a/b.json", ("me/model", "model", "me/model", None, "a/b.json")),
        ("datasets/me/data", ("datasets/me/data", "dataset", "me/data", None, "")),
        ("datasets/me/data@v1/x", ("datasets/me/data@v1", "dataset", "me/data", "v1", "x")),
        ("kernels/me/fast/x", ("kernels/me/fast", "kernel", "me/fast", None, "x")),
        ("spaces/me/app@refs/pr/3/a@b", ("spaces/me/app@refs/pr/3", "space", "me/app", "refs/pr/3", "a@b")),
        ("datasets/me/data@a%2Fb/x", ("datasets/me/data@a%2Fb", "dataset", "me/data", "a/b", "x")),
    ],
)  # fmt: skip
def test_a_path_names_a_repository_a_revision_and_a_file(path, expected):
    assert HubPath.of(path) == expected


@pytest.mark.parametrize("path", ["buckets/me/store/x", "datasets/me", "me", ""])
def test_a_path_in_no_repository_is_rejected(path):
    with pytest.raises(RequestRejected, match=rf"hf://{path}: .*OWNER/NAME"):
        HubPath.of(path)


def test_another_endpoint_is_another_origin():
    def of(environ=None, **options):
        return identity_of("hf", options, environ=environ or {})

    mirror = "https://hub.example.com"
    assert len({of(), of({"HF_ENDPOINT": mirror}), of(endpoint=mirror), of(token="x")}) == 4
    assert of(token="x") == of(token="y")


# Commits
@pytest.mark.parametrize("name", ["a.txt", "a.bin"])
async def test_a_branch_is_read_at_the_commit_that_was_looked_up(origin, world, name):
    path, first = world.put(name, DATA), world.head
    pinned = await origin.lookup(path)
    assert pinned.details["commit"] == first
    world.put(name, DATA[::-1])
    assert (await read(origin, path, Range(5, 50), pinned))[0] == DATA[5:50]
    data, now, _, _ = await read(origin, path)
    assert (data, now.details["commit"]) == (DATA[::-1], world.head)
    listed = [info async for info in origin.list(world.root)]
    assert [(info.fingerprint, info.details["commit"]) for info in listed] == [(now.fingerprint, world.head)]


async def test_a_commit_without_a_change_of_a_file_leaves_its_version(origin, world):
    path = world.put("a.bin", DATA)
    before = await origin.lookup(path)
    world.put("b.bin", DATA)
    after = await origin.lookup(path)
    assert before.fingerprint == after.fingerprint
    assert before.details["commit"] != after.details["commit"]


async def test_a_revision_in_the_path_is_the_one_that_is_read(origin, world):
    world.put("a.txt", b"old")
    commit = world.head
    world.put("a.txt", b"new")
    assert (await read(origin, f"{world.root}@{commit}/a.txt"))[0] == b"old"
    assert (await read(origin, f"{world.root}@refs/pr/1/a.txt"))[0] == b"new"
    assert await names(origin.list(f"{world.root}@{commit}")) == {(f"{world.root}@{commit}/a.txt", "file")}
    with pytest.raises(ObjectNotFound, match="no such branch, tag or commit"):
        await read(origin, f"{world.root}@none/a.txt")


async def test_an_answer_with_other_bytes_is_never_used(origin, world):
    pinned = await origin.lookup(world.put("a.txt", DATA))

    def other(answer):
        answer.headers["ETag"] = '"another"'

    world.change = other
    with pytest.raises(ObjectChanged):
        await read(origin, pinned.path, Range(0, 5), pinned)
    world.change = lambda answer: answer.headers.pop("X-Repo-Commit", None)
    with pytest.raises(OriginUnavailable, match="names no commit"):
        await read(origin, pinned.path)


# Requests
@pytest.mark.parametrize(("name", "sent"), [("a.txt", {"resolve": 1}), ("a.bin", {"bytes": 1, "resolve": 1})])
async def test_a_first_read_is_one_request_to_the_hub(origin, world, name, sent):
    path = world.put(name, DATA)
    await read(origin, path)
    assert world.counts() == sent
    with pytest.raises(IsAFolder):
        await read(origin, f"{world.put('folder/b.txt', DATA).rpartition('/')[0]}")
    assert world.counts() == {"api": 1, "resolve": 1}


async def test_the_token_is_sent_to_the_hub_only(origin, world):
    await read(origin, world.put("a.bin", DATA))
    assert world.tokens == [("resolve", "Bearer hf_secret"), ("bytes", None)]


# Errors
@pytest.mark.parametrize(
    ("status", "headers", "error", "text"),
    [
        (401, {"X-Error-Code": "RepoNotFound"}, AccessDenied, "hf auth login"),
        (401, {"X-Error-Message": "Invalid credentials"}, AccessDenied, "hf auth login.*Invalid credentials"),
        (403, {"X-Error-Code": "GatedRepo"}, AccessDenied, "accept the conditions"),
        (404, {}, OriginUnavailable, "does not look like one of the Hub"),
        (404, {"X-Error-Code": "RepoNotFound"}, ObjectNotFound, "no such repository"),
        (429, {"RateLimit": '"resolvers";r=0;t=290'}, OriginUnavailable, "429.*Too many requests"),
        (402, {}, CachedFSError, "unexpected answer.*402"),
    ],
)  # fmt: skip
async def test_an_error_says_what_to_do(origin, world, status, headers, error, text):
    path = world.put("a.txt", DATA)

    def refuse(answer):
        answer.status, answer.headers, answer.body = status, dict(headers), b""

    world.change = refuse
    with pytest.raises(error, match=rf"hf://{path}: .*{text}"):
        await read(origin, path)


# Through the cache
@pytest.fixture
def hub(configured, own_cache):
    """The stand-in with three files; each reading of them is that of a new process."""
    for name in ("train/0.bin", "train/1.bin", "README.md"):
        configured.put(name, name.encode() * 1000)
    return configured


def test_files_are_read_from_the_hub_once(hub):
    url = f"cachedfs::hf://{hub.root}"
    for sent in ({"bytes": 2, "resolve": 3}, {}):
        for name in ("train/0.bin", "train/1.bin", "README.md"):
            with fsspec.open(f"{url}/{name}") as file:
                assert file.read() == name.encode() * 1000
        forget()
        assert hub.counts() == sent


def test_a_dataset_is_loaded_from_the_hub(hub, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.endpoint)  # which it passes on
    rows = "".join(f'{{"n": {n}}}\n' for n in range(1000))
    url = f"cachedfs::hf://{hub.put('rows.jsonl', rows.encode())}"
    for sent in ({"resolve": 3}, {}):  # datasets looks it up twice, with other options each time
        loaded = datasets.load_dataset(
            "json", data_files=url, split="train", cache_dir=str(tmp_path / str(sent))
        )
        assert loaded["n"][:] == [*range(1000)]
        forget()
        assert hub.counts() == sent
