"""docs/works-with.md: each line of code in its tables is in a test here."""

import ast
import pathlib
import re

import pytest

from tests.support import ROOT

HERE = pathlib.Path(__file__).parent


def same(node):
    """Return code in a normal form: formatted, with the constants of tests renamed to those a user writes."""
    return ast.unparse(node).lower()


def rows(heading):
    """Return the code in each row of the table below a heading."""
    page = (ROOT / "docs/works-with.md").read_text()
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ")[1] for line in section.splitlines() if line.startswith("| ")]
    return [[same(ast.parse(code).body[0]) for code in re.findall(r"`(.+?)`", cell)] for cell in cells[1:]]


def code_in(node):
    """Return the expressions and assignments in a part of a test."""
    return {same(each) for each in ast.walk(node) if isinstance(each, ast.expr | ast.Assign | ast.Expr)}


def is_raises(node):
    return isinstance(node, ast.With) and "pytest.raises(" in ast.unparse(node.items)


@pytest.mark.parametrize(("heading", "must_raise"), [("What works", False), ("What does not", True)])
def test_each_row_is_in_a_test(heading, must_raise):
    tests = [ast.parse(path.read_text()) for path in HERE.glob("test_*.py")]
    parts = [each for test in tests for each in ast.walk(test) if is_raises(each)] if must_raise else tests
    tested = set().union(*map(code_in, parts))
    table = rows(heading)
    assert len(table) > 5
    for row in table:
        assert row
        assert set(row) <= tested, row


def test_the_image_folder_on_the_page_is_the_one_tested():
    page, tried = (ROOT / "docs/works-with.md").read_text(), (HERE / "folders.py").read_text()
    for each in ast.parse(tried).body:
        if isinstance(each, ast.ClassDef | ast.FunctionDef):
            code = ast.get_source_segment(tried, each).replace(f'    """{ast.get_docstring(each)}"""\n\n', "")
            assert f"\n{code}\n" in page
