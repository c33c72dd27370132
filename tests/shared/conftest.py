"""Nodes: filesystems with a local cache of their own, one after the other in this process, that share a folder."""

import math
import threading

import fsspec
import pytest

from cachedfs.cache import disk
from cachedfs.common.clock import clock as metadata_clock
from cachedfs.core import engines
from cachedfs.shared.piece import is_gathered
from cachedfs.shared.shared_drive import SharedDrive
from cachedfs.shared.shared_reads import _Read
from cachedfs.shared.shared_store import SharedPlace
from cachedfs.shared.whole_files import WholeFiles
from tests.support import forget


def leave():
    """Do what the end of a process would, and wait for all that is to be shared."""
    for engine in list(engines._engines.values()):
        assert engine.drain(120)
        assert engine.shared is None or engine.shared.flush(120)
    forget()


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
