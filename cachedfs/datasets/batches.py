"""Measure batches, and move them to pinned memory or a device.

The containers in a batch keep their types.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

__all__ = ["BatchMover", "mapped", "size_of"]


def leaves(batch: Any) -> Iterator[Any]:
    """Yield all values in a batch that are not containers."""
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, list | tuple | set | frozenset):
        yield batch
        return
    for value in batch:
        yield from leaves(value)


def size_of(batch: Any) -> int:
    """Return the total bytes of the tensors, arrays, `bytes` and strings in a batch.

    Other values count as 0.
    """
    return sum(map(_leaf_size, leaves(batch)))


def _leaf_size(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor):
        return leaf.numel() * leaf.element_size() if leaf.layout == torch.strided else 0
    if isinstance(leaf, np.ndarray | np.generic | memoryview):
        return leaf.nbytes
    if isinstance(leaf, bytes | bytearray | str):
        return len(leaf)
    return 0


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
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(mapped(value, change) for value in batch)
    return batch


class BatchMover:
    """Move batches to where the training wants them: to pinned memory, or to a device.

    Copies to a CUDA device run on a separate stream, while the training computes. Create it in the thread that takes
    the batches: all batch threads use the current CUDA device of that thread.
    """

    def __init__(self, device: torch.device | str | int | None, pin_memory: bool | None) -> None:
        """Set the target.

        `pin_memory`: None pins only batches for a CUDA device. Without CUDA nothing is pinned.
        """
        self._device = None if device is None else torch.device(device)
        is_cuda = self._device is not None and self._device.type == "cuda"
        self._pins = torch.cuda.is_available() and (is_cuda if pin_memory is None else pin_memory)
        self._stream: torch.cuda.Stream | None = None
        self._current: int | None = None
        if is_cuda or self._pins:
            self._current = torch.cuda.current_device()
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
        """Start to pin and copy the batch; return it with the CUDA event of its arrival (or None).

        Thread-safe.
        """
        if self._pins:
            batch = mapped(batch, _pinned)
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
        """Return the batch for use on the current CUDA stream.

        The stream waits for its arrival, not this thread.
        """
        if event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(event)
            for leaf in leaves(batch):
                if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                    # Otherwise the copy stream could reuse the memory as soon as the tensor is dropped.
                    leaf.record_stream(stream)
        return batch


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_cuda else tensor.pin_memory()
