"""The API reference: docs/api*.md name every public name, and each has a docstring."""

import contextlib
import importlib
import importlib.util
import inspect
import re
from typing import Any

import pytest

from tests.support import ROOT

REFERENCE = {"api": "cachedfs", "api-datasets": "cachedfs.datasets", "api-sim": "cachedfs.sim"}


def named_by(page: str) -> list[str]:
    """Return the full names whose docstrings a page shows."""
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    return re.findall(r"^::: (\S+)$", text, re.MULTILINE)


def resolved(name: str) -> Any:
    """Return the object of a full name, which may be a module."""
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.import_module(name)
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def needs_torch(page: str) -> Any:
    without = importlib.util.find_spec("torch") is None
    skip = pytest.mark.skipif(page == "api-datasets" and without, reason="needs torch")
    return pytest.param(page, marks=skip)


@pytest.mark.parametrize("page", [needs_torch(page) for page in REFERENCE])
def test_every_public_name_is_in_the_reference(page):
    module = importlib.import_module(REFERENCE[page])
    shown = [resolved(name) for name in named_by(page)]
    shown += [value for each in shown if inspect.ismodule(each) for value in vars(each).values()]
    for name in module.__all__:
        is_there = any(each is getattr(module, name) for each in shown)
        assert is_there or name == "__version__", f"docs/{page}.md lacks {REFERENCE[page]}.{name}"


@pytest.mark.parametrize("page", [needs_torch(page) for page in REFERENCE])
def test_everything_in_the_reference_has_a_docstring(page):
    for name in named_by(page):
        thing, inner = resolved(name), {}
        if inspect.isclass(thing):
            inner = {key: value for key, value in vars(thing).items() if not key.startswith("_")}
        elif inspect.ismodule(thing):
            inner = {key: getattr(thing, key) for key in thing.__all__}
        for key, value in {"": thing, **inner}.items():
            if callable(value) or isinstance(value, property | classmethod | staticmethod):
                assert (value.__doc__ or "").strip().endswith((".", ":", "`")), f"{name}.{key}"
