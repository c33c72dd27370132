"""The files of a shared cache: what is in them, how they are written, and what is no such file."""

import gzip
import itertools
import os
import pathlib
import struct
import zlib

import pytest

from cachedfs.cache import disk
from cachedfs.cache.block_file import PAGE
from cachedfs.common.types import ObjectInfo
from cachedfs.shared.metadata_rows import DamagedFile
from cachedfs.shared.piece import (
    Piece,
    encoded_index,
    key_of,
    name_of_file,
    range_in_name,
    shareable_key,
)
from cachedfs.shared.shared_folder import OpenShared, SharedFolder
from tests.support import MiB, noise, tally

IDENTITY = "gs|storage.googleapis.com|anon"
A, B = noise(3 * PAGE + 5), noise(100, 1)


def crcs(data):
    return [zlib.crc32(data[at : at + PAGE]) for at in range(0, len(data), PAGE)]


PIECES = [
    Piece("0a" * 16, 10 * PAGE, PAGE, PAGE + len(A), crcs(A)),
    Piece("0b" * 16, len(B), 0, len(B), crcs(B)),
]
ROWS = [["object", "b/k", 1.5, "{}"]]


@pytest.fixture
def folder(tmp_path):
    made = SharedFolder(str(tmp_path / "shared"), trust="group", is_read_only=False)
    made.check()
    return made


def write(folder, pieces=PIECES, data=(A, B), rows=ROWS):
    name = name_of_file(pieces, rows)
    folder.write(name, list(data), lambda: encoded_index(IDENTITY, 5.0, pieces, rows))
    return name


def content(file):
    """Return all that a file has."""
    index = file.index()
    pieces = [(piece, file.read(piece, offset, piece.start, piece.stop)) for piece, offset in index.pieces]
    return index.identity, index.made_at, pieces, list(index.rows)


def expected():
    pieces = [
        (piece._replace(checksums=tuple(piece.checksums)), data)
        for piece, data in zip(PIECES, (A, B), strict=True)
    ]
    return IDENTITY, 5.0, pieces, ROWS


def test_a_file_has_what_was_written(folder):
    name = write(folder)
    assert content(folder.open(name)) == expected()
    assert write(folder) == name
    file, (piece, offset) = folder.open(name), (PIECES[0], 0)
    for start, stop in itertools.combinations((0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, len(A)), 2):
        assert file.read(piece, offset, piece.start + start, piece.start + stop) == A[start:stop]
    assert os.listdir(f"{folder.path}/tmp") == []


def test_a_large_piece_has_a_file_that_is_named_after_it():
    large = Piece("0a" * 16, 30 * MiB, 8 * MiB, 16 * MiB, ())
    name = name_of_file([large], [])
    assert name == f"runs/0a/{'0a' * 16}-800000-1000000"
    assert range_in_name(name.rpartition("/")[2]) == (large.key, large.start, large.stop)
    others = [name_of_file(pieces, rows) for pieces in (PIECES, PIECES[:1], []) for rows in (ROWS, [])]
    assert len({*others}) == 6
    assert all(range_in_name(each.rpartition("/")[2]) is None for each in others)


def test_every_flipped_byte_is_noticed_or_harmless(folder):
    path = pathlib.Path(folder.path, write(folder))
    data = bytearray(path.read_bytes())
    for at in [*range(0, len(A), 997), *range(len(A), len(data))]:
        data[at] ^= 0x10
        path.write_bytes(data)
        data[at] ^= 0x10
        tally("bytes of shared files changed")
        try:
            assert content(OpenShared(path)) == expected()
        except DamagedFile:
            continue


def packed(rows, *, size=None, crc=None, magic=b"cachedfS", version=1):
    data = rows
    if not isinstance(rows, bytes):  # without a time: the names of the cases are the same in each worker
        data = gzip.compress("".join(f"{row}\n" for row in rows).encode(), mtime=0)
    crc = zlib.crc32(data) if crc is None else crc
    return data + struct.pack("<8sIII", magic, version, len(data) if size is None else size, crc)


HEAD = f'["cachedfs","{IDENTITY}",5.0]'


@pytest.mark.parametrize(
    "data",
    [
        packed([HEAD], magic=b"cachedfs"), packed([HEAD], version=2), packed([HEAD], size=1 << 31), packed([HEAD], crc=1),
        packed([HEAD], size=1000), packed(b"x"), packed([]), packed(["[]"]), packed(['["cachedfs","gs||",NaN]']),
        packed(['["cachedfs","gs||",1e300]']), packed([f'["cachedfs",{"[" * 50000}']),
        packed([HEAD, '["piece"]']), packed([HEAD, '["piece","x",5,0,5,[1]]']), packed([HEAD, f'["piece","{"0a" * 16}",5,0,5,[1]]']),
        packed([HEAD, f'["piece","{"0a" * 16}",5,0,{10**400},[1]]']), packed([HEAD, f'["piece","{"0a" * 16}",5,-5,0,[1]]']),
        packed([HEAD, f'["piece","{"0a" * 16}",5,0,5,[]]']), packed([HEAD, f'["piece","{"0a" * 16}",5,0,5,["x"]]']),
        packed([HEAD, "x" * (2 << 20)]),
    ],
)  # fmt: skip
def test_forged_files_are_refused(folder, data):
    path = f"{folder.path}/forged"
    with open(path, "wb") as file:
        file.write(data)
    with pytest.raises(DamagedFile):
        content(OpenShared(path))


CALLS = ["os.open", "os.fchmod", "os.close", "os.rename", "disk.write_all", "disk.write_all 2"]


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_a_writer_that_is_killed_leaves_a_whole_file_or_none(folder, call, is_after):
    name, nth = call.partition(" ")[0], int(call.partition(" ")[2] or 1)
    child = os.fork()
    if not child:
        module = disk if name.startswith("disk") else os
        real, n = getattr(module, name.partition(".")[2]), itertools.count(1)

        def dies(*args):
            if next(n) < nth:
                return real(*args)
            if is_after:
                real(*args)
            os._exit(9)

        setattr(module, name.partition(".")[2], dies)
        write(folder)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    tally("writers of shared files killed")
    for found in folder.listed("gathered"):
        assert content(folder.open(found)) == expected()
    assert content(folder.open(write(folder))) == expected()


INFO = ObjectInfo("b/k", "file", 5, "1")


def test_what_is_not_the_same_everywhere_or_may_be_secret_has_no_key():
    assert shareable_key(IDENTITY, INFO) == shareable_key(IDENTITY, INFO)
    for identity in ("file||-", "memory||-", "sftp|host|-", "zip||-"):
        assert shareable_key(identity, INFO) is None
    web = "https|host|-"
    assert shareable_key(web, ObjectInfo("https://host/k", "file", 5, "1")) is not None
    for path in (
        "https://host/k?X-Amz-Signature=secret",
        "https://host/k?page=1",
        "https://me:secret@host/k",
    ):
        assert shareable_key(web, ObjectInfo(path, "file", 5, "1")) is None
    assert shareable_key(IDENTITY, ObjectInfo("b/k", "file", 5, None)) is None
    assert shareable_key(IDENTITY, ObjectInfo("b/k", "file", None, "1")) is None


def test_each_version_has_a_key_of_its_own_and_files_of_drive_one_for_all_accounts_and_paths():
    infos = [
        INFO,
        *(
            ObjectInfo(*each)
            for each in (("b/l", "file", 5, "1"), ("b/k", "file", 6, "1"), ("b/k", "file", 5, "2"))
        ),
    ]
    assert len({key_of(IDENTITY + end, info) for info in infos for end in ("", "x")}) == 8
    drive = "drive|www.googleapis.com|"
    keys = {
        key_of(drive + account, ObjectInfo(path, "file", 5, "id md5 5", "id"))
        for account in ("one", "two")
        for path in ("My Drive/a", "Shared drives/b/a")
    }
    assert len(keys) == 1
    assert key_of(drive, ObjectInfo("My Drive/a", "file", 5, "id md5 5", "other")) not in keys
