"""The filesystem against a model: a read returns a version that `max_age` allows."""

import asyncio
import contextlib
import math
import pathlib
import shutil
import tempfile

import fsspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from cachedfs.errors import CachedFSError, ObjectChanged, OriginUnavailable, OriginUnreachable
from cachedfs.fetch.runtime import Runtime
from tests.fakes import FakeOrigin
from tests.support import KiB, forget

BLOCK = 64 * KiB
SMALL = {"target_protocol": "gs", "block_size": BLOCK, "request_size": 2 * BLOCK, "keep_free": 0}
AGES = {"usual": 60.0, "always asks": 0.0, "never asks": math.inf, "offline": math.inf}
OPTIONS = {
    "usual": {},
    "always asks": {"max_age": 0},
    "never asks": {"max_age": "immutable"},
    "offline": {"offline": True},
}
PATHS = ["b/x", "b/y"]
SIZES = [5 * BLOCK - 7, 3 * BLOCK, BLOCK + 1, 10, 0]

paths = st.sampled_from(PATHS)
names = st.sampled_from(list(OPTIONS))
writers = st.sampled_from(["usual", "always asks", "never asks"])
sizes = st.sampled_from(SIZES)
offsets = st.one_of(st.integers(0, 5 * BLOCK), st.sampled_from([0, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK]))
# Faults before the n-th step of a read, or none.
troubles = st.one_of(
    st.none(),
    st.tuples(st.just("replace"), st.integers(1, 3)),
    st.tuples(st.sampled_from(["replace", "delete", "fail", "break", "away"]), st.integers(1, 3)),
)


def _through_a_file(fs, path):
    with fs.open(path) as file:
        return file.read()


def _through_a_local_file(fs, path):
    with fs.local_path(path) as local:
        return pathlib.Path(local).read_bytes()


WHOLE = {
    "cat_file": lambda fs, path: fs.cat_file(path),
    "_cat_file": lambda fs, path: asyncio.run(fs._cat_file(path)),
    "cat": lambda fs, path: fs.cat([path])[path],
    "open": _through_a_file,
    "local_path": _through_a_local_file,
}


class FilesystemMachine(RuleBasedStateMachine):
    """Four filesystems with different options over one cache, and an origin whose objects others change.

    The clock stands still except that every rule takes a second.
    """

    @initialize()
    def begin(self):
        self.patch = pytest.MonkeyPatch()
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.now = 1e9
        self.patch.setattr("time.time", lambda: self.now)
        self.patch.setattr(Runtime, "_count_request", self.on_request)
        self.origin = FakeOrigin()
        self.origin.piece_size = BLOCK + 1000
        self.origin.install(self.patch)
        self.n_requests, self.trouble, self.trouble_at = 0, (None, ""), 0
        # The content of each path, and since when; None: absent. `first` is the first version that may still be returned.
        self.history = {path: [(0.0, None)] for path in PATHS}
        self.first = dict.fromkeys(PATHS, 0)
        self.n_versions = 0
        self.may_break = False  # a request that will break in its body may be in flight
        self.has_listed = False
        for path in PATHS:
            self.hold(path, self.content(SIZES[0]))
        self.reopen()

    def reopen(self):
        self.filesystems = {
            name: fsspec.filesystem("cachedfs", cache_dir=str(self.folder / "cache"), **SMALL, **options)
            for name, options in OPTIONS.items()
        }

    def teardown(self):
        if hasattr(self, "patch"):
            forget()
            self.patch.undo()
            shutil.rmtree(self.folder)

    @invariant()
    def what_arrived_is_stored(self):
        """Store all received blocks, so that the next rule finds the same state in every run."""
        runtime = self.filesystems["usual"]._source.runtime
        assert runtime.drain(120)
        self.may_break &= bool(runtime.active_requests)

    # The origin.

    def on_request(self):
        """Before every request: apply the fault planned for the n-th request of a read."""
        self.n_requests += 1
        number = len(self.origin.log) + 1
        kind, path = self.trouble if self.n_requests == self.trouble_at else (None, "")
        if kind == "replace":
            self.hold(path, self.content(2 * BLOCK + 3))
        elif kind == "delete":
            self.hold(path, None)
        elif kind == "fail":
            self.origin.fail_with[number] = OriginUnavailable("503, six times")
        elif kind == "break":
            self.may_break = True
            self.origin.break_after[number] = BLOCK
        if self.trouble[0] == "away" and self.n_requests >= self.trouble_at:
            self.origin.fail_with[number] = OriginUnreachable("refused")

    @contextlib.contextmanager
    def trouble_with(self, path, trouble):
        self.n_requests, self.trouble, self.trouble_at = (
            0,
            (trouble and trouble[0], path),
            trouble and trouble[1],
        )
        try:
            yield
        finally:
            self.trouble = (None, "")
            self.origin.fail_with.clear()
            self.origin.break_after.clear()
            self.filesystems["usual"]._source.runtime._unreachable.clear()

    def content(self, size):
        self.n_versions += 1
        return (b"%08d" % self.n_versions * (size // 8 + 1))[:size]

    def hold(self, path, data):
        """Set the content of `path` at the origin, as another client would."""
        if data is not None:
            self.origin.put(path, data)
        elif path in self.origin.objects:
            self.origin.delete(path)
        self.history[path].append((self.now, data))

    # Allowed results.

    def allowed(self, path, age):
        """Return the versions that a reader may get now, when its metadata may be `age` seconds old."""
        ends = [since for since, _ in self.history[path][1:]] + [math.inf]
        return [
            n for n in range(self.first[path], len(ends)) if ends[n] >= self.now or ends[n] > self.now - age
        ]

    def bytes_of(self, path, numbers):
        return [data for _, data in (self.history[path][n] for n in numbers) if data is not None]

    def check_absent(self, path, name, trouble):
        age = math.inf if trouble == "away" else AGES[name]
        if not self.has_listed and age != math.inf:
            age = min(age, 10.0)  # a single 404 is fresh for at most 10 s
        assert any(self.history[path][n][1] is None for n in self.allowed(path, age)), "it was there"

    def check_error(self, error, path, name, trouble):
        if self.may_break and "the connection broke" in str(error):
            return  # a request of an earlier rule is still in flight, and this read joined it
        if isinstance(error, FileNotFoundError):
            self.check_absent(path, name, trouble)
        elif name == "offline":
            assert isinstance(error, OriginUnavailable)
        else:
            assert trouble in ("fail", "break", "away"), error

    def read(self, name, path, part, function, trouble, *, is_handle=False):
        self.now += 1
        kind = trouble and trouble[0]
        try:
            with self.trouble_with(path, trouble):
                data = function(self.filesystems[name], path)
        except ObjectChanged:
            assert is_handle
            assert len(self.allowed(path, AGES[name])) > 1 or kind == "away"
            return
        except CachedFSError as error:
            self.check_error(error, path, name, kind)
            return
        versions = self.bytes_of(path, self.allowed(path, math.inf if kind == "away" else AGES[name]))
        assert any(data == version[part] for version in versions), f"{data[:8]!r}, {len(data)} bytes"

    # Reads.

    @rule(name=names, path=paths, how=st.sampled_from(list(WHOLE)), trouble=troubles)
    def read_whole(self, name, path, how, trouble):
        self.read(name, path, slice(None), WHOLE[how], trouble, is_handle=how in ("open", "local_path"))

    @rule(name=names, path=paths, start=offsets, size=offsets, trouble=troubles)
    def read_a_range(self, name, path, start, size, trouble):
        part = slice(start, start + size)
        self.read(name, path, part, lambda fs, path: fs.cat_file(path, start, start + size), trouble)

    @rule(name=names, path=paths, size=offsets.filter(bool), trouble=troubles)
    def read_the_end(self, name, path, size, trouble):
        self.read(name, path, slice(-size, None), lambda fs, path: fs.cat_file(path, -size), trouble)

    @rule(name=names, deep=st.booleans(), trouble=troubles)
    def list_the_folder(self, name, deep, trouble):
        self.now += 1
        kind = trouble and trouble[0]
        fs, self.has_listed = self.filesystems[name], True
        try:
            with self.trouble_with("b/x", trouble):
                found = fs.find("b", detail=True).values() if deep else fs.ls("b")
        except FileNotFoundError:
            found = []
        except CachedFSError as error:
            self.check_error(error, "b/x", name, kind)
            return
        sizes = {info["name"]: info["size"] for info in found}
        for path in PATHS:
            if path not in sizes:
                self.check_absent(path, name, kind)
            else:
                age = math.inf if kind == "away" else AGES[name]
                assert sizes[path] in map(len, self.bytes_of(path, self.allowed(path, age)))

    # Changes, by us and by others.

    @rule(name=writers, path=paths, how=st.sampled_from(["write", "write", "remove", "copy"]), size=sizes)
    def change(self, name, path, how, size):
        """Make an own write: earlier versions are never returned again."""
        self.now += 1
        fs, data = self.filesystems[name], None
        (other,) = {*PATHS} - {path}
        with contextlib.suppress(FileNotFoundError):
            if how == "write":
                fs.pipe_file(path, data := self.content(size))
            elif how == "copy":
                data = self.history[other][-1][1]
                fs.cp_file(other, path)
            else:
                fs.rm_file(path)
            self.history[path].append((self.now, data))
            self.first[path] = len(self.history[path]) - 1

    @rule(path=paths, how=st.sampled_from(["write", "write", "remove", "write the same"]), size=sizes)
    def others_change(self, path, how, size):
        self.now += 1
        same = self.history[path][-1][1]
        self.hold(path, {"write": self.content(size), "remove": None}.get(how, same))

    @rule(seconds=st.sampled_from([8, 30, 57, 61, 10_000]))
    def wait(self, seconds):
        self.now += seconds

    # The cache.

    @rule(name=names, path=paths, how=st.sampled_from(["forget", "evict", "pin", "unpin"]))
    def call_the_cache(self, name, path, how):
        fs = self.filesystems[name]
        if how == "forget":
            fs.invalidate_cache(path)
            self.first[path] = len(self.history[path]) - 1
        else:
            getattr(fs, how)(path)

    @rule()
    def begin_a_new_process(self):
        forget()
        self.reopen()

    @rule(what=st.sampled_from(["*", "blocks", "index.db*", "marks", "touches", "claims"]))
    def delete_from_the_cache(self, what):
        for path in (self.folder / "cache").glob(f"cachedfs-*/{what}"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


few = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


def test_reads_return_versions_allowed_by_max_age():
    run_state_machine_as_test(FilesystemMachine, settings=few)


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_reads_return_versions_allowed_by_max_age_many_times():
    many = settings(few, max_examples=2000, stateful_step_count=60, derandomize=False)
    run_state_machine_as_test(FilesystemMachine, settings=many)
