"""A process that is killed while it writes: no other one reads old bytes."""

import os
import signal
from pathlib import Path

import fsspec
import pytest

from cachedfs.common.atomic_files import PartFile
from tests.support import KiB, forget, noise, tally

OLD, NEW = noise(700 * KiB), noise(700 * KiB, seed=1)


def filesystem(folder):
    return fsspec.filesystem("cachedfs", target_protocol="file", cache_dir=str(folder / "c"), keep_free=0)


def write_and_die(folder, when):
    """Die right before or right after the write reaches the origin, before any other process learns of it."""
    close = PartFile.close  # it puts the written file in its place

    def dying(self):
        if when == "after":
            close(self)
        os.kill(os.getpid(), signal.SIGKILL)

    PartFile.close = dying
    filesystem(Path(folder)).pipe_file(f"{folder}/file", NEW)


@pytest.mark.parametrize("when", ["before", "after"])
def test_after_a_killed_write_no_process_reads_old_bytes(folder, fork_server, when):
    path = folder / "file"
    path.write_bytes(OLD)
    fs = filesystem(folder)
    assert fs.cat_file(str(path)) == OLD
    ended = fork_server.run("tests.integration.test_crash:write_and_die", str(folder), when)
    assert ended.signal == signal.SIGKILL
    tally("kills of the whole stack")
    assert fs.cat_file(str(path)) == path.read_bytes() == (NEW if when == "after" else OLD)
    forget()  # before the folder is removed
