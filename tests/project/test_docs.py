"""Documentation: the code of the pages runs and prints what they show; links, names, commands and messages exist.

The ```python blocks of a page run in one namespace, with an empty home directory, against a simulated GCS and a simulated
Google Drive. A ```text block right after one is its output: "..." stands for anything; after `text about` a number may be
up to twice or half of what is shown, after `text measured` up to ten times or a tenth (zeros are zeros, times are
anything). `python needs torch` runs where torch is installed, `python not run: <reason>` never does.
"""

import ast
import asyncio
import code
import contextlib
import dataclasses
import doctest
import errno
import functools
import gc
import importlib.util
import inspect
import io
import json
import logging
import os
import pickle
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import fsspec
import gcsfs.core
import pytest
from fsspec.registry import _registry
from pydrive2.auth import GoogleAuth
from typer.testing import CliRunner

from cachedfs.cli.app import app
from cachedfs.cli.output import message_of
from cachedfs.config import Config
from cachedfs.core import engines
from cachedfs.filesystem import CachedFileSystem
from cachedfs.mount.fuse_session import FuseSession, fusermount
from cachedfs.mount.local_files import LocalFile
from cachedfs.mount.mounting import serve
from cachedfs.mount.temporary_files import temporary_folder
from cachedfs.origins.drive import accounts, quota
from cachedfs.origins.drive.credentials import SIGN_IN
from cachedfs.origins.drive.options import DriveOptions
from cachedfs.origins.drive.rates import RateLimit
from cachedfs.origins.upload import UploadContent
from cachedfs.sim import PROFILES, DriveServer, Fault, GCSServer, SimServer
from cachedfs.sim.messages import Refusal
from tests.origins.drive.certificates import private_key
from tests.support import ROOT, noise, until

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "skills/cachedfs/SKILL.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
RUN = {  # the number of blocks that run in each page, with all packages installed
    "README.md": 2,
    "skills/cachedfs/SKILL.md": 1,
    "docs/api-sim.md": 1,
    "docs/configuration.md": 5,
    "docs/guide-datasets.md": 5,
    "docs/guide-drive.md": 5,
    "docs/guide-gcs.md": 9,
    "docs/guide-packing.md": 2,
    "docs/guide-s3.md": 1,
    "docs/guide-serve.md": 1,
    "docs/guide-sharing.md": 1,
    "docs/guide-training.md": 4,
    "docs/guide-zarr.md": 7,
    "docs/index.md": 1,
    "docs/start.md": 2,
    "docs/works-with.md": 3,
    "docs/watching.md": 3,
}
LATITUDE = {"about": 2, "measured": 10}  # the allowed factor between printed and shown numbers
TIME = re.compile(r"(m?s|times)\b")  # after a number: times depend on how busy the machine is
OUTPUT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
OUTPUT_CHECKER = doctest.OutputChecker()


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block: the line of its opening fence, its language, the rest of the fence, its text."""

    line: int
    language: str
    note: str
    text: str
    follows: bool  # only blank lines since the previous block

    @property
    def lacks(self) -> bool:
        """Return whether a block needs a package that is not installed."""
        if not self.note.startswith("needs "):
            return False
        try:
            return importlib.util.find_spec(self.note[6:]) is None
        except ModuleNotFoundError:  # the package that contains it
            return True

    @property
    def runs(self) -> bool:
        """Return whether a block runs here and now."""
        return self.language == "python" and not self.note.startswith("not run:") and not self.lacks


def blocks_of(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page in order."""
    lines = text.splitlines()
    line, end = 0, None
    while line < len(lines):
        if fence := re.fullmatch(r"```(\w*) ?(.*)", lines[line]):
            stop = next(i for i in range(line + 1, len(lines)) if lines[i] == "```")
            follows = end is not None and not any(lines[end:line])
            yield Block(line + 1, fence[1], fence[2], "\n".join(lines[line + 1 : stop]), follows)
            line = end = stop + 1
        else:
            line += 1


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(page: str) -> str:
    """Return the page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", read(page), flags=re.MULTILINE | re.DOTALL)


# Data that the pages assume.


LINES = b"".join(b'{"text": "line %d"}\n' % i for i in range(1000))
BIG = noise(32 << 20)


@contextlib.contextmanager
def cloud_with_data() -> Iterator[GCSServer]:
    """A simulated GCS with the objects that the pages name."""
    with GCSServer(profile="off") as server:
        for bucket in ("my-bucket", "private-bucket"):
            server.make_bucket(bucket)
        server.put("my-bucket", "train.jsonl", LINES)
        server.put("my-bucket", "big.bin", BIG)
        for i in range(100):
            server.put("my-bucket", f"texts/{i:03}.txt", b"text %d" % i)
        server.forbid("private-bucket")
        yield server


@contextlib.contextmanager
def drive_with_data() -> Iterator[DriveServer]:
    """A simulated Google Drive with the files that the pages name."""
    with DriveServer(profile="off") as server:
        server.put("data/train.jsonl", LINES)
        server.put("data/big.bin", BIG)
        for i in range(100):
            server.put(f"data/texts/{i:03}.txt", b"text %d" % i)
        yield server


def s3_with_data(page: str) -> contextlib.AbstractContextManager[Any]:
    """A simulated S3 with the objects that a page names; None if it names none, or where there is no moto."""
    is_here = importlib.util.find_spec("moto") is not None and importlib.util.find_spec("s3fs") is not None
    if not is_here or not any("s3://" in block.text for block in blocks_of(read(page)) if block.runs):
        return contextlib.nullcontext()
    from tests.s3_server import S3Server

    server = S3Server().start()
    server.make_bucket("my-bucket")
    server.put("my-bucket", "train.jsonl", LINES)
    for i in range(100):
        server.put("my-bucket", f"texts/{i:03}.txt", b"text %d" % i)
    return contextlib.closing(server)


def expectations(page: str) -> list[tuple[Block, Block | None]]:
    """Return the blocks that run, each with the block of its output."""
    blocks = list(blocks_of(read(page)))
    pairs = zip(blocks, [*blocks[1:], None], strict=True)
    return [
        (block, then if then and then.follows and then.language == "text" else None)
        for block, then in pairs
        if block.runs
    ]


def is_shown(printed: str, by: Block | None) -> bool:
    """Return whether a block prints what the page shows."""
    shown = by.text + "\n" if by else ""
    if by is None or by.note not in LATITUDE:
        return OUTPUT_CHECKER.check_output(shown, printed, OUTPUT)
    (ours, our_words), (theirs, their_words) = numbers_of(printed), numbers_of(shown)
    times = LATITUDE[by.note]
    return our_words == their_words and all(
        TIME.match(unit) or (a <= times * b and b <= times * a)
        for a, b, unit in zip(ours, theirs, our_words[1:], strict=True)
    )


def numbers_of(text: str) -> tuple[list[int], list[str]]:
    """Return the whole numbers in a text, and the text between them; columns may be wider for a larger number."""
    parts = re.split(r"(\d+(?:,\d{3})*)", text)
    return [int(part.replace(",", "")) for part in parts[1::2]], [
        " ".join(part.split()) for part in parts[::2]
    ]


@pytest.fixture
def new_home(request, tmp_path, monkeypatch, default_patience):
    """An empty home directory and the configuration of a new user, in which a page runs like a new process."""
    monkeypatch.chdir(tmp_path)
    # Pages show the number of requests; simulated latency would only slow the test.
    for profile in ("drive-typical", "table"):
        monkeypatch.setitem(PROFILES, profile, PROFILES["off"])
    # If a page sets a variable before gcsfs is imported, gcsfs registers this class.
    monkeypatch.setitem(_registry, "gs", gcsfs.core.GCSFileSystem)
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("FSSPEC_", "GCSFS_", "XDG_"))}
    page = request.node.callspec.params["page"] if hasattr(request.node, "callspec") else "docs/start.md"
    with cloud_with_data() as server, drive_with_data() as drive, s3_with_data(page) as s3:
        conf = {
            "gs": {"token": "anon", "endpoint_url": server.endpoint_url},
            "drive": {"token": "anon", "endpoint_url": drive.endpoint_url},
            "s3": {"key": "an-id", "secret": "a-secret", "endpoint_url": s3 and s3.endpoint_url},
            "cachedfs": {"keep_free": 0},  # the disk under the tests may be nearly full
        }
        with (
            mock.patch.dict(os.environ, {**variables, "HOME": str(tmp_path)}, clear=True),
            mock.patch.dict(fsspec.config.conf, conf, clear=True),
        ):
            yield
            engines._close_all()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", [page for page in PAGES if page in RUN])
def test_the_code_of_a_page_runs_and_prints_what_it_shows(page, new_home, monkeypatch):
    expected = expectations(page)
    missing = [block for block in blocks_of(read(page)) if block.lacks]
    assert len(expected) + len(missing) == RUN[page]
    monkeypatch.setattr(logging.root, "handlers", [])  # those of pytest exist by now
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # a process pool finds its functions there
    try:
        for block, shown in expected:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                code = compile("\n" * block.line + block.text, page, "exec", dont_inherit=True)
                exec(code, vars(module))  # a traceback has the line numbers of the page
            assert is_shown(out.getvalue(), shown), (
                f"{page}, line {block.line}, prints\n{out.getvalue()}\nand not\n{shown and shown.text}"
            )
            # A user takes a moment between two blocks, in which requests finish and blocks are stored.
            for engine in list(engines._engines.values()):
                until(lambda engine=engine: not engine.active_requests)
                engine.drain(120)
    finally:
        servers = [value for value in vars(module).values() if isinstance(value, SimServer)]
        vars(module).clear()
        gc.collect()  # ends the threads of loaders
        for server in servers:
            server.close()


def test_the_first_program_pasted_into_python_prints_only_its_results(new_home, capsys):
    console = code.InteractiveConsole({})
    try:
        for block, shown in expectations("docs/start.md"):
            for line in [*block.text.splitlines(), ""]:
                console.push(line)
            assert is_shown(capsys.readouterr().out, shown)
    finally:
        for value in console.locals.values():
            if isinstance(value, SimServer):
                value.close()


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs_or_says_why_not(page):
    for block in blocks_of(read(page)):
        where = f"{page}, line {block.line}"
        assert block.language in ("python", "text", "sh", "bash", "json", "yaml", "diff", ""), where
        if block.language == "python":
            assert re.fullmatch(r"|needs [\w.]+|not run: \S.{5,}", block.note), where
            assert page in RUN or block.note.startswith("not run:"), f"{where}: give the page a number in RUN"
            compile(block.text, where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        elif block.language == "text":
            assert block.note in ("", *LATITUDE), where
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            for document in importlib.import_module("yaml").safe_load_all(block.text):
                assert {"apiVersion", "kind", "metadata", "spec"} <= document.keys(), where
        elif block.language == "bash":
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)


# Names and links.


def slugs(page: str) -> set[str]:
    """Return the anchors of a page: its headings, and the names in its part of the reference."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    names = re.findall(r"^::: (\S+)$", prose(page), flags=re.MULTILINE)
    return {*names} | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_links_have_a_target(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+:", target):  # external: only the form of the address is checked
            assert re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/\S*)?", target), f"{page}: {target}"
            continue
        name, _, anchor = target.partition("#")
        there = (ROOT / page).parent / name if name else ROOT / page
        assert there.exists(), f"{page}: {target}"
        if anchor and not anchor.startswith("only-"):  # of a picture, for one color scheme
            assert anchor in slugs(str(there.resolve().relative_to(ROOT))), f"{page}: {target}"


@pytest.mark.parametrize("page", ["README.md", "llms.txt"])
def test_pictures_and_pages_named_outside_of_the_docs_exist(page):
    named = re.findall(r'(?:src|srcset)="([^"]+)"', read(page)) + re.findall(r"\]\(([^)#]+)\)", read(page))
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_page_has_one_place_in_the_site():
    nav = read("mkdocs.yml").partition("\nnav:\n")[2].partition("\n\n")[0]
    listed = re.findall(r"^ +- .+: (\S+\.md)$", nav, re.MULTILINE)
    assert sorted(f"docs/{name}" for name in listed) == [page for page in PAGES if page.startswith("docs/")]


@pytest.mark.parametrize("page", PAGES)
def test_every_page_is_linked_from_the_first_one(page):
    if page in ("CONTRIBUTING.md", "SECURITY.md", "skills/cachedfs/SKILL.md"):  # not pages of the site
        assert f"({page})" in read("README.md")
    elif page not in ("README.md", "docs/index.md"):
        assert f"({page.removeprefix('docs/')})" in read("docs/index.md")


@pytest.mark.parametrize("page", PAGES)
def test_names_used_in_the_pages_exist(page):
    for name in re.findall(r"`fs\.(\w+)", prose(page)):
        assert hasattr(CachedFileSystem, name), f"{page}: fs.{name}"


def test_the_table_of_options_matches_the_config():
    section = read("docs/configuration.md").partition("\n## Options\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| ", section, re.MULTILINE)
    assert [name for name, _ in rows] == [*Config._fields]
    for name, default in rows:
        if name == "cache_dir":
            assert Config().cache_dir is None  # the table has its meaning in words
        else:
            said = Config.resolve({name: default.strip('`"').replace("0 B", "0")})
            assert getattr(said, name) == getattr(Config(), name), f"{name}: {default}"


def test_the_table_of_drive_options_matches_drive():
    section = read("docs/configuration.md").partition("\n## Google Drive\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \| ", section, re.MULTILINE))
    own = {field.name: field.default for field in dataclasses.fields(DriveOptions) if field.name != "sign_in"}
    assert list(rows) == [*SIGN_IN, *own]
    assert {rows[name] for name in SIGN_IN} == {"none"}
    assert {name: ast.literal_eval(rows[name].strip("`")) for name in own} == own


def test_variables_named_in_the_pages_are_used():
    import gcsfs

    folder = Path(gcsfs.__file__).parent
    sources = "".join(path.read_text() for path in folder.glob("*.py"))
    of_gcsfs = inspect.signature(importlib.import_module("gcsfs.core").GCSFileSystem.__init__).parameters
    ours = [*Config._fields]
    of_drive = [*SIGN_IN, *(field.name for field in dataclasses.fields(DriveOptions))]
    for page in PAGES:
        for section, name in re.findall(r"FSSPEC_(CACHEDFS|CGS|GS|DRIVE)(?:_([A-Z_]*[A-Z]))?", read(page)):
            known = {"GS": of_gcsfs, "DRIVE": of_drive}.get(section, ours)
            assert not name or name.lower() in known, f"{page}: FSSPEC_{section}_{name}"
        for name in re.findall(r"\b(?:GCSFS|STORAGE|NO_GCE)_[A-Z_]+[A-Z]\b", read(page)):
            assert name in sources, f"{page}: {name}"


# Shell blocks: every command exists, with the given options.


def check_make(arguments: list[str]) -> None:
    for target in arguments:
        assert re.search(rf"^{target}:", read("Makefile"), re.MULTILINE), target


def check_pip(arguments: list[str]) -> None:
    assert arguments[0] == "install"
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    for given in {*arguments[1:]} - {"xarray"}:
        name, _, wanted = given.partition("[")
        assert re.fullmatch(r"\.|cachedfs(-\d+\.\d+\.\d+-py3-none-any\.whl)?", name), given
        assert set(filter(None, wanted.rstrip("]").split(","))) <= extras.keys(), given


def check_python(arguments: list[str]) -> None:
    assert arguments[0] == "-m"
    path = ROOT / arguments[1].replace(".", "/")
    path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.exists():
        assert importlib.util.find_spec(arguments[1]) is not None, arguments[1]
        return
    declared = re.findall(r'add_argument\(\s*"(--[\w-]+)"', path.read_text())
    assert {text for text in arguments if text.startswith("--")} <= {*declared, "--help"}, arguments


def check_cachedfs(arguments: list[str]) -> None:
    help_text = help_of(arguments[0])
    for option in filter(lambda text: text.startswith("-"), arguments):
        assert option in help_text, option


def check_uvx(arguments: list[str]) -> None:
    assert arguments[0] == "--from"
    check_pip(["install", arguments[1].removeprefix("dist/")])
    assert arguments[2] == "cachedfs"
    check_cachedfs(arguments[3:])


@functools.cache
def help_of(command: str) -> str:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [command, "--help"]).stdout


def check_export(arguments: list[str]) -> None:
    for given in arguments:
        assert re.fullmatch(r"[A-Z_]+=.+", given), given


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "make": check_make,
    "pip": check_pip,
    "%pip": check_pip,  # in a notebook
    "python": check_python,
    "export": check_export,
    "cachedfs": check_cachedfs,
    "uvx": check_uvx,
}


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page):
    for block in blocks_of(read(page)):
        if block.language != "sh":
            continue
        for line in block.text.splitlines():
            words = shlex.split(line, comments=True)
            if words:
                assert words[0] in COMMANDS, f"{page}, line {block.line}: {line}"
                COMMANDS[words[0]](words[1:])


# The messages in troubleshooting.md, and others that say themselves what to do and that no other test causes.
MESSAGES = """\
AccessDenied: Google Drive: no saved sign-in (there is no ...default.json): sign in once...
AccessDenied: Google Drive: no account 'work' is saved (...): sign in with `cachedfs login drive --account work`
CachedFSError: ...: Drive shows the folder '...', and does not find its contents...
CachedFSError: ...: data being written is stored in ... until it is sent, and that failed...TMPDIR...
ObjectChanged: ...: the file changed while it was being appended to...open it again
OriginUnavailable: ...: copying to it failed after 1 try...What it makes may be there all the same...
OriginUnavailable: ...: not all of it, or of its listing, is in the cache, and offline=True forbids asking for it
TypeError: drive option google_auth=: a live GoogleAuth cannot travel to another process...
ValueError: drive option ...: this is an OAuth client (client_secrets.json), nobody's sign-in...
ValueError: drive://data: a Drive path starts with one of 'My Drive', 'shared:NAME'...
ValueError: ...: mode 'r+b' is none of rb, wb, xb and ab
WARNING: ...: no item has this name, ..., but one that looks the same...
WARNING: ...; serving the versions known to the cache (stale_if_error=False forbids it)
WARNING: Google Drive makes some 2 to 3 new files a second for a user, and many wait for their turn...
cachedfs: mounting needs Linux...
""".splitlines()


def rate_limited(server: DriveServer) -> None:
    """Let Drive refuse reads of bytes as it does when there are too many."""
    message = "User Rate Limit Exceeded"
    error = {"message": message, "reason": "userRateLimitExceeded", "domain": "usageLimits"}
    body = json.dumps({"error": {"code": 403, "message": message, "errors": [error]}})
    server.fail(Fault(kind="media", status=403, body=body, times=None))


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
            self.said.append(f"{type(error).__name__}: {error}")

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
            self.attempt(lambda: old.cat_file("My Drive/data/big.bin"))
        self.attempt(lambda: fsspec.filesystem("cdrive", offline=True).cat_file("My Drive/data/a.txt"))

    def of_mounts(self) -> None:
        def attempt(what: Callable[[], object]) -> None:
            try:
                what()
            except Exception as error:
                self.said.append(f"cachedfs: {message_of(error)}")

        program = self.folder / "programs" / "fusermount3"
        program.parent.mkdir()
        with self.monkeypatch.context() as patch:
            patch.setattr("sys.platform", "darwin")
            attempt(lambda: serve(mock.Mock(), "", ""))
        with self.monkeypatch.context() as patch:
            patch.setenv("PATH", str(program.parent))
            patch.setenv("XDG_STATE_HOME", str(self.folder))
            attempt(fusermount)
            program.write_text("#!/bin/sh\necho mount failed: Operation not permitted >&2\nexit 1\n")
            program.chmod(0o700)
            attempt(lambda: FuseSession(mock.Mock(), str(self.folder), []))
            attempt(lambda: temporary_folder(str(self.folder / "missing"), None))
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
            {"token": "key.json"},
            {"token": "anon", "client_id": "123"},
        ):
            self.attempt(lambda sign_in=sign_in: self.fs(server, drive=sign_in).ls("My Drive"))
        for send in (lambda fs: fs.to_json(), pickle.dumps):
            self.attempt(lambda send=send: send(self.fs(server, drive={"google_auth": gauth})))
        self.of_accounts(server)
        server.require_token("ya29.new")
        self.attempt(lambda: self.fs(server, token="ya29.old").ls("My Drive"))
        server.require_no_token()
        for reason in ("insufficientPermissions", "dailyLimitExceededUnreg"):
            server.fail(Fault(status=403, reason=reason))
            self.attempt(lambda: self.fs(server).cat_file("My Drive/data/a.txt"))
        lacking = Refusal(403, "Request had insufficient authentication scopes.", "insufficientPermissions")
        server.fail(Fault(status=403, body=lacking.to_json()))
        self.attempt(lambda: self.fs(server).cat_file("My Drive/data/a.txt"))
        said = {"error": "invalid_grant", "error_description": "Token must be a short-lived token"}
        server.fail(Fault(kind="token", status=400, body=json.dumps(said), times=None))
        key = {
            "type": "service_account",
            "client_email": "robot@example.com",
            "private_key": private_key()[1],
        }
        key["token_uri"] = f"{server.endpoint_url}/token"
        self.attempt(lambda: self.fs(server, token=key).ls("My Drive"))
        server.heal()
        with self.monkeypatch.context() as patch:
            patch.setenv("https_proxy", "socks5://127.0.0.1:9")
            google = {"token": "anon", "endpoint_url": "https://www.googleapis.com"}
            self.attempt(lambda: self.fs(server, drive=google).ls("My Drive"))
        server.put("data/a.txt", b"a")

    def of_accounts(self, server: DriveServer) -> None:
        user = {"type": "authorized_user", "client_id": "c", "client_secret": "s", "refresh_token": "r"}
        for name in ("default", "me", "you"):
            accounts.save(name, {**user, "token_uri": f"{server.endpoint_url}/token", "account": name})
        accounts.remove("default")
        server.refuse_tokens()
        for sign_in in ({"account": "me"}, {"account": "work"}, {}):
            self.attempt(lambda sign_in=sign_in: self.fs(server, drive=sign_in).ls("My Drive"))
        server.refuse_tokens(False)
        for name in accounts.names():
            accounts.remove(name)

    def of_reading(self, server: DriveServer) -> None:
        server.put("data/twice.txt", b"1")
        server.put("data/twice.txt", b"2", new=True)
        server.document("data/report", "words")
        hidden = {"canDownload": True, "canReadRevisions": False}
        server.put("data/big.bin", noise(12 << 20), capabilities=hidden)
        server.put("data/locked.bin", b"x", capabilities={"canDownload": False})
        server.edit(server.put("data/virus.bin", b"x"), abusive=True)
        for name in ("none.txt", "report", "locked.bin", "virus.bin", "twice.txt"):
            self.attempt(lambda name=name: self.fs(server).cat_file(f"My Drive/data/{name}"))
        server.limit(server.folder("limited"))
        self.attempt(lambda: self.fs(server).ls("My Drive/limited"))
        server.document("data/long", "x" * (10 << 20) + "x")
        self.attempt(
            lambda: self.fs(server, drive={"token": "anon", "export": "pdf"}).cat_file("My Drive/data/long")
        )
        server.put("data/o\u0308", b"x")
        self.attempt(lambda: self.fs(server).cat_file("My Drive/data/\u00f6"))
        self.attempt(lambda: self.fs(server).ls("data"))
        self.attempt(lambda: self.fs(server).open("My Drive/data"))
        server.fail(Fault(kind="list", key=server.folder("data"), status=404))
        self.attempt(lambda: self.fs(server).ls("My Drive/data"))
        self.attempt(lambda: self.fs(server).open("My Drive/data/a.txt", "r+b"))
        server.fail(Fault(kind="media", status=403, reason="downloadQuotaExceeded"))
        self.attempt(lambda: self.fs(server).cat_file("My Drive/data/a.txt"))
        own_limit = {"token": "anon", "daily_limit": 1e-9, "daily_limit_stops": "everything"}
        self.attempt(lambda: self.fs(server, drive=own_limit).cat_file("My Drive/data/a.txt"))
        server.fail(Fault(kind="upload", status=403, reason="storageQuotaExceeded"))
        self.attempt(lambda: self.fs(server).pipe_file("My Drive/data/new.txt", b"x"))
        server.heal()
        self.of_writing(server)
        with self.fs(server, read_ahead=0).open("My Drive/data/big.bin") as file:
            file.read(1)
            server.put("data/big.bin", noise(12 << 20, seed=1))
            file.seek(11 << 20)
            self.attempt(lambda: file.read(1))
        rate_limited(server)
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
        for what, name, failing in (
            (UploadContent, "md5", lambda self: "0" * 32),
            (tempfile.SpooledTemporaryFile, "write", lambda self, data: raise_(full)),
        ):
            with self.monkeypatch.context() as patch:
                patch.setattr(what, name, failing)
                file = self.fs(server).open("My Drive/data/new.txt", "wb")
                self.attempt(lambda file=file: (file.write(b"x"), file.close()))
                with contextlib.suppress(OSError):  # the same once more, for the write
                    file.close()
        server.fail(Fault(kind="copy", lose=True))
        self.attempt(lambda: self.fs(server).cp_file("My Drive/data/report", "My Drive/data/copied"))
        with self.monkeypatch.context() as patch:
            patch.setattr(quota, "CREATES", (RateLimit(1, 0.01),))
            patch.setattr(quota, "_MANY_WAIT", 2)  # a busy machine begins them one after the other
            fs = self.fs(server, concurrency=15)  # a new filesystem, which uses that rate
            fs.pipe({f"My Drive/data/new/{number}.txt": b"x" for number in range(30)})

    def of_the_cache(self, server: DriveServer) -> None:
        for bad in ({"cache_dir": "/proc/none"}, {"cache_size": 0}):
            fs = self.fs(server, **bad)
            fs.cat_file("My Drive/data/a.txt")
            fs.stats()
            engines._close_all()


def test_the_messages_of_troubleshooting_are_real(tmp_path, monkeypatch, caplog):
    first_cells = re.findall(r"^\| (.*?) \| ", read("docs/troubleshooting.md"), re.MULTILINE)
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


# Promises, changes, numbers.


def test_every_promise_is_numbered_and_names_existing_tests():
    text = read("docs/semantics.md")
    promises, others = text.partition("## What is promised")[2].split("## What is not promised")
    numbers = re.findall(r"^(\d+)\. ", promises, re.MULTILINE)
    assert numbers == [str(i + 1) for i in range(len(numbers))]
    assert re.findall(r"^(\d+)\. ", others, re.MULTILINE), "non-promises are numbered too"
    for promise in re.split(r"^(?=\d+\. )", promises, flags=re.MULTILINE)[1:]:
        assert "::" in promise, f"names no test: {promise}"
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        assert (ROOT / file).exists(), file
        assert re.search(rf"^\s*(async )?def {name}\(", read(file), re.MULTILINE), f"{file}::{name}"


def test_semantics_and_design_state_the_same_rules():
    tenets = re.findall(r"^\d\. (.+)$", read("docs/design.md").partition("## ")[0], re.MULTILINE)
    assert len(tenets) == 4
    start = read("docs/semantics.md").partition("## ")[0]
    assert [tenet for tenet in tenets if tenet not in start] == [tenets[3]]  # the last is only about design


def test_the_changelog_has_the_standard_form():
    headings = re.findall(r"^## (.+)$", read("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    kinds = set(re.findall(r"^### (.+)$", read("CHANGELOG.md"), re.MULTILINE))
    allowed = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Disk format", "Defaults"}
    assert kinds <= allowed


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_measured_numbers_are_in_one_place(page):
    text = read(page)
    assert text.count("<!-- bench:start -->") == text.count("<!-- bench:end -->") == 1
    assert text.index("<!-- bench:start -->") < text.index("<!-- bench:end -->")


def test_the_summary_of_measured_numbers_matches_the_page():
    page = {row[1]: row for row in map(_cells, read("docs/benchmarks.md").splitlines()) if len(row) > 2}
    table = read("README.md").partition("<!-- bench:start -->")[2].partition("\n\n")[0]
    rows = [_cells(line) for line in table.splitlines()[3:]]
    assert len(rows) > 5
    for row in rows:
        known = {cell.partition(" (")[0] for cell in page[row[1]]}
        assert {re.sub(r"^[\w-]+ ", "", cell) for cell in row[2:] if cell} <= known, row[1]


def test_the_chart_is_drawn_from_the_results_of_the_benchmarks():
    chart = runpy.run_path(str(ROOT / "docs/chart.py"))
    times = {
        "gcsfs": (31.47, 30.86),
        "tensorstore": (29.7, 29.4),
        "cachedfs": (1.312, 0.0123),
        "local": (9.0, 9.0),
    }
    results = [
        {
            "row": "samples",
            "contender": name,
            "figures": {"cold": {"median": cold}, "second": {"median": second}},
        }
        for name, (cold, second) in times.items()
    ]
    drawn = chart["drawn"](
        chart["seconds_of"]([*results, {"row": "dense", "contender": "gcsfs", "figures": {}}]), "dark"
    )
    shown = [each.text for each in ElementTree.fromstring(drawn) if re.fullmatch(r"[\d.]+", each.text or "")]
    assert shown == ["1.31", "0.012", "29.7", "29.4", "31.5", "30.9"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_chart_shows_the_numbers_of_the_page(scheme):
    shown = ElementTree.parse(ROOT / f"docs/chart-{scheme}.svg").getroot()
    numbers = [each.text for each in shown if re.fullmatch(r"[\d.]+", each.text or "")]
    pairs = [" / ".join(pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
    row = next(
        line for line in read("docs/benchmarks.md").splitlines() if line.startswith("| 300 random samples")
    )
    assert len(pairs) == 3
    assert all(pair in row for pair in pairs), pairs
    alt = re.search(r'alt="(.+?)"', read("README.md"))[1]
    assert all(pair.replace(" / ", " and ") in alt for pair in pairs), pairs


def _cells(line):
    return [cell.strip() for cell in line.split("|")]
