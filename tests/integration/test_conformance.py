"""The conformance suites of fsspec and zarr on cachedfs over memory and simulated GCS.

tests/origins/drive/test_drive_filesystem.py has those of fsspec for Google Drive.
"""

import fsspec
import fsspec.tests.abstract as suites
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from zarr.core.buffer import cpu
from zarr.storage import FsspecStore
from zarr.testing.stateful import ZarrHierarchyStateMachine, ZarrStoreStateMachine
from zarr.testing.store import StoreTests


# fsspec.
def filesystem(tmp_path_factory, protocol, **options):
    return fsspec.filesystem(
        protocol, cache_dir=str(tmp_path_factory.mktemp("cache")), keep_free=0, **options
    )


class Suites(
    suites.AbstractCopyTests,
    suites.AbstractGetTests,
    suites.AbstractPutTests,
    suites.AbstractPipeTests,
    suites.AbstractOpenTests,
    suites.AbstractFixtures,
):
    # Two suites have a test of this name.
    test_put_as_list = suites.AbstractPutTests.test_copy_with_source_and_destination_as_list

    @pytest.fixture
    def fs_join(self):
        return lambda *parts: "/".join(parts)


class TestOverMemory(Suites):
    @pytest.fixture(scope="class")
    @classmethod
    def fs(cls, tmp_path_factory):
        MemoryFileSystem.store.clear()
        yield filesystem(tmp_path_factory, "cachedfs", target_protocol="memory")
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]

    @pytest.fixture
    def fs_path(self):
        return ""


class TestOverGCS(Suites):
    # Patterns are expanded from what `find` returns, the same for all origins.
    test_copy_glob_edge_cases = test_get_glob_edge_cases = test_put_glob_edge_cases = None

    @pytest.fixture(scope="class")
    @classmethod
    def fs(cls, gcs_server, tmp_path_factory):
        gcs_server.make_bucket("conformance")
        origin = {"token": "anon", "endpoint_url": gcs_server.endpoint_url}
        return filesystem(tmp_path_factory, "cgs", gs=origin)

    @pytest.fixture
    def fs_path(self):
        return "conformance"

    @pytest.fixture
    def supports_empty_directories(self):
        return False


# zarr.
@pytest.fixture
def prefix(cloud):
    return cloud.path("store")


@pytest.fixture
def options(cloud):
    """Options that are pickled with a store."""
    return {"cache_dir": str(cloud.cache_dir), "keep_free": 0, **cloud.options}


class TestStore(StoreTests[FsspecStore, cpu.Buffer]):
    """The store tests of zarr; `set` and `get` bypass the store and access the origin."""

    store_cls = FsspecStore
    buffer_cls = cpu.Buffer

    @pytest.fixture
    def store_kwargs(self, prefix, options):
        fs = fsspec.filesystem("cachedfs", target_protocol="gs", asynchronous=True, **options)
        return {"fs": fs, "path": prefix}

    async def set(self, store, key, value):
        aside = fsspec.filesystem(
            "cgs", **{**store.fs.storage_options, "asynchronous": False, "target_protocol": "gs"}
        )
        aside.pipe_file(f"{store.path}/{key}", value.to_bytes())

    async def get(self, store, key):
        return self.buffer_cls.from_bytes(store.fs.origin_fs.cat_file(f"{store.path}/{key}"))

    def test_store_repr(self, store):
        assert str(store) == f"<FsspecStore(CachedFileSystem, {store.path})>"

    def test_store_supports_writes(self, store):
        assert store.supports_writes

    def test_store_supports_listing(self, store):
        assert store.supports_listing


FEW_EXAMPLES = settings(
    max_examples=6,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


class Mended(FsspecStore):
    """A store without two faults of zarr's own, which it has over gcsfs and memory as well.

    `clear` of 3.1.6 ends, silently, at the first folder that went with its parent. `getsize_prefix` of 3.4.2 counts an
    object that has the very name of the folder.
    """

    async def clear(self):
        await self.delete_dir("")

    async def getsize_prefix(self, prefix):
        keys = [key async for key in self.list_prefix(prefix) if not prefix or key.startswith(f"{prefix}/")]
        return sum([await self.getsize(key) for key in keys])


@pytest.mark.filterwarnings("ignore:The data type")  # zarr, for the types that its state machine tries
@pytest.mark.filterwarnings("ignore:The codec")
@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize("machine", [ZarrHierarchyStateMachine, ZarrStoreStateMachine])
def test_the_state_machines_of_zarr_pass(machine, prefix, options):
    def make():
        fs = fsspec.filesystem("cachedfs", target_protocol="gs", asynchronous=True, **options)
        return machine(Mended(fs, path=prefix))

    run_state_machine_as_test(make, settings=FEW_EXAMPLES)
