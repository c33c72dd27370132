"""Starting a mount: what has to exist, and how long a start in the background may take."""

import signal
import subprocess

import pytest

from cachedfs.cli import background, mount
from cachedfs.cli.urls import locate
from tests.cli.helpers import options as common


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


class Child:
    """A process that writes to its log, and mounts nothing."""

    pid = 1

    def __init__(self, ignored, stdout):
        self.ignored, self.code, self.signals = ignored, None, []
        stdout.write(b"looking for a network\n")

    def poll(self):
        return self.code

    def terminate(self):
        self._signal(signal.SIGTERM)

    def kill(self):
        self._signal(signal.SIGKILL)

    def _signal(self, number):
        if self.code is None:  # as Popen does it
            self.signals.append(number)
            self.code = None if number in self.ignored else -number

    def wait(self, timeout=None):
        if self.code is None:
            raise subprocess.TimeoutExpired("mount", timeout)
        return self.code


@pytest.mark.parametrize(
    ("ignored", "signals"), [([], [signal.SIGTERM]), ([signal.SIGTERM], [signal.SIGTERM, signal.SIGKILL])]
)
def test_a_mount_in_the_background_that_takes_too_long_is_ended(tmp_path, monkeypatch, ignored, signals):
    children = []

    def popen(command, *, stdout, **options):
        children.append(Child(ignored, stdout))
        return children[-1]

    passed = iter(range(0, 1000, 50))
    monkeypatch.setattr(background.subprocess, "Popen", popen)
    monkeypatch.setattr(background.time, "monotonic", lambda: next(passed))
    monkeypatch.setattr(background.time, "sleep", lambda _: None)
    log = tmp_path / "log"
    log.write_text("of an earlier mount\n")
    with pytest.raises(OSError, match=r"was not mounted within 60 s: looking for a network$"):
        background.start(
            ["mount", "gs://b"],
            ["mount"],
            log=str(log),
            is_ready=lambda said: False,
            failed="/mnt was not mounted",
        )
    assert children[0].signals == signals
