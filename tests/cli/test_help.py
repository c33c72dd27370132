"""The help of all commands, and the page about them."""

import re
import subprocess
import sys
import textwrap

import pytest
import typer.main

from cachedfs.cli.app import app
from tests.cli.helpers import run
from tests.support import ROOT

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
