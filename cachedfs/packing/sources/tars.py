"""Tar files in WebDataset format: adjacent members of one base name are one sample."""

from __future__ import annotations

import contextlib
import logging
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from cachedfs.packing.pack_types import END, Array, Field, FieldSpan, PieceCounts, SampleBatch, SourcePiece
from cachedfs.packing.sources.file_samples import NAME_FIELD
from cachedfs.packing.sources.sample_source import MAX_SAMPLE, NAMES, BadFile, SampleSource, SourceFiles
from cachedfs.packing.sources.source_tools import checked_fields, joined, looked_at, names_of, spread, within

__all__ = ["TarSource"]

logger = logging.getLogger("cachedfs.packing")

SAMPLED = 8  # tar files that `look` reads
SAMPLED_SIZE = 2 << 20  # bytes of each of them that it reads
MEMBER_SIZE = 256 << 10  # bytes of each member that it reads
# Largest size of the counts of a piece, in bytes. Those of 32 pieces (`task.MAX_COUNTS`) may be in memory.
KEPT = 4 << 20


class TarSource(SampleSource):
    """A source with one field of bytes for each ending, such as "jpg" and "cls".

    A piece is a tar file, or a part of a large one whose counts stay below `KEPT` bytes. It starts at a member's
    header.
    """

    kind = "tar"
    may_skip = True

    def __init__(self, files: SourceFiles, columns: Any = None, **options: Any) -> None:
        advice = "members are packed as bytes: give a list of endings, such as ['jpg']"
        super().__init__(files, names_of(columns, advice))
        self.notes: list[str] = []

    def look(self) -> list[SampleBatch]:
        numbers = self.files.numbers
        chosen = [numbers[i] for i in spread(len(numbers), SAMPLED)]
        looked = [sample for _, samples in looked_at(chosen, self._looked) for sample in samples]
        endings = sorted({ending for _, datas in looked for ending in datas})
        if missing := [ending for ending in self.columns or () if ending not in endings]:
            raise ValueError(f"{self.files.url}: no member ends in {missing}; there are {endings}")
        if not endings:
            raise ValueError(f"{self.files.url}: no file is in it")
        endings = self.columns or endings
        if dotted := [ending for ending in endings if "." in ending]:
            self.notes.append(
                f"endings with a dot: {', '.join(dotted)}; the name of a sample ends at the first dot, as in WebDataset"
            )
        ragged = (Field(ending, "uint8", is_ragged=True, means="bytes") for ending in endings)
        self.fields = checked_fields((*ragged, NAME_FIELD))
        found = {ending: joined(datas.get(ending, b"") for _, datas in looked) for ending in endings}
        found[NAMES] = joined(name for name, _ in looked)
        values = {name: data for name, (data, _) in found.items()}
        return [SampleBatch(len(looked), values, {name: sizes for name, (_, sizes) in found.items()})]

    def _looked(self, number: int) -> list[tuple[str, dict[str, bytes]]]:
        """Return the names of the first samples of a tar, and the first bytes of their members."""
        found, size = [], 0
        with _opened(self.files, number) as samples:
            for sample in samples:
                chosen = self.columns or sample.members
                members = {ending: each for ending, each in sample.members.items() if ending in chosen}
                datas = {ending: each.data(MEMBER_SIZE) for ending, each in members.items()}
                found.append((sample.name, datas))
                size += sum(map(len, datas.values()))
                if size > SAMPLED_SIZE:
                    break
        return found

    def measure(self, piece: SourcePiece) -> PieceCounts:
        """Read the headers and the small members. `places` has the byte positions of all other members."""
        endings = [field.name for field in self.fields if field.name != NAMES]
        small: dict[str, list[bytes]] = {field.name: [] for field in self.fields if field.is_small}
        starts: dict[str, list[int]] = {ending: [] for ending in endings}
        sizes: dict[str, list[int]] = {ending: [] for ending in endings}
        where, names, stop, kept_size = self.files.shown(piece.file), list[str](), END, 0
        with _opened(self.files, piece.file, piece.start) as samples:
            for sample in samples:
                if kept_size > KEPT:
                    stop = next(iter(sample.members.values())).header
                    break
                more = [ending for ending in sample.members if ending not in starts]
                if more and self.columns is None:
                    raise ValueError(
                        f"{where}: sample {sample.name!r} has {more[0]!r}, which those looked at first do not have; "
                        "name all endings that are to be packed: columns=[...]"
                    )
                names.append(sample.name)
                kept_size += len(sample.name) + 16 * len(endings)
                for ending in endings:
                    member = sample.members.get(ending)
                    starts[ending].append(member.start if member else 0)
                    sizes[ending].append(member.size if member else 0)
                    if ending in small:
                        small[ending].append(_small(member, where) if member else b"")
                        kept_size += len(small[ending][-1])
        self._note_apart(names, where)
        text, text_sizes = joined(names)
        return PieceCounts(
            len(names),
            {**{ending: joined(datas)[0] for ending, datas in small.items()}, NAMES: text},
            {**{ending: np.array(each, np.int64) for ending, each in sizes.items()}, NAMES: text_sizes},
            {ending: np.array(starts[ending], np.int64) for ending in endings if ending not in small},
            stop,
        )

    def _note_apart(self, names: list[str], where: str) -> None:
        """Note the samples of a tar whose members do not follow one another."""
        if apart := sorted(name for name, n in Counter(names).items() if n > 1):
            note = (
                f"{where}: {apart[0]!r}{f' and {len(apart) - 1:,} more' if len(apart) > 1 else ''} became several samples, "
                "as their members do not follow one another; tar --sort=name"
            )
            logger.warning("%s", note)
            self.notes.append(note)

    def rows(self, field: Field, span: FieldSpan, box: tuple[slice, ...], counts: PieceCounts) -> Array:
        known, (piece, start, stop) = counts, span
        parts = [
            (int(known.places[field.name][i]), first, last)
            for i, first, last in within(known.sizes[field.name], start, stop)
        ]
        datas = self.files.ranges((piece.file, at + first, at + last) for at, first, last in parts)
        return np.frombuffer(b"".join(datas), "u1")

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


def _small(member: TarMember, where: str) -> bytes:
    if member.size > MAX_SAMPLE:
        raise ValueError(
            f"{where}: {member.name!r} has {member.size:,} bytes, more than {MAX_SAMPLE:,}, where those of its ending "
            "that were looked at have few; pack that ending apart: columns=[...]"
        )
    return member.data(member.size)


@contextlib.contextmanager
def _opened(files: SourceFiles, number: int, start: int = 0) -> Iterator[Iterator[TarSample]]:
    """Return a context manager for the samples of a tar, from the header at byte `start` on."""
    with files.fs.open(files.paths[number], "rb") as raw:
        where = files.shown(number)
        yield _samples(_members(raw, start, int(files.sizes[number]), where), where)


def _samples(members: Iterable[TarMember], where: str) -> Iterator[TarSample]:
    """Yield the samples as WebDataset does.

    Adjacent members are one sample if their paths are equal up to the first dot of the file name. Raises ValueError
    for an ending that occurs twice in one sample.
    """
    sample: TarSample | None = None
    for member in members:
        folder, slash, base = member.name.rpartition("/")
        stem, dot, ending = base.partition(".")
        if not dot or not stem:
            continue  # WebDataset skips members without an ending
        name, ending = folder + slash + stem, ending.lower()
        if sample is not None and sample.name != name:
            yield sample
            sample = None
        sample = sample or TarSample(name, {})
        if ending in sample.members:
            raise ValueError(f"{where}: {member.name!r} occurs twice in one sample")
        sample.members[ending] = member
    if sample is not None:
        yield sample


def _members(raw: Any, start: int | None, size: int, where: str) -> Iterator[TarMember]:
    """Yield the files in an open tar. Several tars may follow one another in a file (`cat a.tar b.tar`)."""
    try:
        while start is not None:
            raw.seek(start)  # tarfile reports positions of the file object itself
            end = 0
            with tarfile.open(fileobj=raw, mode="r:") as tar:
                while (info := tar.next()) is not None:
                    tar.members.clear()  # type: ignore[attr-defined]  # typeshed hides it  # else it keeps all of them
                    end = info.offset_data + info.size
                    if info.issparse():
                        raise ValueError(
                            f"{where}: {info.name!r} is sparse: its bytes do not follow one another; make the tar "
                            "without --sparse"
                        )
                    if info.isreg():
                        yield TarMember(info.name, info.offset, info.offset_data, info.size, raw)
                if end > size:
                    raise tarfile.ReadError("it is cut off")
                start = _next_header(raw, tar.offset)
    except tarfile.TarError as error:
        raise BadFile(
            where,
            f"cannot be read as a tar: {error}; a compressed one cannot be read in parts: decompress it first",
        ) from error


def _next_header(raw: Any, end: int) -> int | None:
    """Return the position of the next tar behind blocks of zeros at `end`; None at the end of the file."""
    raw.seek(end)
    position = end
    while block := raw.read(tarfile.RECORDSIZE):
        if any(block):
            n_zeros = len(block) - len(block.lstrip(b"\0"))
            found = position + n_zeros // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE
            if found == end:  # tarfile treats a damaged header as the end
                raise tarfile.ReadError(f"there is no header at byte {end:,}")
            return int(found)
        position += len(block)
    return None
