"""torch: tensors, checkpoints and workers; safetensors, and the Loader's batches as arrays of JAX."""

import fsspec
import numpy as np
import pytest
import zarr

torch = pytest.importorskip("torch")

from torch.distributed import checkpoint  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from cachedfs.datasets import Loader, ZarrDataset  # noqa: E402
from tests.libraries.data import forking  # noqa: E402
from tests.libraries.opening import Numbers  # noqa: E402

WEIGHTS = {"w": torch.arange(1000.0), "b": torch.ones(3)}


def same(weights):
    return weights.keys() == WEIGHTS.keys() and all(
        torch.equal(weights[name], WEIGHTS[name]) for name in weights
    )


def test_tensors_are_saved_loaded_and_mapped(place):
    url = place.url("a.pt")
    with fsspec.open(url, "wb") as file:
        torch.save(WEIGHTS, file)
    for _ in place.twice(fetches=1):
        with fsspec.open(url) as file:
            assert same(torch.load(file))
        fs = place.fs
        with fs.local_path(url) as path:
            assert same(torch.load(path, mmap=True))


# Without a process group, torch warns.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_a_checkpoint_of_many_ranks(place):
    folder = place.url("step-7")
    checkpoint.save(WEIGHTS, checkpoint_id=folder)
    for _ in place.twice(fetches=2):
        back = {name: torch.zeros_like(value) for name, value in WEIGHTS.items()}
        checkpoint.load(back, checkpoint_id=folder)
        assert same(back)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.works)])
@forking
def test_workers_of_a_data_loader(place, method):
    for i in range(12):
        place.put(f"n/{i}", b"%d" % i)
    for _ in place.twice(fetches=12):
        numbers = Numbers([place.url(f"n/{i}") for i in range(12)])
        batches = DataLoader(numbers, batch_size=4, num_workers=2, multiprocessing_context=method)
        assert torch.cat(list(batches)).tolist() == list(range(12))


def test_safetensors_are_read_whole_and_by_slices(place):
    safetensors = pytest.importorskip("safetensors.torch")
    url = place.url("a.safetensors")
    with fsspec.open(url, "wb") as file:
        file.write(safetensors.save(WEIGHTS))
    for _ in place.twice(fetches=1):
        with fsspec.open(url) as file:
            assert same(safetensors.load(file.read()))
        fs = place.fs
        with fs.local_path(url) as path, safetensors.safe_open(path, "pt") as tensors:
            assert tensors.get_slice("w")[10:20].tolist() == list(range(10, 20))


def test_arrays_of_jax_from_the_loader(place):
    jnp = pytest.importorskip("jax.numpy")
    url, data = place.url("a.zarr"), np.arange(64 * 4, dtype="f4").reshape(64, 4)
    zarr.open_group(url, mode="w").create_array("image", shape=data.shape, chunks=(16, 4), dtype="f4")[:] = (
        data
    )
    for _ in place.twice():
        with Loader(ZarrDataset(url, arrays="image"), batch_size=16) as loader:
            arrays = [jnp.asarray(batch) for batch in loader]
        np.testing.assert_array_equal(np.concatenate(arrays), data)
