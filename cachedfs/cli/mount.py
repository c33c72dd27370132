"""The commands `mount` and `unmount`: a URL as a folder, for programs that read paths."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated

from cachedfs.cli.arguments import CommonOptions, argument, command, flag, option
from cachedfs.cli.output import say
from cachedfs.cli.url_arguments import url_argument
from cachedfs.cli.urls import Location, locate
from cachedfs.common.logging import public_url
from cachedfs.common.user_folders import writable_folder
from cachedfs.errors import AccessDenied

__all__ = ["mount", "unmount"]

TEMPORARY = "CACHEDFS_MOUNT_TEMPORARY"  # environment variable of --temporary
SERVE = "import json, sys; from cachedfs.cli import main; main(json.load(sys.stdin))"
CHECK_S = 0.05  # between two looks at whether the folder is mounted
MOUNTED_WITHIN_S = 60.0  # after which a start in the background has failed
TERMINATED_WITHIN_S = 5.0  # after which a process that ignores SIGTERM is killed


@command(
    "cachedfs mount gs://my-bucket/data /mnt/data",
    "cachedfs mount --daemon 'drive://My Drive/data' /content/data",
    "cachedfs mount --write -o max_age=10 gs://my-bucket/results /mnt/results",
)
def mount(
    common: CommonOptions,
    url: Annotated[str, url_argument("URL", "The folder to mount.")],
    folder: Annotated[str, argument("FOLDER", "A local folder that exists.")],
    write: Annotated[bool, flag("Allow changes; a file is sent when it is closed.", "--write")] = False,
    daemon: Annotated[
        bool, flag("Return once it is mounted, and serve it in the background.", "--daemon")
    ] = False,
    allow_other: Annotated[bool, flag("Let other users in.", "--allow-other")] = False,
    uid: Annotated[int | None, option("N", "Owner of all files.", default="yours")] = None,
    gid: Annotated[int | None, option("N", "Group of all files.", default="yours")] = None,
    log: Annotated[
        str | None, option("FILE", "Log of --daemon.", default="in the user's folder of logs")
    ] = None,
    temporary: Annotated[
        str | None,
        option(
            "DIR", "Where files are until they are sent.", default="in the cache directory", envvar=TEMPORARY
        ),
    ] = None,
) -> None:
    """Mount a URL as a folder, until Ctrl-C or `cachedfs unmount`.

    Programs that read paths read it through the same cache and read-ahead as
    URLs. Needs FUSE (on Debian, Ubuntu and Colab: apt-get install fuse3).

    Give secrets in the environment (FSSPEC_GS_TOKEN, FSSPEC_DRIVE_TOKEN): all
    users of the machine can see the command line while it runs.
    """
    from cachedfs.mount.mounting import check_folder, serve
    from cachedfs.mount.temporary_files import temporary_folder

    location = locate(url, common)
    check_exists(location, is_writable=write)
    given, folder = folder, os.path.realpath(folder)  # the system mounts at the folder that a link points to
    check_folder(folder)
    temporary = temporary_folder(temporary, location.cache.root) if write else None
    if daemon:
        flags = {"--write": write, "--allow-other": allow_other, "--debug": common.debug}
        values = {"temporary": temporary, "uid": uid, "gid": gid, "cache-dir": common.cache_dir}
        arguments = [name for name, is_set in flags.items() if is_set]
        arguments += [f"--{name}={value}" for name, value in values.items() if value is not None]
        arguments += [f"--option={text}" for text in common.options]
        pid, log = start([*arguments, url, folder], url, folder, log)
        common.show({"pid": pid, "log": log}, f"mounted at {given}; log: {log}")
        return
    serve(
        location.fs,
        location.path,
        folder,
        is_writable=write,
        allow_other=allow_other,
        uid=uid,
        gid=gid,
        temporary=temporary,
        on_mounted=lambda: say(f"{url} is mounted at {folder} until Ctrl-C or cachedfs unmount", err=True),
    )


def check_exists(location: Location, *, is_writable: bool) -> None:
    """Raise unless the URL is a folder. If `is_writable`, only its bucket has to exist: a write creates the folder."""
    from cachedfs.common.urls import SLASH_NAMES

    fs, path, url = location.fs, location.path, location.text
    if fs.isfile(path):
        raise NotADirectoryError(f"{url} is a file, not a folder")
    bucket, slash, _ = path.partition("/")
    if not (is_writable and slash):
        if not fs.exists(path):
            raise FileNotFoundError(f"{url} does not exist; `cachedfs ls` shows what does")
    elif fs.target_protocol in SLASH_NAMES:
        with contextlib.suppress(AccessDenied):  # it exists, and may be written without being listed
            if not fs.exists(bucket):
                raise FileNotFoundError(
                    f"{url} cannot be mounted: there is no bucket {bucket}; check its name, or create it first"
                )


def start(arguments: list[str], url: str, folder: str, log: str | None) -> tuple[int, str]:
    """Run `cachedfs mount` in the background; return its pid and log once the folder is mounted.

    Raises OSError with what the log says if it is not mounted within `MOUNTED_WITHIN_S`.
    """
    import platformdirs

    name = f"mount{folder.replace('/', '-')}.log"
    log = log or os.path.join(writable_folder(partial(platformdirs.user_log_dir, "cachedfs")), name)
    with open(log, "ab", opener=open_private) as file, tempfile.TemporaryFile() as given:
        began = file.tell()
        # Not on its command line, which all users can see: options may be secret, and it runs for days.
        given.write(json.dumps(["mount", *arguments]).encode())
        given.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-c", SERVE, "mount", public_url(url), folder],  # the last three for `ps`
            stdin=given,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + MOUNTED_WITHIN_S
        while not os.path.ismount(folder):
            has_ended = child.poll() is not None
            if has_ended or time.monotonic() >= until:
                within = "" if has_ended else f" within {MOUNTED_WITHIN_S:.0f} s"
                said = Path(log).read_bytes()[began:].decode(errors="replace").strip()
                raise OSError(f"{folder} was not mounted{within}: {said or f'nothing is in {log}'}")
            time.sleep(CHECK_S)
    except BaseException:  # also Ctrl-C: nothing is mounted later
        end(child)
        raise
    return child.pid, log


def end(child: subprocess.Popen[bytes]) -> None:
    """End a process that may have ended already."""
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(TERMINATED_WITHIN_S)
    child.kill()
    child.wait()


def open_private(path: str, flags: int) -> int:
    """Open a log that only its owner may read; a device or pipe keeps its mode."""
    fd = os.open(path, flags, 0o600)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        with contextlib.suppress(PermissionError):  # somebody else's, named with --log
            os.fchmod(fd, 0o600)
    return fd


@command("cachedfs unmount /mnt/data")
def unmount(
    common: CommonOptions, folder: Annotated[str, argument("FOLDER", "A folder that is mounted.")]
) -> None:
    """Unmount a folder that `cachedfs mount` has mounted."""
    from cachedfs.mount.mounting import unmount as do

    do(os.path.realpath(folder))
    common.show({"unmounted": folder}, f"unmounted {folder}")
