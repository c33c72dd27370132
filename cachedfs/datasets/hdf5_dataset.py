"""`HDF5Dataset`: a map-style dataset over the rows of datasets in one HDF5 file, read by h5py."""

from __future__ import annotations

import atexit
import contextlib
import copy
import errno
import io
import math
import os
import threading
import weakref
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py._objects import phil

from cachedfs.core.reader import versions_read
from cachedfs.datasets.hdf5_layout import common_length, dataset_at, native, unreadable
from cachedfs.datasets.samples import Item, Samples, once_each, reading
from cachedfs.errors import ObjectChanged
from cachedfs.filesystem.file import CachedFile

PIECE = 16 << 10  # bytes of contiguous data read together: several small rows, or one large row
# HDF5's cache of decoded chunks for each dataset, as large as the pool of a ZarrDataset. With the default of 1 MiB, a
# window shuffle decompresses its chunks again for every batch, at seven times the CPU time. There are many slots,
# because two chunks with the same slot evict each other.
CHUNK_CACHE = {"rdcc_nbytes": 256 << 20, "rdcc_nslots": 100_003}


class HDF5Dataset(Samples):
    """Rows of datasets in one HDF5 file: sample `i` is a tuple with row `i` of each of `datasets`.

        digits = HDF5Dataset("cachedfs::gs://my-bucket/digits.h5", ("image", "label"))
        image, label = digits[42]

    A row is an array of the dataset's dtype in native byte order, or a NumPy scalar if the dataset has one axis. Strings
    of variable length are `bytes`, as in h5py. With a single name instead of a list, a sample is the row itself.
    `transform` comes last. `dtypes` and `shapes` are those of the rows, by name.

    A batch reads each chunk once, in any order of samples, and fetches what is not cached in one round trip. Each
    process opens the file at its first read, and HDF5 runs one call of its threads at a time. A process that opens the
    file after it was replaced reads the new content, and raises `ObjectChanged` if the length, a shape or a dtype differs.
    """

    def __init__(
        self,
        url: str,
        datasets: Sequence[str] | str = ("image", "label"),
        *,
        transform: Callable[[Any], Any] | None = None,
        h5py: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the file and inspect the named datasets, which must have equal length.

        A name may contain groups (`train/image`). `h5py`: options of `h5py.File`. `{"rdcc_nbytes": 1 << 30}` keeps
        more decoded chunks of each dataset and process than the default of 256 MiB; a window shuffle of `window`
        chunks needs room for twice as many.

        Raises ObjectNotFound for a missing file, and OSError for one that h5py cannot read. Raises ValueError for a name
        that is missing, repeated or in another file (virtual datasets, links), for datasets of unequal length, and for
        variable-length rows in a foreign byte order.
        """
        super().__init__(url, transform=transform, storage_options=storage_options)
        self.datasets = [datasets] if isinstance(datasets, str) else once_each(datasets, self.url)
        self._is_single = isinstance(datasets, str)
        self._options = {**CHUNK_CACHE, **(h5py or {})}
        self._opened: _Opened | None = None
        self._properties: dict[str, _Properties] = {}
        columns = self._file().columns
        self._properties = {name: column.properties for name, column in columns.items()}
        try:
            self._length = common_length({name: column.data for name, column in columns.items()})
        except ValueError as error:
            raise ValueError(f"{self.url}: {error}") from None
        self.dtypes = {name: properties.dtype for name, properties in self._properties.items()}
        self.shapes = {name: properties.shape for name, properties in self._properties.items()}
        # The dataset with the largest rows decides: the chunks of the others are small in comparison.
        largest = max(columns.values(), key=lambda column: column.row_size)
        self.group_size = largest.data.chunks[0] if largest.data.chunks else 1

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indexes: Sequence[int]) -> list[Any]:
        """Return the samples with these indexes, read in one round trip."""
        numbers = [self.number(index) for index in indexes]
        if not numbers:
            return []
        rows, places = np.unique(numbers, return_inverse=True)
        columns = [[column[place] for place in places.tolist()] for column in self._file().read(rows)]
        if len(rows) < len(numbers):  # a repeated sample is copied, so that in-place changes stay separate
            columns = [[copy.copy(row) for row in column] for column in columns]
        samples = columns[0] if self._is_single else list(zip(*columns, strict=True))
        return [self.transformed(number, sample) for number, sample in zip(numbers, samples, strict=True)]

    def items(self, indexes: Iterable[int]) -> Iterator[Item]:
        """Yield the byte ranges of the chunks of these samples, as `fs.prefetch` takes them; none of compact datasets."""
        file = self._file()
        last: dict[str, int] = {}
        for index in indexes:
            number = self.number(index)
            for name, column in file.columns.items():
                group = number // column.rows
                if last.get(name) != group:  # the next sample is often in the same chunk
                    last[name] = group
                    for start, stop in column.pieces(group):
                        yield self.path, start, stop

    def _file(self) -> _Opened:
        opened = self._opened
        if opened is None or opened.pid != os.getpid():
            # A file opened before a fork is left alone in the child: the parent still uses it.
            opened = _Opened(self)
            for name, properties in self._properties.items():
                if (now := opened.columns[name].properties) != properties:
                    raise ObjectChanged(
                        f"{self.url}: replaced since the dataset was created: {name!r} is {now}, and was {properties}; create the dataset again"
                    )
            self._opened = opened
        return opened

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


class _Opened:
    """The file opened in one process; it is closed when no reference to this is left."""

    def __init__(self, of: HDF5Dataset) -> None:
        self.pid = os.getpid()
        self._url, self._fs, self._path = of.url, of.fs, of.path
        self._lock = threading.Lock()
        file = of.fs.open(of.path, "rb")
        # The version of the open file: the path may name a newer one by now.
        self._version = file._object().fingerprint if isinstance(file, CachedFile) else None
        self._bytes = _Bytes(file)
        with _explained(f"{of.url}: not an HDF5 file that h5py can read", errno.EINVAL):
            self._file = h5py.File(self._bytes, "r", **of._options)
        self.columns: dict[str, _Column] = {}
        _close_pending()
        _opened.add(self)
        weakref.finalize(self, _close_later, self._file, self.columns).atexit = False
        self.columns.update({name: _Column(self._dataset(name)) for name in of.datasets})
        if not self.columns:
            self._dataset("")  # whose error names those that there are

    def read(self, rows: Any) -> list[list[Any]]:
        """Return these rows of each dataset; `rows` must be sorted and unique."""
        fetched = self._fetched(rows)
        which = f"samples {rows[0]} to {rows[-1]}" if len(rows) > 1 else f"sample {rows[0]}"
        found = []
        with self._lock:
            self._bytes.set_pieces(fetched)
            try:
                for name, column in self.columns.items():
                    with _explained(f"{self._url}: {name!r}: h5py cannot read {which}", errno.EIO):
                        found.append(column.read(rows))
            finally:
                self._bytes.set_pieces({})
        return found

    def _fetched(self, rows: Any) -> dict[int, bytes]:
        """Return the bytes that HDF5 will read, by offset, fetched in one round trip; {} if HDF5 may as well do it."""
        if self._version is None:
            return {}
        with self._lock:
            pieces = [piece for column in self.columns.values() for piece in column.pieces_of(rows)]
        if len(pieces) < 2:
            return {}
        starts, stops = [start for start, _ in pieces], [stop for _, stop in pieces]
        with reading(), versions_read() as versions:
            found = self._fs.cat_ranges([self._path] * len(pieces), starts, stops, on_error="return")
        if versions != {self._path: {self._version}}:
            return {}  # of another version: reading the open file raises an error
        return {start: data for start, data in zip(starts, found, strict=True) if isinstance(data, bytes)}

    def _dataset(self, name: str) -> Any:
        try:
            found = dataset_at(self._file, name)
            if problem := unreadable(found) if found.shape else "has no rows":
                raise ValueError(f"{name!r} {problem}")
        except ValueError as error:
            raise ValueError(f"{self._url}: {error}") from None
        return found


@contextlib.contextmanager
def _explained(what: str, code: int) -> Iterator[None]:
    """Say in an error of the file's content what failed."""
    try:
        yield
    except OSError as error:
        if type(error) is not OSError:  # an error of reading the file, not of its content
            raise
        raise OSError(code, f"{what}: {error}") from error


# Unreferenced files, with their datasets, that could not be closed at once. A finalizer must not wait for h5py's
# lock: it may run in the event loop thread, while the holder of the lock waits for bytes from that thread.
_pending: deque[tuple[Any, dict[str, _Column]]] = deque()


def _close_later(file: Any, columns: dict[str, _Column]) -> None:
    _pending.append((file, columns))
    if phil.acquire(False):
        try:
            _close_pending()
        finally:
            phil.release()


def _close_pending() -> None:
    with contextlib.suppress(IndexError):  # the deque is empty
        while True:
            _pending.popleft()[0].close()


@atexit.register
def _close_all() -> None:
    # HDF5 would close the files itself after the interpreter has ended, and crash.
    for opened in [*_opened]:
        opened._file.close()
    _close_pending()


_opened: weakref.WeakSet[_Opened] = weakref.WeakSet()


class _Properties(NamedTuple):
    """The properties of a dataset that must stay the same when the file is opened again."""

    length: int
    shape: tuple[int, ...]  # of a row
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return f"{self.length:,} rows of {self.dtype}{list(self.shape)}"


class _Column:
    """One dataset of the open file, and the byte ranges of its rows."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.properties = _Properties(data.shape[0], data.shape[1:], native(data.dtype))
        self.row_size = data.id.get_type().get_size() * math.prod(data.shape[1:])
        # Rows that are read together: those of a chunk, or `PIECE` bytes of contiguous data.
        self.rows: int = data.chunks[0] if data.chunks else max(1, PIECE // max(1, self.row_size))
        # HDF5 decompresses a chunk that is too large for its chunk cache again on every read.
        chunk_cache_size = data.id.get_access_plist().get_chunk_cache()[1]
        is_filtered = data.id.get_create_plist().get_nfilters() > 0
        self._is_read_once = is_filtered and self.rows * self.row_size > chunk_cache_size
        # The last groups read, no more than are certainly in HDF5's chunk cache; none of contiguous data.
        self._n_recent = chunk_cache_size // max(1, self.rows * self.row_size) // 2 if data.chunks else 0
        self._recent_groups: OrderedDict[int, None] = OrderedDict()
        self._chunks: tuple[Any, Any, Any] | None = None  # group, start and stop of each chunk, sorted

    def read(self, rows: Any) -> list[Any]:
        """Return these rows, sorted and unique. All reads are slices: h5py takes milliseconds for each row of a list.

        One read takes adjacent rows, and all rows of a chunk that is too large for HDF5's chunk cache.
        """
        is_cut = np.diff(rows) > 1
        if self._is_read_once:
            is_cut &= np.diff(rows // self.rows) > 0
        found: list[Any] = []
        for run in np.split(rows, np.flatnonzero(is_cut) + 1):
            first, last = int(run[0]), int(run[-1])
            block = self.data[first : last + 1]
            block = block.astype(native(block.dtype), copy=False)  # torch requires native byte order
            found.extend(block if len(block) == len(run) else block[run - first])
        for group in dict.fromkeys((rows // self.rows).tolist()):
            self._recent_groups[group] = None
            self._recent_groups.move_to_end(group)
        while len(self._recent_groups) > self._n_recent:
            self._recent_groups.popitem(last=False)
        return found

    def pieces_of(self, rows: Any) -> list[tuple[int, int]]:
        """Return the byte ranges of these rows, sorted and merged, without chunks that HDF5 has in its cache."""
        groups = dict.fromkeys((rows // self.rows).tolist()).keys() - self._recent_groups.keys()
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(piece for group in groups for piece in self.pieces(group)):
            if merged and merged[-1][1] == start:
                start = merged.pop()[0]
            merged.append((start, stop))
        return merged

    def pieces(self, group: int) -> Sequence[tuple[int, int]]:
        """Return the byte ranges of the file that hold one group of rows."""
        if self.data.chunks is None:
            begin = self.data.id.get_offset()
            if begin is None:  # compact, or in an external file
                return ()
            start, stop = group * self.rows, min((group + 1) * self.rows, len(self.data))
            return ((begin + start * self.row_size, begin + stop * self.row_size),)
        if self._chunks is None:
            # One walk over HDF5's index: it has no cheaper lookup of a single chunk.
            found: list[tuple[int, int, int]] = []
            if hasattr(self.data.id, "chunk_iter"):  # missing in old versions of the HDF5 library
                self.data.id.chunk_iter(
                    lambda at: found.append((at.chunk_offset[0] // self.rows, at.byte_offset, at.size))
                )
            groups, starts, sizes = np.array(sorted(found), dtype=np.int64).reshape(-1, 3).T.copy()
            self._chunks = groups, starts, starts + sizes
        groups, starts, stops = self._chunks
        low, high = np.searchsorted(groups, [group, group + 1])
        return list(zip(starts[low:high].tolist(), stops[low:high].tolist(), strict=True))


class _Bytes(io.RawIOBase):
    """The file object that h5py reads: it has pieces that were fetched before, and else reads the open file."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._position = 0
        # Sorted offsets and their pieces, in one tuple: a thread may read it while another one replaces it.
        self._pieces: tuple[list[int], list[bytes]] = ([], [])

    def set_pieces(self, pieces: Mapping[int, bytes]) -> None:
        starts = sorted(pieces)
        self._pieces = starts, [pieces[start] for start in starts]

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset if whence == 0 else self._file.seek(offset, whence)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        start, size = self._position, len(buffer)
        starts, pieces = self._pieces
        at = bisect_right(starts, start) - 1
        inside = start - starts[at] if at >= 0 else 0
        if at >= 0 and inside + size <= len(pieces[at]):
            buffer[:] = memoryview(pieces[at])[inside : inside + size]
            n = size
        else:
            with reading():
                self._file.seek(start)
                n = self._file.readinto(buffer)
        self._position += n
        if n != size:  # HDF5 would not notice
            raise OSError(
                errno.EIO, f"{self._file}: {n} bytes at {start:,}, not {size}: the file is truncated"
            )
        return size
