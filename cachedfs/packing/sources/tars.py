"""Tar files in WebDataset format: adjacent members of one base name are one sample."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from cachedfs.packing.pack_types import END, Array, Field, FieldSpan, PieceCounts, SampleBatch, SourcePiece
from cachedfs.packing.sources.field_names import checked
from cachedfs.packing.sources.file_samples import as_text
from cachedfs.packing.sources.sample_source import (
    MAX_SAMPLE,
    NAMES,
    BadFile,
    Item,
    SampleSource,
    SourceFiles,
    looked_at,
    spread,
)

__all__ = ["TarSource"]

SAMPLED = 8  # tar files that `look` reads
SAMPLED_SIZE = 2 << 20  # bytes of each of them that it reads
MEMBER_SIZE = 256 << 10  # bytes of each member that it reads
# Largest size of the counts of a piece, in bytes. Those of 32 pieces (`task.TALLIES`) may be in memory.
KEPT = 4 << 20


class TarSource(SampleSource):
    """A source with one field of bytes for each ending, such as "jpg" and "cls".

    A piece is a tar file, or a part of a large one whose counts stay below `KEPT` bytes. It starts at a member's
    header.
    """

    kind = "tar"
    may_skip = True

    def __init__(self, files: SourceFiles, columns: Any = None, **options: Any) -> None:
        super().__init__(files)
        if columns is not None and (
            isinstance(columns, dict) or not all(isinstance(name, str) for name in columns)
        ):
            raise ValueError(
                f"columns={columns!r}: members are packed as bytes: give a list of endings, such as ['jpg']"
            )
        self.columns = None if columns is None else [columns] if isinstance(columns, str) else list(columns)

    def look(self) -> list[SampleBatch]:
        found: dict[str, list[bytes]] = {}
        lengths: dict[str, list[int]] = {}
        names: list[str] = []
        numbers = self.files.numbers
        chosen = [numbers[i] for i in spread(len(numbers), SAMPLED)]
        for sample, datas in (each for _, looked in looked_at(chosen, self._looked) for each in looked):
            names.append(sample.name)
            for ending, data in datas.items():
                found.setdefault(ending, []).append(data)
                lengths.setdefault(ending, []).append(sample.members[ending].size)
        if missing := [ending for ending in self.columns or () if ending not in found]:
            raise ValueError(f"{self.files.url}: no member ends in {missing}; there are {sorted(found)}")
        if not found:
            raise ValueError(f"{self.files.url}: no file is in it")
        self.fields = checked(
            (
                *(
                    Field(ending, "uint8", is_ragged=True, means="bytes")
                    for ending in self.columns or sorted(found)
                ),
                Field(NAMES, "uint8", is_ragged=True, means="utf-8", is_small=True),
            )
        )
        text, text_sizes = as_text(names)
        values = {ending: np.frombuffer(b"".join(datas), "u1") for ending, datas in found.items()} | {
            NAMES: text
        }
        sizes = {ending: np.fromiter(map(len, datas), np.int64) for ending, datas in found.items()} | {
            NAMES: text_sizes
        }
        return [SampleBatch(len(names), values, sizes)]

    def _looked(self, number: int) -> list[tuple[TarSample, dict[str, bytes]]]:
        """Return the first samples of a tar, and the first bytes of their members."""
        found, size = [], 0
        with _members(self.files, number) as members:
            for sample in samples_of(members, self.files.shown(number)):
                datas = {
                    ending: member.data(MEMBER_SIZE)
                    for ending, member in sample.members.items()
                    if self.columns is None or ending in self.columns
                }
                found.append((sample, datas))
                size += sum(map(len, datas.values()))
                if size > SAMPLED_SIZE:
                    break
        return found

    def pieces(self) -> Iterable[SourcePiece]:
        return [SourcePiece(number, 0, END) for number in self.files.numbers]

    def measure(self, piece: SourcePiece) -> PieceCounts:
        """Read the headers and the small members. `places` has the byte positions of all other members."""
        endings = [field.name for field in self.fields if field.name != NAMES]
        small = {field.name for field in self.fields if field.is_small}
        names: list[str] = []
        starts: dict[str, list[int]] = {ending: [] for ending in endings}
        sizes: dict[str, list[int]] = {ending: [] for ending in endings}
        datas: dict[str, list[bytes]] = {ending: [] for ending in endings if ending in small}
        stop, kept_size = END, 0
        with _members(self.files, piece.file, piece.start) as members:
            for sample in samples_of(members, self.files.shown(piece.file)):
                if kept_size > KEPT:
                    stop = next(iter(sample.members.values())).header
                    break
                more = [ending for ending in sample.members if ending not in starts]
                if more and self.columns is None:
                    raise ValueError(
                        f"{self.files.shown(piece.file)}: sample {sample.name!r} has {more[0]!r}, which those looked at first do not have; "
                        "name all endings that are to be packed: columns=[...]"
                    )
                names.append(sample.name)
                kept_size += len(sample.name) + 16 * len(endings)
                for ending in endings:
                    member = sample.members.get(ending)
                    starts[ending].append(member.start if member else 0)
                    sizes[ending].append(member.size if member else 0)
                    if ending in small:
                        datas[ending].append(self._small(piece, member) if member else b"")
                        kept_size += len(datas[ending][-1])
        text, text_sizes = as_text(names)
        kept = {ending: np.frombuffer(b"".join(found), "u1") for ending, found in datas.items()}
        return PieceCounts(
            len(names),
            {NAMES: text, **kept},
            {NAMES: text_sizes, **{ending: np.array(found, np.int64) for ending, found in sizes.items()}},
            {ending: np.array(starts[ending], np.int64) for ending in endings if ending not in small},
            stop,
        )

    def _small(self, piece: SourcePiece, member: TarMember) -> bytes:
        """Return the bytes of a member of a small field.

        Raises ValueError if it has more than `MAX_SAMPLE` bytes.
        """
        if member.size > MAX_SAMPLE:
            raise ValueError(
                f"{self.files.shown(piece.file)}: {member.name!r} has {member.size:,} bytes, more than {MAX_SAMPLE:,}, where those of its "
                "ending that were looked at have few; pack that ending apart: columns=[...]"
            )
        return member.data(member.size)

    def rows(
        self, field: Field, span: FieldSpan, box: tuple[slice, ...], tally: Callable[[], PieceCounts]
    ) -> Array:
        known, (piece, start, stop) = tally(), span
        sizes, starts = known.sizes[field.name], known.places[field.name]
        ends = np.cumsum(sizes)
        at = int(np.searchsorted(ends, start, side="right"))
        wanted = []
        while start < stop:
            begin = int(ends[at] - sizes[at])
            if sizes[at]:
                inside = int(starts[at]) - begin
                wanted.append((piece.file, inside + start, inside + min(stop, int(ends[at]))))
            start, at = int(ends[at]), at + 1
        return np.frombuffer(b"".join(self.files.ranges(wanted)), "u1")

    def items(self, piece: SourcePiece) -> Iterator[Item]:
        yield self.files.paths[piece.file], 0, int(self.files.sizes[piece.file])

    @property
    def total_size(self) -> int:
        return self.files.size


class TarMember(NamedTuple):
    """A file in a tar: its name, the positions of its header and content, and the open tar."""

    name: str
    header: int
    start: int
    size: int
    file: Any

    def data(self, most: int) -> bytes:
        """Return its first `most` bytes."""
        self.file.seek(self.start)
        return bytes(self.file.read(min(self.size, most)))


class TarSample(NamedTuple):
    """A sample: its name, and its members by lower-case ending."""

    name: str
    members: dict[str, TarMember]


def samples_of(members: Iterable[TarMember], where: str) -> Iterator[TarSample]:
    """Yield the samples as WebDataset does.

    Adjacent members are one sample if their paths are equal up to the first dot of the file name. Raises ValueError
    for an ending that occurs twice in one sample.
    """
    sample: TarSample | None = None
    for member in members:
        folder, slash, base = member.name.rpartition("/")
        stem, dot, ending = base.partition(".")
        if not dot or base.startswith("."):
            continue  # WebDataset skips members without an ending
        name = folder + slash + stem
        if sample is not None and sample.name != name:
            yield sample
            sample = None
        sample = sample or TarSample(name, {})
        ending = ending.lower()
        if ending in sample.members:
            raise ValueError(f"{where}: {member.name!r} occurs twice in one sample")
        sample.members[ending] = member
    if sample is not None:
        yield sample


class _members:
    """Context manager that iterates over the files in a tar, from the header at byte `start` on.

    Several tars may follow one another in a file (`cat a.tar b.tar`).
    """

    def __init__(self, files: SourceFiles, number: int, start: int = 0) -> None:
        self._files, self._number, self._start = files, number, start

    def __enter__(self) -> Iterator[TarMember]:
        self._raw = self._files.fs.open(self._files.paths[self._number], "rb")
        return self._all()

    def __exit__(self, *error: object) -> None:
        self._raw.close()

    def _all(self) -> Iterator[TarMember]:
        start: int | None = self._start
        while start is not None:
            self._raw.seek(start)  # tarfile reports positions of the file object itself
            try:
                with tarfile.open(fileobj=self._raw, mode="r:") as tar:
                    yield from self._members_of(tar)
                    start = self._next_header(tar.offset)
            except tarfile.TarError as error:
                raise self._wrong(error) from error

    def _members_of(self, tar: tarfile.TarFile) -> Iterator[TarMember]:
        last = 0
        while (info := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # typeshed hides it  # else it keeps all of them
            last = info.offset_data + info.size
            if info.issparse():
                raise ValueError(
                    f"{self._files.shown(self._number)}: {info.name!r} is sparse: its bytes do not follow one another; "
                    "make the tar without --sparse"
                )
            if info.isreg():
                yield TarMember(info.name, info.offset, info.offset_data, info.size, self._raw)
        if last > int(self._files.sizes[self._number]):
            raise self._wrong(EOFError("it is cut off"))

    def _next_header(self, end: int) -> int | None:
        """Return the position of the next tar behind blocks of zeros at `end`; None at the end of the file."""
        self._raw.seek(end)
        position = end
        while block := self._raw.read(tarfile.RECORDSIZE):
            if any(block):
                found = (
                    position
                    + (len(block) - len(block.lstrip(b"\0"))) // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE
                )
                if found == end:  # tarfile treats a damaged header as the end
                    raise self._wrong(tarfile.ReadError(f"there is no header at byte {end:,}"))
                return found
            position += len(block)
        return None

    def _wrong(self, error: Exception) -> BadFile:
        return BadFile(
            self._files.shown(self._number),
            f"cannot be read as a tar: {error}; a compressed one cannot be read in parts: decompress it first",
        )
