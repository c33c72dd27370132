"""`FileDataset`: a map-style dataset with one sample per file."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from fsspec.core import has_magic

from cachedfs.datasets.file_list import CompactStrings, URLs, as_urls, files_of, paths_of
from cachedfs.datasets.samples import Item, Samples, reading
from cachedfs.errors import without_frames

__all__ = ["FileDataset"]

logger = logging.getLogger("cachedfs.datasets")


class FileDataset(Samples):
    """One sample per file of a pattern, a folder or a list.

        texts = FileDataset("cachedfs::gs://my-bucket/texts/*.txt", decode=bytes.decode)
        print(len(texts), texts[0])

    A folder stands for all files below it, without hidden ones such as `.DS_Store`. A sample is the file's bytes,
    passed through `decode` and then `transform` if they are given. With `label`, it is a tuple `(sample, label(path))`.
    A batch is read in one round trip. `paths` lists the files in the order of the samples: natural order (`img2` before
    `img10`, folder by folder), or the order of the list.

    The files are listed once, in the constructor. A file that was replaced since then is read as it is now. A file that
    was deleted raises `ObjectNotFound` (a FileNotFoundError) with its name.
    """

    tells_reading = True

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

        `on_error="skip"`: batches leave out files whose read, `decode` or `transform` fails, and are smaller by them.
        `skipped` has their paths and errors in this process, and each is logged once. A batch with no other file, and
        `dataset[i]`, still raise.

        Raises ObjectNotFound if the URL names no file, and ValueError for an empty list or several filesystems.
        """
        if on_error not in ("raise", "skip"):
            raise ValueError(f'on_error={on_error!r}: expected "raise" or "skip"')
        first, urls = as_urls(url)
        super().__init__(first, transform=transform, storage_options=storage_options)
        self.decode, self.label = decode, label
        listed = files_of(self.fs, first, self.path) if urls is None else paths_of(self.fs, urls)
        self.paths = CompactStrings(listed)
        self.on_error = on_error
        self.skipped: dict[str, Exception] = {}

    def __len__(self) -> int:
        return len(self.paths)

    def __getitems__(self, indexes: Sequence[int]) -> list[Any]:
        """Return the samples with these indexes, their files read in one round trip. An error names the file."""
        wanted = [(number, self.paths[number]) for number in map(self.number, indexes)]
        found = self._read(list(dict.fromkeys(path for _, path in wanted)))
        if self.on_error == "raise" or len(wanted) == 1:
            return [self._sample(number, path, found[path]) for number, path in wanted]
        samples = []
        for number, path in wanted:
            try:
                samples.append(self._sample(number, path, found[path]))
            except Exception as error:  # any type: user code may raise it
                if path not in self.skipped:
                    kind = type(error).__name__
                    logger.warning("%s: skipped: %s: %s", self.fs.unstrip_protocol(path), kind, error)
                self.skipped.setdefault(path, without_frames(error))
        if not samples:
            raise self.skipped[wanted[-1][1]]
        return samples

    def items(self, indexes: Iterable[int]) -> Iterator[Item]:
        """Yield the paths of these samples, as `fs.prefetch` takes them."""
        for index in indexes:
            path = self.paths[self.number(index)]
            # An explicit byte range: `prefetch` would take the path alone for a pattern.
            yield (path, 0, sys.maxsize) if has_magic(path) else path

    def _read(self, paths: list[str]) -> dict[str, bytes | BaseException]:
        with reading():  # not `cat`: it takes some names for patterns
            return dict(zip(paths, self.fs.cat_ranges(paths, None, None, on_error="return"), strict=True))

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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "skipped": {}}

    def __repr__(self) -> str:
        return f"FileDataset({self.url!r}, {len(self):,} files)"
