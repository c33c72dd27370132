"""Which blocks are written together, and when."""

from cachedfs.common.types import ObjectInfo, ObjectKey
from cachedfs.shared import gatherer as shared_gatherer
from cachedfs.shared.gatherer import FILE, Gatherer, runs_of
from tests.support import KiB, MiB

IDENTITY = "gs|host|anon"


def noted(gatherer, name, size, indexes, now, identity=IDENTITY, data=None):
    info = ObjectInfo(name, "file", size, "1")
    version = ObjectKey(identity, name, "1", MiB)
    for index in indexes:
        gatherer.note(version, info, name, index, now, data)


def taken(gatherer, now, **options):
    """Return the files to write: for each the name, and the blocks of each group."""
    return [
        [(each.info.path, sorted(each.blocks)) for each in file] for file in gatherer.take(now, **options)
    ]


def test_a_large_part_is_written_when_it_is_complete_or_nobody_reads_on():
    gatherer = Gatherer()
    noted(gatherer, "big", 20 * MiB, [*range(7), 16], 1)
    assert taken(gatherer, 1) == []
    noted(gatherer, "big", 20 * MiB, [7], 2)
    assert taken(gatherer, 2) == [[("big", [*range(8)])]]
    noted(gatherer, "big", 20 * MiB, [17, 18, 19], 2.5)
    assert taken(gatherer, 2.5) == [[("big", [16, 17, 18, 19])]]
    noted(gatherer, "big", 20 * MiB, range(5), 3)
    assert taken(gatherer, 4.9) == []
    assert taken(gatherer, 5) == [[("big", [*range(5)])]]
    assert not gatherer


def test_a_part_is_written_sooner_if_another_node_waits_and_no_request_brings_more_of_it():
    gatherer = Gatherer()
    noted(gatherer, "big", 20 * MiB, range(5), 1)
    noted(gatherer, "other", 20 * MiB, range(5), 1)
    coming = {"is_coming": lambda group: group.key == "big"}
    assert taken(gatherer, 1.1, hurries=True, **coming) == []
    assert taken(gatherer, 1.25, **coming) == []
    assert taken(gatherer, 1.25, hurries=True, **coming) == [[("other", [*range(5)])]]
    assert taken(gatherer, 1.25, hurries=True) == [[("big", [*range(5)])]]


def test_small_objects_fill_files_of_about_one_size():
    gatherer = Gatherer()
    for i in range(3000):
        noted(gatherer, f"{i}", 1 + 7919 * i % 200_000, [0], 1)
    sizes = [sum(group.size for group in file) for file in gatherer.take(1)]
    assert all(FILE <= size < FILE + 200_000 for size in sizes)
    assert len(sizes) > 30


def test_the_rest_is_written_when_nothing_came_for_as_long_as_the_reading_took():
    gatherer = Gatherer()
    for now in range(10, 31):
        noted(gatherer, f"{now}", 10 * KiB, [0], now)
    assert taken(gatherer, 49.9) == []
    assert [len(file) for file in taken(gatherer, 50)] == [21]
    noted(gatherer, "late", 10 * KiB, [0], 1000)
    assert taken(gatherer, 1059.9) == []
    assert taken(gatherer, 1060) == [[("late", [0])]]


def test_everything_can_be_written_at_once():
    gatherer = Gatherer()
    noted(gatherer, "big", 20 * MiB, [0, 3], 1)
    noted(gatherer, "small", 5, [0], 1)
    noted(gatherer, "elsewhere", 5, [0], 1, "s3|host|-")
    assert taken(gatherer, 1, everything=True) == [[("big", [0, 3]), ("small", [0])], [("elsewhere", [0])]]


def test_bytes_are_kept_while_they_are_few(monkeypatch):
    monkeypatch.setattr(shared_gatherer, "IN_MEMORY", 10)
    gatherer, data = Gatherer(), [memoryview(b"12345")]
    for now, indexes in ((1, [0, 0, 1, 2]), (2, [0, 1])):  # then there is room again
        noted(gatherer, "x", 3 * MiB, indexes, now, data=data)
        [[group]] = gatherer.take(now, everything=True)
        assert group.blocks == {index: data if index < 2 else None for index in indexes}


def test_runs_are_consecutive():
    assert list(runs_of([])) == []
    assert list(runs_of([1, 2, 3, 5, 7, 8])) == [[1, 2, 3], [5], [7, 8]]
