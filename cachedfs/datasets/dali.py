"""Adapter from the batches of a Loader to the source of NVIDIA DALI's `fn.external_source`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["ExternalSource"]


class ExternalSource:
    """Source of a DALI pipeline, made by `Loader.external_source`.

        images, labels = fn.external_source(loader.external_source(), num_outputs=2, batch=True, cycle="raise")

    As an iterable, it returns one epoch, and the next epoch when iterated again: use `cycle="raise"`, and `reset` the
    pipeline between epochs. As a callable, use its method `batch`.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None  # iterator of `batch` over its current epoch

    def __iter__(self) -> Iterator[Any]:
        return map(as_arrays, self._loader)

    def batch(self) -> Any:
        """Return the next batch.

        Raises StopIteration once at the end of each epoch. The call after that starts the next epoch.
        """
        if self._batches is None:
            self._batches = iter(self)
        try:
            return next(self._batches)
        except BaseException:  # the end of the epoch, or an error: the next call makes a new iterator
            self._batches = None
            raise


def as_arrays(batch: Any) -> Any:
    """Return a batch as one DALI output, or as a tuple of outputs in the order of the batch.

    Nothing is copied. A tensor or array is one output. A list of `bytes`, such as encoded images, is one output with
    a uint8 array for each. CPU tensors become NumPy arrays: DALI asks for the CUDA stream of a tensor, and fails
    without CUDA. Raises TypeError for other values.
    """
    if isinstance(batch, torch.Tensor | np.ndarray) or _is_bytes(batch):
        return _output(batch)
    return tuple(map(_output, _outputs(batch)))


def _outputs(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, list | tuple) or _is_bytes(batch):
        yield batch
        return
    for value in batch:
        yield from _outputs(value)


def _is_bytes(batch: Any) -> bool:
    """Return whether a batch is a list of `bytes`.

    Their lengths may differ, so DALI gets a list of arrays.
    """
    return isinstance(batch, list | tuple) and bool(batch) and all(isinstance(each, bytes) for each in batch)


def _output(leaf: Any) -> Any:
    if isinstance(leaf, list | tuple):
        return [np.frombuffer(each, np.uint8) for each in leaf]
    return _as_array(leaf)


def _as_array(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf if leaf.is_cuda else leaf.numpy()
    if isinstance(leaf, np.ndarray):
        return leaf
    raise TypeError(
        f"DALI takes tensors and arrays, and the batch has a {type(leaf).__name__}: let collate_fn leave it out"
    )
