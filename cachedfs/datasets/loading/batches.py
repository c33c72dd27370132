"""Batches: what their tensors take, and where they are. Tuples, dicts and named tuples of a batch stay what they are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

__all__ = ["BatchMover", "mapped", "size_of"]


def leaves(batch: Any) -> Iterator[Any]:
    """Yield everything in a batch that is no container."""
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, list | tuple | set | frozenset):
        yield batch
        return
    for value in batch:
        yield from leaves(value)


def size_of(batch: Any) -> int:
    """Return the bytes that the tensors, arrays, strings of bytes and texts of a batch take; other things count as nothing."""
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
    """Return the batch with each tensor in it changed; containers are new ones of their kind."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, MutableMapping):
        new = copy.copy(batch)  # of whatever kind, with what else it has
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
    """Brings batches to where a training wants them: into pinned memory, to a device.

    To a CUDA device they are copied on a stream of their own, while the training computes. Made in the thread that takes
    the batches: its current CUDA device is that of all threads.
    """

    def __init__(self, device: torch.device | str | int | None, pin_memory: bool | None) -> None:
        """`pin_memory`: None pins what goes to a CUDA device. Without CUDA nothing is pinned."""
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
        """Begin in a thread that makes batches: else all of them were to use the first device."""
        if self._current is not None:
            torch.cuda.set_device(self._current)

    def sent(self, batch: Any) -> tuple[Any, Any]:
        """Return the batch pinned and on its way to the device, and the event of its arrival, or None. In any thread."""
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
        """Return the batch for use on the current stream, which waits for its arrival; this thread does not."""
        if event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(event)
            for leaf in leaves(batch):
                if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                    # Else its memory was the other stream's again when it is dropped.
                    leaf.record_stream(stream)
        return batch


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_cuda else tensor.pin_memory()
