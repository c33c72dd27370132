"""Starting a mount: what has to exist, and how long a start in the background may take."""

import os

import pytest

from cachedfs.cli import background, mount
from cachedfs.cli.urls import locate
from tests.cli.helpers import options as common
from tests.support import until


@pytest.mark.parametrize("machine", ["cloud", "s3"])
def test_a_folder_that_will_be_written_needs_its_bucket_only(request, machine):
    machine = request.getfixturevalue(machine)
    machine.put("a", b"1")

    def check(url, **options):
        mount.check_exists(locate(url, common()), **options)

    url = f"{machine.protocol}://{machine.path('new')}"
    check(url, is_writable=True)
    bucket = {"gs": "bucket", "s3": "metadata"}[machine.protocol]
    assert machine.asked() == sorted([bucket, "list", "metadata"])  # one more than whether it is a file
    with pytest.raises(FileNotFoundError, match=f"{url} does not exist"):
        check(url, is_writable=False)
    missing = f"{machine.protocol}://there-is-none/new"
    with pytest.raises(
        FileNotFoundError, match=f"{missing} cannot be mounted: there is no bucket there-is-none"
    ):
        check(missing, is_writable=True)
    with pytest.raises(NotADirectoryError, match="is a file"):
        check(f"{machine.protocol}://{machine.path('a')}", is_writable=True)


def test_a_folder_of_drive_that_will_be_written_may_be_missing(drive):
    mount.check_exists(locate(f"drive://{drive.path('new/folder')}", common()), is_writable=True)


@pytest.mark.parametrize("action", ["SIG_DFL", "SIG_IGN"])
def test_a_mount_in_the_background_that_takes_too_long_is_ended(tmp_path, monkeypatch, action):
    monkeypatch.setattr(background, "READY_WITHIN_S", 0)
    monkeypatch.setattr(background, "TERMINATED_WITHIN_S", 0.1)
    program = f"import os, signal, time; signal.signal(signal.SIGTERM, signal.{action})"
    monkeypatch.setattr(background, "RUN", f"{program}; print(os.getpid(), flush=True); time.sleep(600)")
    log = tmp_path / "log"
    log.write_text("of an earlier mount\n")

    def is_ready(said):
        until(lambda: said().endswith(b"\n"))
        return False

    with pytest.raises(OSError, match=r"was not mounted within 0 s: \d+$"):
        background.start(
            ["mount", "gs://b"], ["mount"], log=str(log), is_ready=is_ready, failed="/mnt was not mounted"
        )
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text().split()[-1]), 0)
