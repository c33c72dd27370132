"""The help of all commands, and the page about them."""

import doctest
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap

import fsspec
import pytest
import typer.main

from cachedfs import log_events
from cachedfs.cli.app import app
from cachedfs.sim import GCSServer
from tests.cli.helpers import in_terminal, run
from tests.support import ROOT, noise

COMMANDS = list(typer.main.get_command(app).commands)
PAGE = (ROOT / "docs/cli.md").read_text(encoding="utf-8")


def test_the_help_has_one_line_for_each_command_in_the_order_of_the_page(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    below = run("--help").stdout.partition("Commands")[2]
    on_page = re.findall(r"\[`(\w+)`\]\(#", "".join(re.findall(r"^\|.*?\|", PAGE, re.MULTILINE)))
    assert re.findall(r"^│ (\w*) ", below, re.MULTILINE) == on_page == COMMANDS
    assert run("--version").stdout == "cachedfs 0.1.0\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = run(command, "--help").stdout
    assert "Exit status 0: success, 1: failure, 2: wrong usage, 130: Ctrl-C" in text
    assert re.search(rf"^ cachedfs {command}\b", text.partition("Examples")[2], re.MULTILINE)
    assert "…" not in text
    for line in text.partition("Examples")[2].splitlines():
        assert not line.strip() or line.startswith(" cachedfs "), f"wrapped: {line}"


def test_help_imports_no_filesystem():
    code = """
        import sys
        from cachedfs import cli
        try:
            cli.main(["ls", "--help"])
        except SystemExit:
            pass
        print(sorted({"fsspec", "aiohttp", "sqlite3", "asyncio"} & set(sys.modules)))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.endswith("\n[]\n")


def sessions(page):
    """Yield (is about, command, output) of what a page shows, in order; what runs until Ctrl-C is tested above."""
    content = (ROOT / page).read_text(encoding="utf-8")
    for note, text in re.findall(r"^```text ?(\w*)\n(.*?)^```$", content, re.MULTILINE | re.DOTALL):
        for command, shown in re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
            if not command.startswith("cachedfs sim"):
                yield note == "about", command, shown


def shell(command):
    """Do what a shell does with a line of the page: variables, one command, then `> file` or `| program`."""
    line, _, program = command.partition(" | ")
    line, _, file = line.partition(" > ")
    words = shlex.split(line)
    if "cachedfs" not in words:
        return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout
    environ = dict(word.split("=", 1) for word in words[: words.index("cachedfs")])
    arguments = words[words.index("cachedfs") + 1 :]
    log_events(environ.get("CACHEDFS_EVENTS"))  # read when a process begins
    if not program and not file:
        return in_terminal(*arguments, **environ)
    with open(file or "piped", "w") as stdout:
        in_terminal(*arguments, stdout=stdout, **environ)
    if file:
        return ""
    with open("piped") as piped:
        return subprocess.run(shlex.split(program), stdin=piped, capture_output=True, text=True).stdout


@pytest.mark.parametrize("page", ["docs/cli.md", "docs/recipes.md"])
def test_the_page_shows_what_is_printed(page, tmp_path, monkeypatch):
    # Of a name that is always as long: lines are broken where they are.
    with tempfile.TemporaryDirectory() as home, GCSServer(profile="off") as server:
        server.make_bucket("my-bucket")
        lines = b"".join(b'{"text": "line %d"}\n' % i for i in range(1000))
        server.put("my-bucket", "train.jsonl", lines)
        server.put("my-bucket", "big.bin", noise(32 << 20))
        for i in range(100):
            server.put("my-bucket", f"texts/{i:03}.txt", b"text %d" % i)
        monkeypatch.chdir(home)
        monkeypatch.setenv("HOME", home)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        gs = {"token": "anon", "endpoint_url": server.endpoint_url}
        monkeypatch.setitem(fsspec.config.conf, "gs", gs)
        monkeypatch.setitem(fsspec.config.conf, "cachedfs", {"keep_free": 0})
        compare = doctest.OutputChecker().check_output
        for is_about, command, shown in sessions(page):
            printed = shell(command)
            same = compare(*(comparable(text, is_about) for text in (shown, printed)), doctest.ELLIPSIS)
            assert same, f"{command} prints\n{printed}\nand not\n{shown}"
        monkeypatch.chdir(tmp_path)


def comparable(text, is_about):
    """Return what of a text does not depend on the machine and on how the test sets it up."""
    text = re.sub(r"\w+ +options.*?(?=\w+ +cache directory)", "", text, flags=re.DOTALL)
    text = re.sub(r"\w+ +write speed.*?(?=\w+ +index)", "", text, flags=re.DOTALL)
    text = re.sub(r"\w+ +limit .*?(?=\w+ +to set)", "", text, flags=re.DOTALL)
    # What fills a link is seen where several requests get more than one does, and not on a busy machine.
    text = re.sub(
        r"(The\s+link\s+gives.*?fill\s+it\.|\d+\s+requests\s+at\s+a\s+time\s+would.*?of\s+10\.)",
        "",
        text,
        flags=re.DOTALL,
    )
    if is_about:
        text = re.sub(r"\d[\d.,]*( [kMG]?B\b| bytes)?", "#", text)
    return " ".join(text.split()) + "\n"
