"""Measure batches, and move them to pinned memory or a device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch


def leaves(batch: Any) -> Iterator[Any]:
    """Yield the values in a batch that are no containers."""
    if not isinstance(batch, Mapping | list | tuple | set | frozenset):
        yield batch
        return
    for value in batch.values() if isinstance(batch, Mapping) else batch:
        yield from leaves(value)


def size_of(batch: Any) -> int:
    """Return the bytes of the tensors, arrays, `bytes` and strings in a batch. Other values count as 0."""
    total = 0
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            total += leaf.numel() * leaf.element_size() if leaf.layout == torch.strided else 0
        elif isinstance(leaf, np.ndarray | np.generic | memoryview):
            total += leaf.nbytes
        elif isinstance(leaf, bytes | bytearray | str):
            total += len(leaf)
    return total


def mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of the batch with `change` applied to each tensor; containers keep their types."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, MutableMapping):
        new = copy.copy(batch)  # keeps its type and attributes
        new.update({key: mapped(value, change) for key, value in batch.items()})
        return new
    if isinstance(batch, Mapping):
        return {key: mapped(value, change) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        values = [mapped(value, change) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


class BatchMover:
    """Move batches to pinned memory, or to a device.

    Copies to a CUDA device run on a separate stream, while the training computes. Create it in the thread that takes
    the batches: all batch threads use the current CUDA device of that thread. `pin_memory`: None pins only batches for
    a CUDA device. Without CUDA nothing is pinned.
    """

    def __init__(self, device: torch.device | str | int | None, pin_memory: bool | None) -> None:
        self._device = None if device is None else torch.device(device)
        is_cuda = self._device is not None and self._device.type == "cuda"
        self._pins = torch.cuda.is_available() and (is_cuda if pin_memory is None else pin_memory)
        self._stream: torch.cuda.Stream | None = None
        self._current = torch.cuda.current_device() if is_cuda or self._pins else None
        if is_cuda:
            assert self._device is not None
            if self._device.index is None:
                self._device = torch.device("cuda", self._current)
            self._stream = torch.cuda.Stream(self._device)

    def enter(self) -> None:
        """Set the CUDA device of a batch thread, which would otherwise be the first one."""
        if self._current is not None:
            torch.cuda.set_device(self._current)

    def sent(self, batch: Any) -> tuple[Any, Any]:
        """Start to pin and copy the batch; return it with the CUDA event of its arrival (or None). Thread-safe."""
        if self._pins:
            batch = mapped(batch, lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory())
        if self._device is None:
            return batch, None
        if self._stream is None:
            return mapped(batch, lambda tensor: tensor.to(self._device)), None
        with torch.cuda.stream(self._stream):
            batch = mapped(batch, lambda tensor: tensor.to(self._device, non_blocking=True))
            event = torch.cuda.Event()
            event.record(self._stream)
        return batch, event

    def received(self, batch: Any, event: Any) -> Any:
        """Return the batch for use on the current CUDA stream, which waits for its arrival; this thread does not."""
        if event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(event)
            for leaf in leaves(batch):
                if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                    # Otherwise the copy stream could reuse the memory as soon as the tensor is dropped.
                    leaf.record_stream(stream)
        return batch
