"""The cache against a model: it may forget blocks, returns no wrong byte, and keeps its bound."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from cachedfs.cache.block_store import BlockStore
from cachedfs.common.types import CacheBounds
from cachedfs.errors import CacheError
from tests.cache.audit import audit
from tests.cache.helpers import content, disk_usage, flip, key_of, put

SIZE = 3 * 65536 + 100  # bytes of a block: four pages, the last one short
BOUNDS = CacheBounds(size=9 << 19, keep_free=0)  # about ten such blocks beside the bookkeeping

KEYS = [key_of(path, version, block_size=SIZE) for path in ("b/x", "b/y") for version in ("v1", "v2")]
keys = st.sampled_from(KEYS)
indexes = st.integers(0, 2)
offsets = st.one_of(st.integers(0, SIZE + 10), st.just(0))
sizes = st.one_of(st.integers(1, SIZE + 10), st.just(SIZE))
which = st.integers(0, 1)


class CacheMachine(RuleBasedStateMachine):
    """Two caches on one directory, as two processes would have them."""

    @initialize()
    def open(self):
        self.folder = tempfile.mkdtemp()
        self.caches = [BlockStore(self.folder, explicit=True) for _ in range(2)]
        self.pinned = set()
        for key in KEYS[::2]:
            put(self.caches[0], key, 0, 1, bounds=BOUNDS)

    def teardown(self):
        for cache in self.caches:
            cache.close()
        shutil.rmtree(self.folder)

    def files(self):
        return sorted(Path(self.caches[0].root, "blocks").glob("*/*"))

    @rule(key=keys, index=indexes, which=which)
    def put(self, key, index, which):
        with contextlib.suppress(CacheError):
            put(self.caches[which], key, index, bounds=BOUNDS)

    @rule(key=keys, index=indexes, which=which, start=offsets, size=sizes, verify=st.booleans())
    def read(self, key, index, which, start, size, verify):
        data = self.caches[which].read(key, index, start, start + size, verify=verify)
        assert data is None or data == content(key, index)[start : start + size]

    @rule(which=which)
    def read_all(self, which):
        for key in KEYS:
            for index in range(3):
                assert self.caches[which].read(key, index, 0, SIZE, verify=False) in (
                    None,
                    content(key, index),
                )

    @rule(key=keys, index=indexes, which=which, start=offsets, size=sizes, verify=st.booleans())
    def read_into(self, key, index, which, start, size, verify):
        buffer = bytearray(size)
        read = self.caches[which].read_into(key, index, start, memoryview(buffer), verify=verify)
        assert read == -1 or buffer[:read] == content(key, index)[start : start + size]

    @rule(key=keys, which=which)
    def evict(self, key, which):
        self.caches[which].evict(key.identity, key.path)
        assert not any(
            self.caches[which].has(each, i) for each in KEYS if each.path == key.path for i in range(3)
        )

    @rule(key=keys, which=which, is_wished=st.booleans())
    def pin_or_unpin(self, key, which, is_wished):
        if is_wished:
            self.caches[which].pin(key.identity, key.path)
            self.pinned.add((key.identity, key.path))
        else:
            self.caches[which].unpin(key.identity, key.path)
            self.pinned.discard((key.identity, key.path))

    @rule(which=which)
    def reopen(self, which):
        self.caches[which].close()
        self.caches[which] = BlockStore(self.folder, explicit=True)

    @rule(
        choice=st.integers(0, 11),
        at=st.integers(0, SIZE),
        how=st.sampled_from(["flip", "cut", "delete"]),
        reader=which,
    )
    def harm_a_file(self, choice, at, how, reader):
        """A byte is flipped in a copy that takes the file's place: `verify` is for what changes under an open handle."""
        files = self.files()
        if not files:
            return
        path = files[choice % len(files)]
        if how == "flip" and path.stat().st_size:
            copy = path.with_name("copy")
            shutil.copyfile(path, copy)
            flip(copy, min(at, path.stat().st_size - 1))
            copy.replace(path)
        elif how in ("flip", "cut"):
            os.truncate(path, min(at, path.stat().st_size))
        else:
            path.unlink()
        self.read_all(reader)

    @rule(what=st.sampled_from(["index.db", "blocks", "change-counters", "access-records"]))
    def lose(self, what):
        path = Path(self.caches[0].root, what)
        if what == "index.db":
            self.pinned.clear()
        if what == "blocks":
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    @rule(which=which)
    def repair(self, which):
        report = audit(self.caches[which])
        assert (report.orphans, report.wrong_sums) == ((), ())

    @invariant()
    def pins_are_those_that_were_wished(self):
        self.caches[0]._own.index.look_again()
        assert set(self.caches[0].pins()) == self.pinned

    @invariant()
    def the_bound_is_kept(self):
        assert disk_usage(self.caches[0]) <= BOUNDS.size


few = settings(
    max_examples=8,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


def test_the_cache_forgets_and_never_lies():
    run_state_machine_as_test(CacheMachine, settings=few)


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_the_cache_forgets_and_never_lies_many_times():
    run_state_machine_as_test(
        CacheMachine, settings=settings(few, max_examples=1500, stateful_step_count=60, derandomize=False)
    )
