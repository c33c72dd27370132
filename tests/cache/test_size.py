"""A large cache: no operation looks at more rows than in a small one."""

import ast
import re
import time
from pathlib import Path

from cachedfs.cache import disk
from cachedfs.cache.block_cache import BlockCache
from cachedfs.cache.index import block_rows
from cachedfs.cache.index.metadata_records import MetadataRecord
from cachedfs.common.types import CacheBounds, ObjectInfo, ObjectKey
from tests.cache.helpers import put

BLOCK = 1 << 20
FILE = 150  # bytes of each on the disk: as many as a block of 10 bytes has with its trailer
SMALL, LARGE = 4000, 40_000  # blocks; a fifth as many objects
IDENTITY = "gs://test"


def key_of(number):
    return ObjectKey(IDENTITY, f"bucket/folder-{number // 1000}/object-{number:07d}", f"{number:016d}", BLOCK)


def build(directory, n_blocks):
    """Have the index know `n_blocks` blocks of a fifth as many objects, made by its own code; their files are not there."""
    cache = BlockCache([str(directory)], explicit=True)
    put(cache, key_of(0), 0, size=10)
    with cache._own.index.writing() as rows:
        for number in range(n_blocks // 5):
            for index in range(5):
                rows.add_block(key_of(number), index, size=FILE, clock=number & 0xFFFF, since=0.0, writer=0)
    learn(cache, range(n_blocks // 5))
    cache.close()


def learn(cache, numbers):
    now = time.time()
    infos = [ObjectInfo(key_of(i).path, size=5 * BLOCK, fingerprint=f"{i:016d}") for i in numbers]
    cache.metadata.keep_records([MetadataRecord(IDENTITY, info.path, info, now, 1) for info in infos])


def bounds_of(cache):
    """Return the bounds under which the cache is full now."""
    bounds = CacheBounds(size=1 << 30, keep_free=0)
    for _ in range(4):  # the index and its log count as well, and the log's limit follows the bound
        bounds = bounds._replace(size=bounds.size - cache.allowance(bounds) + cache.usage()[1])
    return bounds


class Work:
    """Counts what SQLite does for one cache: instructions of its machine, which follow the rows that it looks at."""

    def __init__(self, cache):
        self._cache = cache
        cache._own._look_at = float("inf")
        self._n = 0
        for slot in self._slots():
            slot.sqlite.set_progress_handler(self._count, 10)

    def _slots(self):
        database = self._cache._own.index.database
        with database.reading(), database.writing():
            return [database._reader, database._writer]

    def _count(self):
        self._n += 1
        return 0

    def of(self, act):
        before = self._n
        act()
        return 10 * (self._n - before)


def further(cache, path):
    with cache._own.index.reading() as rows:
        assert len(rows.blocks_of(IDENTITY, path, after=1000, limit=1000)) == 1000


def operations(cache, n_objects):
    """Return what users of the room do, by name; each leaves as many rows as it found."""
    bounds, middle = bounds_of(cache), n_objects // 2
    fresh = iter(range(10_000_000, 20_000_000))

    def put_and_evict():
        for _ in range(64):
            put(cache, key_of(next(fresh)), 0, bounds=bounds, size=10)

    def put_several():
        put(cache, key_of(next(fresh)), *range(8), bounds=bounds, size=10)

    return {
        "lookup": lambda: cache.metadata.lookup(IDENTITY, key_of(middle).path),
        "absence": lambda: cache.metadata.lookup(IDENTITY, "bucket/nothing"),
        "listing": lambda: cache.metadata.find(IDENTITY, "bucket/folder-1/x"),
        "learn": lambda: learn(cache, [middle]),
        "usage": cache.usage,
        "allowance": lambda: cache.allowance(bounds),
        "pin": lambda: (
            cache.pin(IDENTITY, key_of(middle).path),
            cache.unpin(IDENTITY, key_of(middle).path),
        ),
        "go on evicting a large folder": lambda: further(cache, "bucket"),
        "go on evicting an origin": lambda: further(cache, None),
        "evict one object": lambda: cache.evict(IDENTITY, key_of(middle).path),
        "evict a folder that is not there": lambda: cache.evict(IDENTITY, "bucket/nothing"),
        "discard": lambda: cache.discard(key_of(middle + 1), 0),
        "put and evict": put_and_evict,
        "put several": put_several,
        "lease": lambda: cache.lease(100, bounds).close(),
    }


def work_of(directory, n_blocks):
    build(directory, n_blocks)
    cache = BlockCache([str(directory)], explicit=True)
    try:
        acts = operations(cache, n_blocks // 5)
        acts["put and evict"]()  # sets the limit of the log, and reads the first batch of candidates, in both
        work = Work(cache)
        found = {name: work.of(act) for name, act in acts.items()}
        assert all(found.values()), found
        assert cache.evictions > 100
        return found
    finally:
        cache.close()


def test_no_operation_looks_at_more_rows_in_a_larger_cache(tmp_path):
    """In ten times as many blocks: a tree may be a level deeper, and nothing else is more."""
    small, large = (work_of(tmp_path / str(n_blocks), n_blocks) for n_blocks in (SMALL, LARGE))
    assert {name: (small[name], large[name]) for name in small if large[name] > 1.5 * small[name] + 200} == {}


# The tables that grow, and the statements that may read all of one: none of them belongs to a read or a write.
GROWING = {
    "blocks",
    "objects",
    "facts",
    "listings",
    "children",
    "graves",
    "pins",
    "leases",
    "folders",
    "quota",
}
WHOLE = {
    "SELECT clock FROM blocks ORDER BY id DESC LIMIT 1": "the last row",
    "SELECT listing FROM graves LIMIT 1": "the first row",
    "SELECT name, size FROM leases": "one for each file that is lent now",
    "SELECT identity, path FROM pins ORDER BY identity, path": "asked for by who lists them",
    "SELECT path, sum(size), count(*), min(nullif(since, 0)), max(nullif(since, 0)) FROM blocks"
    " JOIN objects ON objects.id = blocks.object GROUP BY path ORDER BY path": "asked for by who has it listed or drawn",
    "SELECT count(*), total(size) FROM blocks": "the audit",
    "SELECT total(size) FROM leases": "the audit",
    "SELECT (SELECT count(*) FROM facts) + (SELECT count(*) FROM children)": "the audit",
    "SELECT total(bytes) FROM objects WHERE pinned": "the audit",
    "UPDATE objects SET bytes = (SELECT total(size) FROM blocks WHERE object = objects.id)": "the audit",
    "DELETE FROM objects WHERE bytes <= 0": "the audit",
    "DELETE FROM blocks": "the recount",
}


def statements(text):
    """Return the SQL statements in a source of Python: what adjacent strings that begin with a verb say together."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            sql = " ".join(node.value.split())
            if re.match(r"(SELECT|INSERT|UPDATE|DELETE) ", sql):
                yield sql


def test_no_statement_scans_a_table_that_grows(cache):
    """Every statement of the index is planned by SQLite itself; those that read a whole table are known by name."""
    put(cache, key_of(0), 0, size=10)
    cache.quota.add("a", "2026-11-25", 5, 0)  # creates the table
    ends = [" WHERE digest = ? AND number = ?", " WHERE blocks.id = ?"]
    ends += [" WHERE blocks.id > ? AND NOT pinned ORDER BY blocks.id LIMIT ?"]
    ends += [" WHERE blocks.id > ? ORDER BY blocks.id LIMIT ?"]
    block = " ".join(block_rows._BLOCK.split())
    modules = Path(disk.__file__).parent.rglob("*.py")
    found = [sql for module in modules for sql in statements(module.read_text()) if sql != block]
    scans = {}
    with cache._own.index.writing() as rows:
        for sql in [*found, *(block + end for end in ends)]:
            plan = rows._run(f"EXPLAIN QUERY PLAN {sql}", (0,) * sql.count("?")).fetchall()
            for *_, step in plan:
                if (read := re.match(r"SCAN (\w+)", step)) and read[1] in GROWING:
                    scans.setdefault(sql, step)
    assert len(found) > 40
    assert {sql: step for sql, step in scans.items() if sql not in WHOLE} == {}
