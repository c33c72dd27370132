"""Forks and threads: a child opens its own connections, handles and locks."""

import gc
import itertools
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cachedfs.cache.index import database
from cachedfs.cache.index.database import CacheIndex, _after_fork_in_child
from cachedfs.cache.locks import ByteRangeLocks
from tests.cache.helpers import finish, key_of, put, start

FORKER = """
from cachedfs.cache.index.metadata_records import MetadataRecord
def used(cache, n):
    key = key_of()
    put(cache, key, n)
    assert whole(cache, key, 0) == content(key, 0)
    assert whole(cache, key, n) == content(key, n)
    cache.metadata.keep_records([MetadataRecord('gs://test', f'b/{n}', None, 1e12, 1)])
    assert cache.metadata.lookup('gs://test', f'b/{n}') is not None
cache = BlockStore(sys.argv[1], explicit=True)
used(cache, 0)
assert cache.locks.take(7)
children = []
for n in range(1, 3):
    pid = os.fork()
    if pid == 0:
        assert not cache.locks.take(7)
        assert cache.locks.holder(7) == os.getppid()
        assert cache.locks.take(100 + n)
        used(cache, n)
        sys.exit(0)
    children.append(pid)
    used(cache, 10 + n)
for pid in children:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert not cache.locks.take(7) and cache.locks.take(101)
assert (cache.locks.holder(7), cache.locks.holder(8)) == (os.getpid(), None)
used(cache, 20)
print(cache.usage()[0], audit(cache).ok)
"""


def test_parent_and_children_go_on_after_a_fork_with_everything_open(cache):
    assert finish(start(FORKER, Path(cache.root).parent)) == "6 True\n"


def test_a_fork_in_the_middle_of_a_transaction_harms_nobody(cache):
    """A thread holds the index while another forks: the child leaves that connection alone and opens its own."""
    code = (
        "import threading\n"
        "from cachedfs.cache.index import database\n"
        "database._FORK_WAIT_S = 0.05\n"
        "cache = BlockStore(sys.argv[1], explicit=True)\n"
        "put(cache, key_of(), 0)\n"
        "holding, done = threading.Event(), threading.Event()\n"
        "def hold():\n"
        "    with cache._own.index.reading() as rows:\n"
        "        holding.set(); done.wait()\n"
        "thread = threading.Thread(target=hold); thread.start(); holding.wait()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    ok = cache.usage()[0] == 1 and whole(cache, key_of(), 0) == content(key_of(), 0)\n"
        "    put(cache, key_of(), 1)\n"
        "    os._exit(0 if ok else 1)\n"
        "status = os.waitpid(pid, 0)[1]\n"
        "done.set(); thread.join()\n"
        "assert status == 0\n"
        "put(cache, key_of(), 2)\n"
        "print(cache.usage()[0], audit(cache).ok)\n"
    )
    assert finish(start(code, Path(cache.root).parent)) == "3 True\n"


def test_a_child_neither_closes_nor_uses_an_inherited_connection(cache):
    put(cache, key_of(), 0)
    inherited = cache._own.index._idle[-1].sqlite
    _after_fork_in_child()
    assert cache._own.index._idle == []
    assert inherited.execute("SELECT 1").fetchone() == (1,)  # still open: nobody closed it
    put(cache, key_of(), 1)
    assert cache._own.index._idle[-1].sqlite is not inherited
    inherited.close()


def is_interrupted(n, act, function):
    """Call `act` with an interrupt after the nth call that `function` makes of C; return whether there were so many."""
    left = n

    def profile(frame, event, arg):
        nonlocal left
        if event == "c_return" and frame.f_code is function.__code__:
            left -= 1
            if not left:
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.fixture
def lost_connections():
    """Collect the connections that an interrupt took from their users: Python 3.13 warns of each, here and not later."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


@pytest.mark.usefixtures("lost_connections")
def test_ctrl_c_anywhere_in_a_transaction_locks_nobody_out(cache):
    put(cache, key_of(), 0)

    def act():
        cache.pin("gs://test", "b/x")
        cache.pins()

    for n in itertools.count(1):
        go_on = is_interrupted(n, act, CacheIndex.reading.__wrapped__)
        with ThreadPoolExecutor(1) as another:
            another.submit(cache.pin, "gs://test", "b/y").result()
        assert not database._IN_USE
        if not go_on:
            break
    assert n > 5


def test_ctrl_c_anywhere_in_taking_or_releasing_locks_leaves_none(cache):
    locks = cache.locks
    for n in itertools.count(1):
        if not is_interrupted(n, lambda: locks.take(5, 3), ByteRangeLocks.take):
            break
        assert locks.take(5, 3) == 3
        for number in range(5, 8):
            locks.release(number)
    assert n > 3
    for n in itertools.count(1):
        go_on = is_interrupted(n, lambda: locks.release(5), ByteRangeLocks.release)
        locks.release(5)  # it was interrupted before it began
        assert locks.take(5)
        if not go_on:
            break
    assert n > 3
