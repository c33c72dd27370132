"""The work on the samples of a pack: cut arrays into shards, write shards, and count the samples of some files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cachedfs.packing.pack_types import Array
from cachedfs.packing.shard_encoder import ArrayEncoding
from cachedfs.packing.sources.sample_source import Counts, SampleSource
from cachedfs.packing.store import StoredObject, ZarrTarget

Emit = Callable[[str, int, Array], object]


class ArrayWriter:
    """Cuts the rows of an array, which come in order, into shards. `length` is the number of rows so far."""

    def __init__(
        self,
        name: str,
        encoding: ArrayEncoding,
        emit: Emit,
        needs: Callable[[str, int], bool] = lambda name, index: True,
    ) -> None:
        """`emit(name, i, rows)` gets each shard `i` along the first axis for which `needs(name, i)`."""
        self.name, self._encoding, self._emit, self._needs = name, encoding, emit, needs
        self.length = 0
        self._rows: Array | None = None  # of the shard that is not full yet

    def add(self, values: Array) -> None:
        n_rows = self._encoding.shard[0]
        while len(values):
            index, begin = divmod(self.length, n_rows)
            part, values = values[: n_rows - begin], values[n_rows - begin :]
            self.length += len(part)
            if not self._needs(self.name, index):
                continue
            if len(part) == n_rows:
                self._emit(self.name, index, part)
                continue
            if self._rows is None:
                self._rows = np.empty((n_rows, *part.shape[1:]), self._encoding.dtype)
            self._rows[begin : begin + len(part)] = part
            if begin + len(part) == n_rows:
                self.finish()
                self._rows = None

    def finish(self) -> None:
        """Emit the shard that is not full."""
        if self._rows is not None:
            index, last = divmod(self.length - 1, self._encoding.shard[0])
            self._emit(self.name, index, self._rows[: last + 1])

    @property
    def rest(self) -> Array:
        """The rows of the shard that is not full."""
        none = np.empty(0, self._encoding.dtype)
        return none if self._rows is None else self._rows[: self.length % self._encoding.shard[0]]

    def restore(self, length: int, rest: Array) -> None:
        """Continue after `length` rows; `rest` has those of the shard that is not full."""
        self.add(rest)
        self.length = length


class PackTask:
    """The source, target and encodings of a pack, with the methods that workers run."""

    def __init__(
        self, source: SampleSource, store: ZarrTarget, encodings: Mapping[str, ArrayEncoding]
    ) -> None:
        self.source, self.store, self.encodings = source, store, encodings
        self.big = [field.name for field in source.fields if not field.is_small]

    def put(self, name: str, index: int, rows: Array) -> list[StoredObject]:
        """Write the shards of an array at an index along its first axis, each as one object, and verify them."""
        encoding = self.encodings[name]
        return [
            self.store.put_checked(f"{name}/{key}", encoding.encoded(rows[(slice(None), *box)]))
            for key, box in encoding.shards_at(index)
        ]

    def count(self, files: range) -> Counts:
        """Read some files, and return the lengths that tell where the samples after them belong."""
        counts = Counts(dict.fromkeys(self.big, 0), [])
        for batch in self.source.batches(files):
            small = {name: values for name, values in batch.values.items() if name not in counts.lengths}
            counts.batches.append(dataclasses.replace(batch, values=small))
            for name in self.big:
                counts.lengths[name] += len(batch.values[name])
        return counts

    def write(
        self, wanted: Mapping[str, Sequence[int]], parts: Sequence[range], starts: Mapping[str, Sequence[int]]
    ) -> list[StoredObject]:
        """Write shards of big fields, given by index, from the parts of the source with their samples.

        `starts` has the length of each field before each part, and after the last one.
        """
        stored: list[StoredObject] = []

        def put(name: str, index: int, rows: Array) -> None:
            stored.extend(self.put(name, index, rows))

        def needs(name: str, index: int) -> bool:
            return index in wanted[name]

        writers = [ArrayWriter(name, self.encodings[name], put, needs) for name in wanted]
        for i, files in enumerate(parts):
            for writer in writers:
                writer.length = starts[writer.name][i]
            for batch in self.source.batches(files):
                for writer in writers:
                    writer.add(batch.values[writer.name])
            check_lengths(
                writers,
                {name: each[i + 1] for name, each in starts.items()},
                self.source.files.url_of(files.start),
            )
        for writer in writers:
            writer.finish()
        return stored


def check_lengths(writers: Sequence[ArrayWriter], lengths: Mapping[str, int], where: str) -> None:
    """Raise ValueError if the files had other samples when they were counted."""
    if any(writer.length != lengths[writer.name] for writer in writers):
        raise ValueError(
            f"{where}: its samples differ from those counted before: the file was replaced meanwhile; pack again, "
            "with overwrite"
        )
