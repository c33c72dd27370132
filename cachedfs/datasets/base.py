"""What the map-style datasets have in common: samples by number, and what they will read by name."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fsspec.core import url_to_fs
from torch.utils.data import Dataset, default_collate

__all__ = ["Item", "Samples", "naming"]

Item = str | tuple[str, int, int]


class Samples(Dataset[Any]):
    """Samples by number, of what is behind one URL.

    It pickles and forks as its filesystem does. `fs` and `path` are what `url` names there.
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

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        """Return one sample. Raises IndexError beyond the last."""
        return self.__getitems__([index])[0]

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


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Add to any error from inside what it is about; its type and traceback stay."""
    try:
        yield
    except Exception as error:  # of any kind: it is the caller's own code, and goes on
        error.add_note(f"in {what}")
        raise
