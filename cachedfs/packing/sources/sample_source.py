"""Base classes of sources, the listing of their files, and a cache of decoded batches."""

from __future__ import annotations

import contextlib
import hashlib
import io
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

import numpy as np

from cachedfs.common.urls import filesystem_at
from cachedfs.datasets.file_list import CompactStrings, URLs, as_urls, infos_at, infos_of, paths_of
from cachedfs.filesystem import CachedFileSystem
from cachedfs.packing.pack_types import (
    END,
    Array,
    Field,
    FieldSpan,
    PieceCounts,
    SampleBatch,
    SourcePiece,
    version_of,
)

__all__ = ["MAX_SAMPLE", "NAMES", "PIECE", "BadFile", "BatchCache", "DecodedSource", "Item"]
__all__ += ["SampleSource", "SourceFiles"]

Item = str | tuple[str, int, int]
PIECE = 16 << 20  # bytes of a source that are read and decoded as one piece
# Largest sample in bytes, if it must fit in memory. Samples that are copied as bytes may have any size.
MAX_SAMPLE = 128 << 20
MAX_DECODED = 128 << 20  # decoded bytes that stay in memory until they are written
NAMES = "names"  # field with the name of each sample in the source


class BadFile(ValueError):
    """A file that cannot be read or decoded. A pack may leave it out."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.reason}"


class SourceFiles:
    """The files of a source, listed once, and `digest`, which is equal for two listings of unchanged files.

    If a pack goes on after files were removed, it keeps the list of the earlier run, because the numbers of the files
    are in its counts. `removed` has the numbers of those files. `listed` is the digest of the files that exist.
    """

    def __init__(self, urls: URLs, options: Mapping[str, Any] | None = None) -> None:
        """List the files.

        Raises ObjectNotFound if there is none, and ValueError for a file without bytes, such as a Google document.
        """
        given: Any = urls
        self._urls = given if isinstance(given, str) or hasattr(given, "__fspath__") else list(given)
        self._options = dict(options or {})
        self.url, url_list = as_urls(self._urls)
        self.fs, path = filesystem_at(self.url, self._options)
        self.root = "" if url_list is not None else str(path)  # the folder, file or pattern that was given
        if url_list is None:
            found = infos_of(self.fs, self.url, path)
            paths, infos = list(found), list(found.values())
        else:  # a list may name a file twice
            paths = paths_of(self.fs, url_list)
            infos = infos_at(self.fs, paths)
        unknown = [at for at, info in enumerate(infos) if info.get("size") is None]
        for at, info in zip(unknown, infos_at(self.fs, [paths[at] for at in unknown]), strict=True):
            infos[at] = info  # not every listing has sizes
            if info.get("size") is None:
                name = paths[at]
                raise ValueError(
                    f"{self.fs.unstrip_protocol(name)} has no bytes to pack, as a document of Google's own: leave it "
                    "out, or name a type to export it as"
                )
        self.removed: frozenset[int] = frozenset()
        sizes = np.fromiter((info["size"] for info in infos), np.int64, len(infos))
        self._set(paths, sizes, np.array([_key(*each) for each in zip(paths, infos, strict=True)], "u8"))
        self.listed = self.digest

    def _set(self, paths: list[str], sizes: Array, keys: Array) -> None:
        self.paths, self.sizes, self._keys = CompactStrings(paths), sizes, keys
        first, last = min(paths), max(paths)
        n = next((i for i in range(len(first)) if first[i] != last[i : i + 1]), len(first))
        self._head = first[: first.rfind("/", 0, n) + 1]  # the common folder of all files

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def size(self) -> int:
        return int(self.sizes.sum())

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self._keys.tobytes(), digest_size=16).hexdigest()

    @property
    def numbers(self) -> list[int]:
        """The numbers of the files that exist."""
        return [number for number in range(len(self)) if number not in self.removed]

    def as_bytes(self) -> bytes:
        """Return the list of files as a NumPy npz file."""
        buffer = io.BytesIO()
        paths = np.frombuffer("\0".join(self.paths).encode("utf-8", "surrogatepass"), "u1")
        np.savez_compressed(buffer, paths=paths, sizes=self.sizes, keys=self._keys)
        return buffer.getvalue()

    def adopt(self, data: bytes) -> None:
        """Take over the list of an earlier run (`as_bytes`), if files were only removed since."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as stored:
                paths = stored["paths"].tobytes().decode("utf-8", "surrogatepass").split("\0")
                sizes, keys = stored["sizes"], stored["keys"]
        except Exception:  # zip, zlib and NumPy raise different errors for damaged bytes
            return
        n, removed = 0, []
        for number, key in enumerate(keys.tolist()):
            if n < len(self) and self._keys[n] == key:
                n += 1
            else:
                removed.append(number)
        if n == len(self) and removed:
            sizes[removed] = 0
            self.removed = frozenset(removed)
            self._set(paths, sizes, keys)

    def name(self, number: int) -> str:
        """Return the path of a file relative to the common folder of all files."""
        return self.paths[number].removeprefix(self._head)

    def shown(self, number: int) -> str:
        return str(self.fs.unstrip_protocol(self.paths[number]))

    @contextlib.contextmanager
    def open(self, number: int) -> Iterator[Any]:
        """Return a context manager for an open file."""
        with self.noted(number), self.fs.open(self.paths[number], "rb") as file:
            yield file

    @contextlib.contextmanager
    def noted(self, number: int) -> Iterator[None]:
        """Return a context manager that adds the name of a file to errors as a note."""
        try:
            yield
        except Exception as error:  # each library raises its own errors for damaged data
            error.add_note(f"in {self.shown(number)}")
            raise

    def again(self) -> SourceFiles:
        """List the files again. An offline filesystem keeps its metadata, since it cannot list anew."""
        is_offline = isinstance(self.fs, CachedFileSystem) and self.fs.config.offline
        if hasattr(self.fs, "invalidate_cache") and not is_offline:
            self.fs.invalidate_cache()
        return SourceFiles(self._urls, self._options)

    def head(self, number: int, n: int) -> bytes:
        """Return the first `n` bytes of a file."""
        size = int(self.sizes[number])
        return bytes(self.fs.cat_file(self.paths[number], start=0, end=min(n, size))) if size else b""

    def ranges(
        self, wanted: Iterable[tuple[int, int, int]], bad: dict[int, str] | None = None
    ) -> list[bytes]:
        """Read byte ranges `(file number, start, stop)` with one `cat_ranges` call.

        If `bad` is given, it gets the reason for each file that may not be read. Its bytes are then empty. Raises the
        filesystem's error with a note that names the file, and ValueError for a file shorter than listed.
        """
        wanted = list(wanted)
        if not wanted:
            return []
        numbers, starts, stops = map(list, zip(*wanted, strict=True))
        found = self.fs.cat_ranges([self.paths[i] for i in numbers], starts, stops, on_error="return")
        for i, (number, start, stop) in enumerate(wanted):
            data = found[i]
            if isinstance(data, PermissionError) and bad is not None:
                bad[number] = f"cannot be read: {data}"
                found[i] = b""
            elif isinstance(data, BaseException):
                data.add_note(f"while packing {self.shown(number)}")
                raise data
            elif len(data) != stop - start:
                raise ValueError(
                    f"{self.shown(number)}: {len(data):,} bytes at {start:,}, where its listing has {stop - start:,}: "
                    "it was replaced meanwhile; pack again, with overwrite"
                )
        return list(found)


class SampleSource:
    """Base class of sources, which read samples piece by piece.

    Sources pickle, and any thread may call them. `look` sets `fields`, `shared` and `group_attributes`. The plan then replaces them by the same
    fields with `is_small` set.
    """

    kind: ClassVar[str]
    is_known: ClassVar[bool] = False  # True: `measure` needs no request
    is_decoded: ClassVar[bool] = False  # True: reading a piece decodes all its fields
    may_skip: ClassVar[bool] = False  # True: files that cannot be read or decoded can be left out
    notes: Sequence[str] = ()  # what `look` found and the user should know
    fields: tuple[Field, ...] = ()
    shared: Sequence[tuple[Field, Array]] = ()  # arrays that are not cut into samples, with all their axes

    def __init__(self, files: SourceFiles, columns: Any = None, **options: Any) -> None:
        self.files, self.columns = files, columns
        # By the path of the group; "": the store's own.
        self.group_attributes: Mapping[str, Mapping[str, Any]] = {}

    def look(self) -> list[SampleBatch]:
        """Set `fields`, and return some samples. The caller must call it once, before any other method."""
        raise NotImplementedError

    def pieces(self) -> Iterable[SourcePiece]:
        """Return the pieces in sample order.

        If a piece stops at END, `measure` returns the start of the piece that continues it, or END.
        """
        return [SourcePiece(number, 0, END) for number in self.files.numbers]

    def piece_of(self, number: int) -> SourcePiece:
        """Return the piece where a file begins."""
        return SourcePiece(number, 0, END)

    def measure(self, piece: SourcePiece) -> PieceCounts:
        """Count the samples of a piece, and read its small fields.

        Raises BadFile for a file that can be left out if nothing of it has been packed.
        """
        raise NotImplementedError

    def rows(self, field: Field, span: FieldSpan, box: tuple[slice, ...], counts: PieceCounts) -> Array:
        """Return rows, or elements of a ragged field.

        `box` slices each sample along its own axes. `counts` are those of the piece; empty if the source is decoded.
        """
        raise NotImplementedError

    def items(self, piece: SourcePiece) -> Iterator[Item]:
        """Yield the `fs.prefetch` items of a piece: paths or (path, start, stop)."""
        if not piece.start:
            yield self.files.paths[piece.file], 0, int(self.files.sizes[piece.file])

    @property
    def total_size(self) -> int | None:
        """Bytes of all big fields, if they are the files' bytes; None if unknown before reading."""
        return None

    def shown(self, piece: SourcePiece) -> str:
        """Return the name of a piece for error messages."""
        return self.files.shown(piece.file)


class DecodedSource(SampleSource):
    """Base class of sources that decode a piece at once, with all its fields. Decoded batches are cached."""

    is_decoded = True

    def __init__(self, files: SourceFiles, columns: Any = None, **options: Any) -> None:
        super().__init__(files, columns, **options)
        self._batches = BatchCache(MAX_DECODED)

    def read(self, piece: SourcePiece) -> SampleBatch:
        """Read and decode a piece."""
        raise NotImplementedError

    def measure(self, piece: SourcePiece) -> PieceCounts:
        return self._batches.get(piece, self.read).counts(self.fields)

    def rows(self, field: Field, span: FieldSpan, box: tuple[slice, ...], counts: PieceCounts) -> Array:
        batch = self._batches.get(span.piece, self.read)
        return batch.values[field.name][(slice(span.start, span.stop), *box)]


class BatchCache:
    """A cache of decoded batches, up to `size` bytes. Concurrent calls for one piece decode it once.

    It evicts batches in source order, and not by last use, because batches are written in source order. It pickles
    empty.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._batches: dict[SourcePiece, Future[SampleBatch]] = {}

    def __reduce__(self) -> Any:
        return type(self), (self._size,)

    def get(self, piece: SourcePiece, read: Callable[[SourcePiece], SampleBatch]) -> SampleBatch:
        with self._lock:
            future = self._batches.get(piece)
            if is_new := future is None:
                future = self._batches[piece] = Future()
        if is_new:
            try:
                future.set_result(read(piece))
            except BaseException as error:  # an interrupt, too: other threads wait for this future
                with self._lock:
                    del self._batches[piece]
                future.set_exception(error)
                raise
            self._evict(piece)
        return future.result()

    def _evict(self, wanted: SourcePiece) -> None:
        with self._lock:
            done = [(piece, future) for piece, future in self._batches.items() if future.done()]
            sizes = {piece: future.result().nbytes for piece, future in sorted(done)}
            over = sum(sizes.values()) - self._size
            for piece, size in sizes.items():
                if over > 0 and piece != wanted:
                    del self._batches[piece]
                    over -= size


def _key(path: str, info: Mapping[str, Any]) -> int:
    """Return a number that changes with the name, size or content of a file."""
    data = f"{path}\0{info['size']}\0{version_of(info)}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
