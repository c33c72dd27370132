"""A large cache is as fast as a small one: no read or write scans a table that grows."""

import ast
import re
from pathlib import Path

from cachedfs.cache import disk
from cachedfs.cache.index import block_rows
from tests.cache.helpers import key_of, put

# The tables that grow, and the statements that may read all of one: none of them belongs to a read or a write.
GROWING = {
    "blocks", "metadata", "listings", "children", "removed_listings", "versions", "pins",
    "folders", "quota",
}  # fmt: skip
WHOLE = {
    "SELECT name FROM blocks": "asked for by who removes all",
    "SELECT clock FROM blocks ORDER BY id DESC LIMIT 1": "the last row",
    "SELECT identity, path FROM pins ORDER BY identity, path": "asked for by who lists them",
    "SELECT path, sum(size), count(*), min(nullif(stored_at, 0)), max(nullif(stored_at, 0)) FROM blocks"
    " GROUP BY path ORDER BY path": "asked for by who has it listed or drawn",
    " ".join(block_rows._SUMS.split()): "the audit",
}


def statements(text):
    """Return the SQL statements in a source of Python: what adjacent strings that begin with a verb say together."""
    tree = ast.parse(text)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) not in parts and isinstance(node, ast.Constant) and isinstance(node.value, str):
            sql = " ".join(node.value.split())
            if re.match(r"(SELECT|INSERT|UPDATE|DELETE) ", sql):
                yield sql


def test_no_statement_scans_a_table_that_grows(cache):
    """Every statement of the index is planned by SQLite itself; those that read a whole table are known by name."""
    put(cache, key_of(), 0, size=10)
    ends = [" WHERE name = ?", " WHERE name IN (SELECT value FROM json_each(?))", " WHERE blocks.id = ?"]
    ends += [" WHERE blocks.id > ? AND blocks.id <= ? AND NOT is_pinned ORDER BY blocks.id LIMIT ?"]
    ends += [" WHERE blocks.id > ? ORDER BY blocks.id LIMIT ?"]
    block = " ".join(block_rows._BLOCK.split())
    modules = Path(disk.__file__).parent.rglob("*.py")
    found = [sql for module in modules for sql in statements(module.read_text()) if sql != block]
    scans = {}
    with cache._own.index.writing() as rows:
        for sql in [*found, *(block + end for end in ends)]:
            plan = rows.run(f"EXPLAIN QUERY PLAN {sql}", (0,) * sql.count("?")).fetchall()
            for *_, step in plan:
                if (read := re.match(r"SCAN (\w+)", step)) and read[1] in GROWING:
                    scans.setdefault(sql, step)
    assert len(found) > 40
    assert {sql: step for sql, step in scans.items() if sql not in WHOLE} == {}
