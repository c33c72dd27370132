"""State that processes share without a database: change counters, use records, fetch locks."""

import errno
import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachedfs.cache import disk
from cachedfs.cache.eviction.access_stats import AccessStats, BlockAccess, touch_slots
from cachedfs.cache.shared_memory import ChangeCounters
from cachedfs.common.types import CacheBounds
from tests.cache.helpers import finish, key_of, put, start

ORIGIN = "gs://test"


def test_a_change_moves_the_marks_of_its_path_and_of_all_above_and_of_nothing_else(cache):
    moved, others = ["b/k/x", "b/k", "b", ""], ["b/k/y", "b/z", "c", "b/k/x/below"]
    before = {path: cache.metadata.mark(ORIGIN, path) for path in moved + others}
    beside = cache.metadata.listing_mark(ORIGIN, "b/z"), cache.metadata.epoch("gs://elsewhere")
    epoch = cache.metadata.epoch(ORIGIN)
    cache.metadata.changed(ORIGIN, ["b/k/x"])
    assert [path for path in before if cache.metadata.mark(ORIGIN, path) != before[path]] == moved
    assert beside == (cache.metadata.listing_mark(ORIGIN, "b/z"), cache.metadata.epoch("gs://elsewhere"))
    assert cache.metadata.epoch(ORIGIN) != epoch


def test_a_change_of_a_tree_moves_the_marks_of_what_is_in_it_and_no_other(cache):
    inside = ["b/t", "b/t/x", "b/t/deep/er/y"]
    outside = ["b/tt", "b/u/x", "c/t/x"]
    before = {path: cache.metadata.mark(ORIGIN, path) for path in inside + outside}
    below = cache.metadata.listing_mark(ORIGIN, "b/t/deep")
    beside, elsewhere = (
        cache.metadata.listing_mark(ORIGIN, "b/u"),
        cache.metadata.mark("gs://elsewhere", "b/t/x"),
    )
    cache.metadata.changed(ORIGIN, ["b/t"], tree=True)
    assert all(cache.metadata.mark(ORIGIN, path) != before[path] for path in inside)
    assert all(cache.metadata.mark(ORIGIN, path) == before[path] for path in outside)
    assert cache.metadata.listing_mark(ORIGIN, "b/t/deep") != below
    assert cache.metadata.listing_mark(ORIGIN, "b/u") == beside
    cache.metadata.changed(ORIGIN, [""], tree=True)
    assert cache.metadata.mark("gs://elsewhere", "b/t/x") == elsewhere
    assert all(cache.metadata.mark(ORIGIN, path) != before[path] for path in outside)


@given(st.lists(st.text(alphabet="ab/", max_size=6), max_size=4), st.text(alphabet="ab/", max_size=6))
@settings(max_examples=50, deadline=None)
def test_every_name_above_a_changed_path_moves(paths, path):
    marks = ChangeCounters(None, "")
    above = {path[:at] for at in range(len(path)) if path[at] == "/"} | {"", path}
    before = {
        each: (marks.at(marks.slots_of("i", each)), marks.at(marks.listing_slots_of("i", each)))
        for each in above
    }
    marks.change("i", [*paths, path], tree=False)
    for each, (own, listing) in before.items():
        assert marks.at(marks.slots_of("i", each)) != own
        assert marks.at(marks.listing_slots_of("i", each)) != listing


def test_another_process_sees_a_change_at_once(cache):
    before = cache.metadata.mark(ORIGIN, "b/x"), cache.metadata.epoch(ORIGIN)
    finish(
        start(
            "BlockCache([sys.argv[1]], explicit=True).metadata.changed('gs://test', ['b/x'])",
            Path(cache.root).parent,
        )
    )
    assert cache.metadata.mark(ORIGIN, "b/x") != before[0]
    assert cache.metadata.epoch(ORIGIN) != before


def test_two_writers_at_once_cannot_cancel_each_other(tmp_path):
    """A writer never reads a slot: whichever of two wins, the mark is neither the old one nor a repeated one."""
    first, second = (
        ChangeCounters(str(tmp_path / "m"), str(tmp_path / "t1")),
        ChangeCounters(str(tmp_path / "m"), str(tmp_path / "t2")),
    )
    slots, seen = first.slots_of("i", "p"), set()
    for _ in range(100):
        seen.add(first.at(slots))
        second.change("i", ["p"], tree=False)
        first.change("i", ["p"], tree=False)
        assert first.at(slots) == second.at(slots)
    assert len(seen) == 100


def test_facts_from_before_the_marks_were_lost_are_not_valid(cache, open_cache):
    mark = cache.metadata.mark(ORIGIN, "b/x")
    assert open_cache().metadata.mark(ORIGIN, "b/x") == mark
    Path(cache.root, "marks").unlink()
    assert open_cache().metadata.mark(ORIGIN, "b/x") != mark
    cache._own._look_at = 0.0
    cache.metadata.lookup(ORIGIN, "b/x")
    assert cache.metadata.mark(ORIGIN, "b/x") == open_cache().metadata.mark(ORIGIN, "b/x") != mark


def test_a_write_right_after_the_marks_were_lost_is_seen_with_the_old_ones_and_the_new(cache, open_cache):
    with_old = open_cache()
    before = with_old.metadata.mark(ORIGIN, "b/x")
    assert cache.metadata.mark(ORIGIN, "b/x") == before
    Path(cache.root, "marks").unlink()
    with_new = open_cache()
    new = with_new.metadata.mark(ORIGIN, "b/x")
    cache.metadata.changed(ORIGIN, ["b/x"])
    assert with_old.metadata.mark(ORIGIN, "b/x") != before
    assert with_new.metadata.mark(ORIGIN, "b/x") != new
    assert cache.metadata.mark(ORIGIN, "b/x") == with_new.metadata.mark(ORIGIN, "b/x")


@pytest.mark.parametrize(
    "harm", [lambda path: os.truncate(path, 100), lambda path: path.write_bytes(bytes(528384))]
)
def test_a_damaged_file_of_marks_is_made_anew(cache, open_cache, harm):
    cache.metadata.mark(ORIGIN, "b/x")
    harm(Path(cache.root, "marks"))
    assert open_cache().metadata.mark(ORIGIN, "b/x") == open_cache().metadata.mark(ORIGIN, "b/x") != 0


def test_without_room_the_marks_are_memory_of_this_process(cache, monkeypatch, caplog):
    def full(fd, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "allocate", full)
    before = cache.metadata.mark(ORIGIN, "b/x")
    cache.metadata.changed(ORIGIN, ["b/x"])
    assert cache.metadata.mark(ORIGIN, "b/x") != before
    assert cache._mapped.marks.is_private
    assert not Path(cache.root, "marks").exists()
    assert list(Path(cache.root, "tmp").iterdir()) == []
    assert len([record for record in caplog.records if "cannot be shared" in record.message]) == 1


# Touches
def touches_of(n_slots=1 << 12, **options):
    return AccessStats(None, "", n_slots, **options)


def block(number):
    """Return a hash: blocks of other numbers have other tags and other buckets."""
    return number << 48 | number << 2


def test_a_use_is_remembered_with_its_clock():
    touches = touches_of()
    assert touches.use_of(block(5)) is None
    for number in (5, 6, 5):
        touches.touch(block(number))
    assert touches.use_of(block(5)) == BlockAccess(clock=3, uses=2, is_new=True)
    assert touches.use_of(block(6)) == BlockAccess(clock=2, uses=1, is_new=True)
    assert touches.now == 3
    assert touches.slots[block(5) & 0xFFF] == 5 << 48 | 2 << 32 | 3


def test_a_long_use_of_one_block_is_one_use():
    touches = touches_of()
    for _ in range(100):
        touches.touch(block(5))
    assert (touches.use_of(block(5)).uses, touches.now) == (1, 1)


def test_a_block_that_is_fetched_again_after_it_was_used_is_not_new():
    touches = touches_of()
    for number in (5, 6):
        touches.missed(block(number))
    assert touches.use_of(block(5)) is None
    touches.touch(block(5))
    assert touches.use_of(block(5)).is_new
    touches.missed(block(5))
    touches.touch(block(6))
    touches.touch(block(5))
    assert touches.use_of(block(5)) == BlockAccess(clock=3, uses=2, is_new=False)
    assert touches.use_of(block(6)).is_new


def test_what_passes_through_passes_until_it_is_fetched_again_after_a_use():
    touches = touches_of()
    touches.missed(block(5), passes=True)
    assert touches.use_of(block(5)) == BlockAccess(clock=(1 << 32) - 1, uses=0, is_new=True, passes=True)
    touches.missed(block(5), passes=True)
    touches.touch(block(5))
    assert touches.use_of(block(5)) == BlockAccess(clock=1, uses=1, is_new=True, passes=True)
    touches.missed(block(5), passes=True)
    assert touches.use_of(block(5)) == BlockAccess(clock=1, uses=1, is_new=False, passes=False)


def test_a_first_use_is_no_gap_and_what_fits_by_now_does_not_pass():
    touches = touches_of()
    for number in range(1, 50):
        touches.missed(block(number), passes=True)
    for number in range(1, 50):
        touches.touch(block(number))
    assert touches.longest_gap == 0
    touches.missed(block(60), passes=True)
    touches.missed(block(60))
    assert not touches.use_of(block(60)).passes


def test_counts_stop_at_their_limit_and_the_clock_goes_round():
    touches = touches_of(clock=(1 << 32) - 2)
    for number in (7, 8, 7):
        touches.touch(block(number))
    assert touches.now == 1
    assert touches.age((1 << 32) - 1) == 2
    assert touches.use_of(block(7)).uses == 1, "a round is one of the times when counts are halved"
    touches.slots[block(7) & 0xFFF] |= 0xFF << 32
    touches.touch(block(8))
    touches.touch(block(7))
    assert touches.use_of(block(7)).uses == 255


def test_counts_are_halved_every_so_many_touches():
    touches = touches_of()
    touches.fit(window=5, aging=8)
    for _ in range(20):
        for number in (5, 6):
            touches.touch(block(number))
    assert touches.use_of(block(5)).uses == 20
    others = itertools.cycle((7, 8))
    for _ in range(256):
        touches.touch(block(next(others)))
    assert touches.use_of(block(5)).uses == 10
    for _ in range(256):
        touches.touch(block(next(others)))
    touches.touch(block(5))
    assert touches.use_of(block(5)).uses == 20 // 4 + 1
    for _ in range(10 * 256):
        touches.touch(block(next(others)))
    assert touches.use_of(block(5)).uses == 0


def test_the_longest_gap_is_that_of_this_window_and_the_one_before():
    touches = touches_of()
    touches.fit(window=2, aging=31)
    assert touches.longest_gap == 0
    for number in [5, *range(10, 20), 5]:
        touches.touch(block(number))
    assert touches.longest_gap == 11
    for number in (5, 6) * 20:
        touches.touch(block(number))
    assert touches.longest_gap == 2


def test_four_blocks_share_a_bucket_and_the_fifth_displaces_the_oldest():
    touches = touches_of()
    blocks = [tag << 48 | 16 for tag in range(1, 6)]
    for block in blocks:
        touches.touch(block)
    assert [touches.use_of(block) and touches.use_of(block).clock for block in blocks] == [None, 2, 3, 4, 5]


def test_touches_are_shared(cache, open_cache):
    key, other = key_of(), open_cache()
    put(cache, key, 0)
    before = cache._mapped.open_touches().now
    assert other.read(key, 0, 0, 10) is not None
    assert cache._mapped.open_touches().now == before + 1


def test_the_number_of_touch_records_follows_the_bound():
    assert [touch_slots(size) for size in (None, 0, 4 << 20, 40 << 20, 4 << 30, 1 << 50)] == [
        1 << 16,
        1 << 12,
        1 << 12,
        1 << 15,
        1 << 21,
        1 << 22,
    ]


def test_the_records_of_a_larger_bound_take_the_place_of_too_few(cache, open_cache):
    key = key_of()
    cache.touch(key, 0)
    assert cache._mapped.open_touches().n_slots == 1 << 16
    other = open_cache()
    assert other.read(key, 0, 0, 10) is None
    put(cache, key, 0, bounds=CacheBounds(size=1 << 30, keep_free=0))
    assert cache._mapped.open_touches().n_slots == 1 << 19
    assert cache._mapped.open_touches().now == 1, "the clock goes on"
    put(other, key, 1, bounds=CacheBounds(size=1 << 24, keep_free=0))
    assert other._mapped.open_touches().n_slots == 1 << 19
    assert not other._mapped.open_touches().is_private


# Claims

CLAIMANT = (
    "cache = BlockCache([sys.argv[1]], explicit=True)\n"
    "print(cache.take_lock(7), flush=True)\nsys.stdin.readline()\n"
    "print(cache.take_lock(7), flush=True)\nsys.stdin.readline()\n"
)


def test_a_claim_has_one_owner_at_a_time(cache):
    assert cache.take_lock(7)
    assert not cache.take_lock(7)  # nor does another thread of this process get it
    assert cache.take_lock(8)
    other = start(CLAIMANT, Path(cache.root).parent)
    assert other.stdout.readline() == "False\n"
    cache.release_lock(7)
    cache.release_lock(7)
    print("", file=other.stdin, flush=True)
    assert other.stdout.readline() == "True\n"
    assert not cache.take_lock(7)
    other.kill()
    other.communicate()
    assert cache.take_lock(7)


def test_other_caches_in_the_process_do_not_drop_claims(cache, open_cache):
    assert cache.take_lock(7)
    other = open_cache()
    assert other.take_lock(9)
    put(other, key_of(), 0)
    other.check()
    other.close()
    assert finish(start(CLAIMANT, Path(cache.root).parent), "\n\n") == "False\nFalse\n"


def test_claims_of_all_hashes_are_within_what_kernels_lock(cache):
    assert cache.take_lock((1 << 64) - 1)


def test_without_locks_everybody_may_fetch(cache, monkeypatch, caplog):
    def refuse(fd, offset):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(disk, "lock_byte", refuse)
    assert cache.take_lock(7)
    assert not cache.take_lock(7)
    cache.release_lock(7)
    assert cache.take_lock(7)
    assert len([record for record in caplog.records if "do not work here" in record.message]) == 1


def test_mapped_files_that_were_cut_off_are_let_go_of_when_it_is_noticed():
    """Whoever touches one before is ended by the kernel: so this runs in a process of its own."""
    code = (
        "import tempfile\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    cache = BlockCache([folder], explicit=True)\n"
        "    key = key_of()\n"
        "    put(cache, key, 0)\n"
        "    before = cache.metadata.mark('gs://test', 'b/x')\n"
        "    for name in ('marks', 'touches'): os.truncate(f'{cache.root}/{name}', 100)\n"
        "    cache._own._look_at = 0.0  # a second later\n"
        "    cache.metadata.lookup('gs://test', 'b/x')\n"
        "    assert cache.metadata.mark('gs://test', 'b/x') != before\n"
        "    assert whole(cache, key, 0) == content(key, 0)\n"
        "    assert not cache._mapped.marks.is_private\n"
        "    cache.close()\n"
    )
    finish(start(code))
