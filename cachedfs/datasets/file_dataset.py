"""Many small files, each of them a sample."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fsspec.core import has_magic

from cachedfs.datasets.file_list import CompactStrings, URLs, as_urls, files_of, paths_of
from cachedfs.datasets.loading.metrics import reading
from cachedfs.datasets.samples import Item, Samples

__all__ = ["FileDataset"]


class FileDataset(Samples):
    """A sample for each file: those that match a pattern, those below a folder, or those of a list.

    A sample is what `decode` makes of the file's bytes (the bytes themselves without it), then `transform`; with `label`,
    it is a tuple `(sample, label(path))`. A batch is one round trip. `paths` are the names of the files, in the order of
    the samples: natural order (`img2` before `img10`, folder by folder), or that of the list.

    The files are listed once, where it is made; copies in workers have the list. A file that was replaced since is read as
    it is now; one that is gone is an `ObjectNotFound` (FileNotFoundError) that names it.
    """

    tells_reading = True

    def __init__(
        self,
        url: URLs,
        *,
        decode: Callable[[bytes], Any] | None = None,
        label: Callable[[str], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """List the files of a pattern (`gs://b/train/*.json`, also `**`) or folder; a list is taken as it is, unasked.

        `decode` is called with the bytes of a file, `transform` with what that returned, `label` with the path, as in
        `paths`. All have to be picklable where workers are spawned: functions of a module, not lambdas.

        Raises ObjectNotFound when the URL names no file; ValueError for an empty list.
        """
        first, urls = as_urls(url)
        super().__init__(first, transform=transform, storage_options=storage_options)
        self.decode, self.label = decode, label
        listed = files_of(self.fs, first, self.path) if urls is None else paths_of(self.fs, urls)
        self.paths = CompactStrings(listed)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitems__(self, indexes: Sequence[int]) -> list[Any]:
        """Return the samples with these numbers, their files read in one round trip; one that cannot be read is named."""
        wanted = [(number, self.paths[number]) for number in map(self.number, indexes)]
        found = self._read(list(dict.fromkeys(path for _, path in wanted)))
        return [self._sample(number, path, found[path]) for number, path in wanted]

    def items(self, indexes: Iterable[int]) -> Iterator[Item]:
        """Yield the paths of these samples, as `fs.prefetch` takes them."""
        for index in indexes:
            path = self.paths[self.number(index)]
            # All of one object: a name alone would be taken for a pattern.
            yield (path, 0, sys.maxsize) if has_magic(path) else path

    def _read(self, paths: list[str]) -> dict[str, bytes | BaseException]:
        with reading():
            if any(map(has_magic, paths)):  # `cat` would take them for patterns
                return dict(zip(paths, self.fs.cat_ranges(paths, None, None, on_error="return"), strict=True))
            found: dict[str, bytes | BaseException] = self.fs.cat(paths, on_error="return")
            return found

    def _sample(self, number: int, path: str, data: bytes | BaseException) -> Any:
        with self.naming(number, self.fs.unstrip_protocol(path)):
            if isinstance(data, BaseException):
                raise data
            sample: Any = data if self.decode is None else self.decode(data)
            if self.transform is not None:
                sample = self.transform(sample)
            return sample if self.label is None else (sample, self.label(path))

    def __repr__(self) -> str:
        return f"FileDataset({self.url!r}, {len(self):,} files)"
