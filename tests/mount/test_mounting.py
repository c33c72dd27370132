"""A real mount: what the kernel makes of the calls, and how a mount ends."""

import errno
import hashlib
import json
import mmap
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from cachedfs.mount.mounting import check_folder, unmount
from tests.support import HAS_FUSE, MiB, forget, noise, until

pytestmark = pytest.mark.skipif(not HAS_FUSE, reason="needs FUSE: apt-get install fuse3")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "mounted"
    folder.mkdir()
    yield folder
    subprocess.run(["fusermount3", "-u", "-z", folder], capture_output=True, check=False)  # if it is mounted


@pytest.fixture
def cachedfs(cloud, tmp_path):
    """Run a command of cachedfs with the cloud and the cache of the test."""
    environment = {**cloud._environment(), "XDG_STATE_HOME": str(tmp_path / "state")}

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "cachedfs", *map(str, arguments)],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def mount(cachedfs, *arguments):
    """Mount in the background, and return the process id."""
    done = cachedfs("mount", "--daemon", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["pid"]


def names_in(folder):
    """Return what is in a folder: nothing if it is the local one, and None if its mount ends, or has no process."""
    try:
        return os.listdir(folder)
    except OSError:
        return None


def written(pid):
    """Return the path of the one open file without a name."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.name != "0"]
    (path,) = [path for path in links if "cachedfs-" in path.rpartition("/")[2] or "/#" in path]
    return path


def rsync(source, target):
    """Copy a folder, and return the names of the files that were sent."""
    command = ["rsync", "-a", "--update", "--out-format=%n", f"{source}/", f"{target}/"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if not name.endswith("/")]


def test_programs_read_and_write_a_mounted_folder(cloud, fs, cachedfs, folder, tmp_path):
    data = cloud.put("a/b.bin", noise(3 * MiB))
    cloud.put("a/log", b"1")
    pid = mount(cachedfs, "--write", cloud.url("", "gs://"), folder)
    with pytest.raises(FileExistsError, match=f"something is mounted there; cachedfs unmount {folder}"):
        check_folder(str(folder))
    assert {file.name: file.stat().st_size for file in (folder / "a").iterdir()} == {
        "b.bin": 3 * MiB,
        "log": 1,
    }
    cloud.put("a/log", b"12")
    assert fsspec.filesystem("cachedfs", target_protocol="gs", max_age=0).size(cloud.path("a/log")) == 2
    forget()  # store what this process learned
    with (folder / "a/log").open("a+b") as file:  # the kernel opens it again, because of ESTALE
        file.write(b"3")
        file.seek(0)
        assert file.read() == b"123"
    with (folder / "a/b.bin").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert hashlib.sha256(mapped).digest() == hashlib.sha256(data).digest()
    shutil.copytree(folder / "a", folder / "copy")
    assert fs.cat_file(cloud.path("copy/b.bin")) == data
    if shutil.which("rsync"):
        for source, target in ((folder / "a", tmp_path / "local"), (tmp_path / "local", folder / "synced")):
            assert [rsync(source, target) for _ in range(2)] == [["b.bin", "log"], []]
        assert fs.cat_file(cloud.path("synced/b.bin")) == data
        shutil.rmtree(folder / "synced")
    with (folder / "notes").open("a") as file:
        file.write("one\n")
        file.flush()
        assert written(pid).startswith(str(cloud.cache_dir))
        subprocess.run(["true"], check=True)  # it inherits the file, and closes it
        assert not fs.exists(cloud.path("notes"))
    with (folder / "notes").open("a") as file:
        file.write("two\n")
    os.rename(folder / "notes", folder / "copy/notes")
    assert (folder / "copy/notes").read_text() == "one\ntwo\n"
    shutil.rmtree(folder / "copy")
    assert sorted(os.listdir(folder)) == ["a"]
    done = cachedfs("unmount", folder)
    assert done.returncode == 0, done.stderr
    assert os.listdir(folder) == []


def test_a_mount_is_read_only_and_ends_with_its_process(cloud, cachedfs, folder):
    cloud.put("a", b"1")
    pid = mount(cachedfs, cloud.url("", "gs://"), folder)
    with pytest.raises(OSError) as raised:
        (folder / "new").touch()
    assert raised.value.errno == errno.EROFS
    os.kill(pid, signal.SIGTERM)
    until(lambda: names_in(folder) == [])


def test_a_folder_can_be_mounted_again_after_its_mount_was_killed(cloud, cachedfs, folder, tmp_path):
    cloud.put("a", b"1")
    os.kill(mount(cachedfs, cloud.url("", "gs://"), folder), signal.SIGKILL)
    until(lambda: not names_in(folder))
    link = tmp_path / "link"
    link.symlink_to(folder.name)
    mount(cachedfs, cloud.url("", "gs://"), link)
    assert os.listdir(folder) == ["a"]
    done = cachedfs("unmount", link)
    assert done.returncode == 0, done.stderr
    assert names_in(folder) == []


def test_a_mount_in_the_background_keeps_its_options_and_its_log_to_its_user(
    cloud, cachedfs, folder, tmp_path
):
    cloud.put("a/b", b"1")
    log, url = tmp_path / "log", cloud.url("a", "gs://")
    log.touch(mode=0o644)
    options = ["-o", "project=SECRET", "--log", log, "--write", f"--temporary={tmp_path}"]
    pid = mount(cachedfs, *options, url, folder)
    with (folder / "b").open("r+b") as file:
        assert file.read() == b"1"
        file.write(b"2")
        file.flush()
        assert written(pid).rpartition("/")[0] == str(tmp_path)
    line = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    assert line[-4:-1] == ["mount", url, str(folder)]
    assert "SECRET" not in str(line) + log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_mounted_says_why(folder, tmp_path):
    with pytest.raises(NotADirectoryError, match="there is no such folder; make it first"):
        check_folder(f"{tmp_path}/no")
    (folder / "own").touch()
    with pytest.raises(NotADirectoryError, match="this is a file"):
        check_folder(f"{folder}/own")
    with pytest.raises(OSError, match="the folder is not empty"):
        check_folder(str(folder))
    with pytest.raises(OSError, match="nothing is mounted there"):
        unmount(str(folder))


READ_AND_FORK = """
import os, sys, fsspec
from cachedfs.shared.shared_store import SharedPlace
SharedPlace.answers_s = 0.1
fs = fsspec.filesystem("cachedfs", target_protocol="gs", shared_cache=sys.argv[2])
print(len(fs.cat_file(sys.argv[1])), "did not answer" in fs.stats().shared_cache, flush=True)
if (pid := os.fork()) == 0:
    print(len(fs.cat_file(sys.argv[1] + "2")), "did not answer" in fs.stats().shared_cache, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


def test_a_shared_cache_in_a_folder_that_hangs_holds_up_no_read_and_no_exit(cloud, cachedfs, folder):
    cloud.put("place/shared/x", b"")
    cloud.put("k", noise(50_000))
    cloud.put("k2", b"100")
    pid = mount(cachedfs, cloud.url("place", "gs://"), folder)
    os.kill(pid, signal.SIGSTOP)
    try:
        done = subprocess.run(
            [sys.executable, "-c", READ_AND_FORK, cloud.path("k"), folder / "shared"],
            env=cloud._environment(), capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
    finally:
        os.kill(pid, signal.SIGCONT)
    assert done.stdout == "50000 True\n3 True\n"
    assert done.stderr.count("did not answer") == 1
