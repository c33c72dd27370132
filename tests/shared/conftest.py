"""Nodes: filesystems with a local cache of their own, one after the other in this process, that share a folder."""

import math
import threading

import fsspec
import pytest

from cachedfs.cache import disk
from cachedfs.common.clock import clock as metadata_clock
from cachedfs.common.types import CacheBounds
from cachedfs.core import engines
from cachedfs.shared.leases import lease_of
from cachedfs.shared.piece import is_gathered, key_of
from cachedfs.shared.shared_drive import SharedDrive
from cachedfs.shared.shared_folder import SharedFolder
from cachedfs.shared.shared_reads import _Read
from cachedfs.shared.shared_store import SharedPlace
from cachedfs.shared.whole_files import WholeFiles
from tests.support import MiB, forget, noise

BIG = noise(20 * MiB + 5, 1)


def flush(fs):
    """Wait until what a filesystem has fetched is shared."""
    assert fs._objects.engine.drain(120)
    assert fs._objects.engine.shared.flush(120)


def leave():
    """Do what the end of a process would, and wait for all that is to be shared."""
    for engine in list(engines._engines.values()):
        assert engine.drain(120)
        assert engine.shared is None or engine.shared.flush(120)
    forget()


def place_of(shared):
    return SharedFolder(str(shared), trust="group", is_read_only=False)


def files_in(shared):
    return sorted(path for path in shared.rglob("*") if path.is_file() and path.parent.name != "leases")


def read_all(fs, data):
    assert fs.cat(fs.find("b")) == data


def asked(origin):
    """Return kind and path of each request since the last call."""
    log = [each[:2] for each in origin.log]
    origin.log.clear()
    return log


def quiet(caplog):
    """Return the warnings about the shared cache."""
    return [each.getMessage() for each in caplog.records if each.name == "cachedfs.shared"]


def version_of(fs, path):
    return fs._objects.version(fs._objects.known(path))


def lease_on(fs, path):
    """Return the lease on the first part of an object that a filesystem knows."""
    version = version_of(fs, path)
    return lease_of(key_of(version.identity, version.info), 0)


def reading(fs, path, want, ask):
    """Read from the shared cache; `ask` asks the origin."""
    version, options = version_of(fs, path), {"is_complete": lambda: False, "bounds": CacheBounds()}
    return fs._objects.engine.shared.read(version, version.info, want, ask, waits=False, **options)


def wait_for_whole_files(monkeypatch):
    """From now on, no object is read by itself from a file with many before one of these is read as a whole."""
    begun, read, bytes_of = threading.Event(), WholeFiles._read, _Read._bytes_of

    def read_whole(*arguments):
        begun.set()
        return read(*arguments)

    def read_alone(self, placed, *arguments):
        assert not is_gathered(placed.file.rpartition("/")[2]) or begun.wait(60)
        return bytes_of(self, placed, *arguments)

    monkeypatch.setattr(WholeFiles, "_read", read_whole)
    monkeypatch.setattr(_Read, "_bytes_of", read_alone)


@pytest.fixture
def shared(tmp_path):
    return tmp_path / "shared"


@pytest.fixture(autouse=True)
def patient_nodes(monkeypatch):
    """Wait long for the shared cache: a busy machine would otherwise ask the origin."""
    for place in (SharedPlace, SharedDrive):
        monkeypatch.setattr(place, "answers_s", 60.0)


@pytest.fixture
def on_a_network(monkeypatch):
    """Let the shared folder count as one on a network: what is read there is copied."""
    monkeypatch.setattr(disk, "is_local", lambda path: False)


@pytest.fixture(params=["local disk", "network"])
def anywhere(request):
    if request.param == "network":
        request.getfixturevalue("on_a_network")


@pytest.fixture
def node(own_cache, tmp_path, shared):
    """Go to another machine: `node("b")` is a filesystem with its own cache, and nothing in memory."""

    def go(name, **options):
        leave()
        metadata_clock.offset = -math.inf
        given = {"cache_dir": str(tmp_path / name), "shared_cache": str(shared), **options}
        return fsspec.filesystem("cachedfs", target_protocol="gs", **given)

    yield go
    leave()


@pytest.fixture
def filled(origin):
    """Return a function that puts small objects and a large one at the origin, and returns them by path."""

    def fill(n=20):
        small = {f"b/d/{i % 3}/{i}": noise(50_000 + i, i) for i in range(n)}
        return {path: origin.put(path, content) for path, content in {**small, "b/big": BIG}.items()}

    return fill


@pytest.fixture
def put_there(origin, node, filled):
    """Return a function that does this and lets node a read, and so share, all of them; then nothing was asked."""

    def put(n=20, **options):
        data = filled(n)
        read_all(node("a", **options), data)
        leave()
        assert asked(origin)
        return data

    return put
