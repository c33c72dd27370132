"""What all map-style datasets promise: any index, workers, copies, prefetching, and errors that name the sample."""

import io
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")
h5py = pytest.importorskip("h5py")
zarr = pytest.importorskip("zarr")
pytest.importorskip("pyarrow")

from torch.utils.data import DataLoader  # noqa: E402

from cachedfs.datasets import FileDataset, HDF5Dataset, Loader, ZarrDataset, pack  # noqa: E402
from cachedfs.datasets.samples import reading_s  # noqa: E402
from tests.support import forget  # noqa: E402

N = 24  # samples, of which each is its own number


def files(cloud):
    for i in range(N):
        cloud.put(f"d/{i:02}", b"%d" % i)
    return FileDataset, cloud.url("d")


def hdf5(cloud):
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        file.create_dataset("x", data=np.arange(N), chunks=(5,))
    cloud.put("a.h5", buffer.getvalue())
    return HDF5Dataset, cloud.url("a.h5"), "x"


def shards(cloud):
    group = zarr.create_group(cloud.url("a.zarr"))
    group.create_array("x", shape=(N,), chunks=(2,), shards=(8,), dtype="i8")[:] = np.arange(N)
    return ZarrDataset, cloud.url("a.zarr"), "x"


def packed(cloud):
    _, url = files(cloud)
    pack(url, cloud.url("packed.zarr"), chunk_bytes="1KiB", shard_bytes="1KiB")
    return ZarrDataset, cloud.url("packed.zarr"), "data"


def fail_on_five(sample):
    if int(sample) == 5:
        raise ZeroDivisionError("mine")
    return int(sample)


@pytest.fixture(params=[files, hdf5, shards, packed])
def made(request, cloud):
    """Return a function that makes a dataset of each kind; nothing of its data is cached."""
    kind, *given = request.param(cloud)
    forget()

    def make(transform=int):
        dataset = kind(*given, transform=transform)
        dataset.fs.invalidate_cache()
        dataset.fs.evict()
        cloud.asked()
        return dataset

    return make


def test_samples_have_any_index(made):
    dataset = made()
    for indexes in (range(N), range(N - 1, -1, -1), [7, 7, 0, -1, 7], []):
        assert dataset.__getitems__(indexes) == [i % N for i in indexes]
    assert [dataset[0], dataset[-1], dataset[np.int64(7)]] == [0, N - 1, 7]
    assert list(dataset) == list(range(N))
    for index in (N, -N - 1):
        with pytest.raises(IndexError, match=f"sample {index} of {N}"):
            dataset[index]
    with pytest.raises(TypeError):
        dataset["a"]


def test_workers_and_loaders_read_each_sample_once_and_the_next_epoch_requests_nothing(made, cloud):
    dataset = made()
    assert dataset[3] == 3  # what the parent has open is not used by its workers
    workers = DataLoader(
        dataset,
        batch_size=4,
        shuffle=True,
        num_workers=2,
        multiprocessing_context="fork",
        persistent_workers=True,
    )
    assert sorted(torch.cat(list(workers)).tolist()) == list(range(N))
    cloud.asked()
    with Loader(dataset, batch_size=5, shuffle=True) as loader:
        for batches in (workers, loader):
            assert sorted(torch.cat(list(batches)).tolist()) == list(range(N))
    assert cloud.asked() == []


def test_a_copy_has_what_was_listed_and_reads_by_itself(made, cloud):
    dataset = made()
    data = pickle.dumps(dataset)
    forget()
    copy = pickle.loads(data)
    assert (len(copy), copy.group_size, repr(copy)) == (N, dataset.group_size, repr(dataset))
    assert cloud.asked() == []
    assert copy.__getitems__([9, 2]) == [9, 2]


def test_prefetched_items_are_all_that_an_epoch_reads(made, cloud):
    dataset = made()
    order = np.random.default_rng(0).permutation(N).tolist()
    with dataset.fs.prefetch(dataset.items(order)) as plan:
        plan.wait()
    assert cloud.asked()
    assert pickle.loads(pickle.dumps(dataset)).__getitems__(order) == order
    assert cloud.asked() == []


def test_an_error_of_transform_names_the_sample(made):
    dataset = made(fail_on_five)
    with pytest.raises(ZeroDivisionError, match=r"^mine\n") as caught:
        dataset.__getitems__([4, 5])
    assert caught.value.__notes__[0].startswith(f"in sample 5 of {dataset!r}")
    assert caught.traceback[-1].name == "fail_on_five"


def test_the_wait_for_bytes_is_counted(made):
    before = reading_s()
    made().batch([0, 5])
    assert reading_s() > before
