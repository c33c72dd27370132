"""What a Loader takes its samples from: any map-style dataset, and what more can be asked of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, Subset, default_collate

from cachedfs.datasets.base import Item, Samples, naming
from cachedfs.filesystem import CachedFileSystem
from cachedfs.readahead.object_history import as_declared

__all__ = ["Collate", "Source"]

Collate = Callable[[list[Any]], Any]
SHOWN = 16  # samples of a batch that an error names


class Source:
    """The samples of a map-style dataset, by batch. It looks into `Subset`s, as `random_split` makes them."""

    def __init__(self, dataset: Any) -> None:
        """Raises TypeError for a dataset that has no samples by number."""
        if isinstance(dataset, IterableDataset) or not all(
            hasattr(dataset, name) for name in ("__len__", "__getitem__")
        ):
            raise TypeError(
                f"{type(dataset).__name__} has no samples by number: a Loader needs __len__ and __getitem__; "
                f"for an iterable there is torch.utils.data.DataLoader"
            )
        self.dataset = dataset
        self._samples, self._subsets = _unwrapped(dataset)
        self._are_runs = all(map(_is_run, self._subsets))

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def group_size(self) -> int:
        """Neighbouring samples that come with one fetch."""
        return self._samples.group_size if self._samples is not None and self._are_runs else 1

    @property
    def fs(self) -> CachedFileSystem | None:
        """The filesystem that the samples are read through, if it is one of ours, and that can be told."""
        fs = None if self._samples is None else self._samples.fs
        return fs if isinstance(fs, CachedFileSystem) else None

    @property
    def tells_reading(self) -> bool:
        """Whether the dataset tells how long it waits for bytes: see `clock`."""
        return self._samples is not None and self._samples.tells_reading

    @property
    def prefetch(self) -> Callable[[Iterable[Item]], Any] | None:
        """What fetches items ahead; None where the samples are not of a filesystem that does."""
        return None if self._samples is None else getattr(self._samples.fs, "prefetch", None)

    def items(self, indexes: Iterable[int]) -> Iterator[Item]:
        """Yield what samples read, in their order. REQUIRES: `prefetch`."""
        assert self._samples is not None
        for subset in self._subsets:
            indexes = map(subset.__getitem__, indexes)
        return self._samples.items(indexes)

    def batch(self, indexes: Sequence[int], collate: Collate | None) -> Any:
        """Return a batch of samples; an error from inside is told which samples those were.

        Where there is `prefetch` they are read as declared: by this process, or by the first one of the machine.
        """
        reading = as_declared() if self.prefetch is not None else nullcontext()
        with reading, naming(f"a batch of samples {_listed(indexes)} of {self!r}"):
            if self._samples is not None:
                for subset in self._subsets:
                    indexes = [subset[index] for index in indexes]
                return self._samples.batch(indexes, collate)
            return (collate or default_collate)(self._fetched(indexes))

    def _fetched(self, indexes: Sequence[int]) -> list[Any]:
        if callable(fetch := getattr(self.dataset, "__getitems__", None)):
            return list(fetch(list(indexes)))
        samples = []
        for index in indexes:
            with naming(f"sample {index} of {self!r}"):
                samples.append(self.dataset[index])
        return samples

    def __repr__(self) -> str:
        return repr(self.dataset) if self._samples is self.dataset else type(self.dataset).__name__


def _unwrapped(dataset: Any) -> tuple[Samples | None, list[Sequence[int]]]:
    """Return our dataset inside subsets, if it is one, and their indexes, those of the outermost first."""
    subsets = []
    while type(dataset) is Subset:  # one derived from it may do anything
        subsets.append(dataset.indices)
        dataset = dataset.dataset
    return (dataset, subsets) if isinstance(dataset, Samples) else (None, [])


def _is_run(indexes: Sequence[int]) -> bool:
    return bool(np.all(np.diff(np.asarray(indexes)) == 1))


def _listed(indexes: Sequence[int]) -> str:
    shown = ", ".join(str(index) for index in indexes[:SHOWN])
    return f"{shown} and {len(indexes) - SHOWN} more" if len(indexes) > SHOWN else shown
