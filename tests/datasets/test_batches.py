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


BATCH = {
    "pair": Pair(torch.zeros(3, 4), "cat"),  # 48 bytes and 3
    "list": [torch.ones(2, dtype=torch.bool), (np.zeros(5, np.int16), b"abc")],  # 2 + 10 + 3
    "encoding": Encoding(ids=torch.zeros(4)),  # 16
    "fixed": types.MappingProxyType({"a": torch.zeros(1)}),  # 4
    "ordered": collections.OrderedDict(b=np.float32(1), a=1),  # 4
    "set": {7, None, 1.5},
}


def test_the_size_of_a_batch_counts_nested_tensors_arrays_and_strings():
    assert size_of(BATCH) == 90


def test_nested_tensors_are_moved_in_containers_of_the_same_type():
    moved = mapped(BATCH, lambda tensor: tensor.to("meta"))
    tensors = [moved["pair"].image, moved["list"][0], moved["encoding"]["ids"], moved["fixed"]["a"]]
    assert [tensor.device.type for tensor in tensors] == ["meta"] * 4
    kinds = [type(moved["pair"]), type(moved["encoding"]), type(moved["ordered"]), type(moved["list"][1])]
    assert kinds == [Pair, Encoding, collections.OrderedDict, tuple]
    assert BATCH["pair"].image.device.type == BATCH["encoding"]["ids"].device.type == "cpu"


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
