"""Release metadata: pyproject.toml, the pages and the package agree."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import cachedfs
from tests.support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ABOUT = PROJECT["project"]
PAGE = (ROOT / "docs/releases.md").read_text(encoding="utf-8")
STATED = dict(re.findall(r"^\| ([\w-]+) \| (.+) \|$", PAGE, re.MULTILINE))


def test_the_version_is_stated_once():
    assert "version" not in ABOUT
    assert ABOUT["dynamic"] == ["version"]
    path = PROJECT["tool"]["hatch"]["version"]["path"]
    assert re.findall(r'^__version__ = "(.+?)"', (ROOT / path).read_text(), re.MULTILINE) == [
        cachedfs.__version__
    ]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heading, first = re.search(r"^## \[(.+?)\].*?(\d+\.\d+\.\d+)", changes, re.MULTILINE | re.DOTALL).groups()
    assert heading in ("Unreleased", cachedfs.__version__)
    assert first == cachedfs.__version__, "the newest section names another version"


def test_stated_python_versions_are_those_of_the_package():
    pythons = STATED["Python"].split(", ")
    classified = re.findall(r"Programming Language :: Python :: (3\.\d+)", "\n".join(ABOUT["classifiers"]))
    assert classified == pythons
    allowed = SpecifierSet(ABOUT["requires-python"])
    oldest = int(pythons[0].partition(".")[2])
    assert f"3.{oldest}" in allowed
    assert f"3.{oldest - 1}" not in allowed


@pytest.mark.parametrize(
    "name", ["fsspec", "aiohttp", "zlib-ng", "gcsfs", "s3fs", "PyDrive2", "zarr", "torch"]
)
def test_stated_minimum_versions_are_those_of_the_installer(name):
    extras = [each for some in ABOUT["optional-dependencies"].values() for each in some]
    needed = [Requirement(text) for text in [*ABOUT["dependencies"], *extras]]
    minimums = {str(each.specifier) for each in needed if each.name == name.lower()}
    assert minimums == {f">={STATED[name].removesuffix(' or newer')}"}


def test_the_readme_lists_every_extra_of_a_user():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition("| extra |")[2].partition("\n\n")[0]
    listed = [
        name
        for cell in re.findall(r"^\| (`.+?) \| ", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", cell)
    ]
    assert sorted(listed) == sorted(ABOUT["optional-dependencies"])
