"""The batches of a Loader as DALI's `external_source` takes them: arrays, by iterating or by calling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["ExternalSource"]


class ExternalSource:
    """What feeds a DALI pipeline; see `Loader.external_source`.

    Iterating gives one epoch, and iterating again the next one: for `cycle="raise"`, where the pipeline is `reset` between
    them. `batch` is the callable: it raises StopIteration at the end of an epoch, and goes on with the next one after that.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None  # of the epoch that `batch` is in

    def __iter__(self) -> Iterator[Any]:
        return map(as_arrays, self._loader)

    def batch(self) -> Any:
        """Return the next batch. Raises StopIteration once at the end of each epoch."""
        if self._batches is None:
            self._batches = iter(self)
        try:
            return next(self._batches)
        except BaseException:  # the end, or an error of the dataset: the next call begins anew
            self._batches = None
            raise


def as_arrays(batch: Any) -> Any:
    """Return what one output takes, or a tuple of that in the order of the batch; nothing is copied. Raises TypeError for others.

    A tensor or array is one output; so is a list of `bytes`, such as encoded images, as an array of uint8 for each. Tensors of
    the CPU become NumPy arrays: of tensors DALI wants to know the CUDA stream, and fails where there is none.
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
    """True for samples of different lengths: DALI takes a list of arrays for them."""
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
