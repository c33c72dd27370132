"""External sources for DALI: epochs of arrays, by iterating and by calling."""

import contextlib
import io

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cachedfs.datasets import FileDataset, Loader  # noqa: E402
from cachedfs.datasets.batches import as_arrays  # noqa: E402
from cachedfs.datasets.sampler import EpochOrders  # noqa: E402
from tests.support import noise  # noqa: E402


def order(n, epoch):
    return EpochOrders(n, 0, "full").order(epoch).tolist()


def pairs(n):
    return [(torch.full((2, 3), i, dtype=torch.uint8), i) for i in range(n)]


def labels(batch):
    return batch[1].tolist()


def test_iterating_yields_one_epoch_and_again_the_next():
    loader = Loader(pairs(10), batch_size=4, shuffle=True)
    source = loader.external_source()
    for epoch in range(2):
        batches = list(source)
        assert [[type(each) for each in batch] for batch in batches] == [[np.ndarray] * 2] * 3
        assert [image.shape for image, _ in batches] == [(4, 2, 3), (4, 2, 3), (2, 2, 3)]
        assert [label for batch in batches for label in labels(batch)] == order(10, epoch)
    assert loader.epoch == 2


def test_calling_returns_batches_and_raises_once_at_the_end_of_each_epoch():
    call = Loader(pairs(6), batch_size=4, shuffle=True).external_source().batch
    for epoch in range(2):
        assert labels(call()) + labels(call()) == order(6, epoch)
        with pytest.raises(StopIteration):
            call()


def test_after_an_error_the_next_call_tries_again():
    class Sick(list):
        def __getitem__(self, index):
            if sick.pop(index, False):
                raise OSError("not today")
            return super().__getitem__(index)

    sick = {5: True}
    with Loader(Sick(range(8)), batch_size=4, n_threads=1) as loader:
        call = loader.external_source().batch
        assert call().tolist() == [0, 1, 2, 3]
        with pytest.raises(OSError, match="not today"):
            call()
        assert call().tolist() == [4, 5, 6, 7]


def test_arrays_share_the_memory_of_the_tensors():
    tensor, array = torch.zeros(4, 2), np.ones(3)
    assert np.shares_memory(as_arrays(tensor), tensor.numpy())
    found = as_arrays({"x": [tensor], "y": array})
    assert isinstance(found, tuple)
    assert np.shares_memory(found[0], tensor.numpy())
    assert found[1] is array


def test_bytes_of_any_length_are_one_output_of_arrays():
    data = [b"\x01", b"\x02\x03\x04"]
    for batch in (data, tuple(data)):
        alone = as_arrays(batch)
        assert isinstance(alone, list)
        assert [each.tolist() for each in alone] == [[1], [2, 3, 4]]
        assert {each.dtype for each in alone} == {np.dtype(np.uint8)}
    encoded, label = as_arrays({"image": data, "label": torch.tensor([7, 8])})
    assert [each.tolist() for each in encoded] == [[1], [2, 3, 4]]
    assert label.tolist() == [7, 8]
    assert len(as_arrays([data, data])) == 2


def test_samples_that_are_no_tensors_are_refused_by_type():
    with pytest.raises(TypeError, match="the batch has a bytes"):
        as_arrays([torch.zeros(2), b"a"])
    with pytest.raises(TypeError, match="the batch has a str: let collate_fn leave it out"):
        as_arrays([torch.zeros(2), ("a", "b")])


# A real pipeline, on the CPU.


def files(cloud, n):
    for i in range(n):
        cloud.put(f"d/{i:03}", bytes([i]) + noise(99, i))
    return FileDataset(cloud.url("d"), decode=as_tensor)


def as_tensor(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def make_pipeline(source, **options):
    dali = pytest.importorskip("nvidia.dali")

    @dali.pipeline_def(batch_size=8, num_threads=2, device_id=None)
    def pipeline():
        data = dali.fn.external_source(source, dtype=dali.types.UINT8, batch=True, **options)
        return dali.fn.cast(data, dtype=dali.types.INT32)

    made = pipeline()
    made.build()
    return made


def test_a_dali_pipeline_decodes_images_read_by_the_loader(cloud):
    dali, images = pytest.importorskip("nvidia.dali"), pytest.importorskip("PIL.Image")
    for i in range(10):
        buffer = io.BytesIO()
        images.new("RGB", (10 + i, 5), (i, 2 * i, 3 * i)).save(buffer, "PNG")
        cloud.put(f"images/{i}.png", buffer.getvalue())

    @dali.pipeline_def(batch_size=4, num_threads=2, device_id=None)
    def pipeline(source):
        encoded, label = dali.fn.external_source(source, num_outputs=2, batch=True, cycle="raise")
        return dali.fn.decoders.image(encoded), label

    dataset = FileDataset(cloud.url("images"), label=lambda path: int(path[-5]))
    with Loader(dataset, batch_size=4, shuffle=True) as loader:
        pipe = pipeline(loader.external_source())
        pipe.build()
        found = {}
        with contextlib.suppress(StopIteration):
            while True:
                pixels, labels = pipe.run()
                found |= dict(zip(labels.as_array().tolist(), map(np.asarray, pixels), strict=True))
    assert sorted(found) == list(range(10))
    for i, image in found.items():
        assert image.shape == (5, 10 + i, 3)
        assert (image == [i, 2 * i, 3 * i]).all()


def run(pipeline):
    """Return the first bytes of all samples until the epoch is over."""
    found = []
    while True:
        try:
            (batch,) = pipeline.run()
        except StopIteration:
            return found
        found += [int(np.asarray(sample)[0]) for sample in batch]


def test_a_dali_pipeline_gets_each_epoch_in_order(cloud):
    with Loader(files(cloud, 20), batch_size=8, shuffle=True) as loader:
        pipeline = make_pipeline(loader.external_source(), cycle="raise")
        for epoch in range(3):
            assert run(pipeline) == order(20, epoch)
            pipeline.reset()
    assert cloud.asked().count("media") == 20


def test_a_dali_pipeline_may_call_instead_of_iterate(cloud):
    with Loader(files(cloud, 20), batch_size=8, shuffle=True) as loader:
        pipeline = make_pipeline(loader.external_source().batch)
        assert run(pipeline) == order(20, 0)
        pipeline.reset()
        assert run(pipeline) == order(20, 1)
