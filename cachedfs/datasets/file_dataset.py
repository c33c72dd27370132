"""`FileDataset`: a map-style dataset with one sample per file."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from fsspec.core import has_magic

from cachedfs.datasets.file_list import CompactStrings, URLs, as_urls, files_of, paths_of
from cachedfs.datasets.nodes import Keys, name_keys
from cachedfs.datasets.samples import Item, Samples, T, reading
from cachedfs.datasets.skipped_files import SkippedFiles
from cachedfs.errors import ChecksumMismatch, OriginUnavailable

logger = logging.getLogger("cachedfs.datasets")


class FileDataset(Samples[T]):
    """One sample per file of a pattern, a folder or a list.

        texts = FileDataset("cachedfs::gs://my-bucket/texts/*.txt", decode=bytes.decode)
        print(len(texts), texts[0])

    A folder stands for all files below it, without hidden ones such as `.DS_Store`. A sample is the file's bytes,
    passed through `decode` and then `transform` if they are given. With `label`, it is a tuple `(sample, label(path))`.
    A batch is read in one round trip. `paths` lists the files in the order of the samples: natural order (`img2` before
    `img10`, folder by folder), or the order of the list. For a type checker, `FileDataset[tuple[bytes, str]]` says what
    a sample is.

    The files are listed once, in the constructor. A file that was replaced since then is read as it is now. A file that
    was deleted raises `ObjectNotFound` (a FileNotFoundError) with its name.
    """

    def __init__(
        self,
        url: URLs,
        *,
        decode: Callable[[bytes], Any] | None = None,
        label: Callable[[str], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """List the files of a pattern (`gs://b/train/*.json`, also `**`) or folder.

        A list is used as it is, without a request. `decode`, `transform` and `label` must be picklable if workers are
        spawned: module-level functions, not lambdas. `label` is called with the path as in `paths`.

        `on_error="skip"`: batches leave out files whose read, `decode` or `transform` fails, and are smaller by them. A
        batch without any other file gets the next good one of the dataset. `skipped` has their paths and errors, and
        each is logged once. `dataset[i]` still raises, and so does a batch if no file of the dataset is good, or the
        origin cannot be reached.

        Raises ObjectNotFound if the URL names no file, and ValueError for an empty list or several filesystems.
        """
        if on_error not in ("raise", "skip"):
            raise ValueError(f'on_error={on_error!r}: expected "raise" or "skip"')
        first, urls = as_urls(url)
        super().__init__(first, transform=transform, storage_options=storage_options)
        self.decode, self.label = decode, label
        sizes = files_of(self.fs, first, self.path) if urls is None else {}
        listed = sizes if urls is None else paths_of(self.fs, urls)
        self.paths = CompactStrings(listed)
        self._sizes = np.array([size or 0 for size in sizes.values()], np.int64) if sizes else None
        self.on_error = on_error
        self._skipped = SkippedFiles() if on_error == "skip" else None

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def skipped(self) -> dict[str, Exception]:
        """The errors of the files left out so far, by path, also those that DataLoader workers left out."""
        return self._skipped.errors() if self._skipped is not None else {}

    def __getitem__(self, index: int) -> T:
        ((number, path, data),) = self._read([self.number(index)])
        sample: T = self._sample(number, path, data)
        return sample

    def __getitems__(self, indexes: Sequence[int]) -> list[T]:
        """Return the samples with these indexes, their files read in one round trip. An error names the file."""
        numbers = [*map(self.number, indexes)]
        found = self._read(numbers)
        if self._skipped is None or not numbers:
            return [self._sample(*each) for each in found]
        samples = self._good(found)
        # The batch may not be empty: it could not be collated, and all ranks need the same number of batches.
        path = self.paths[numbers[-1]]
        others = (number % len(self) for number in range(numbers[-1] + 1, numbers[-1] + len(self)))
        while not samples:
            error = self._skipped.errors()[path]
            number = next((each for each in others if self.paths[each] not in self._skipped.errors()), None)
            if number is None or _is_outage(error):
                raise error
            path = self.paths[number]
            samples = self._good(self._read([number]))
        return samples

    def items(self, indexes: Iterable[int]) -> Iterator[Item]:
        """Yield the paths of these samples, as `fs.prefetch` takes them."""
        for index in indexes:
            path = self.paths[self.number(index)]
            # An explicit byte range: `prefetch` would take the path alone for a pattern.
            yield (path, 0, sys.maxsize) if has_magic(path) else path

    def objects(self) -> tuple[Keys, npt.NDArray[np.int64] | None]:
        """Return a hash of each file's path, and the size of each file as listed (None: the files were given as a list)."""
        return name_keys(self.paths, len(self)), self._sizes

    def _read(self, numbers: list[int]) -> Iterable[tuple[int, str, bytes | BaseException]]:
        """Return the number, the path, and the bytes or the error of each of these files."""
        paths = self.paths.at(numbers)
        unique = [*dict.fromkeys(paths)]
        with reading():  # not `cat`: it takes some names for patterns
            found = self.fs.cat_ranges(unique, None, None, on_error="return")
        if len(unique) < len(paths):
            found = map(dict(zip(unique, found, strict=True)).__getitem__, paths)
        return zip(numbers, paths, found, strict=True)

    def _good(self, found: Iterable[tuple[int, str, bytes | BaseException]]) -> list[T]:
        """Return the samples that can be made, and record the others."""
        samples = []
        for number, path, data in found:
            try:
                samples.append(self._sample(number, path, data))
            except Exception as error:  # any type: user code may raise it
                assert self._skipped is not None
                if path not in self._skipped.errors():
                    kind = type(error).__name__
                    logger.warning("%s: skipped: %s: %s", self.fs.unstrip_protocol(path), kind, error)
                    self._skipped.add(path, error)
        return samples

    def _sample(self, number: int, path: str, data: bytes | BaseException) -> Any:
        try:
            if isinstance(data, BaseException):
                raise data
            sample: Any = data if self.decode is None else self.decode(data)
            if self.transform is not None:
                sample = self.transform(sample)
            return sample if self.label is None else (sample, self.label(path))
        except Exception:  # any type: user code may raise it
            with self.naming(number, self.fs.unstrip_protocol(path)):
                raise

    def __repr__(self) -> str:
        return f"FileDataset({self.url!r}, {len(self):,} files)"


def _is_outage(error: Exception) -> bool:
    """Return whether the next file would fail too, after as many retries."""
    return isinstance(error, OriginUnavailable) and not isinstance(error, ChecksumMismatch)
