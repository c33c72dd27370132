"""The messages of docs/troubleshooting.md are those of the code: each problem is caused, and says what the page shows."""

import asyncio
import contextlib
import doctest
import errno
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
from pydrive2.auth import GoogleAuth

from cachedfs.cli.output import message_of
from cachedfs.core import engines
from cachedfs.filesystem import CachedFileSystem
from cachedfs.mount.fuse_session import FuseSession
from cachedfs.mount.local_file import LocalFile
from cachedfs.mount.mounting import serve
from cachedfs.origins.drive import accounts
from cachedfs.sim import DriveServer, Fault
from cachedfs.sim.messages import Refusal
from tests.support import ROOT

OUTPUT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
OUTPUT_CHECKER = doctest.OutputChecker()

# The messages in troubleshooting.md, and others that say themselves what to do and that no other test causes.
MESSAGES = """\
AccessDenied: Google Drive: no saved sign-in (there is no ...default.json): sign in once...
CachedFSError: ...: Drive shows the folder '...', and does not find its contents...
CachedFSError: ...: data being written is stored in ... until it is sent, and that failed...TMPDIR...
ObjectChanged: ...: the file changed while it was being appended to...open it again
OriginUnavailable: ...: copying to it failed after 1 try...What it makes may be there all the same...
OriginUnavailable: ...: not all of it, or of its listing, is in the cache, and offline=True forbids asking for it
TypeError: drive option google_auth=: a live GoogleAuth cannot travel to another process...
ValueError: drive option ...: this is an OAuth client (client_secrets.json), nobody's sign-in...
ValueError: drive://data: a Drive path starts with one of 'My Drive', 'shared:NAME'...
ValueError: ...: mode 'r+b' is none of rb, wb, xb and ab
WARNING: ...; serving the versions known to the cache (stale_if_error=False forbids it)
cachedfs: mounting needs Linux...
""".splitlines()


def raise_(error: Exception) -> None:
    raise error


class Mishaps:
    """Causes every problem of troubleshooting.md, and collects the messages in `said`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.said: list[str] = []
        self.numbers = iter(range(100))

    def fs(self, server: DriveServer, *, token: object = "anon", **given: Any) -> CachedFileSystem:
        """Return a filesystem with an empty cache."""
        sign_in = given.pop("drive", {"token": token})
        given.setdefault("cache_dir", self.folder / str(next(self.numbers)))
        drive = {"endpoint_url": server.endpoint_url, **sign_in}
        return fsspec.filesystem("cachedfs", drive=drive, skip_instance_cache=True, **given)

    def attempt(self, what: Callable[[], object]) -> None:
        try:
            what()
        except Exception as error:
            self.said += [f"{type(error).__name__}: {error}", f"cachedfs: {message_of(error)}"]

    @contextlib.contextmanager
    def retrying_at_once(self) -> Iterator[None]:
        with self.monkeypatch.context() as patch:
            patch.setattr(asyncio, "sleep", lambda s, result=None, sleep=asyncio.sleep: sleep(0, result))
            yield

    def all(self) -> None:
        with DriveServer(profile="off") as server:
            self.of_sign_in(server)
            self.of_reading(server)
            self.of_the_cache(server)
            self.of_mounts()
            old = self.fs(server, max_age=0)
            old.cat_file("My Drive/data/a.txt")
        with self.retrying_at_once():
            old.cat_file("My Drive/data/a.txt")  # the server is unreachable
            self.attempt(lambda: old.cat_file("My Drive/data/never-read.txt"))
        self.attempt(lambda: fsspec.filesystem("cdrive", offline=True).cat_file("My Drive/data/a.txt"))

    def of_mounts(self) -> None:
        program = self.folder / "programs" / "fusermount3"
        program.parent.mkdir()
        with self.monkeypatch.context() as patch:
            patch.setattr("sys.platform", "darwin")
            self.attempt(lambda: serve(mock.Mock(), "", ""))
        with self.monkeypatch.context() as patch:
            patch.setenv("PATH", str(program.parent))
            patch.setenv("XDG_STATE_HOME", str(self.folder))
            program.write_text("#!/bin/sh\necho mount failed: Operation not permitted >&2\nexit 1\n")
            program.chmod(0o700)
            self.attempt(lambda: FuseSession(mock.Mock(), str(self.folder), []))
            local = LocalFile(None, "my-bucket/key", None, None, 0)
            local.write(b"1", 0)
            local.close()

    def of_sign_in(self, server: DriveServer) -> None:
        for name in ("GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG", "XDG_CACHE_HOME"):
            self.monkeypatch.delenv(name, raising=False)
        self.monkeypatch.setenv("HOME", str(self.folder))
        self.monkeypatch.setenv("NO_GCE_CHECK", "true")
        client = self.folder / "client_secrets.json"
        client.write_text('{"installed": {}}')
        gauth = GoogleAuth(settings=dict(GoogleAuth.DEFAULT_SETTINGS))
        for sign_in in (
            {},
            {"client_id": "123", "client_secret": "s"},
            {"token": str(client)},
            {"token": "anon", "client_id": "123"},
        ):
            self.attempt(lambda sign_in=sign_in: self.fs(server, drive=sign_in).ls("My Drive"))
        self.attempt(lambda: pickle.dumps(self.fs(server, drive={"google_auth": gauth})))
        self.of_accounts(server)
        server.require_token("ya29.new")
        self.attempt(lambda: self.fs(server, token="ya29.old").ls("My Drive"))
        server.require_no_token()
        server.fail(Fault(status=403, reason="insufficientPermissions"))
        self.attempt(lambda: self.fs(server).cat_file("My Drive/data/a.txt"))
        lacking = Refusal(403, "Request had insufficient authentication scopes.", "insufficientPermissions")
        server.fail(Fault(status=403, body=lacking.to_json()))
        self.attempt(lambda: self.fs(server).cat_file("My Drive/data/a.txt"))
        server.put("data/a.txt", b"a")

    def of_accounts(self, server: DriveServer) -> None:
        user = {"type": "authorized_user", "client_id": "c", "client_secret": "s", "refresh_token": "r"}
        accounts.save("me", {**user, "token_uri": f"{server.endpoint_url}/token", "account": "me"})
        server.refuse_tokens()
        self.attempt(lambda: self.fs(server, drive={"account": "me"}).ls("My Drive"))
        server.refuse_tokens(False)
        accounts.remove("me")

    def of_reading(self, server: DriveServer) -> None:
        server.put("data/twice.txt", b"1")
        server.put("data/twice.txt", b"2", new=True)
        server.document("data/report", "words")
        server.put("data/never-read.txt", b"3")
        for name in ("none.txt", "twice.txt"):
            self.attempt(lambda name=name: self.fs(server).cat_file(f"My Drive/data/{name}"))
        self.attempt(lambda: self.fs(server).ls("data"))
        server.fail(Fault(kind="list", key=server.folder("data"), status=404))
        self.attempt(lambda: self.fs(server).ls("My Drive/data"))
        self.attempt(lambda: self.fs(server).open("My Drive/data/a.txt", "r+b"))
        server.fail(Fault(kind="upload", status=403, reason="storageQuotaExceeded"))
        self.attempt(lambda: self.fs(server).pipe_file("My Drive/data/new.txt", b"x"))
        server.heal()
        self.of_writing(server)
        limited = Refusal(403, "User Rate Limit Exceeded", "userRateLimitExceeded")
        server.fail(Fault(kind="media", status=403, body=limited.to_json(), times=None))
        with self.retrying_at_once():
            self.attempt(lambda: self.fs(server).cat_file("My Drive/data/a.txt"))
        server.heal()

    def of_writing(self, server: DriveServer) -> None:
        first, second = (self.fs(server).open("My Drive/data/a.txt", "ab") for _ in range(2))
        first.write(b"b")
        second.write(b"c")
        first.close()
        self.attempt(second.close)
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with self.monkeypatch.context() as patch:
            patch.setattr(tempfile.SpooledTemporaryFile, "write", lambda self, data: raise_(full))
            file = self.fs(server).open("My Drive/data/new.txt", "wb")
            self.attempt(lambda: (file.write(b"x"), file.close()))
            with contextlib.suppress(OSError):  # the same once more
                file.close()
        server.fail(Fault(kind="copy", lose=True))
        self.attempt(lambda: self.fs(server).cp_file("My Drive/data/report", "My Drive/data/copied"))

    def of_the_cache(self, server: DriveServer) -> None:
        fs = self.fs(server, cache_size=0)
        fs.cat_file("My Drive/data/a.txt")
        fs.stats()
        engines._close_all()


def test_the_messages_of_troubleshooting_are_real(tmp_path, monkeypatch, caplog):
    first_cells = re.findall(
        r"^\| (.*?) \| ", (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    shown = [text for cell in first_cells for text in re.findall(r"`(\w+: .+?|\.\.\..+?|cannot .+?)`", cell)]
    assert len(shown) > 10
    mishaps = Mishaps(tmp_path, monkeypatch)
    mishaps.all()
    said = mishaps.said + [f"{record.levelname}: {record.getMessage()}" for record in caplog.records]
    for text in shown + MESSAGES:
        pattern = text if text.endswith("...") else f"{text}..."
        pattern = pattern if re.match(r"\w+: ", pattern) else f"...{pattern}"
        found = [each for each in said if OUTPUT_CHECKER.check_output(pattern + "\n", each + "\n", OUTPUT)]
        assert found, f"nothing says {text!r}; said:\n" + "\n".join(said)
