"""Request budgets: numbers that all processes of a machine share."""

import os
import struct
from pathlib import Path

import pytest

from cachedfs.cache import counters
from cachedfs.cache.counters import N_NUMBERS, _File
from tests.cache.faults import replace_call
from tests.cache.helpers import finish, start

ACCOUNT = "drive|www.googleapis.com|auth|requests"


def add(record, n=1.0):
    """Add to the first number and return what it is then."""
    return record.change(lambda numbers: ((numbers[0] + n, *numbers[1:]), numbers[0] + n))


def test_all_processes_count_in_one_record(cache):
    code = f"""
from cachedfs.cache import counters
counters._TURNS = 10**6  # a process that the system puts aside is waited for
cache = BlockCache([sys.argv[1]], explicit=True)
record = cache.budget({ACCOUNT!r})
print("ready", flush=True)
sys.stdin.readline()
def step(numbers):
    os.sched_yield()  # to the others
    return (numbers[0] + 1, *numbers[1:]), None
for _ in range(100):
    record.change(step)
"""
    add(cache.budget(ACCOUNT), 7)
    children = [start(code, Path(cache.root).parent) for _ in range(2)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    for child in children:
        finish(child)
    assert add(cache.budget(ACCOUNT), 0) == 207


def test_what_was_counted_is_there_in_a_later_process(cache, open_cache):
    add(cache.budget(ACCOUNT), 2.5)
    cache.close()
    assert add(open_cache().budget(ACCOUNT), 0) == 2.5


def test_a_cache_that_is_closed_while_another_thread_looks_at_a_record_is_no_error(cache, monkeypatch):
    record = cache.budget(ACCOUNT)
    add(record)
    is_current = _File.is_current
    monkeypatch.setattr(_File, "is_current", lambda file: (cache.close(), is_current(file))[1])
    monkeypatch.setattr(counters, "_LOOK_S", 0.0)  # who comes again looks
    assert [add(record), add(record)] == [2, 3]


def test_accounts_have_records_of_their_own(cache):
    accounts = [f"account {i}" for i in range(10)]
    for i, account in enumerate(accounts):
        add(cache.budget(account), i + 1)
    assert [add(cache.budget(account), 0) for account in accounts] == list(range(1, 11))
    for i in range(1000):  # more than there is room for: some are forgotten, and none gets another's numbers
        assert add(cache.budget(f"more {i}"), 1) == 1


def test_a_process_that_is_slow_or_dies_in_the_middle_holds_nobody_up(cache):
    code = f"""
cache = BlockCache([sys.argv[1]], explicit=True)
cache.budget({ACCOUNT!r}).change(lambda numbers: (print("in", flush=True), sys.stdin.read()))
"""
    add(cache.budget(ACCOUNT), 3)
    with start(code, Path(cache.root).parent) as child:
        assert child.stdout.readline() == "in\n"
        assert add(cache.budget(ACCOUNT)) == 4
        child.kill()
        child.communicate()
    assert add(cache.budget(ACCOUNT)) == 5


def test_what_a_step_raises_changes_nothing_and_frees_the_record(cache):
    add(cache.budget(ACCOUNT), 3)

    def fail(numbers):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cache.budget(ACCOUNT).change(fail)
    assert add(cache.budget(ACCOUNT)) == 4


@pytest.mark.parametrize("damage", [b"", b"x", bytes(8192), b"cfsbudg1" + bytes(100)])
def test_a_damaged_file_is_made_anew(cache, open_cache, damage):
    add(cache.budget(ACCOUNT), 3)
    Path(cache.root, "budgets").unlink()
    Path(cache.root, "budgets").write_bytes(damage)
    assert add(open_cache().budget(ACCOUNT), 1) == 1


def test_any_numbers_may_come_and_are_given_as_they_are(cache, open_cache):
    add(cache.budget(ACCOUNT), 3)
    path = Path(cache.root, "budgets")
    data = bytearray(path.read_bytes())
    record = data.index(struct.pack("=d", 3.0)) - 8
    data[record + 8 : record + 8 * (1 + N_NUMBERS)] = os.urandom(8 * N_NUMBERS)
    path.write_bytes(data)
    numbers = open_cache().budget(ACCOUNT).change(lambda numbers: (numbers, numbers))
    assert len(numbers) == N_NUMBERS


def test_a_deleted_file_is_left_for_the_one_that_others_have(cache, open_cache, monkeypatch):
    import time

    other = open_cache()
    add(cache.budget(ACCOUNT))
    add(other.budget(ACCOUNT))
    Path(cache.root, "budgets").unlink()
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 2)
    assert add(cache.budget(ACCOUNT)) == 1
    assert add(other.budget(ACCOUNT)) == 2


@pytest.mark.parametrize("call", ["create", "allocate", "write_all", "os.link", "map_file"])
def test_without_a_file_a_process_counts_for_itself(cache, monkeypatch, call):
    def fail(*args):
        raise OSError(28, "no room")

    replace_call(monkeypatch, call, fail)
    if call == "os.link":
        replace_call(monkeypatch, "os.rename", fail)
    assert add(cache.budget(ACCOUNT)) == 1
    assert add(cache.budget(ACCOUNT)) == 2
    assert not list(Path(cache.root, "tmp").iterdir())


def test_without_a_directory_a_process_counts_for_itself_and_with_its_children(open_cache, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    cache = open_cache(tmp_path / "file" / "c", explicit=False)
    record = cache.budget(ACCOUNT)
    assert add(record) == 1
    pid = os.fork()
    if not pid:
        add(record)
        os._exit(0)
    os.waitpid(pid, 0)
    assert add(record) == 3
