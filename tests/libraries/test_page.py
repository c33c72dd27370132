"""docs/works-with.md: each line of code in its tables is in a test here, and each test is in a table."""

import ast
import pathlib
import re

import pytest

from tests.support import ROOT

HERE = pathlib.Path(__file__).parent


def rows(heading):
    """Return the rows of the table below a heading, as lists of cells."""
    section = (
        (ROOT / "docs/works-with.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    )
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


WORKS, REFUSED = rows("What works"), rows("What does not")


def same(node):
    """Return code in a normal form: formatted, with the constants of tests renamed to those a user writes."""
    return ast.unparse(node).lower()


def code_of(row):
    return [same(ast.parse(code).body[0]) for code in re.findall(r"`(.+?)`", row[1])]


def all_tests():
    """Return the test functions of this package by file and name."""
    return {
        f"{path.name}::{each.name}": each
        for path in sorted(HERE.glob("test_*.py"))
        if path != pathlib.Path(__file__)
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")
    }


def is_raises(node):
    return isinstance(node, ast.With) and any("pytest.raises(" in ast.unparse(item) for item in node.items)


def lines_of(node):
    """Return the expressions and assignments in a test: those that succeed, and those that must raise."""
    through, raising = set(), set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr | ast.Assign | ast.Expr):
            through.add(same(child))
        inner, refused = lines_of(child)
        through, raising = through | inner, raising | refused
    return (set(), through | raising) if is_raises(node) else (through, raising)


TESTS = all_tests()
LINES = {name: lines_of(test) for name, test in TESTS.items()}


@pytest.mark.parametrize(("table", "which"), [(WORKS, 0), (REFUSED, 1)], ids=["works", "refused"])
def test_each_row_is_in_a_test(table, which):
    assert len(table) > 5
    there = set().union(*(lines[which] for lines in LINES.values()))
    for row in table:
        assert code_of(row), f"no code: {row}"
        for code in code_of(row):
            assert code in there, f"no test with {code}"


def test_each_test_is_in_a_row():
    works, refused = ({code for row in table for code in code_of(row)} for table in (WORKS, REFUSED))
    for name, (through, raising) in LINES.items():
        assert through & works or raising & refused, f"{name} proves no row"


def test_the_image_folder_on_the_page_is_the_one_tested():
    page, tried = (ROOT / "docs/works-with.md").read_text(), (HERE / "folders.py").read_text()
    for each in ast.parse(tried).body:
        if isinstance(each, ast.ClassDef | ast.FunctionDef):
            code = ast.get_source_segment(tried, each).replace(f'    """{ast.get_docstring(each)}"""\n\n', "")
            assert f"\n{code}\n" in page
