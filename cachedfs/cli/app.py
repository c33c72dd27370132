"""The typer app with all its commands, in the order of the help and of docs/cli.md: most used first."""

from __future__ import annotations

from importlib import import_module

from cachedfs.cli.arguments import app as app

MODULES = "reading get prefetch pack mount serve stats cache transfer share report login doctor sim"
for _name in MODULES.split():
    import_module(f"cachedfs.cli.{_name}")  # adds its commands
