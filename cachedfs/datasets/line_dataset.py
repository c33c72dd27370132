"""`LineDataset`: an iterable dataset with one sample per line of text files."""

from __future__ import annotations

import codecs
import contextlib
import io
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from cachedfs.datasets.arguments import current_ranks, ranks_of
from cachedfs.datasets.file_list import CompactStrings, URLs, as_urls, files_of, open_at, paths_of
from cachedfs.datasets.samples import Item
from cachedfs.datasets.text_streams import LineSpan, buffered, is_compressed, lines_in, spans_of
from cachedfs.errors import ObjectChanged
from cachedfs.filesystem import CachedFileSystem


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
        self.fs, path = open_at(first, storage_options)
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
        self._state: dict[str, Any] | None = None  # of the iterator that was started last
        self._resume_state: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        state = self._first_state()
        spans = self._spans(state["part"], state["n_parts"])
        saved, self._resume_state, self._state = self._resume_state, None, state
        if saved is not None:
            spans = self._left_of(spans, saved, state)
        return self._read(spans, state)

    def items(self) -> Iterator[Item]:
        """Yield the byte ranges that the next iterator in this process would read, as `fs.prefetch` takes them."""
        for span in self._spans(*self._part()):
            yield self.paths[span.file], span.start, span.stop

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iterator that was started last, as a dict of JSON-compatible values."""
        return dict(self._resume_state or self._state or self._first_state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iterator continue at a saved position.

        Raises ValueError if `state` is not from `state_dict`. `iter()` raises ValueError if the numbers of ranks or
        workers differ, and ObjectChanged if the files differ.
        """
        if missing := self._first_state().keys() - state.keys():
            raise ValueError(
                f"{self!r}: not a state of a LineDataset: it has no {', '.join(sorted(missing))}"
            )
        self._resume_state = dict(state)

    def _first_state(self) -> dict[str, Any]:
        """Return the state of a new iterator in this process. `file`: None at the start, and at the end (`is_over`)."""
        part, n_parts = self._part()
        place = {"file": None, "number": None, "version": None, "offset": 0, "is_over": False}
        return {"part": part, "n_parts": n_parts, "bytes": sum(self._weights()), **place}

    def _left_of(
        self, spans: list[LineSpan], saved: Mapping[str, Any], state: dict[str, Any]
    ) -> list[LineSpan]:
        """Return the spans from a saved state on, and move `state` there."""
        if (saved["part"], saved["n_parts"]) != (state["part"], state["n_parts"]):
            raise ValueError(
                f"{self!r}: the state is of part {saved['part']} of {saved['n_parts']}, but this is part {state['part']} of "
                f"{state['n_parts']}: resume with the same numbers of ranks and workers"
            )
        if saved["bytes"] != state["bytes"]:
            raise ObjectChanged(f"{self!r}: the files or their sizes differ from those of the saved state")
        state.update(saved)
        if saved["is_over"] or saved["file"] is None:
            return [] if saved["is_over"] else spans
        number, offset = int(saved["number"]), int(saved["offset"])
        if number >= len(self.paths) or self.paths[number] != saved["file"]:
            raise ObjectChanged(
                f"{self!r}: {saved['file']} is at another position in the list than when the state was saved"
            )
        if self._versions[number] != saved["version"]:
            raise ObjectChanged(
                f"{self.fs.unstrip_protocol(saved['file'])}: the file was replaced since the state was saved; start again from the beginning"
            )
        left = [LineSpan(span.file, offset, span.stop) for span in spans if span.file == number]
        return [span for span in left if offset < span.stop] + [span for span in spans if span.file > number]

    def _read(self, spans: Sequence[LineSpan], state: dict[str, Any]) -> Iterator[Any]:
        decode = self._decoder()
        for number, start, stop in spans:
            is_resumed = (number, start) == (state["number"], state["offset"])
            file_state = {"file": self.paths[number], "number": number, "version": self._versions[number]}
            with self._opened(number) as file:
                offset = start
                try:
                    for offset, line in lines_in(file, start, stop, is_start=is_resumed):
                        content = line.removesuffix(b"\n").removesuffix(b"\r")
                        if not offset:
                            content = content.removeprefix(codecs.BOM_UTF8)
                        if self.keep_empty or content.strip():
                            sample = decode(content)
                            state |= file_state
                            state["offset"] = offset + len(line)
                            yield sample
                except Exception as error:  # any type: user code and the libraries of formats raise their own
                    error.add_note(f"in the line at byte {offset:,} of {self._name(number)}, in {self!r}")
                    raise
        state |= {"file": None, "number": None, "version": None, "offset": 0, "is_over": True}

    @contextlib.contextmanager
    def _opened(self, number: int) -> Iterator[io.BufferedReader]:
        path, size = self.paths[number], self._sizes[number]
        with self.fs.open(path, "rb") as file:
            is_other = size is not None and getattr(file, "size", None) not in (None, size)
            if is_other or _version(self.fs, path) != self._versions[number]:
                raise ObjectChanged(
                    f"{self._name(number)}: the file was replaced since {self!r} was created; create it again"
                )
            with buffered(path, file) as lines:
                yield lines

    def _decoder(self) -> Callable[[bytes], Any]:
        decode, transform = self.decode, self.transform
        if decode is None and self.encoding is not None:
            is_utf8 = codecs.lookup(self.encoding).name == "utf-8"
            decode = bytes.decode if is_utf8 else operator.methodcaller("decode", self.encoding)
        if decode is None or transform is None:
            return decode or transform or bytes
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
        state = {**self.__dict__, "_state": None}
        if get_spawning_popen() is not None:  # spawned workers lack the parent's torch.distributed
            state["_spawned_by"] = self._ranks()
        return state

    def __repr__(self) -> str:
        n_bytes = sum(size or 0 for size in self._sizes)
        return f"LineDataset({self.url!r}, {len(self.paths):,} files, {n_bytes:,} bytes)"


def _version(fs: Any, path: str) -> str | None:
    """Return a key that changes with the object's bytes; None for a filesystem other than cachedfs."""
    return str(fs.ukey(path)) if isinstance(fs, CachedFileSystem) else None


def _listed_version(fs: Any, path: str) -> str | None:
    """Return `_version` as of the last listing or lookup, even if that is expired by now."""
    known = fs._objects.known(path) if isinstance(fs, CachedFileSystem) else None
    return _version(fs, path) if known is None or known.info is None else known.info.fingerprint
