"""Moving folders: all objects, or none and an error that names the one that could not be moved."""

import asyncio
import contextlib
import itertools
import logging
from collections import Counter

import fsspec
import pytest

from cachedfs.common.checksums import StatedChecksum
from cachedfs.errors import AccessDenied
from cachedfs.filesystem.move import MovedObject, ObjectMove, Place, Requests, StatedContent, Step, next_step
from cachedfs.sim import Fault

NAMES = [f"f{i}" for i in range(6)]


def test_no_step_removes_the_only_copy_or_what_somebody_else_wrote():
    for source, target, had_target in itertools.product(Place, Place, [False, True]):
        step = next_step(source, target, had_target=had_target)
        if step is Step.REMOVE_COPY:
            assert source in (Place.OBJECT, Place.OTHER)
        if step in (Step.REMOVE_COPY, Step.MOVE_BACK, Step.COPY_BACK):
            assert target is Place.OBJECT
            assert step is Step.COPY_BACK or not had_target
        if step in (Step.MOVE_BACK, Step.COPY_BACK):
            assert source is Place.NOTHING


def content(data):
    return StatedContent(len(data), StatedChecksum("md5", data))


class Store:
    """Objects in a dict. `failing` has (method, name) pairs; `lost` those that succeed and then raise."""

    def __init__(self, moves, failing=(), lost=()):
        self.data = {f"d/{name}": name for name in NAMES}
        self.failing, self.lost, self.moves = {*failing}, {*lost}, moves

    async def copy(self, source, target):
        with self._answering("copy", source):
            self.data[target] = self.data[source]

    async def remove(self, path):
        with self._answering("remove", path):
            del self.data[path]

    async def move(self, source, target):
        with self._answering("move", source):
            self.data[target] = self.data.pop(source)

    async def content(self, path):
        with self._answering("content", path):
            data = self.data.get(path)
            return None if data is None else content(data)

    @contextlib.contextmanager
    def _answering(self, method, name):
        if (method, name) in self.failing:
            raise AccessDenied(f"{name}: no ({method})")
        yield
        if (method, name) in self.lost:
            raise AccessDenied(f"{name}: no answer ({method})")

    def run(self, had=(), root=False):
        objects = [MovedObject(f"d/{name}", f"e/{name}", content(name), name in had) for name in NAMES]
        if root:
            objects.append(MovedObject("d", "e", is_optional=True))
        move = self.move if self.moves else None
        requests = Requests(self.copy, self.remove, move, self.content, in_turn, lambda path: f"x://{path}")
        asyncio.run(ObjectMove(objects, requests).run())


async def in_turn(coroutines):
    for coroutine in coroutines:
        await coroutine


BEFORE = {f"d/{name}": name for name in NAMES}
AFTER = {f"e/{name}": name for name in NAMES}
BACK = r"Cannot move x://d/f3 to x://e/f3: no .*\(.*\)\. All other objects are back at their old place\.$"


STEPS = pytest.mark.parametrize(("moves", "method"), [(True, "move"), (False, "copy"), (False, "remove")])


@STEPS
@pytest.mark.parametrize("is_done", [False, True])
def test_all_objects_are_back_after_one_failed(moves, method, is_done):
    """Also if the step was done, and only its answer was lost."""
    store = Store(moves)
    (store.lost if is_done else store.failing).add((method, "d/f3"))
    if is_done and method == "remove":
        store.failing.add(("remove", "d/f4"))  # removals after the failed one are not begun
    with pytest.raises(AccessDenied, match=BACK):
        store.run()
    assert store.data == BEFORE


@pytest.mark.parametrize(("moves", "method"), [(True, "move"), (False, "remove")])
def test_a_lost_answer_of_the_last_step_is_a_success(moves, method):
    store = Store(moves, lost=[(method, "d/f5")])
    store.run()
    assert store.data == AFTER


@pytest.mark.parametrize("moves", [True, False])
def test_objects_that_stay_away_are_named_in_the_error_and_the_log(moves, caplog):
    back = "move" if moves else "copy"
    store = Store(moves, [("move" if moves else "remove", "d/f3"), (back, "e/f1")])
    named = "1 object could not be brought back, all others are at their old place: x://d/f1 is at x://e/f1"
    with caplog.at_level(logging.ERROR, "cachedfs.filesystem"), pytest.raises(AccessDenied, match=named):
        store.run()
    assert store.data == {**{f"d/{name}": name for name in NAMES if name != "f1"}, "e/f1": "f1"}
    assert "x://d/f1 is at x://e/f1" in caplog.text


@STEPS
def test_targets_that_existed_before_stay_and_are_named(moves, method):
    store = Store(moves, [(method, "d/f3")])
    store.data |= {"e/f1": "old", "e/f5": "old"}
    replaced = ["f1", "f5"] if method == "remove" else ["f1"]  # else f5 was not copied yet
    named = "; ".join(f"x://e/{name}" for name in replaced)
    with pytest.raises(
        AccessDenied, match=rf"(?s)All other .* may have had these names before.*: {named}\.$"
    ):
        store.run(had=["f1", "f5"])
    assert store.data == {**BEFORE, "e/f1": "f1", "e/f5": "f5" if "f5" in replaced else "old"}


def test_a_copy_that_cannot_be_removed_is_named():
    store = Store(False, [("copy", "d/f3"), ("remove", "e/f1")])
    with pytest.raises(AccessDenied, match=r"All other .* Copies may be left at x://e/f1\.$"):
        store.run()
    assert store.data == {**BEFORE, "e/f1": "f1"}


@pytest.mark.parametrize("moves", [True, False])
def test_an_account_that_may_use_only_the_folder_moves_what_is_in_it(moves):
    store = Store(moves, [("move", "d"), ("copy", "d"), ("content", "d")])
    store.run(root=True)
    assert store.data == AFTER
    store = Store(moves, [("move", "d"), ("copy", "d")])
    store.data["d"] = "the object that has the folder's name"
    with pytest.raises(AccessDenied, match="Cannot move x://d to x://e"):
        store.run(root=True)
    assert store.data == {**BEFORE, "d": "the object that has the folder's name"}


def test_what_somebody_else_wrote_to_a_target_meanwhile_stays():
    store = Store(False, [("copy", "d/f3")])
    honest = store.copy

    async def copy(source, target):
        await honest(source, target)
        if source == "d/f2":
            store.data["e/f1"] = "theirs"

    store.copy = copy
    with pytest.raises(AccessDenied, match=r"All other objects are back at their old place\.$"):
        store.run()
    assert store.data == {**BEFORE, "e/f1": "theirs"}


# At simulated clouds.
class Bucket:
    """A bucket with a folder `d`. `n` has the numbers of requests that moving it to a new folder takes."""

    def __init__(self, machine, n):
        self.machine, self.n, self.path = machine, n, machine.path
        self.fs = fsspec.filesystem("cachedfs", target_protocol=machine.protocol)
        for name in OBJECTS:
            machine.put(name, name.encode())

    def fail(self, name):
        """Refuse all changes of one name."""
        for kind in ("upload", "copy", "delete"):
            self.machine.server.fail(Fault(kind=kind, key=name, status=403, times=None))

    def refusal(self, name, to):
        url = f"cachedfs::{self.machine.protocol}://{self.path('')}"
        return rf"(?s)Cannot move {url}{name} to {url}{to}: access denied.* All other objects are back at their old place\.$"

    def names(self):
        """Return the bytes of all objects by their names."""
        self.machine.server.heal()
        top, inner = self.path(""), self.fs.origin_fs
        return {name.removeprefix(top): inner.cat_file(name) for name in inner.find(top)}


OBJECTS = ["d/", *(f"d/{name}" for name in NAMES), "d/s/g"]


@pytest.fixture(params=["gs", "s3"])
def bucket(request):
    if request.param == "gs":
        # The folder itself may be an object: that is one of the copies.
        return Bucket(request.getfixturevalue("cloud"), {"list": 2, "metadata": 1, "copy": len(OBJECTS) + 1})
    return Bucket(request.getfixturevalue("s3"), {"upload": len(OBJECTS) + 1, "delete": len(OBJECTS)})


def contents(folder):
    return {name.replace("d/", f"{folder}/", 1): name.encode() for name in OBJECTS}


def test_a_folder_is_moved_with_one_or_two_requests_for_each_object(bucket):
    bucket.machine.server.reset()
    bucket.fs.mv(bucket.path("d"), bucket.path("e"), recursive=True)
    sent = Counter(request.kind for request in bucket.machine.server.requests)
    assert {kind: sent[kind] for kind in bucket.n} == bucket.n
    assert bucket.names() == contents("e")
    assert not bucket.fs.exists(bucket.path("d"))
    assert bucket.fs.isdir(bucket.path("e/s"))


@pytest.mark.parametrize("refused", ["d/f3", "e/f3"])
def test_a_folder_stays_whole_if_one_object_cannot_be_moved(bucket, refused):
    if bucket.machine.protocol == "gs" and refused == "d/f3":
        refused = "e/s/g"  # gcsfs moves by the name of the target
    bucket.fail(refused)
    name = refused.partition("/")[2]
    with pytest.raises(AccessDenied, match=bucket.refusal(f"d/{name}", f"e/{name}")):
        bucket.fs.mv(bucket.path("d"), bucket.path("e"), recursive=True)
    assert bucket.names() == contents("d")
    assert bucket.fs.find(bucket.path("e")) == []
    bucket.fs.mv(bucket.path("d"), bucket.path("e"), recursive=True)
    assert bucket.names() == contents("e")


def test_a_folder_that_is_moved_over_objects_names_those_that_were_replaced(bucket):
    for name in ("e/d/f1", "e/d/other", "e/z"):
        bucket.machine.put(name, b"old")
    bucket.fail("e/d/s/g")
    with pytest.raises(AccessDenied, match="back at their old place"):
        bucket.fs.mv(bucket.path("d"), bucket.path("e"), recursive=True)
    found = bucket.names()
    assert found.pop("e/d/f1") in (b"old", b"d/f1")
    assert found == {**contents("d"), "e/d/other": b"old", "e/z": b"old"}
    bucket.fs.mv(bucket.path("d"), bucket.path("e"), recursive=True)
    assert bucket.names() == {**contents("e/d"), "e/d/other": b"old", "e/z": b"old"}


def test_a_folder_and_an_object_of_one_name_are_moved_together_also_into_the_folder_itself(bucket):
    bucket.machine.put("d", b"object")
    bucket.machine.put("d/f1/below", b"1")
    bucket.fs.mv(bucket.path("d"), bucket.path("e"), recursive=True)
    assert bucket.names() == {**contents("e"), "e": b"object", "e/f1/below": b"1"}
    bucket.fs.mv(bucket.path("e"), bucket.path("e/s"), recursive=True)
    assert bucket.names() == {**contents("e/s/e"), "e/s/e": b"object", "e/s/e/f1/below": b"1"}


def test_a_folder_of_a_filesystem_with_folders_stays_whole(tmp_path, monkeypatch):
    fs = fsspec.filesystem("cachedfs", target_protocol="memory")
    fs.pipe({f"{tmp_path}/d/{name}": name.encode() for name in ("a", "s/b", "s/c")})
    inner = type(fs.origin_fs)
    honest = inner.rm_file

    def rm_file(self, path):
        if path.endswith("d/s/b"):
            raise PermissionError(path)
        honest(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(inner, "rm_file", rm_file)
        said = r"(?s)/d/s/b to .*/e/s/b: .* All other objects are back at their old place"
        with pytest.raises(AccessDenied, match=said):
            fs.mv(f"{tmp_path}/d", f"{tmp_path}/e", recursive=True)
    assert fs.find(str(tmp_path)) == [f"{tmp_path}/d/{name}" for name in ("a", "s/b", "s/c")]
    assert not fs.exists(f"{tmp_path}/e")
    fs.mv(f"{tmp_path}/d", f"{tmp_path}/e", recursive=True)
    assert fs.find(str(tmp_path)) == [f"{tmp_path}/e/{name}" for name in ("a", "s/b", "s/c")]
    assert not fs.exists(f"{tmp_path}/d")
