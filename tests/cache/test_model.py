"""The cache against a dict: it may forget, it never lies, and it always knows how much it holds."""

import contextlib
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cachedfs.cache import BlockCache
from cachedfs.errors import CacheError
from cachedfs.model import Bounds
from tests.cache.rig import content, disk_usage, flip, key_of, put

SIZE = 3 * 65536 + 100  # bytes of a block: four pages, the last one short
BOUNDS = Bounds(size=3 << 20, keep_free=0)  # about ten such blocks beside the bookkeeping

KEYS = [key_of(path, version, block_size=SIZE) for path in ("b/x", "b/y") for version in ("v1", "v2")]
keys = st.sampled_from(KEYS)
indexes = st.integers(0, 4)
offsets = st.integers(0, SIZE + 10)
which = st.integers(0, 1)


class CacheMachine(RuleBasedStateMachine):
    """Two caches on one directory, as two processes would have them."""

    @initialize()
    def open(self):
        self.folder = tempfile.mkdtemp()
        self.caches = [BlockCache([self.folder], explicit=True) for _ in range(2)]
        self.pinned = set()

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

    @rule(key=keys, index=indexes, which=which, start=offsets, size=offsets, verify=st.booleans())
    def read(self, key, index, which, start, size, verify):
        data = self.caches[which].read(key, index, start, start + size, verify=verify)
        assert data is None or data == content(key, index)[start : start + size]

    @rule(
        key=keys, index=indexes, which=which, start=offsets, size=st.integers(1, SIZE), verify=st.booleans()
    )
    def read_into(self, key, index, which, start, size, verify):
        buffer = bytearray(size)
        read = self.caches[which].read_into(key, index, start, memoryview(buffer), verify=verify)
        assert read == -1 or buffer[:read] == content(key, index)[start : start + size]

    @rule(key=keys, which=which)
    def evict(self, key, which):
        self.caches[which].evict(key.identity, key.path)
        assert not any(
            self.caches[which].has(each, i) for each in KEYS if each.path == key.path for i in range(5)
        )

    @rule(key=keys, which=which)
    def pin(self, key, which):
        self.caches[which].pin(key.identity, key.path)
        self.pinned.add((key.identity, key.path))

    @rule(key=keys, which=which)
    def unpin(self, key, which):
        self.caches[which].unpin(key.identity, key.path)
        self.pinned.discard((key.identity, key.path))

    @rule(which=which)
    def reopen(self, which):
        self.caches[which].close()
        self.caches[which] = BlockCache([self.folder], explicit=True)

    @rule(choice=st.integers(0), at=st.integers(0))
    def corrupt_a_byte(self, choice, at):
        """In a copy that takes the file's place: a byte flipped under an open handle is what `verify` is for."""
        if files := self.files():
            path = files[choice % len(files)]
            copy = path.with_name("copy")
            shutil.copyfile(path, copy)
            flip(copy, at % path.stat().st_size)
            copy.replace(path)

    @rule(choice=st.integers(0))
    def delete_a_file(self, choice):
        if files := self.files():
            files[choice % len(files)].unlink()

    @rule(which=which)
    def repair(self, which):
        self.caches[which].check(repair=True)
        assert self.caches[which].check().ok

    @rule()
    def lose_the_index(self):
        Path(self.caches[0].root, "index.db").unlink(missing_ok=True)
        self.pinned.clear()

    @invariant()
    def pins_are_those_that_were_wished(self):
        self.caches[0]._index.database._reader.looked_s = 0.0
        assert set(self.caches[0].pins()) == self.pinned

    @invariant()
    def the_bound_is_kept(self):
        assert disk_usage(self.caches[0]) <= BOUNDS.size


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
