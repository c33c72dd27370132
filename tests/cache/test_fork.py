"""Forks, threads, signals: connections, handles and claims of the parent are not the child's, and nobody waits for himself."""

import os
import threading
from pathlib import Path

import pytest

from cachedfs.cache import Fact, database
from cachedfs.cache.database import _after_fork_in_child
from tests.cache.helpers import content, finish, key_of, put, start, whole
from tests.support import until

FORKER = """
from cachedfs.cache import Fact
def used(cache, n):
    key = key_of()
    put(cache, key, n)
    assert whole(cache, key, 0) == content(key, 0)
    assert whole(cache, key, n) == content(key, n)
    cache.known.keep_facts([Fact('gs://test', f'b/{n}', None, 1e12, 1)])
    assert cache.known.lookup('gs://test', f'b/{n}') is not None
cache = BlockCache([sys.argv[1]], explicit=True)
used(cache, 0)
assert cache.take_claim(7)
children = []
for n in range(1, 5):
    pid = os.fork()
    if pid == 0:
        assert not cache.take_claim(7)
        assert cache.take_claim(100 + n)
        used(cache, n)
        sys.exit(0)
    children.append(pid)
    used(cache, 10 + n)
for pid in children:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert not cache.take_claim(7) and cache.take_claim(101)
used(cache, 20)
print(cache.usage()[0], cache.check().ok)
"""


def test_parent_and_children_go_on_after_a_fork_with_everything_open(cache):
    assert finish(start(FORKER, Path(cache.root).parent)) == "10 True\n"


def test_a_fork_in_the_middle_of_a_transaction_harms_nobody(cache):
    """A thread holds the index while another forks: the child leaves that connection alone and opens its own."""
    code = (
        "import threading\n"
        "from cachedfs.cache import database\n"
        "database._FORK_WAIT_S = 0.05\n"
        "cache = BlockCache([sys.argv[1]], explicit=True)\n"
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
        "print(cache.usage()[0], cache.check().ok)\n"
    )
    assert finish(start(code, Path(cache.root).parent)) == "3 True\n"


def test_a_child_neither_closes_nor_uses_an_inherited_connection(cache):
    put(cache, key_of(), 0)
    inherited = cache._own.index.database._writer.sqlite
    _after_fork_in_child()
    assert cache._own.index.database._writer.sqlite is None
    assert inherited.execute("SELECT 1").fetchone() == (1,)  # still open: nobody closed it
    put(cache, key_of(), 1)
    assert cache._own.index.database._writer.sqlite is not inherited
    inherited.close()


SIGNALLED = """
import signal, threading
from cachedfs.cache import Fact, disk
from cachedfs.errors import CacheError
cache, key = BlockCache([sys.argv[1]], explicit=True), key_of()
put(cache, key, 0)
cache.known.keep_facts([Fact('gs://test', 'b/1', None, 1e12, 1)])
asked = []

def ask():
    assert cache.known.lookup('gs://test', 'b/1') is not None
    assert whole(cache, key, 0) == content(key, 0)
    assert cache.take_claim(9)
    cache.drop_claim(9)
    asked.append(threading.current_thread())

def handler(*_):
    other = threading.Thread(target=ask, daemon=True)  # as our loop, which a handler that reads waits for
    other.start()
    other.join(300)
    ask()

def interrupted(where):
    signal.raise_signal(signal.SIGTERM)
    assert len(asked) == 2, where
    asked.clear()

signal.signal(signal.SIGTERM, handler)
with cache._own.index.reading() as rows:
    interrupted('a lookup')
    assert rows.lookup('gs://test', 'b/1') is not None
with cache._own.index.writing() as rows:
    interrupted('a write')
    try:
        put(cache, key, 1)
    except CacheError as error:
        assert 'in the middle of writing' in str(error)
    rows.pin('gs://test', 'b/1', True)
assert cache.pins() == [('gs://test', 'b/1')]

lock = disk.lock_byte
def locked(*byte):
    disk.lock_byte = lock
    interrupted('a claim')
    return lock(*byte)
disk.lock_byte = locked
assert cache.take_claim(7)
assert not cache.take_claim(7)
cache.drop_claim(7)
put(cache, key, 2)
assert len(cache._own.index.database.slots()) == 2
print(cache.usage()[0], cache.check().ok)
"""


def test_a_signal_s_handler_waits_for_nothing_that_it_interrupted(cache):
    assert finish(start(SIGNALLED, Path(cache.root).parent)) == "2 True\n"


def test_ctrl_c_when_a_transaction_has_just_begun_locks_nobody_out(open_cache, monkeypatch):
    cache, other = open_cache(), open_cache()
    put(cache, key_of(), 0)
    put(other, key_of(), 1)
    patiently = database._patiently

    def interrupted(do):
        patiently(do)
        monkeypatch.setattr(database, "_patiently", patiently)
        raise KeyboardInterrupt

    monkeypatch.setattr(database, "_patiently", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.pin("gs://test", "b/x")
    put(other, key_of(), 2)
    cache.pin("gs://test", "b/y")
    assert cache.pins() == [("gs://test", "b/y")]


def test_nobody_opens_a_connection_while_a_fork_waits_for_the_others(cache, monkeypatch):
    """It would be open in the child, which may neither use nor close it: who reads waits until the fork is over."""
    monkeypatch.setattr(database, "_FORK_WAIT_S", 60.0)
    put(cache, key_of(), 0)
    shared, step = cache._own.store._index.database, threading.Event()
    is_written, is_forked, found = threading.Event(), threading.Event(), []

    def write():
        with shared.writing():
            is_written.set()
            step.wait(120)

    def fork():
        database._before_fork()
        try:
            is_forked.set()
            found.append([slot for slot in shared.slots() if slot.sqlite is not None])
        finally:
            database._after_fork_in_parent()

    def read():
        with shared.reading() as connection:
            found.append(is_forked.is_set())
            connection.execute("SELECT 1")

    threads = [threading.Thread(target=each) for each in (write, fork, read)]
    threads[0].start()
    is_written.wait(120)
    threads[1].start()
    until(lambda: database._FORKING)  # the reading connection: it waits for the writing one
    threads[2].start()
    threads[2].join(4 * database._READER_WAIT_S)
    step.set()
    for each in threads:
        each.join(600)
    assert found == [[], True]


def test_threads_that_fork_at_once_take_turns(cache, monkeypatch):
    """Else one gives back what the other has locked, and who reads next waits for ever."""
    monkeypatch.setattr(database, "_FORK_WAIT_S", 0.05)
    put(cache, key_of(), 0)
    shared, errors = cache._own.store._index.database, []

    def fork():
        try:
            database._before_fork()
            database._after_fork_in_parent()
        except RuntimeError as error:
            errors.append(error)

    database._before_fork()
    other = threading.Thread(target=fork)
    other.start()
    other.join(1.0)
    assert other.is_alive()  # it waits for this one
    database._after_fork_in_parent()
    other.join(600)
    assert not errors
    for slot in shared.slots():
        assert slot.lock.acquire(blocking=False)
        slot.lock.release()


def test_a_further_connection_is_closed_where_a_fork_would_wait_for_it(cache, monkeypatch):
    """In the middle of it a child would inherit what SQLite has locked."""
    put(cache, key_of(), 0)
    shared, close, is_free = cache._own.store._index.database, database._Connection.close, []

    def closed(slot):
        if slot in shared._further and slot.sqlite is not None:
            thread = threading.Thread(target=lambda: is_free.append(slot.lock.acquire(blocking=False)))
            thread.start()
            thread.join()
        close(slot)

    monkeypatch.setattr(database._Connection, "close", closed)
    with shared.reading(), shared.reading() as further:  # as a signal's handler that reads
        assert further.execute("SELECT 1").fetchone() == (1,)
    assert is_free == [False]
    assert not shared._further


def test_threads_share_a_cache(cache):
    """Eight threads read, put, evict and learn at once: every read is right or a miss."""
    key, wrong, start_together = key_of(), [], threading.Barrier(8)

    def work(me):
        start_together.wait()
        for n in range(60):
            index = (n * 7 + me * 3) % 20
            data = whole(cache, key, index)
            if data is None:
                put(cache, key, index)
            elif data != content(key, index):
                wrong.append(index)
            if n % 20 == me:
                cache.evict(key.identity, key.path)
            cache.known.keep_facts([Fact("gs://test", f"b/{index}", None, float(n), 1)])
            cache.known.lookup("gs://test", f"b/{index}")

    threads = [threading.Thread(target=work, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cache.check().ok
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else pytest.skip("no /proc")
    n_handles = len(cache._handles._idle)
    cache._handles.close_all()
    assert len(os.listdir("/proc/self/fd")) == before - n_handles  # no descriptor was lost
