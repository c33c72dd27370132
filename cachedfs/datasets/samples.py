"""What the map-style datasets have in common: samples by number, and what they will read by name."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from fsspec.core import url_to_fs
from torch.utils.data import Dataset, IterableDataset, Subset, default_collate

from cachedfs.filesystem import CachedFileSystem
from cachedfs.readahead.object_history import as_declared

__all__ = ["Collate", "Item", "Samples", "SampleReader", "naming", "once_each"]


Item = str | tuple[str, int, int]


class Samples(Dataset[Any]):
    """Samples by number, of what is behind one URL.

    It pickles and forks as its filesystem does. `fs` and `path` are what `url` names there.

    A class derived from it overrides `__getitem__` or `__getitems__`: what gives a batch asks the one, `[i]` the other, and
    either follows from the one that is given. One round trip for a batch is only in `__getitems__`.
    """

    tells_reading = False  # whether all waiting for bytes is counted, by `clock.reading`
    # Neighbouring samples that come with one fetch, as those of one chunk, or of one block: what a window shuffle keeps together.
    group_size = 1

    def __init__(
        self,
        url: str,
        *,
        transform: Callable[[Any], Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """`transform` is called with each sample; `storage_options` are those of the URL's filesystem, nested for a chain."""
        self.url, self.transform = str(url), transform
        self.fs, self.path = url_to_fs(self.url, **(storage_options or {}))

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Else who asks for a batch would have the inherited one, and nobody would say so.
        given = next(names for names in map(_given, cls.__mro__) if names)
        if given == {"__getitem__"}:
            cls.__getitems__ = _one_by_one(cls)  # type: ignore[method-assign]
        elif given == {"__getitems__"}:
            cls.__getitem__ = _of_many(cls)  # type: ignore[method-assign]

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        """Return one sample. Raises IndexError beyond the last."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        """Yield each sample. Not left to `__getitem__`: there an IndexError of `decode` would be the end."""
        for number in range(len(self)):
            yield self[number]

    def __getitems__(self, indexes: Sequence[int]) -> list[Any]:
        """Return the samples with these numbers, in one round trip: what a DataLoader asks for a batch."""
        raise NotImplementedError

    def batch(self, indexes: Sequence[int], collate: Callable[[list[Any]], Any] | None = None) -> Any:
        """Return a batch of samples, put together by `collate`; torch's own where none is given."""
        return (collate or default_collate)(self.__getitems__(indexes))

    def items(self, indexes: Iterable[int]) -> Iterator[Item]:
        """Yield what these samples read, in their order, as `fs.prefetch` takes it; nothing where that cannot be told."""
        return iter(())

    def number(self, index: Any) -> int:
        """Return the number of a sample counted from the front. Raises IndexError, and TypeError for what is no number."""
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}: {self!r}")
        return number % len(self)

    def transformed(self, index: int, sample: Any, *, name: str = "") -> Any:
        """Return the sample after `transform`; what that raises is told which sample it was."""
        if self.transform is None:
            return sample
        with self.naming(index, name):
            return self.transform(sample)

    def naming(self, index: int, name: str = "") -> contextlib.AbstractContextManager[None]:
        """Add to any error from inside which sample it is about."""
        return naming(f"sample {index} of {self!r}{f': {name}' if name else ''}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


# By the class and not by `self`: `super()` in a class derived from it comes here, and would go in a circle.


def _one_by_one(cls: type[Samples]) -> Any:
    def __getitems__(self: Samples, indexes: Sequence[int]) -> list[Any]:
        """Return the samples with these numbers, one after the other."""
        samples = []
        for index in indexes:
            with self.naming(index):
                samples.append(cls.__getitem__(self, index))
        return samples

    return __getitems__


def _of_many(cls: type[Samples]) -> Any:
    def __getitem__(self: Samples, index: int) -> Any:
        """Return one sample. Raises IndexError beyond the last."""
        return cls.__getitems__(self, [index])[0]

    return __getitem__


def _given(cls: type) -> set[str]:
    return {"__getitem__", "__getitems__"} & vars(cls).keys()


def once_each(names: Iterable[str], url: str) -> list[str]:
    """Return the names. Raises ValueError where one comes twice: samples have each by its name."""
    names = list(names)
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"{url}: expected each name once, and {twice[0]!r} comes twice in {names}")
    return names


def naming(what: str) -> contextlib.AbstractContextManager[None]:
    """Add to any error from inside what it is about; its type and traceback stay.

    But for StopIteration, which becomes a RuntimeError: to who iterates over batches it is the end of the epoch.
    """
    return _Naming(what)


class _Naming(contextlib.AbstractContextManager[None]):
    # A class: a generator that is a context manager has StopIteration go on as it came.

    def __init__(self, what: str) -> None:
        self._what = what

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if isinstance(error, StopIteration):
            raise RuntimeError(f"StopIteration in {self._what}") from error
        if isinstance(error, Exception):  # of any kind: it is the caller's own code, and goes on
            error.add_note(f"in {self._what}")


Collate = Callable[[list[Any]], Any]
SHOWN = 16  # samples of a batch that an error names


class SampleReader:
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
