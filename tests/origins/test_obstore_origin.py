"""An obstore store as an origin: the contract over memory, local files, and the simulated S3; identities."""

from functools import partial
from pathlib import Path

import pytest

from cachedfs.errors import ObjectChanged, ObjectNotFound
from cachedfs.origins.obstore_origin import identity_of_store, root_of_store
from tests.origins.contract import DATA, OriginContract, World
from tests.support import make_old

stores = pytest.importorskip("obstore.store")


class ObstoreContract(OriginContract):
    folder_read = ObjectNotFound

    @pytest.fixture
    def world(self, store):
        root = f"{root_of_store(store)}/root".strip("/")
        return World(root, partial(self.put, store), lambda name: store.delete(f"root/{name}"))

    def put(self, store, name, data):
        store.put(f"root/{name}", data)

    @pytest.fixture
    async def origin(self, store, opened):
        return opened("obstore", store=store, identity="")

    async def test_writes_are_seen_at_once(self, origin, path):
        with pytest.raises(NotImplementedError, match="no pipe_file: use the store itself"):
            await origin.call("pipe_file", path, b"new")

    test_errors_of_calls_are_cachedfs_errors = None  # there are no calls

    async def test_the_inner_filesystem_can_be_used_from_threads(self, origin):
        with pytest.raises(NotImplementedError, match="use the store itself"):
            await origin.filesystem()


class TestOverMemory(ObstoreContract):
    @pytest.fixture
    def store(self):
        return stores.MemoryStore()


class TestOverLocalFiles(ObstoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return stores.LocalStore(tmp_path)

    def put(self, store, name, data):
        super().put(store, name, data)
        make_old(Path(store.prefix, "root", name))


class TestOverS3(ObstoreContract):
    @pytest.fixture
    def store(self, s3):
        options = {"endpoint": s3.server.endpoint_url, "client_options": {"allow_http": True}}
        return stores.S3Store(s3.name, access_key_id="an-id", secret_access_key="a-secret", **options)


# Identity.
def s3_store(bucket="b", **config):
    if "access_key_id" in config:
        config.setdefault("secret_access_key", "s")
    return stores.S3Store(bucket, **config)


def of(store, account=None, **environ):
    return identity_of_store(store, account, environ)


def test_the_identity_names_the_bucket_and_the_account_and_no_secret():
    same = [
        of(s3_store(access_key_id="k")),
        of(s3_store(access_key_id="k", secret_access_key="other", session_token="t", prefix="p")),
        of(s3_store(region="eu-west-1", access_key_id="k", virtual_hosted_style_request=True)),
        of(s3_store(), AWS_ACCESS_KEY_ID="k", AWS_SECRET_ACCESS_KEY="s", AWS_REGION="r"),
    ]
    assert len({*same}) == 1
    others = [
        same[0],
        of(s3_store()),
        of(s3_store(skip_signature=True)),
        of(s3_store(access_key_id="k2")),
        of(s3_store(access_key_id="k", endpoint="http://e")),
        of(s3_store(), AWS_ACCESS_KEY_ID="k", AWS_ENDPOINT_URL="http://e"),
        of(s3_store("c", access_key_id="k")),
        of(s3_store(access_key_id="k"), "me"),
        of(stores.GCSStore("b", config={"bearer_token": "t"})),
        of(stores.GCSStore("b", config={"bearer_token": "u"})),
        of(stores.HTTPStore("https://e/b")),
        of(stores.HTTPStore("http://e/b")),
        of(stores.HTTPStore("https://e/b", client_options={"default_headers": {"x": "y"}})),
        of(stores.MemoryStore()),
        of(stores.MemoryStore()),
    ]
    assert len({*others}) == len(others)
    assert of(s3_store(access_key_id="k"), "me") == of(
        s3_store(skip_signature=True), "me", AWS_ACCESS_KEY_ID="x"
    )
    assert of(s3_store(access_key_id="k"), "me") != of(s3_store("c"), "me")


def test_a_credential_provider_needs_the_name_of_its_account():
    store = s3_store(
        credential_provider=lambda: {"access_key_id": "k", "secret_access_key": "s", "expires_at": None}
    )
    with pytest.raises(ValueError, match="Name the account"):
        of(store)
    assert of(store, "me") == of(s3_store(), "me")


@pytest.mark.parametrize(
    ("store", "root"),
    [
        (lambda: s3_store(prefix="/p/q/"), "b/p/q"),
        (lambda: stores.AzureStore("c", account_name="a", skip_signature=True), "c"),
        (lambda: stores.HTTPStore("https://u:p@e:1/b/"), "e:1/b"),
        (stores.LocalStore, ""),
        (stores.MemoryStore, ""),
    ],
)
def test_the_root_is_bucket_and_prefix(store, root):
    assert root_of_store(store()) == root


# Odd answers.
async def test_a_path_outside_of_the_store_is_not_found(opened):
    with pytest.raises(ObjectNotFound, match="outside of the store"):
        await opened("obstore", store=s3_store(prefix="p"), identity="").lookup("b/q/x")


async def test_a_local_file_that_changes_while_it_is_read_is_object_changed(opened, tmp_path, monkeypatch):
    monkeypatch.setattr("cachedfs.origins.obstore_origin._PIECE", 1000)
    (tmp_path / "x").write_bytes(DATA)
    store = stores.LocalStore(tmp_path)
    origin = opened("obstore", store=store, identity="")
    async with origin.read(f"{root_of_store(store)}/x", None, None) as reply:
        (tmp_path / "x").write_bytes(DATA[::-1] + b"x")
        with pytest.raises(ObjectChanged, match="it was time"):
            async for _ in reply.body:
                pass
