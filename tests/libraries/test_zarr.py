"""zarr: arrays and groups, versions 2 and 3, sharded, resized, consolidated."""

import numpy as np
import pytest
import zarr
from zarr.storage import FsspecStore

from cachedfs.obspec import CachedStore
from tests.libraries.data import consolidating
from tests.support import forget


@pytest.mark.parametrize(
    "options",
    [{"zarr_format": 2}, {"zarr_format": 3}, {"zarr_format": 3, "shards": (20, 20)}],
    ids=["v2", "v3", "sharded"],
)
def test_arrays_are_created_opened_and_resized(base, options):
    url, data = f"{base}/a.zarr", np.arange(40 * 40).reshape(40, 40)
    array = zarr.create_array(url, shape=data.shape, chunks=(10, 10), dtype=data.dtype, **options)
    array[:] = data
    for mode in ("r", "r+"):
        np.testing.assert_array_equal(zarr.open(url, mode=mode)[:], data)
    array.resize((60, 40))
    array[40:] = data[:20]
    forget()
    again = zarr.open_array(url, mode="r")
    np.testing.assert_array_equal(again[:], np.concatenate([data, data[:20]]))
    np.testing.assert_array_equal(again[5:8, 33:35], data[5:8, 33:35])


@pytest.mark.parametrize("zarr_format", [2, 3])
@consolidating
def test_groups_with_and_without_consolidation(base, zarr_format):
    url = f"{base}/g.zarr"
    group = zarr.open_group(url, mode="w", zarr_format=zarr_format)
    for name in ("a", "b/c"):
        group.create_array(name, shape=(5,), dtype="i4", chunks=(2,))[:] = np.arange(5)
    assert sorted(name for name, _ in group.members(max_depth=None)) == ["a", "b", "b/c"]
    for consolidate in (False, True):
        if consolidate:
            zarr.consolidate_metadata(url)
        forget()
        opened = zarr.open_group(url, mode="r", use_consolidated=consolidate)
        assert opened["b/c"][:].tolist() == [0, 1, 2, 3, 4]
    del zarr.open_group(url, mode="a", use_consolidated=False)["a"]
    with pytest.raises(KeyError):
        zarr.open_group(url, mode="r", use_consolidated=False)["a"]


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_second_pass_sends_no_request(place, zarr_format):
    url, data = place.url("g.zarr"), np.arange(40 * 40).reshape(40, 40)
    group = zarr.open_group(url, mode="w", zarr_format=zarr_format)
    group.create_array("a", shape=data.shape, chunks=(20, 20), dtype=data.dtype)[:] = data
    for _ in place.twice():
        np.testing.assert_array_equal(zarr.open_group(url, mode="r")["a"][:], data)


def test_a_store_is_made_of_a_url(place):
    url, data = place.url("a.zarr"), np.arange(40 * 40).reshape(40, 40)
    store = FsspecStore.from_url(url)
    zarr.create_array(store, shape=data.shape, chunks=(20, 20), dtype=data.dtype)[:] = data
    for _ in place.twice():
        store = FsspecStore.from_url(url, read_only=True)
        np.testing.assert_array_equal(zarr.open_array(store, mode="r")[:], data)


def test_a_store_without_fsspec_has_a_filesystem_that_zarr_reads(place):
    url, data = place.url("a.zarr"), np.arange(40 * 40).reshape(40, 40)
    zarr.create_array(url, data=data, chunks=(20, 20))
    for _ in place.twice():
        store = CachedStore(url, asynchronous=True)
        array = zarr.open_array(FsspecStore(store.fs, path=store.root, read_only=True), mode="r")
        np.testing.assert_array_equal(array[:], data)


def test_zarr_accepts_only_the_classes_of_obstore(place):
    store = CachedStore(place.url())
    with pytest.raises(TypeError, match="expected ObjectStore class, got CachedStore"):
        zarr.storage.ObjectStore(store)
