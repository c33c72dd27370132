"""The batches of a Loader as DALI's `external_source` takes them: arrays, by iterating or by calling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cachedfs.datasets.batches import leaves

if TYPE_CHECKING:
    from cachedfs.datasets.loader import Loader

__all__ = ["ExternalSource"]


class ExternalSource:
    """What feeds a DALI pipeline; see `Loader.external_source`.

    Iterating gives one epoch, and iterating again the next one: for `cycle="raise"`, where the pipeline is `reset` between
    them. `batch` is the callable: it raises StopIteration at the end of an epoch, and goes on with the next one after that.
    """

    def __init__(self, loader: Loader) -> None:
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
    """Return one array, or a tuple of the arrays in a batch in their order; nothing is copied. Raises TypeError for others.

    Tensors of the CPU become NumPy arrays: of tensors DALI wants to know the CUDA stream, and fails where there is none.
    """
    if isinstance(batch, torch.Tensor | np.ndarray):
        return _as_array(batch)
    return tuple(map(_as_array, leaves(batch)))


def _as_array(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf if leaf.is_cuda else leaf.numpy()
    if isinstance(leaf, np.ndarray):
        return leaf
    raise TypeError(
        f"DALI takes tensors and arrays, and the batch has a {type(leaf).__name__}: let collate_fn leave it out"
    )
