"""`Samples`, the base class of map-style datasets, and `SampleReader`, which reads batches."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, IterableDataset, Subset, default_collate

from cachedfs.core.readahead import as_declared
from cachedfs.datasets.file_list import open_at
from cachedfs.datasets.nodes import Keys, StoredObjects, run_keys, run_size
from cachedfs.filesystem import CachedFileSystem

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")


Item = str | tuple[str, int, int]  # a path, or (path, start, stop) in bytes

Collate = Callable[[list[Any]], Any]
SHOWN = 16  # sample indexes of a batch that an error lists


class Samples(Dataset[T], Generic[T]):
    """Base class of map-style datasets: samples of type `T` by index, read from one URL.

    `fs` and `path` are the filesystem and the path that `url` resolves to. A dataset pickles and forks as `fs` does.

        class Numbers(Samples):
            def __len__(self):
                return self.fs.size(self.path) // 8

            def __getitem__(self, index):
                start = 8 * self.number(index)
                return int.from_bytes(self.fs.cat_file(self.path, start, start + 8), "little")

    A subclass overrides `__getitem__` or `__getitems__`; the other one then follows from it. `dataset[i]` calls
    `__getitem__`, and a DataLoader or Loader calls `__getitems__` for a batch. Override `__getitems__` to read a
    batch in one round trip. Override `items` to let a Loader prefetch.
    """

    # Neighboring samples that one fetch reads, for example those of a chunk. A window shuffle keeps them together.
    group_size = 1

    def __init__(
        self,
        url: str,
        *,
        transform: Callable[[Any], Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the filesystem of `url`, with fsspec's `storage_options` (nested for a chained URL).

        `transform` is called with each sample.
        """
        self.url, self.transform = str(url), transform
        self.fs, path = open_at(self.url, storage_options)
        self.path = self.fs._strip_protocol(path)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Otherwise a batch would silently use the inherited method instead of the override. Both call `cls` and not
        # `self`: `super()` in a subclass reaches them, and `self` would recurse endlessly.
        given = next(names for names in map(_given, cls.__mro__) if names)
        one, many = cls.__getitem__, cls.__getitems__
        if given == {"__getitem__"}:
            cls.__getitems__ = lambda self, indexes: _each(self, partial(one, self), indexes)  # type: ignore[method-assign]
        elif given == {"__getitems__"}:
            cls.__getitem__ = lambda self, index: many(self, [index])[0]  # type: ignore[method-assign]

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> T:
        """Return one sample. Raises IndexError beyond the last."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[T]:
        # Python's iteration by `__getitem__` would end silently at an IndexError raised by `decode`.
        for number in range(len(self)):
            yield self[number]

    def __getitems__(self, indexes: Sequence[int]) -> list[T]:
        """Return the samples with these indexes, in one round trip. A DataLoader calls this for each batch."""
        raise NotImplementedError

    def batch(self, indexes: Sequence[int], collate: Callable[[list[Any]], Any] | None = None) -> Any:
        """Return a batch of samples, combined by `collate` (by torch's `default_collate` if None)."""
        return (collate or default_collate)(self.__getitems__(indexes))

    def items(self, indexes: Iterable[int]) -> Iterator[Item]:
        """Yield what these samples read, in order, as items of `fs.prefetch`; nothing if it is not known."""
        return iter(())

    def objects(self) -> tuple[Keys, npt.NDArray[np.int64] | None]:
        """Return for each sample a hash of what it is stored in, and the bytes of that (None: not known).

        A Loader with `shuffle="node"` keeps samples with the same hash on one node; by default those of neighbors.
        """
        return run_keys(len(self), run_size(len(self), self.group_size)), None

    def number(self, index: Any) -> int:
        """Return a sample's index counted from the start. Raises IndexError if out of range, TypeError if no integer."""
        number, n = operator.index(index), len(self)
        if 0 <= number < n:
            return number
        if not -n <= number < 0:
            raise IndexError(f"sample {number} of {n}: {self!r}")
        return number + n

    def transformed(self, index: int, sample: Any, *, name: str = "") -> Any:
        """Return the sample after `transform`; an error of `transform` gets a note that names the sample."""
        if self.transform is None:
            return sample
        with self.naming(index, name):
            return self.transform(sample)

    def naming(self, index: int, name: str = "") -> AbstractContextManager[None]:
        """Return a context manager that adds a note with the sample's index and `name` to any error."""
        return naming(f"sample {index} of {self!r}{f': {name}' if name else ''}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


def _each(dataset: Any, get: Callable[[int], Any], indexes: Sequence[int]) -> list[Any]:
    samples = []
    for index in indexes:
        with naming(f"sample {index} of {dataset!r}"):
            samples.append(get(index))
    return samples


def _given(cls: type) -> set[str]:
    return {"__getitem__", "__getitems__"} & vars(cls).keys()


def once_each(names: Iterable[str], url: str) -> list[str]:
    """Return the names as a list. Raises ValueError for a repeated name, because samples are keyed by name."""
    names = list(names)
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"{url}: expected each name once, and {twice[0]!r} occurs twice in {names}")
    return names


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Add a note with `what` to any error; it keeps its type and traceback.

    A StopIteration becomes a RuntimeError, because a loop over batches would take it for the end of the epoch.
    """
    try:
        yield
    except StopIteration:
        raise RuntimeError(f"StopIteration in {what}")  # noqa: B904  # with `from`, contextlib raises the StopIteration
    except Exception as error:  # any type: user code may raise it
        error.add_note(f"in {what}")
        raise


class _Sum(threading.local):
    seconds = 0.0


_sum = _Sum()


@contextmanager
def reading() -> Iterator[None]:
    """Count the time spent inside as this thread's wait for bytes. Must not be nested."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _sum.seconds += time.perf_counter() - began


def reading_s() -> float:
    """Return how many seconds this thread has waited for bytes so far."""
    return _sum.seconds


class SampleReader:
    """Reader of batches of a map-style dataset, also through nested `Subset`s, as `random_split` makes them.

    `fs`: the cachedfs filesystem of the dataset; None if it has another one or does not say. `group_size` is that of
    `Samples`. Raises TypeError for a dataset without access by index.
    """

    def __init__(self, dataset: Any) -> None:
        has_index = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if isinstance(dataset, IterableDataset) or not has_index:
            raise TypeError(
                f"{type(dataset).__name__} has no access by index: a Loader needs __len__ and __getitem__. "
                "For an iterable, use torch.utils.data.DataLoader"
            )
        self.dataset = inner = dataset
        # The index in the innermost dataset of each sample; None if there is no subset.
        self._numbers: npt.NDArray[np.int64] | None = None
        while type(inner) is Subset:  # a subclass of Subset may behave differently
            indices = np.asarray(inner.indices, np.int64)
            self._numbers = indices if self._numbers is None else indices[self._numbers]
            inner = inner.dataset
        samples = self._samples = inner if isinstance(inner, Samples) else None
        self._n_inner = len(inner)
        fs = None if samples is None else samples.fs
        self.fs = fs if isinstance(fs, CachedFileSystem) else None
        self.block_size = 1 if self.fs is None else self.fs._objects.config.block_size
        is_run = self._numbers is None or bool(np.all(np.diff(self._numbers) == 1))
        self.group_size = samples.group_size if samples is not None and is_run else 1

    def __len__(self) -> int:
        return len(self.dataset)

    def items(self, indexes: Iterable[int]) -> Iterator[Item]:
        """Yield the paths and byte ranges that samples read, in order. Requires that `fs` is not None."""
        assert self._samples is not None
        return self._samples.items(indexes if self._numbers is None else map(self._numbers.item, indexes))

    def is_cached(self, indexes: Iterable[int]) -> bool:
        """Return whether a cachedfs filesystem has all that these samples read in its cache."""
        fs = self.fs
        return fs is not None and all(map(fs._is_item_cached, self.items(indexes)))

    def objects(self) -> StoredObjects:
        """Return the objects of the samples, by which a node shuffle divides them."""
        n, sizes = self._n_inner, None
        if self._samples is not None:
            keys, sizes = self._samples.objects()
        else:
            keys = run_keys(n, run_size(n))
        numbers = slice(None) if self._numbers is None else self._numbers
        return StoredObjects(keys[numbers], None if sizes is None else sizes[numbers])

    def batch(self, indexes: Sequence[int], collate: Collate | None) -> Any:
        """Return a batch of samples; any error gets a note that lists their indexes."""
        # No readahead: this process, or the first process of the machine, declares these reads in a prefetch plan.
        declared = as_declared() if self.fs is not None else nullcontext()
        with declared, naming(f"a batch of samples {_listed(indexes)} of {self!r}"):
            if self._samples is not None:
                numbers = indexes if self._numbers is None else self._numbers[indexes].tolist()
                return self._samples.batch(numbers, collate)
            if callable(fetch := getattr(self.dataset, "__getitems__", None)):
                samples = list(fetch(list(indexes)))
            else:
                samples = _each(self, self.dataset.__getitem__, indexes)
            return (collate or default_collate)(samples)

    def __repr__(self) -> str:
        return repr(self.dataset) if self._samples is self.dataset else type(self.dataset).__name__


def _listed(indexes: Sequence[int]) -> str:
    shown = ", ".join(map(str, indexes[:SHOWN]))
    return f"{shown} and {len(indexes) - SHOWN} more" if len(indexes) > SHOWN else shown
