"""Bundles: stored zip files of blocks, whose central directory is the index.

A member is named like the file of its block in the cache, and has the same bytes. Its comment is the JSON of path and
fingerprint. The name is a hash of these, so a damaged index is noticed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, NamedTuple

from cachedfs.cache.block_file import file_size
from cachedfs.common.types import ObjectKey, Range
from cachedfs.shared.metadata_rows import DamagedFile

__all__ = ["Bundle", "BundleEntry", "bundle_of", "cut", "entries_of", "runs", "write"]

LEAST = 64 << 20  # bytes a bundle has before it may end
MEAN = 64 << 20  # mean number of bytes after LEAST until a bundle ends
MOST = 256 << 20  # far below what a zip file without 64-bit records can hold
MOST_BLOCKS = 50_000  # below 65,535, for the same reason
MOST_INDEX = 64 << 20
RUN = 32 << 20  # bytes per request: cheap to repeat, and a few of them fill a link
GAP = 256 << 10  # up to this many unneeded bytes between two missing blocks are read, to save a request

_HEADER, _RECORD, _END = 30, 46, 22  # bytes of a zip file: before a member, in the index for it, at the end
_RECORD_MAGIC = b"PK\1\2"


class BundleEntry(NamedTuple):
    """One block: its key, its index in the object, and its size in a bundle, as on disk."""

    key: ObjectKey
    number: int
    size: int

    @property
    def name(self) -> str:
        return self.key.name(self.number)

    @property
    def comment(self) -> bytes:
        return json.dumps([self.key.path, self.key.fingerprint], separators=(",", ":")).encode()

    @property
    def header_size(self) -> int:
        return _HEADER + len(self.name)

    @property
    def record_size(self) -> int:
        return _RECORD + len(self.name) + len(self.comment)


@dataclasses.dataclass(frozen=True)
class Bundle:
    """One bundle: name, size in bytes, offset of the index, and number of blocks."""

    name: str
    size: int
    index_at: int
    blocks: int


def cut(entries: Iterable[BundleEntry]) -> Iterator[list[BundleEntry]]:
    """Split the entries into bundles, at blocks chosen by their hashes.

    Where a bundle ends depends on its last blocks, not on those long before. So an added or removed block changes its
    own bundle and perhaps the next; the others are in the export already.
    """
    bundle: list[BundleEntry] = []
    size = index = 0
    for entry in entries:
        is_full = len(bundle) == MOST_BLOCKS or index + entry.record_size > MOST_INDEX - _END
        if bundle and (is_full or size + entry.size > MOST):
            yield bundle
            bundle, size, index = [], 0, 0
        bundle.append(entry)
        size += entry.size
        index += entry.record_size
        if size >= LEAST and entry.key.hash64(entry.number) < entry.size * 2**64 // MEAN:
            yield bundle
            bundle, size, index = [], 0, 0
    if bundle:
        yield bundle


def bundle_of(entries: Sequence[BundleEntry]) -> Bundle:
    """Return the bundle with these blocks, before it is written.

    Its name is a hash of the names and sizes of the blocks. The content of a named block never changes.
    """
    names = hashlib.blake2b(digest_size=16)
    for entry in entries:
        names.update(f"{entry.name} {entry.size}\n".encode())
    index_at = sum(entry.header_size + entry.size for entry in entries)
    size = index_at + sum(entry.record_size for entry in entries) + _END
    return Bundle(f"blocks-{names.hexdigest()}.zip", size, index_at, len(entries))


def write(file: IO[bytes], blocks: Iterable[tuple[BundleEntry, bytes]]) -> None:
    """Write a bundle of these blocks, given with their bytes."""
    with zipfile.ZipFile(file, "w") as bundle:
        for entry, packed in blocks:
            member = zipfile.ZipInfo(entry.name)  # dated 1980: the same blocks give the same file
            member.comment = entry.comment
            bundle.writestr(member, packed)


def entries_of(bundle: Bundle, index: bytes, identity: str, block_size: int) -> list[BundleEntry]:
    """Parse the index of a bundle, its bytes from `index_at`, and return its entries in file order.

    Raises DamagedFile if the index is invalid, or contradicts `bundle`.
    """
    # Before parsing: a member takes more memory than its bytes.
    if index.count(_RECORD_MAGIC) != bundle.blocks:
        raise DamagedFile(f"its index does not have {bundle.blocks} blocks")
    try:
        # zipfile takes what precedes the index for cut off; only its offsets need it.
        with zipfile.ZipFile(io.BytesIO(index)) as archive:
            entries = [_entry(member, identity, block_size) for member in archive.infolist()]
    except Exception as error:  # zipfile raises errors of many kinds
        raise DamagedFile(f"its index is invalid: {error}") from error
    if bundle_of(entries) != bundle:
        raise DamagedFile("its index is damaged")
    return entries


def _entry(member: zipfile.ZipInfo, identity: str, block_size: int) -> BundleEntry:
    path, fingerprint = json.loads(member.comment)
    if not isinstance(path, str) or not isinstance(fingerprint, str):
        raise DamagedFile("its index is invalid: a name is not text")
    key = ObjectKey(identity, path, fingerprint, block_size)
    entry = BundleEntry(key, int(member.filename.rpartition("-")[2], 16), member.file_size)
    if entry.name != member.filename:
        raise DamagedFile("its index names a block of something else, or is damaged")
    if entry.number >> 62 or not 0 < entry.size <= file_size(key, block_size):
        raise DamagedFile("its index has an impossible block")
    return entry


def runs(
    entries: Iterable[tuple[BundleEntry, bool]],
) -> Iterator[tuple[Range, list[tuple[int, BundleEntry]]]]:
    """Yield the byte ranges to request, each with the wanted entries inside it and their offsets.

    Each input is an entry and whether it is wanted.
    """
    begin = end = at = 0
    inside: list[tuple[int, BundleEntry]] = []
    for entry, is_wanted in entries:
        at += entry.header_size
        if is_wanted:
            if inside and (at - end > GAP or at + entry.size - begin > RUN):
                yield Range(begin, end), inside
                inside = []
            if not inside:
                begin = at
            inside.append((at, entry))
            end = at + entry.size
        at += entry.size
    if inside:
        yield Range(begin, end), inside
