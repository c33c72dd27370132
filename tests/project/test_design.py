"""The map of the packages in docs/design.md is that of the tree."""

import re

import pytest

from tests.support import ROOT

_ROW = re.compile(r"^\| `(\w+)` \| .+? \| (.+) \|$", re.MULTILINE)


def named():
    """Return the modules that the page names, by package; None for a package that it describes elsewhere."""
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    table = page[page.index("| package |") :].partition("\n\n")[0]
    return {package: modules_in(text) for package, text in _ROW.findall(table)}


def modules_in(text):
    found, folder = set(), ""
    for part in re.findall(r"`([\w./]+)`", text):
        if part.endswith("/"):
            folder = part
        elif not part.endswith(".py"):
            found.add(folder + part)
    return found


def in_tree(package):
    folder = ROOT / "cachedfs" / package
    paths = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py"))
    return {path.as_posix() for path in paths if path.name not in ("__init__", "__main__")}


@pytest.mark.parametrize("package", sorted(named()))
def test_the_page_names_the_modules_of_the_tree(package):
    if (ROOT / "cachedfs" / f"{package}.py").exists():
        return
    elsewhere = {path for path in in_tree(package) if path.startswith("drive/") and package == "origins"}
    assert named()[package] == in_tree(package) - elsewhere


def test_the_page_names_every_package():
    packages = {
        path.stem
        for path in (ROOT / "cachedfs").iterdir()
        if (path / "__init__.py").exists() or path.suffix == ".py"
    }
    assert packages - set(named()) == {"__init__", "__main__"}
