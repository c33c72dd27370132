"""What all tests of the command line share."""

import functools

import pytest
import typer.main
import typer.testing

import cachedfs.cli.app  # noqa: F401 - before single commands: their order is that of their imports


@pytest.fixture(autouse=True, scope="module")
def commands_read_once():
    """Keep what typer reads from the signatures of all commands: it would read them at each run, for 60 ms."""
    get_command = functools.cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", get_command)
        patch.setattr(typer.testing, "_get_command", get_command)
        yield
