"""The files of a shared cache: pieces of objects, an index of them, and the size of the index.

The index is a list of rows: `["cachedfs", identity, made_at]`, a row `["piece", *Piece]` for each piece in the order
of their bytes, and metadata (`metadata_rows`). A file with one large piece is named after it, others after the hash
of what is in them, so the content of a name never changes, and whoever writes it again writes the same.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from cachedfs.cache.block_file import PAGE
from cachedfs.common.types import ObjectInfo
from cachedfs.common.urls import stored_path
from cachedfs.shared.metadata_rows import LATEST_S, DamagedFile, decoded_rows, encoded_rows

GATHERED = "gathered"  # the subfolder of files with many pieces
_RUNS = "runs"  # that of files with one large piece, in 256 folders
LARGE = 4 << 20  # bytes of a piece that gets a file of its own
_MOST_INDEX = 64 << 20
_MOST_PIECES = 100_000
_TAIL = struct.Struct("<8sIII")  # magic, format, size of the rows, CRC-32 of the rows
TAIL_SIZE = _TAIL.size
_MAGIC, _FORMAT = b"cachedfS", 1
_RUN_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{1,15})-([0-9a-f]{1,15})")
_GATHERED_NAME = re.compile(r"[0-9a-f]{32}")
# Protocols whose objects are the same on every machine: `file://` and `memory://` are not.
_EVERYWHERE = frozenset(
    {"abfs", "abfss", "adl", "az", "drive", "gs", "hf", "http", "https", "oci", "oss", "s3", "s3a", "tos"}
)  # fmt: skip


class Piece(NamedTuple):
    """Bytes `[start, stop)` of a version of `size` bytes, with a CRC-32 for each page; `key` is from `key_of`."""

    key: str
    size: int
    start: int
    stop: int
    checksums: Sequence[int]

    @property
    def place(self) -> tuple[str, int, int]:
        return self.key, self.start, self.stop


class PlacedPiece(NamedTuple):
    """A piece in a file, at `offset`; None: known by the name of its file only, which must be opened for the rest."""

    piece: Piece
    file: str
    offset: int | None


class PieceIndex(NamedTuple):
    """The index of a file: pieces and their offsets, the origin of its metadata, and when that was written there."""

    identity: str
    made_at: float
    pieces: list[tuple[Piece, int]]
    rows: Iterator[Any]


def key_of(identity: str, info: ObjectInfo) -> str:
    """Return the text that names a version that can be cached on every machine, 32 hex digits.

    Files of Google Drive are named by their id, without the account.
    """
    name = stored_path(info.path) if "://" in info.path else info.path
    if identity.startswith("drive|") and info.id is not None:
        identity, name = identity.rpartition("|")[0], info.id
    hasher = hashlib.blake2b(digest_size=16)
    for field in (identity, name, info.fingerprint or "", str(info.size)):
        data = field.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.hexdigest()


def shareable_key(identity: str, info: ObjectInfo) -> str | None:
    """Return the key of a version; None if it may not be shared. Paths with a query may contain a secret."""
    name = info.path
    if not is_everywhere(identity) or info.fingerprint is None or info.size is None:
        return None
    if "://" in name and ("?" in name or stored_path(name) != name):
        return None
    return key_of(identity, info)


def blocks_in(piece: Piece, size: int, block_size: int) -> range:
    """Return the blocks of an object of `size` bytes that are whole in a piece of it."""
    stop = -(-size // block_size) if piece.stop >= size else piece.stop // block_size
    return range(-(-piece.start // block_size), stop)


def is_everywhere(identity: str) -> bool:
    return identity.partition("|")[0] in _EVERYWHERE


def folder_of_runs(key: str) -> str:
    """Return the subfolder of the files with one piece of this version."""
    return f"{_RUNS}/{key[:2]}"


def name_of_file(pieces: Sequence[Piece], rows: Sequence[Any]) -> str:
    """Return the path of the file with these pieces and this metadata, below the shared folder."""
    if len(pieces) == 1 and pieces[0].stop - pieces[0].start >= LARGE:
        key, _, start, stop, _ = pieces[0]
        return f"{folder_of_runs(key)}/{key}-{start:x}-{stop:x}"
    names = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        names.update(f"{piece.key}-{piece.start:x}-{piece.stop:x}\n".encode())
    for row in rows:
        names.update(repr(row).encode("utf-8", "surrogatepass"))
    return f"{GATHERED}/{names.hexdigest()}"


def range_in_name(name: str) -> tuple[str, int, int] | None:
    """Return key, start and stop of the piece that a file is named after; None for another name."""
    found = _RUN_NAME.fullmatch(name)
    return found and (found[1], int(found[2], 16), int(found[3], 16))


def is_gathered(name: str) -> bool:
    return _GATHERED_NAME.fullmatch(name) is not None


def has_pieces(name: str) -> bool:
    """Return whether a file, by the last part of its name, is one with pieces."""
    return is_gathered(name) or range_in_name(name) is not None


def encoded_index(identity: str, made_at: float, pieces: Iterable[Piece], rows: Iterable[Any]) -> bytes:
    """Return what follows the bytes of the pieces."""
    head = ["cachedfs", identity, made_at]
    data = encoded_rows([head, *(["piece", *piece] for piece in pieces), *rows])
    if len(data) > _MOST_INDEX:
        raise DamagedFile("its index is too large")
    return data + _TAIL.pack(_MAGIC, _FORMAT, len(data), zlib.crc32(data))


def index_size(tail: bytes, file_size: int) -> int:
    """Return the size of the index with its tail, given the end of the file. Raises DamagedFile."""
    if len(tail) < TAIL_SIZE:
        raise DamagedFile("it is cut off")
    magic, version, size, _ = _TAIL.unpack(tail[-TAIL_SIZE:])
    if magic != _MAGIC or version != _FORMAT:
        raise DamagedFile("it has no index of this format")
    if size > _MOST_INDEX or size + TAIL_SIZE > file_size:
        raise DamagedFile("its index has an impossible size")
    return int(size) + TAIL_SIZE


def parsed_index(index: bytes, file_size: int) -> PieceIndex:
    """Parse an index with its tail. Raises DamagedFile, also while its rows are read."""
    data = index[:-TAIL_SIZE]
    if zlib.crc32(data) != _TAIL.unpack(index[-TAIL_SIZE:])[3]:
        raise DamagedFile("its index is damaged")
    rows, pieces, offset = decoded_rows(io.BytesIO(data)), list[tuple[Piece, int]](), 0
    match next(rows, None):
        case ["cachedfs", str(identity), float() | int() as made_at] if 0 <= made_at < LATEST_S:
            pass
        case _:
            raise DamagedFile("its index does not begin as it should")
    first: list[Any] = []
    for row in rows:
        if not isinstance(row, list) or row[:1] != ["piece"]:
            first = [row]
            break
        pieces.append((_piece(row[1:]), offset))
        offset += pieces[-1][0].stop - pieces[-1][0].start
        if len(pieces) > _MOST_PIECES:
            raise DamagedFile("its index has too many pieces")
    if offset != file_size - len(index):
        raise DamagedFile("its index is not of these bytes")
    return PieceIndex(identity, float(made_at), pieces, itertools.chain(first, rows))


def _piece(row: list[Any]) -> Piece:
    match row:
        case [str(key), int(size), int(start), int(stop), list(checksums)] if (
            _GATHERED_NAME.fullmatch(key)
            and 0 <= start < stop <= size < 1 << 62
            and len(checksums) == -(-(stop - start) // PAGE)
            and all(type(each) is int and 0 <= each < 1 << 32 for each in checksums)
        ):
            return Piece(key, size, start, stop, tuple(checksums))
    raise DamagedFile("its index has an impossible piece")
