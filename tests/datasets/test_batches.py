"""Batches: size in bytes, moving to a device, and as outputs for DALI."""

import collections
import contextlib
import io
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cachedfs.datasets import FileDataset, Loader  # noqa: E402
from cachedfs.datasets.batches import BatchMover, as_arrays, mapped, size_of  # noqa: E402
from cachedfs.datasets.sampler import EpochOrders  # noqa: E402

Pair = collections.namedtuple("Pair", "image label")


class Encoding(collections.UserDict):
    """A mapping of tensors, as tokenizers return it."""


def test_the_size_of_a_batch_counts_nested_tensors_arrays_and_strings():
    batch = {
        "x": torch.zeros(3, 4),  # 48
        "y": [np.zeros(5, np.int16), (b"abc", "de")],  # 10 + 3 + 2
        "z": Pair(torch.zeros(2, dtype=torch.bool), {7, None, 1.5}),  # 2
        "n": np.float32(1),  # 4
    }
    assert size_of(batch) == 69


def test_nested_tensors_are_moved_in_containers_of_the_same_type():
    batch = {
        "pair": Pair(torch.zeros(2), "cat"),
        "list": [torch.ones(1), (torch.ones(1), None)],
        "encoding": Encoding(ids=torch.zeros(4)),
        "fixed": types.MappingProxyType({"a": torch.zeros(1)}),
        "ordered": collections.OrderedDict(b=torch.zeros(1), a=1),
    }
    moved = mapped(batch, lambda tensor: tensor.to("meta"))
    assert type(moved["pair"]) is Pair
    assert type(moved["encoding"]) is Encoding
    assert type(moved["ordered"]) is collections.OrderedDict
    assert type(moved["list"][1]) is tuple
    assert moved["pair"].label == "cat"
    tensors = [
        moved["pair"].image,
        moved["list"][0],
        moved["list"][1][0],
        moved["encoding"]["ids"],
        moved["fixed"]["a"],
        moved["ordered"]["b"],
    ]
    assert [tensor.device.type for tensor in tensors] == ["meta"] * 6
    assert batch["pair"].image.device.type == batch["encoding"]["ids"].device.type == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_nothing_is_pinned_without_cuda():
    mover = BatchMover(None, pin_memory=True)
    mover.enter()
    batch, event = mover.sent([torch.zeros(1)])
    assert not mover.received(batch, event)[0].is_pinned()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_batches_are_copied_on_a_separate_stream_before_use():
    mover = BatchMover("cuda", pin_memory=None)
    mover.enter()
    for i in range(50):
        batch, event = mover.sent({"x": torch.full((1 << 20,), float(i))})
        batch = mover.received(batch, event)
        assert batch["x"].device == torch.device("cuda", torch.cuda.current_device())
        assert batch["x"].sum().item() == i * (1 << 20)


# External sources for DALI: epochs of arrays, by iterating and by calling.


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
