"""Documentation: the code of the pages runs and prints what they show; links, names, commands and messages exist.

The ```python blocks of a page run in one namespace, with an empty home directory, against a simulated GCS and a simulated
Google Drive. A ```text block right after one is its output: "..." stands for anything, and after `text about`
or `text measured`, numbers may differ. `python needs torch` runs where torch is installed, `python not run: <reason>` never.
"""

import ast
import contextlib
import dataclasses
import doctest
import functools
import gc
import importlib.util
import io
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import fsspec
import gcsfs.core
import pytest
from fsspec.registry import _registry
from typer.testing import CliRunner

from cachedfs.cli.app import app
from cachedfs.config import Config
from cachedfs.core import engines
from cachedfs.filesystem import CachedFileSystem
from cachedfs.origins.drive.credentials import SIGN_IN
from cachedfs.origins.drive.options import DriveOptions
from cachedfs.sim import PROFILES, DriveServer, GCSServer, SimServer
from tests.support import ROOT, noise, until

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "skills/cachedfs/SKILL.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
VARYING = ("about", "measured")  # blocks whose numbers depend on the machine
NUMBER = re.compile(r" *\d+(,\d{3})*")  # with the blanks that align it in a column
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


DATA = {f"texts/{i:03}.txt": b"text %d" % i for i in range(100)}
DATA["train.jsonl"] = b"".join(b'{"text": "line %d"}\n' % i for i in range(1000))
DATA["big.bin"] = noise(32 << 20)


@contextlib.contextmanager
def cloud_with_data() -> Iterator[GCSServer]:
    """A simulated GCS with the objects that the pages name."""
    with GCSServer(profile="off") as server:
        for bucket in ("my-bucket", "private-bucket"):
            server.make_bucket(bucket)
        for name, data in DATA.items():
            server.put("my-bucket", name, data)
        server.forbid("private-bucket")
        yield server


@contextlib.contextmanager
def drive_with_data() -> Iterator[DriveServer]:
    """A simulated Google Drive with the files that the pages name."""
    with DriveServer(profile="off") as server:
        for name, data in DATA.items():
            server.put(f"data/{name}", data)
        yield server


def s3_with_data(page: str) -> contextlib.AbstractContextManager[Any]:
    """A simulated S3 with the objects that a page names; None if it names none, or where there is no moto."""
    is_here = importlib.util.find_spec("moto") is not None and importlib.util.find_spec("s3fs") is not None
    if not is_here or not any("s3://" in block.text for block in blocks_of(read(page)) if block.runs):
        return contextlib.nullcontext()
    from tests.s3_server import S3Server

    server = S3Server().start()
    server.make_bucket("my-bucket")
    for name, data in DATA.items():
        server.put("my-bucket", name, data)
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
    if by and by.note in VARYING:
        shown, printed = (NUMBER.sub(" #", text) for text in (shown, printed))
    return OUTPUT_CHECKER.check_output(shown, printed, OUTPUT)


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
    page = request.node.callspec.params["page"]
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
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(block.runs for block in blocks_of(read(page)))]
)
def test_the_code_of_a_page_runs_and_prints_what_it_shows(page, new_home, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])  # those of pytest exist by now
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # a process pool finds its functions there
    try:
        for block, shown in expectations(page):
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


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs_or_says_why_not(page):
    for block in blocks_of(read(page)):
        where = f"{page}, line {block.line}"
        assert block.language in ("python", "text", "sh", "bash", "json", "yaml", "diff", ""), where
        if block.language == "python":
            assert re.fullmatch(r"|needs [\w.]+|not run: \S.{5,}", block.note), where
            compile(block.text, where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        elif block.language == "text":
            assert block.note in ("", *VARYING), where
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


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md", "llms.txt"])
def test_links_and_pictures_have_a_target(page):
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', prose(page))
    for target in [*re.findall(r"\]\(([^)\s]+)\)", prose(page)), *pictures]:
        if re.match(r"\w+:", target):  # external: only the form of the address is checked
            assert re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/\S*)?", target), f"{page}: {target}"
            continue
        name, _, anchor = target.partition("#")
        there = (ROOT / page).parent / name if name else ROOT / page
        assert there.exists(), f"{page}: {target}"
        if anchor and not anchor.startswith("only-"):  # of a picture, for one color scheme
            assert anchor in slugs(str(there.resolve().relative_to(ROOT))), f"{page}: {target}"


def test_every_page_has_one_place_in_the_site():
    nav = read("mkdocs.yml").partition("\nnav:\n")[2].partition("\n\n")[0]
    listed = re.findall(r"^ +- .+: (\S+\.md)$", nav, re.MULTILINE)
    assert sorted(f"docs/{name}" for name in listed) == [page for page in PAGES if page.startswith("docs/")]


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
    drive = {*SIGN_IN, *(field.name for field in dataclasses.fields(DriveOptions))}
    for page in PAGES:
        for section, name in re.findall(r"FSSPEC_(CACHEDFS|CGS|DRIVE)_([A-Z_]*[A-Z])", read(page)):
            known = drive if section == "DRIVE" else Config._fields
            assert name.lower() in known, f"{page}: FSSPEC_{section}_{name}"


@functools.cache
def help_of(command: str) -> str:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [command, "--help"]).stdout


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_the_options_of_the_pages(page):
    for block in blocks_of(read(page)):
        for line in block.text.splitlines() if block.language == "sh" else ():
            program, *words = shlex.split(line, comments=True) or [""]
            if program == "make":
                assert all(re.search(rf"^{word}:", read("Makefile"), re.MULTILINE) for word in words), line
            elif program == "cachedfs":
                options = [word for word in words if word.startswith("-")]
                assert [option for option in options if option not in help_of(words[0])] == [], line


# Promises and changes.


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
