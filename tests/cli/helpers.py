"""Run commands: in this process, on a terminal, as another process, and with Ctrl-C."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from unittest import mock

from typer.testing import CliRunner

from cachedfs.cli import main
from cachedfs.cli.app import app
from cachedfs.cli.arguments import INTERRUPTED, Command, CommonOptions
from cachedfs.core import engines
from tests.support import forget


def run(*arguments, status=0, stdin=None):
    """Run a command in this process; return the result after looking at its exit status."""
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result


def json_of(*arguments):
    return json.loads(run(*arguments, "--json").stdout)


def start(cloud, *arguments, **options):
    """Start the command line as a new process that is configured like this one."""
    command = [sys.executable, "-m", "cachedfs", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=cloud._environment(), stdout=pipe, stderr=pipe, **options)


class Now(threading.Timer):
    """A timer that calls its function at once, in this thread."""

    def start(self):
        self.function()

    def join(self, timeout=None):
        pass


def in_terminal(*arguments, typed="", stdout=None, **environ):
    """Run a command in this process on a terminal of 80 columns without colours; return what is seen there."""
    master, slave = pty.openpty()
    os.write(master, typed.encode())
    seen = []

    def look():
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while data := os.read(master, 65536):
                seen.append(data)

    looking = threading.Thread(target=look)
    looking.start()
    environ = {"TERM": "dumb", "COLUMNS": "80", "LINES": "25", **environ}
    with (
        open(slave, closefd=False) as keys,
        open(slave, "w", closefd=False) as screen,
        mock.patch.multiple(sys, stdin=keys, stdout=stdout or screen, stderr=screen),
        mock.patch.dict(os.environ, environ),
        mock.patch.object(threading, "Timer", Now),  # what takes a moment is shown at once
        contextlib.suppress(SystemExit),
    ):
        main(arguments)
    os.close(slave)
    looking.join()
    os.close(master)
    forget()
    return b"".join(seen).decode().replace("\r\n", "\n")


def interrupted(when, *arguments):
    """Run a command in this process that gets Ctrl-C once `when()` is true; it ends with 130 and says nothing on stdout."""
    is_over = threading.Event()

    def ctrl_c():
        while not is_over.wait(0.005):
            if when():
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=ctrl_c)
    thread.start()
    try:
        result = run(*arguments, status=INTERRUPTED)
    finally:
        is_over.set()
        thread.join()
    assert result.stdout == ""
    engines._close_all()  # as the end of the process does
    return result.stderr


def options(**given):
    """Return the common options of a command, as typed."""
    context = CommonOptions(Command("ls"))
    context.params = given
    return context
