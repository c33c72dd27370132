"""`LineDataset`: an iterable dataset with one sample per line of text files."""

from __future__ import annotations

import codecs
import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from cachedfs.common.urls import filesystem_at
from cachedfs.datasets.arguments import current_ranks, ranks_of
from cachedfs.datasets.file_list import CompactStrings, URLs, as_urls, files_of, paths_of
from cachedfs.datasets.samples import Item
from cachedfs.datasets.text_streams import (
    LineBatch,
    LineSpan,
    decompressed,
    first_line,
    is_compressed,
    lines_from,
    spans_of,
)
from cachedfs.errors import ObjectChanged
from cachedfs.filesystem import CachedFileSystem

__all__ = ["LineDataset"]


class LineDataset(IterableDataset[Any]):
    """One sample per line of one or more text files, in order.

        lines = LineDataset("cachedfs::gs://my-bucket/train.jsonl", decode=json.loads)
        for record in lines:
            ...

    Files come in natural order (or the order of the list), and lines are not shuffled. A line ends with `\\n` or
    `\\r\\n`, which is not part of it; the last line may lack it. A sample is the bytes of a line, passed through
    `decode` and then `transform`. Without `decode` it is a `str`, or `bytes` with `encoding=None`. Lines of nothing but
    spaces and tabs are left out unless `keep_empty` is True. A byte order mark at the start of a file is left out.

    Ranks and DataLoader workers together get each line exactly once. Each has an equal share of the bytes of all
    files, and reads the lines that begin in its share. So the numbers of lines differ a little: under
    DistributedDataParallel, end the epoch together (`join`, or a fixed number of steps). A compressed file (.gz,
    .bz2, .xz, .zst) cannot be split, so one reader gets all of it.

    `state_dict()` returns the position of the iterator that was started last. After `load_state_dict()`, the next
    iterator continues there, with the same files and numbers of ranks and workers. It reads nothing that comes before,
    but decompresses a compressed file up to there again. torchdata's StatefulDataLoader keeps a state for each worker.
    """

    def __init__(
        self,
        urls: URLs,
        *,
        decode: Callable[[bytes], Any] | None = None,
        encoding: str | None = "utf-8",
        keep_empty: bool = False,
        transform: Callable[[Any], Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Find the files of a pattern, folder, URL or list of URLs, and their sizes.

        This takes one listing; for a list of URLs, one lookup per file. `decode` is called with the bytes of a line,
        and `transform` with the result; both must be picklable if workers are spawned. `rank` and `world_size` are by
        default those of torch.distributed, if it is initialized when the iteration begins.

        Raises ObjectNotFound for a missing file, and ValueError for inconsistent options.
        """
        if encoding is not None and "\n".encode(encoding) != b"\n":
            raise ValueError(f"encoding={encoding!r}: its line end is not the byte 10, which separates lines")
        self._explicit_ranks = ranks_of(rank, world_size)
        first, url_list = as_urls(urls)
        self.url, self.encoding, self.keep_empty = first, encoding, keep_empty
        self.decode, self.transform = decode, transform
        self.fs, path = filesystem_at(first, storage_options or {})
        self._sizes: list[int | None]
        if url_list is None:
            found = files_of(self.fs, first, path)
            paths, self._sizes = list(found), list(found.values())
        else:
            paths = paths_of(self.fs, url_list)
            self._sizes = self.fs.sizes(paths)
        self.paths = CompactStrings(paths)
        self._versions = [_listed_version(self.fs, path) for path in paths]
        self._spawned_by = (0, 1)  # ranks of the process that spawned this one
        self._resume_state: dict[str, Any] | None = None
        self._position = _Position()

    def __iter__(self) -> Iterator[Any]:
        position = _Position(*self._part())
        spans = self._spans(position.part, position.n_parts)
        state, self._resume_state = self._resume_state, None
        self._position = position
        if state is not None:
            spans = self._left_of(spans, state, position)
        return self._read(spans, position)

    def items(self) -> Iterator[Item]:
        """Yield the byte ranges that the next iterator in this process would read, as `fs.prefetch` takes them."""
        for span in self._spans(*self._part()):
            yield self.paths[span.file], span.start, span.stop

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iterator that was started last, as a dict of JSON-compatible values."""
        if self._resume_state is not None:
            return dict(self._resume_state)
        file, offset = self._position.current()
        return {
            "part": self._position.part,
            "n_parts": self._position.n_parts,
            "bytes": sum(self._weights()),
            "file": None if file is None else self.paths[file],
            "number": file,
            "version": None if file is None else self._versions[file],
            "offset": offset,
            "is_over": self._position.is_over,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iterator continue at a saved position.

        Raises ValueError if `state` is not from `state_dict`. `iter()` raises ValueError if the numbers of ranks or
        workers differ, and ObjectChanged if the files differ.
        """
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise ValueError(
                f"{self!r}: not a state of a LineDataset: it has no {', '.join(sorted(missing))}"
            )
        self._resume_state = dict(state)

    def _left_of(
        self, spans: list[LineSpan], state: Mapping[str, Any], position: _Position
    ) -> list[LineSpan]:
        """Return the spans from the saved state on, and move `position` there."""
        if (state["part"], state["n_parts"]) != (position.part, position.n_parts):
            raise ValueError(
                f"{self!r}: the state is of part {state['part']} of {state['n_parts']}, but this is part {position.part} of "
                f"{position.n_parts}: resume with the same numbers of ranks and workers"
            )
        if state["bytes"] != sum(self._weights()):
            raise ObjectChanged(f"{self!r}: the files or their sizes differ from those of the saved state")
        position.is_over = state["is_over"]
        if position.is_over or state["file"] is None:
            return [] if position.is_over else spans
        number, offset = int(state["number"]), int(state["offset"])
        if number >= len(self.paths) or self.paths[number] != state["file"]:
            raise ObjectChanged(
                f"{self!r}: {state['file']} is at another position in the list than when the state was saved"
            )
        if self._versions[number] != state["version"]:
            raise ObjectChanged(
                f"{self.fs.unstrip_protocol(state['file'])}: the file was replaced since the state was saved; start again from the beginning"
            )
        position.file, position.start = number, offset
        left = [LineSpan(span.file, offset, span.stop) for span in spans if span.file == number]
        return [span for span in left if offset < span.stop] + [span for span in spans if span.file > number]

    def _read(self, spans: Sequence[LineSpan], position: _Position) -> Iterator[Any]:
        decode = self._decoder()
        for span in spans:
            with self._opened(span.file) as file:
                offset = span.start
                if (span.file, offset) == (position.file, position.start):  # resumed: a line begins here
                    file.seek(offset)
                else:
                    offset = first_line(file, offset, span.stop)
                for found in _with_name(lines_from(file, offset, span.stop), self._name(span.file)):
                    lines = position.enter(span.file, found, keep_empty=self.keep_empty)
                    # The only Python code that runs once per line.
                    samples = iter(lines) if decode is None else map(decode, lines)
                    try:
                        for position.line, sample in enumerate(samples):
                            yield sample
                        # Otherwise the loop would take a StopIteration of `decode` for the end of `map`.
                        if position.line + 1 < len(lines):
                            raise RuntimeError("decode or transform raised StopIteration")
                    except Exception as error:  # any type: user code may raise it
                        where = f"in the line at byte {position.current()[1]:,}"
                        error.add_note(f"{where} of {self._name(span.file)}, in {self!r}")
                        raise
        position.is_over = True

    @contextlib.contextmanager
    def _opened(self, number: int) -> Iterator[Any]:
        path, size = self.paths[number], self._sizes[number]
        with self.fs.open(path, "rb") as file:
            is_other = size is not None and getattr(file, "size", None) not in (None, size)
            if is_other or _version(self.fs, path) != self._versions[number]:
                raise ObjectChanged(
                    f"{self._name(number)}: the file was replaced since {self!r} was created; create it again"
                )
            with contextlib.closing(decompressed(path, file)) if is_compressed(path) else file as stream:
                yield stream

    def _decoder(self) -> Callable[[bytes], Any] | None:
        decode, transform = self.decode, self.transform
        if decode is None and self.encoding is not None:
            is_utf8 = codecs.lookup(self.encoding).name == "utf-8"
            decode = bytes.decode if is_utf8 else operator.methodcaller("decode", self.encoding)
        if decode is None or transform is None:
            return decode or transform
        return lambda line: transform(decode(line))

    def _spans(self, part: int, n_parts: int) -> list[LineSpan]:
        # A file of unknown size is not split.
        unsplit = [
            size is None or is_compressed(path) for path, size in zip(self.paths, self._sizes, strict=True)
        ]
        return spans_of(self._weights(), unsplit, part, n_parts)

    def _weights(self) -> list[int]:
        known = [size for size in self._sizes if size is not None]
        mean = max(1, sum(known) // len(known)) if known else 1
        return [mean if size is None else size for size in self._sizes]

    def _part(self) -> tuple[int, int]:
        """Return `(part, n_parts)` of this process: by rank, then by DataLoader worker."""
        rank, world_size = self._ranks()
        if (worker := get_worker_info()) is None:
            return rank, world_size
        return rank * worker.num_workers + worker.id, world_size * worker.num_workers

    def _ranks(self) -> tuple[int, int]:
        return self._explicit_ranks or current_ranks() or self._spawned_by

    def _name(self, number: int) -> str:
        return str(self.fs.unstrip_protocol(self.paths[number]))

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_position": _Position()}
        if get_spawning_popen() is not None:  # spawned workers lack the parent's torch.distributed
            state["_spawned_by"] = self._ranks()
        return state

    def __repr__(self) -> str:
        n_bytes = sum(size or 0 for size in self._sizes)
        return f"LineDataset({self.url!r}, {len(self.paths):,} files, {n_bytes:,} bytes)"


class _Position:
    """The position of an iterator. It is computed on request only, so that a line costs almost nothing."""

    def __init__(self, part: int = 0, n_parts: int = 1) -> None:
        self.part, self.n_parts = part, n_parts
        self.is_over = False
        self.line = -1  # index of the last yielded line in the current batch of lines
        self.file: int | None = None
        self.start = 0  # offset of the first line of the batch
        self._lines: list[bytes] = []  # the lines of the batch, as in the file
        self._numbers: Sequence[int] = ()  # indexes of the lines to yield in `_lines`

    def enter(self, file: int, found: LineBatch, *, keep_empty: bool) -> list[bytes]:
        """Start a batch of lines; return the lines to yield, without line ends and byte order mark."""
        self.file, self.start, self._lines, self.line = file, found.begin, found.lines, -1
        lines, self._numbers = found.lines, range(len(found.lines))
        if found.begin == 0 and lines[0].startswith(codecs.BOM_UTF8):
            lines = [lines[0].removeprefix(codecs.BOM_UTF8), *lines[1:]]
        if found.may_return:
            lines = [line.removesuffix(b"\r") for line in lines]
        if not keep_empty and not all(map(bytes.strip, lines)):
            self._numbers = [i for i, line in enumerate(lines) if line.strip()]
            lines = [lines[i] for i in self._numbers]
        return lines

    def current(self) -> tuple[int | None, int]:
        """Return the file index and the offset of the next line; (None, 0) at the start and at the end."""
        if self.file is None or self.is_over:
            return None, 0
        n = self.line + 1
        before = self._lines[: self._numbers[n] if n < len(self._numbers) else len(self._lines)]
        return self.file, self.start + sum(map(len, before)) + len(before)


def _with_name(blocks: Iterator[Any], name: str) -> Iterator[Any]:
    """Yield from `blocks`; an error while reading or decompressing gets a note with the file's name."""
    try:
        yield from blocks
    except Exception as error:  # any type: each library raises its own for corrupt data
        error.add_note(f"while reading {name}")
        raise


def _version(fs: Any, path: str) -> str | None:
    """Return a key that changes with the object's bytes; None for a filesystem other than cachedfs."""
    return str(fs.ukey(path)) if isinstance(fs, CachedFileSystem) else None


def _listed_version(fs: Any, path: str) -> str | None:
    """Return `_version` as of the last listing or lookup, even if that is expired by now."""
    known = fs._objects.known(path) if isinstance(fs, CachedFileSystem) else None
    return _version(fs, path) if known is None or known.info is None else known.info.fingerprint
