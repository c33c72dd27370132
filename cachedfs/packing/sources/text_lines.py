"""Text files as sources: blocks of complete lines, and plain lines as samples."""

from __future__ import annotations

import codecs
import contextlib
import io
from collections.abc import Iterator

from cachedfs.datasets.text_streams import buffered, is_compressed
from cachedfs.packing.pack_types import Field, SampleBatch
from cachedfs.packing.sources.arrow_columns import parse_columns
from cachedfs.packing.sources.sample_source import MAX_SAMPLE, RecordSource, joined, spread
from cachedfs.packing.sources.source_files import SourceFiles

SAMPLED = 16  # files that `look` reads; ranges of the source if it has fewer files
RANGE_SIZE = 512 << 10  # bytes of such a range
PIECE = 8 << 20  # bytes of lines that are parsed at a time


@contextlib.contextmanager
def opened(files: SourceFiles, number: int) -> Iterator[io.BufferedReader]:
    """Return a context manager for the decompressed content of a file."""
    with files.open(number) as raw, buffered(files.paths[number], raw) as stream:
        yield stream


def sampled_ranges(files: SourceFiles) -> Iterator[tuple[int, int, bytes]]:
    """Yield bytes from all over a source: (file, position, bytes), of up to 16 files, the start of each first.

    Of compressed files it yields only the start, because all before the others would be decompressed.
    """
    sizes = files.sizes.tolist()
    nonempty = [number for number, size in enumerate(sizes) if size]
    if not nonempty:
        raise ValueError(f"{files.url}: nothing to pack: all files are empty")
    some = [nonempty[i] for i in spread(len(nonempty), SAMPLED)]
    n = max(2, SAMPLED // len(some))
    for number in some:
        with opened(files, number) as stream:
            yield number, 0, stream.read(RANGE_SIZE)
        size = sizes[number]
        if size > RANGE_SIZE and not is_compressed(files.paths[number]):
            starts = sorted({max(RANGE_SIZE, (size - RANGE_SIZE) * i // n) for i in range(1, n + 1)})
            datas = files.ranges((number, at, min(at + RANGE_SIZE, size)) for at in starts)
            yield from ((number, at, data) for at, data in zip(starts, datas, strict=True))


class TextLines(RecordSource):
    """Base class of sources with one sample for each line."""

    record = "line"

    def chunks(self, number: int) -> Iterator[bytes]:
        """Yield blocks of complete lines. Raises ValueError for a line of more than `MAX_SAMPLE` bytes."""
        with opened(self.files, number) as stream:
            bom = codecs.BOM_UTF8
            while records := stream.read(PIECE):
                if not records.endswith(b"\n"):
                    records += stream.readline(MAX_SAMPLE)
                    if not records.endswith(b"\n") and stream.peek(1):
                        raise ValueError(
                            f"{self.files.url_of(number)}: a line of more than {MAX_SAMPLE:,} bytes is not packed by line; "
                            'kind="files" keeps the bytes of whole files, of any size'
                        )
                if records := records.removeprefix(bom):
                    yield records
                bom = b""

    def n_of(self, records: bytes) -> int:
        return records.count(b"\n") + (not records.endswith(b"\n"))

    def first(self, records: bytes, n: int) -> bytes:
        return b"".join(line + b"\n" for line in records.split(b"\n")[:n])

    def sampled(self) -> list[tuple[int, int, bytes]]:
        """Return (file, position, complete lines) from all over the source."""
        found = []
        for number, at, data in sampled_ranges(self.files):
            start = data.find(b"\n") + 1 or len(data) if at else 0
            end = data.rfind(b"\n") + 1 if len(data) >= RANGE_SIZE else len(data)
            found.append((number, at, data[start:end].removeprefix(b"" if at else codecs.BOM_UTF8)))
        return found


class LineSource(TextLines):
    """A source with one sample for each line that is not empty: its bytes without the line end."""

    def look(self) -> list[SampleBatch]:
        _, columns = parse_columns(self.columns)
        given = columns.get("data")
        if {*columns} - {"data"} or given not in (None, "utf8", "bytes"):
            raise ValueError(
                f"columns={self.columns}: lines are data, 'utf8' or 'bytes', and have no others; kind='jsonl' reads lines of JSON"
            )
        datas = [data for _, _, data in self.sampled()]
        is_text = given == "utf8" or (given is None and all(map(_is_utf8, datas)))
        self.fields = (Field("data", "uint8", is_ragged=True, means="utf-8" if is_text else "bytes"),)
        if not any(map(is_compressed, self.files.paths)):
            self.total_size = self.files.size
        return [_samples_of(data) for data in datas]

    def batch(self, records: bytes, number: int) -> SampleBatch:
        if self.fields[0].means == "utf-8":
            records.decode()
        return _samples_of(records)

    def problem(self, records: bytes, bad: int, error: Exception) -> str:
        assert isinstance(error, UnicodeDecodeError)
        found = records.split(b"\n")[bad]
        found = found[: len(found.decode(errors="ignore").encode()) + 1]
        return (
            f"byte {found[-1]:#x} is not UTF-8: {found[-80:]!r}; "
            'columns={"data": "bytes"} (--column data=bytes) packs lines as bytes'
        )


def _samples_of(data: bytes) -> SampleBatch:
    lines = data.split(b"\n")
    if b"\r" in data:
        lines = [line.removesuffix(b"\r") for line in lines]
    values, sizes = joined(filter(None, lines))
    return SampleBatch({"data": values}, {"data": sizes})


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
