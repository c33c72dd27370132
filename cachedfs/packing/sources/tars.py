"""Tar files in WebDataset format: adjacent members of one base name are one sample."""

from __future__ import annotations

import tarfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from cachedfs.packing.pack_types import Field, SampleBatch
from cachedfs.packing.sources.file_samples import NAME_FIELD
from cachedfs.packing.sources.sample_source import (
    NAMES,
    PIECE,
    SampleSource,
    checked_fields,
    joined,
    names_of,
    spread,
    without_bad,
)
from cachedfs.packing.sources.source_files import BadFile, SourceFiles

SAMPLED = 8  # tar files that `look` reads
SAMPLED_SIZE = 2 << 20  # bytes of each of them that it reads
MEMBER_SIZE = 256 << 10  # bytes of each member that it reads
EMPTY = tarfile.TarInfo()  # for a sample without a member of an ending


class TarSource(SampleSource):
    """A source with one field of bytes for each ending, such as "jpg" and "cls"."""

    may_skip = True

    def __init__(self, files: SourceFiles, columns: Any = None, **options: Any) -> None:
        advice = "members are packed as bytes: give a list of endings, such as ['jpg']"
        super().__init__(files, names_of(columns, advice))
        self.total_size = files.size

    def look(self) -> list[SampleBatch]:
        numbers = self.files.numbers
        some = [numbers[i] for i in spread(len(numbers), SAMPLED)]
        by_tar = [samples for _, samples in without_bad(some, self._first_samples)]
        looked = [sample for samples in by_tar for sample in samples]
        endings = sorted({ending for _, datas in looked for ending in datas})
        if missing := [ending for ending in self.columns or () if ending not in endings]:
            raise ValueError(f"{self.files.url}: no member ends in {missing}; there are {endings}")
        if not endings:
            raise ValueError(
                f"{self.files.url}: nothing to pack: no member has an ending; kind='files' packs whole tars"
            )
        endings = self.columns or endings
        self.notes = _notes(endings, by_tar)
        ragged = (Field(ending, "uint8", is_ragged=True, means="bytes") for ending in endings)
        self.fields = checked_fields((*ragged, NAME_FIELD))
        found = {ending: joined(datas.get(ending, b"") for _, datas in looked) for ending in endings}
        found[NAMES] = joined(name for name, _ in looked)
        values = {name: data for name, (data, _) in found.items()}
        return [SampleBatch(values, {name: sizes for name, (_, sizes) in found.items()})]

    def _first_samples(self, number: int) -> list[tuple[str, dict[str, bytes]]]:
        """Return the names of the first samples of a tar, and the first bytes of their members."""
        found, size = [], 0
        with self.files.open(number) as raw:
            for name, members in self._samples(raw, number):
                chosen = {
                    ending: each for ending, each in members.items() if ending in (self.columns or members)
                }
                datas = {ending: _data(raw, each, 0, MEMBER_SIZE) for ending, each in chosen.items()}
                found.append((name, datas))
                size += sum(map(len, datas.values()))
                if size > SAMPLED_SIZE:
                    break
        return found

    def read(self, number: int) -> Iterator[SampleBatch]:
        endings = [field.name for field in self.fields if field.name != NAMES]
        where = self.files.url_of(number)
        with self.files.open(number) as raw:
            batch = _TarBatch(endings)
            for name, members in self._samples(raw, number):
                more = [ending for ending in members if ending not in endings]
                if more and self.columns is None:
                    raise ValueError(
                        f"{where}: sample {name!r} has {more[0]!r}, which those looked at first do not have; name all "
                        "endings that are to be packed: columns=[...]"
                    )
                batch.names.append(name)
                for ending in endings:
                    member = members.get(ending, EMPTY)
                    batch.sizes[ending].append(member.size)
                    for start in range(0, member.size, PIECE):
                        if batch.size >= PIECE:
                            yield batch.joined()
                            batch = _TarBatch(endings)
                        batch.add(ending, _data(raw, member, start, PIECE))
            yield batch.joined()

    def _samples(self, raw: Any, number: int) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
        """Yield the name of each sample of a tar, and its members by lower-case ending, as WebDataset does.

        Adjacent members are one sample if their paths are equal up to the first dot of the file name. Raises ValueError
        for an ending that occurs twice in one sample.
        """
        sample, found = "", dict[str, tarfile.TarInfo]()
        where = self.files.url_of(number)
        for member in _members(raw, int(self.files.sizes[number]), where):
            folder, slash, base = member.name.rpartition("/")
            stem, dot, ending = base.partition(".")
            if not dot or not stem:
                continue  # WebDataset skips members without an ending
            name, ending = folder + slash + stem, ending.lower()
            if found and name != sample:
                yield sample, found
                found = {}
            if ending in found:
                raise ValueError(f"{where}: {member.name!r} occurs twice in one sample")
            sample, found[ending] = name, member
        if found:
            yield sample, found


def _notes(endings: list[str], by_tar: list[list[tuple[str, dict[str, bytes]]]]) -> list[str]:
    """Return what WebDataset's rules make of the names of members, where that may surprise."""
    notes = []
    if dotted := [ending for ending in endings if "." in ending]:
        notes.append(
            f"names of members are cut at their first dot, as in WebDataset, so that endings are {dotted}"
        )
    counts = [Counter(name for name, _ in samples) for samples in by_tar]
    if apart := [name for names in counts for name, n in names.items() if n > 1]:
        notes.append(
            f"members of {apart[0]!r} do not stand together, and are several samples, as in WebDataset"
        )
    return notes


class _TarBatch:
    """A batch that grows: names of samples, and by ending the sizes and the bytes of members."""

    def __init__(self, endings: list[str]) -> None:
        self.names: list[str] = []
        self.sizes: dict[str, list[int]] = {ending: [] for ending in endings}
        self._datas: dict[str, list[bytes]] = {ending: [] for ending in endings}
        self.size = 0

    def add(self, ending: str, data: bytes) -> None:
        self._datas[ending].append(data)
        self.size += len(data)

    def joined(self) -> SampleBatch:
        values = {ending: joined(datas)[0] for ending, datas in self._datas.items()}
        sizes = {ending: np.array(each, np.int64) for ending, each in self.sizes.items()}
        values[NAMES], sizes[NAMES] = joined(self.names)
        return SampleBatch(values, sizes)


def _data(raw: Any, member: tarfile.TarInfo, start: int, most: int) -> bytes:
    """Return up to `most` bytes of a member."""
    raw.seek(member.offset_data + start)
    return bytes(raw.read(min(most, member.size - start)))


def _members(raw: Any, size: int, where: str) -> Iterator[tarfile.TarInfo]:
    """Yield the files in an open tar. Several tars may follow one another in a file (`cat a.tar b.tar`)."""
    start: int | None = 0
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
                        yield info
                if end > size:
                    raise tarfile.ReadError("it is cut off")
                start = _next_header(raw, tar.offset)
    except tarfile.TarError as error:
        raise BadFile(
            where,
            f"cannot be read as a tar: {error}; a compressed one cannot be read in parts: decompress it first",
        ) from error


def _next_header(raw: Any, end: int) -> int | None:
    """Return the position of the next tar after blocks of zeros at `end`; None at the end of the file."""
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
