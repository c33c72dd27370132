"""The commands `mount` and `unmount`: a URL as a folder, for programs that read paths."""

from __future__ import annotations

import contextlib
import os
from typing import Annotated

from cachedfs.cli.arguments import CommonOptions, argument, command, flag, option
from cachedfs.cli.background import Daemon, Log, log_of, start
from cachedfs.cli.output import say
from cachedfs.cli.urls import Location, locate, url_argument
from cachedfs.common.logging import public_url
from cachedfs.errors import AccessDenied

TEMPORARY = "CACHEDFS_MOUNT_TEMPORARY"  # environment variable of --temporary


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
    daemon: Daemon = False,
    allow_other: Annotated[bool, flag("Let other users in.", "--allow-other")] = False,
    uid: Annotated[int | None, option("N", "Owner of all files.", default="yours")] = None,
    gid: Annotated[int | None, option("N", "Group of all files.", default="yours")] = None,
    log: Log = None,
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
        pid, log = start(
            common.in_foreground(),
            ["mount", public_url(url), folder],
            log=log or log_of("mount", folder),
            is_ready=lambda said: os.path.ismount(folder),
            failed=f"{folder} was not mounted",
        )
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


@command("cachedfs unmount /mnt/data")
def unmount(
    common: CommonOptions, folder: Annotated[str, argument("FOLDER", "A folder that is mounted.")]
) -> None:
    """Unmount a folder that `cachedfs mount` has mounted."""
    from cachedfs.mount.mounting import unmount as do

    do(os.path.realpath(folder))
    common.show({"unmounted": folder}, f"unmounted {folder}")
