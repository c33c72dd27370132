"""Batches: size in bytes, and moving to a device."""

import collections
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cachedfs.datasets.batches import BatchMover, mapped, size_of  # noqa: E402

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
