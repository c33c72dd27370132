"""`CachedStore`: obspec's protocols over URLs and over obstore stores; identities, versions, errors, processes."""

import asyncio
import datetime
import pickle

import numpy as np
import obspec
import pytest
from obspec.exceptions import NotFoundError, map_exception
from obspec_utils.protocols import ReadableStore

from cachedfs.errors import ObjectChanged
from cachedfs.obspec import CachedStore
from tests.support import forget, make_old, noise

stores = pytest.importorskip("obstore.store")

DATA = noise(3 << 20, seed=5)
PROTOCOLS = [
    getattr(obspec, name + suffix)
    for name in ("Get", "GetRange", "GetRanges", "Head", "List", "ListWithDelimiter")
    for suffix in ("", "Async")
]


def gcs_store(cloud, token="t", **options):
    return stores.GCSStore(
        cloud.bucket,
        config={"base_url": cloud.server.endpoint_url, "bearer_token": token},
        client_options={"allow_http": True},
        retry_config={"max_retries": 0, "retry_timeout": datetime.timedelta(seconds=10)},
        **options,
    )


@pytest.fixture(params=["URL", "GCSStore", "LocalStore"])
def store(request, cloud, tmp_path):
    """A store with the objects a/0.bin, a/b/1.bin and c.bin, made in each way."""
    match request.param:
        case "URL":
            store = CachedStore(f"gs://{cloud.bucket}/top", **cloud.options)
        case "GCSStore":
            store = CachedStore(gcs_store(cloud, prefix="top"))
        case _:
            store = CachedStore(stores.LocalStore(tmp_path / "local", mkdir=True), prefix="top")
    for path, data in {"a/0.bin": DATA, "a/b/1.bin": b"one", "c.bin": b"see", "empty": b""}.items():
        if request.param == "LocalStore":
            (tmp_path / "local" / "top" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "local" / "top" / path).write_bytes(data)
            make_old(tmp_path / "local" / "top" / path)
        else:
            cloud.put(f"top/{path}", data)
    return store


class Both:
    """Calls the methods of a store, and checks that the asynchronous ones return the same."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        def call(*args, **options):
            async def same():
                return await getattr(self._store, f"{name}_async")(*args, **options)

            found = getattr(self._store, name)(*args, **options)
            assert asyncio.run(same()) == found
            return found

        return call

    def list(self, *args, **options):
        async def same():
            return [page async for page in self._store.list_async(*args, **options)]

        pages = list(self._store.list(*args, **options))
        assert asyncio.run(same()) == pages
        return [row for page in pages for row in page]


@pytest.fixture
def both(store):
    return Both(store)


def test_it_has_the_methods_of_the_protocols(store):
    assert isinstance(store, ReadableStore)
    for protocol in PROTOCOLS:
        (name,) = (each for each in vars(protocol) if not each.startswith("_"))
        ours, theirs = getattr(CachedStore, name), getattr(protocol, name)
        n_given = theirs.__code__.co_argcount + theirs.__code__.co_kwonlyargcount
        assert ours.__code__.co_varnames[:n_given] == theirs.__code__.co_varnames[:n_given]
        assert ours.__code__.co_argcount == theirs.__code__.co_argcount
        assert asyncio.iscoroutinefunction(ours) == asyncio.iscoroutinefunction(theirs)


def test_ranges(both):
    assert both.get_range("a/0.bin", start=5, end=9) == DATA[5:9]
    assert both.get_range("a/0.bin", start=np.int64(5), length=np.int64(4)) == DATA[5:9]
    assert both.get_range("a/0.bin", start=len(DATA) - 2, length=100) == DATA[-2:]
    starts = [0, 2 << 20, 7]
    expected = [DATA[start : start + 3] for start in starts]
    assert both.get_ranges("a/0.bin", starts=starts, lengths=[3] * 3) == expected
    assert both.get_ranges("a/0.bin", starts=starts, ends=[start + 3 for start in starts]) == expected
    assert both.get_ranges("a/0.bin", starts=[], ends=[]) == []
    assert both._store.get("empty", options={"range": {"suffix": 5}}).buffer() == b""
    assert both.get_ranges("a/0.bin", starts=[0, 5], lengths=[2, 2], coalesce=0) == [DATA[:2], DATA[5:7]]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"start": 0}, "either an end or a length"),
        ({"start": -1, "end": 5}, "either an end or a length"),
        ({"start": 9, "end": 12}, "no bytes in a range from"),
    ],
)
def test_a_wrong_range_is_an_error(store, wrong, why):
    with pytest.raises(ValueError, match=why):
        store.get_range("c.bin", **wrong)
    with pytest.raises(ValueError, match="there are 2 starts, but 1 ends"):
        store.get_ranges("c.bin", starts=[0, 5], ends=[3])


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ((0, -3), "has a negative number"), ({"suffix": -1}, "has a negative number"),
        ({"offset": 1, "suffix": 2}, "it must be"), ((1,), "it must be"), ({"offset": 1.0}, "it must be"),
        ((2, 2), "no bytes in a range from"), ({"offset": 3}, "no bytes in a range from"),
    ],
)  # fmt: skip
def test_a_wrong_range_of_get_is_an_error(store, wanted, why):
    with pytest.raises(ValueError, match=rf"c\.bin: .*{why}"):
        store.get("c.bin", options={"range": wanted})
    with pytest.raises(NotImplementedError, match="no option if_match"):
        store.get("c.bin", options={"range": wanted, "if_match": "x", "version": None})


@pytest.mark.parametrize(
    ("wanted", "start", "stop"),
    [
        (None, 0, len(DATA)),
        ((9, len(DATA) + 9), 9, len(DATA)),
        ({"offset": 1 << 20}, 1 << 20, len(DATA)),
        ({"suffix": len(DATA) + 10}, 0, len(DATA)),
        ({"suffix": 0}, len(DATA), len(DATA)),
    ],
)
def test_get_returns_metadata_and_bytes_of_a_range(store, monkeypatch, wanted, start, stop):
    monkeypatch.setattr("cachedfs.obspec._PIECE", 1 << 20)
    options = {"range": wanted} if wanted else None
    result = store.get("a/0.bin", options=options)
    assert (result.range, result.buffer()) == ((start, stop), DATA[start:stop])
    pieces = [DATA[at : min(at + (1 << 20), stop)] for at in range(start, stop, 1 << 20)]
    assert list(result) == pieces
    assert result.meta == store.head("a/0.bin")

    async def same():
        again = await store.get_async("a/0.bin", options=options)
        return await again.buffer_async(), [piece async for piece in again]

    assert asyncio.run(same()) == (DATA[start:stop], pieces)


def test_metadata_and_listings(both, monkeypatch):
    paths = ["a/0.bin", "a/b/1.bin", "c.bin", "empty"]
    meta = both.head("a/0.bin")
    assert (meta["path"], meta["size"]) == ("a/0.bin", len(DATA))
    assert datetime.datetime.now(datetime.UTC) - meta["last_modified"] < datetime.timedelta(minutes=10)
    assert meta["e_tag"] or meta["version"]
    assert [(row["path"], row["size"]) for row in both.list()] == list(
        zip(paths, [len(DATA), 3, 3, 0], strict=True)
    )
    assert [row["path"] for row in both.list("a")] == [row["path"] for row in both.list("a/")] == paths[:2]
    assert [row["path"] for row in both.list(offset="a/0.bin")] == paths[1:]
    assert both.list("a/0.bin") == both.list("nowhere") == both.list("a/0") == []
    for folder, prefixes, objects in ((None, ["a"], paths[2:]), ("a", ["a/b"], paths[:1])):
        found = both.list_with_delimiter(folder)
        assert (found["common_prefixes"], [row["path"] for row in found["objects"]]) == (prefixes, objects)
    assert found["objects"] == [both.head("a/0.bin")]
    nothing = {"common_prefixes": [], "objects": []}
    assert both.list_with_delimiter("nowhere") == both.list_with_delimiter("c.bin") == nothing
    monkeypatch.setattr("cachedfs.obspec._ROWS", 3)
    assert [len(page) for page in both._store.list()] == [3, 1]


@pytest.mark.parametrize("path", ["none", "a"])
@pytest.mark.parametrize(
    ("name", "options"), [("head", {}), ("get", {}), ("get_range", {"start": 0, "end": 1})]
)
def test_a_missing_object_is_the_error_that_obspec_knows(store, path, name, options):
    async def ask():
        await getattr(store, f"{name}_async")(path, **options)

    for act in (lambda: getattr(store, name)(path, **options), lambda: asyncio.run(ask())):
        with pytest.raises(FileNotFoundError, match=path) as caught:
            act()
        assert isinstance(map_exception(caught.value), NotFoundError)


def test_a_second_read_sends_no_request_even_as_in_a_new_process(store):
    def read():
        before = store.fs.stats().requests
        assert store.head("a/0.bin")["size"] == len(DATA)
        assert store.get("a/0.bin").buffer() == DATA
        assert store.get_ranges("a/0.bin", starts=[0, 9], ends=[5, 10]) == [DATA[:5], DATA[9:10]]
        assert len([*store.list()]) == 1
        return store.fs.stats().requests - before

    assert read() > 0
    assert read() == 0
    forget()
    assert read() == 0


def test_stores_of_one_bucket_and_account_share_blocks(cloud):
    cloud.put("a/b/c.bin", b"abc")

    def asked(path, *, token="t", root=None, prefix="", account=None):
        store = CachedStore(gcs_store(cloud, token, prefix=root), prefix=prefix, account=account)
        assert store.get(path).buffer() == b"abc"
        return cloud.asked()

    assert asked("a/b/c.bin") == ["media"]
    assert asked("c.bin", root="a", prefix="b") == asked("/c.bin", root="/a/b/") == []
    assert asked("a/b/c.bin", token="another") == asked("a/b/c.bin", account="me") == ["media"]
    assert asked("a/b/c.bin", token="another", account="me") == []


def test_a_replaced_object_is_read_again_after_max_age_and_never_mixed(cloud, clock):
    cloud.put("a.bin", DATA)
    store = CachedStore(gcs_store(cloud), max_age=60)
    result = store.get("a.bin", options={"range": (0, 10)})
    assert result.buffer() == DATA[:10]
    forget()  # ends the request, which would go on with the old version
    store.fs.evict()
    cloud.put("a.bin", DATA[::-1])
    with pytest.raises(ObjectChanged, match="it was replaced"):
        store.get("a.bin").buffer()
    clock(61)
    assert store.get("a.bin").buffer() == DATA[::-1]


def test_a_store_with_new_credentials_replaces_one_of_the_same_account(cloud):
    cloud.put("a.bin", b"abc")
    for token in ("expired", "new"):
        given = gcs_store(cloud, token=token)
        assert CachedStore(given, account="me").fs._objects.origin("a.bin").store is given


@pytest.mark.parametrize("made", [lambda cloud: cloud.url(), gcs_store])
def test_a_store_is_pickled(cloud, made):
    cloud.put("a.bin", b"abc")
    store = CachedStore(made(cloud))
    again = pickle.loads(pickle.dumps(store))
    assert again == store
    assert hash(again) == hash(store)
    assert again.get("a.bin").buffer() == b"abc"


def test_a_forked_process_reads_what_is_cached_and_does_not_wait_forever(cloud, tmp_path):
    for name in ("cached", "missing"):
        (tmp_path / name).write_bytes(b"abc")
    printed = cloud.python(
        """
        import os, sys, warnings
        from obstore.store import LocalStore
        from cachedfs.obspec import CachedStore

        warnings.simplefilter("ignore")  # Python 3.12 warns of every fork
        store = CachedStore(LocalStore(sys.argv[1]))
        store.get("cached").buffer()
        if os.fork():
            os.wait()
        else:
            print(store.get("cached").buffer())
            try:
                store.get("missing")
            except OSError as error:
                print(error, flush=True)
            os._exit(0)
        """,
        str(tmp_path),
    )
    assert printed.startswith("b'abc'\n")
    assert "obstore does not work in a process forked" in printed


def test_what_is_no_store_is_an_error(cloud):
    with pytest.raises(TypeError, match="a URL or a store of obstore, not dict"):
        CachedStore({})
    with pytest.raises(ValueError, match="account= is for stores of obstore"):
        CachedStore(cloud.url(), account="me")
    with pytest.raises(ValueError, match=r"'my-bucket'.* has no protocol.*write gs://my-bucket"):
        CachedStore("my-bucket")


def test_a_local_folder_is_a_store(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "k").write_bytes(b"12345")
    monkeypatch.chdir(tmp_path)
    for place in ("folder", "./folder", tmp_path / "folder"):
        assert CachedStore(place).get_range("k", start=1, end=3) == b"23"


@pytest.mark.parametrize(
    ("made", "root", "prefix"),
    [
        (lambda: CachedStore("gs://b/p/q"), "b/p/q", "p/q"),
        (lambda: CachedStore("cdrive://My Drive/p"), "My Drive/p", "p"),
        (lambda: CachedStore("https://h:1/a", prefix="b"), "https://h:1/a/b", "a/b"),
        (lambda: CachedStore(stores.HTTPStore("https://h:1/a"), prefix="b"), "h:1/a/b", "a/b"),
        (lambda: CachedStore(stores.LocalStore("/tmp"), prefix="b"), "tmp/b", "tmp/b"),
        (lambda: CachedStore(stores.MemoryStore(), prefix="/b/"), "b", "b"),
    ],
)
def test_the_prefix_is_the_path_that_a_url_has_behind_its_bucket(made, root, prefix):
    store = made()
    assert (store.root, store.prefix) == (root, prefix)
    assert repr(store).startswith("CachedStore('c")
