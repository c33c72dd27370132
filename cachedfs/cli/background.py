"""Run a command in the background, with its output in a log."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from cachedfs.cli.arguments import flag, option
from cachedfs.common.user_folders import writable_folder

Daemon = Annotated[bool, flag("Return once it is ready, and serve in the background.", "--daemon")]
Log = Annotated[str | None, option("FILE", "Log of --daemon.", default="in the user's folder of logs")]
RUN = "import json, sys; from cachedfs.cli import main; main(json.load(sys.stdin))"
CHECK_S = 0.05  # between two looks at whether it is ready
READY_WITHIN_S = 60.0  # after which a start in the background has failed
TERMINATED_WITHIN_S = 5.0  # after which a process that ignores SIGTERM is killed


def log_of(command: str, name: str) -> str:
    """Return the log of a command that runs in the background: a file in the user's folder of logs."""
    import platformdirs

    folder = writable_folder(partial(platformdirs.user_log_dir, "cachedfs"))
    return os.path.join(folder, f"{command}{name.replace('/', '-')}.log")


def start(
    arguments: Sequence[str],
    shown: Sequence[str],
    *,
    log: str,
    is_ready: Callable[[Callable[[], bytes]], bool],
    failed: str,
) -> tuple[int, str]:
    """Run a command with `arguments` in the background; return its pid and log once it is ready.

    `shown` are the arguments that `ps` shows. `is_ready` gets a function that returns what the log says by then. Raises
    OSError with `failed` and the log after `READY_WITHIN_S`.
    """
    with open(log, "ab", opener=open_private) as file, tempfile.TemporaryFile() as given:
        began = file.tell()
        # Not on its command line, which all users can see: options may be secret, and it runs for days.
        given.write(json.dumps(arguments).encode())
        given.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-c", RUN, *shown],
            stdin=given,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )

    def said() -> bytes:
        return Path(log).read_bytes()[began:]

    try:
        until = time.monotonic() + READY_WITHIN_S
        while not is_ready(said):
            has_ended = child.poll() is not None
            if has_ended or time.monotonic() >= until:
                within = "" if has_ended else f" within {READY_WITHIN_S:.0f} s"
                text = said().decode(errors="replace").strip()
                raise OSError(f"{failed}{within}: {text or f'nothing is in {log}'}")
            time.sleep(CHECK_S)
    except BaseException:  # also Ctrl-C: nothing is ready later
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
