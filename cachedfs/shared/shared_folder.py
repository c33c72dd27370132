"""A folder that holds a shared cache: what may be used of it, and how its files are made, listed and read."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from cachedfs.cache import disk
from cachedfs.shared.metadata_rows import DamagedFile
from cachedfs.shared.piece import GATHERED, Piece, PlacedPiece, has_pieces
from cachedfs.shared.shared_store import KeptFile, SharedPlace, StoredFile, read_exactly

logger = logging.getLogger("cachedfs.shared")

DAY_S = 86400.0
MOST_OPEN = 16  # files
_WAITING = "leases/waiting"  # its time says when a node last waited for another
ALONE = "leases/alone"  # names the node that fetches small objects and found no other one
_LONGEST_NAME = 64
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class OpenShared(StoredFile):
    """A file of a folder; it is closed with the last reference to it."""

    def __init__(self, path: str) -> None:
        self._found = dict[tuple[str, int, int], tuple[Piece, int]]()
        self.fd = os.open(path, disk.READ)  # a link is an error, a pipe does not hang
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedFile("it is not a file")
        self.size, self.modified_at = status.st_size, status.st_mtime
        self.is_own = status.st_uid == os.geteuid()
        if status.st_atime < time.time() - DAY_S:  # note the use: many file systems do not
            with contextlib.suppress(OSError):  # of another user, or read-only
                os.utime(self.fd, ns=(time.time_ns(), status.st_mtime_ns))

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.fd)

    def part(self, start: int, stop: int) -> bytes:
        return read_exactly(self.fd, start, stop - start)

    def find(self, placed: PlacedPiece) -> tuple[Piece, int]:
        if (found := self._found.get(placed.piece.place)) is None:
            found = self._found[placed.piece.place] = super().find(placed)
        return found


class SharedFolder(SharedPlace):
    """The shared cache in a folder. Methods that do not say so raise OSError, and block.

    `trust` "anyone" also accepts a folder in which all users may write.
    """

    def __init__(self, folder: str, *, trust: str, is_read_only: bool) -> None:
        super().__init__(folder, is_read_only=is_read_only)
        self._trust = trust
        self._is_checked = self._is_network = False
        # The files opened last: a network file system is asked at each opening.
        self._opened: dict[str, OpenShared] = {}

    def check(self) -> None:
        """Once, raise OSError with what to do if the folder cannot be used; create it where it is missing."""
        if self._is_checked:
            return
        try:
            self._check()
        except PermissionError as error:
            if error.errno is None:  # raised by `_check`: all users may write
                raise
            raise PermissionError(
                f"this user may not use {self.url}: `cachedfs share init` makes it for a group ({error})"
            ) from error
        self._is_checked = True

    def _check(self) -> None:
        if not self.is_read_only:
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.url)
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"there is no folder {os.path.dirname(self.url)}: make it, or correct the name"
                ) from error
            self._make(self.path)
        elif disk.state(self.path) is None:
            raise FileNotFoundError(
                f"{self.url} has no shared cache: nothing was put there yet, or its name is wrong"
            )
        for path, status in ((self.url, os.stat(self.url)), (self.path, os.lstat(self.path))):
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(f"{path} is not a folder: name another as shared_cache")
            if status.st_mode & stat.S_IWOTH and self._trust != "anyone":
                raise PermissionError(
                    f"all users can write to {path}, and so choose what you read: chmod o-w it, or trust them "
                    'with shared_cache_trust="anyone"'
                )
        self._is_network = disk.is_network(self.url)
        self.is_local = disk.is_local(self.url)

    def listed(self, subfolder: str) -> list[str]:
        """Return the names in a subfolder; none if it does not exist."""
        try:
            return [f"{subfolder}/{name}" for name in os.listdir(f"{self.path}/{subfolder}")]
        except FileNotFoundError:
            return []

    def files(self) -> Iterator[KeptFile]:
        for subfolder in (GATHERED, *self.listed("runs")):
            yield from self._described(
                name for name in self.listed(subfolder) if has_pieces(name.rpartition("/")[2])
            )

    def leftovers(self) -> Iterator[KeptFile]:
        """Yield leases and temporary files."""
        yield from self._described([*self.listed("tmp"), *self.listed("leases")])

    def _described(self, names: Iterable[str]) -> Iterator[KeptFile]:
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                status = os.lstat(f"{self.path}/{name}")
                if stat.S_ISREG(status.st_mode):
                    used_at = max(status.st_atime, status.st_mtime)
                    yield KeptFile(name, status.st_size, used_at, status.st_mtime)

    def open(self, name: str) -> OpenShared:
        if (file := self._opened.get(name)) is None:
            file = self._opened.setdefault(name, OpenShared(f"{self.path}/{name}"))
            if len(self._opened) > MOST_OPEN:
                with contextlib.suppress(StopIteration, RuntimeError):  # another thread changes the dict
                    self.close_file(next(iter(self._opened)))
        return file

    def close_file(self, name: str) -> None:
        """Close a file once nobody reads it: the next one that opens it gets what is there then."""
        self._opened.pop(name, None)

    def close_deleted(self) -> None:
        for name, file in list(self._opened.items()):
            with contextlib.suppress(OSError):
                if os.fstat(file.fd).st_nlink == 0:
                    self.close_file(name)

    def write(
        self, name: str, data: Sequence[disk.Buffer], index: Callable[[], bytes], *, replaces: bool = False
    ) -> None:
        # A process that dies before the end leaves a temporary file.
        path, temp = f"{self.path}/{name}", self._temp()
        self.close_file(name)
        if disk.state(path) is not None and not replaces:
            return
        for at, letter in enumerate(name):
            if letter == "/":
                self._make(f"{self.path}/{name[:at]}")
        fd = self._create(temp)
        try:
            try:
                disk.write_all(fd, data, 0)
                if self._is_network:  # else it is there at once
                    os.fsync(fd)
                disk.write_all(fd, [index()], sum(memoryview(each).nbytes for each in data))
            finally:
                os.close(fd)  # a network file system may report a full disk only now
            os.rename(temp, path)
        except BaseException:  # an interrupt too
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise

    def remove(self, name: str) -> None:
        self.close_file(name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.path}/{name}")

    def make_empty(self, name: str) -> bool:
        """Create an empty file; return False if it exists."""
        path = f"{self.path}/{name}"
        for _ in range(2):
            try:
                os.close(self._create(path))
                return True
            except FileExistsError:
                return False
            except FileNotFoundError:
                self._make(path.rpartition("/")[0])
        return False

    def renew(self, name: str) -> None:
        """Give a file the time of now."""
        os.utime(f"{self.path}/{name}")

    def wait_for_others(self) -> float | None:
        """Let others know that a node waits; return the time of now by the clock of the folder, None if others may not."""
        self.make_empty(_WAITING)
        with contextlib.suppress(PermissionError):
            self.renew(_WAITING)
        return self.modified_at(_WAITING)

    def waited_at(self) -> float:
        """Return a number that is another one once a node waits."""
        return self.modified_at(_WAITING) or 0.0

    def node_alone(self) -> tuple[str, float] | None:
        """Return the name of the node that takes itself to be alone, and when it last said so; None without one.

        The time is that of the server.
        """
        found = self._small(ALONE)
        return found and (found[0].decode(errors="replace"), found[1])

    def set_node_alone(self, node: str) -> bool:
        """Let others know that a node takes itself to be alone; return False if one does already."""
        temp = self._temp()
        fd = self._create(temp)
        try:
            with open(fd, "wb", buffering=0) as file:
                file.write(node.encode())
            self._make(f"{self.path}/leases")
            os.link(temp, f"{self.path}/{ALONE}")
            return True
        except FileExistsError:
            return False
        finally:
            os.unlink(temp)

    def modified_at(self, name: str) -> float | None:
        """Return the time of a file, as its server has it now; None without one."""
        found = self._small(name)
        return found and found[1]

    def _small(self, name: str) -> tuple[bytes, float] | None:
        """Return the content and the time of a small file, for which the server is asked now; None without one."""
        try:
            with open(os.open(f"{self.path}/{name}", disk.READ), "rb", buffering=0) as file:
                return file.read(_LONGEST_NAME), os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return None

    def now(self) -> float | None:
        """Return the time by the clock that dates the files; None where that cannot be asked."""
        try:
            temp = self._temp()
            fd = os.open(temp, _NEW, 0o600)
            try:
                os.utime(fd)  # "now" by the clock of the server
                return os.fstat(fd).st_mtime
            finally:
                os.close(fd)
                os.unlink(temp)
        except OSError:  # it can only be read
            return None if self._is_network else time.time()

    def _temp(self) -> str:
        self._make(f"{self.path}/tmp")
        return f"{self.path}/tmp/{os.urandom(8).hex()}"

    def _create(self, path: str) -> int:
        """Create a file with the mode of the folder, open for writing."""
        mode = self._mode
        fd = os.open(path, _NEW, 0o666 if mode is None else mode & 0o666)
        if mode is not None:
            with contextlib.suppress(PermissionError):  # there are none, as on a stick
                os.fchmod(fd, mode & 0o666)  # whatever the umask removed
        return fd

    def _make(self, path: str) -> None:
        """Create a subfolder with the mode of the folder; do nothing if it exists."""
        if disk.state(path) is None:
            mode = self._mode
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o777 if mode is None else mode)
                if mode is not None:
                    os.chmod(path, mode)

    @functools.cached_property
    def _mode(self) -> int | None:
        """Return the mode of what is made in the folder, as that of the folder itself; None if its ACL says it."""
        if hasattr(os, "listxattr"):
            with contextlib.suppress(OSError):
                if "system.posix_acl_default" in os.listxattr(self.url):
                    return None
        return 0o700 | os.stat(self.url).st_mode & 0o2077
