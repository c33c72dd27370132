"""Imports in threads while a process forks: a child never inherits a half-imported module."""

import json
import threading

import fsspec

from cachedfs.common import optional_imports

# Fails if a thread other than the main one imports a module while a fork could happen.
IMPORTS = """
import json, sys, threading
from cachedfs.common import optional_imports
class Finder:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is not threading.main_thread() and not optional_imports._lock._is_owned():
            unheld.append(name)
unheld = []
sys.meta_path.insert(0, Finder())
import fsspec
fsspec.config.conf.update(json.loads(sys.argv[1]))
fsspec.filesystem("memory").pipe("/data/a", b"1")
for url in sys.argv[2:]:
    fs, path = fsspec.url_to_fs(url)
    assert fs.cat_file(path) == b"1"
    fs.ls(fs._parent(path))
    fs.pipe_file(f"{path}.new", b"2")
    with fs.open(f"{path}.new", "wb") as file:
        file.write(b"3")
    fs.prefetch([f"{path}.new"]).wait()
    fs.rm(f"{path}.new")
print(unheld)
"""

# Forks while another thread, on its first read, is importing a module.
FORK = """
import fsspec, os, signal, sys, threading, warnings
from importlib.machinery import PathFinder
warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)  # Python 3.12 warns where threads are
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "gcsfs.core" and threading.current_thread() is not threading.main_thread():
            spec = PathFinder.find_spec(name, path)
            run = spec.loader.exec_module
            def exec_module(module):
                begun.set()
                assert forking.wait(120)
                run(module)
            spec.loader.exec_module = exec_module
            return spec
begun, forking = threading.Event(), threading.Event()
sys.meta_path.insert(0, Finder())
fs, path = fsspec.url_to_fs(sys.argv[1])
reader = threading.Thread(target=fs.cat_file, args=[path])
reader.start()
assert begun.wait(120)
os.register_at_fork(before=forking.set)  # the last that is registered is called first
pid = os.fork()
if pid == 0:
    signal.alarm(300)
    os._exit(fs.cat_file(f"{path}.other") != b"2")
reader.join()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_no_thread_imports_while_a_fork_could_happen(cloud, drive):
    for machine in (cloud, drive):
        machine.put("data/a", b"1")
    conf = {name: fsspec.config.conf[name] for name in ("gs", "drive")}
    urls = [cloud.url("data/a", "cgs://"), drive.url("data/a"), "cachedfs::memory://data/a"]
    assert cloud.python(IMPORTS, json.dumps(conf), *urls) == "[]\n"


def test_a_child_forked_during_the_first_read_of_another_thread_can_read(cloud):
    cloud.put("a", b"1")
    cloud.put("a.other", b"2")
    assert cloud.python(FORK, cloud.url("a", "cgs://")) == "0\n"


def test_forks_continue_after_an_import_and_after_a_wait_that_timed_out(monkeypatch):
    with optional_imports.importing():
        optional_imports._before_fork()
        optional_imports._after_fork_in_parent()
        assert optional_imports._lock._is_owned()
    assert not optional_imports._lock._is_owned()
    monkeypatch.setattr(optional_imports, "_MAX_WAIT_S", 0.0)
    is_held, is_over = threading.Event(), threading.Event()

    def hold():
        with optional_imports.importing():
            is_held.set()
            is_over.wait(120)

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(120)
    optional_imports._before_fork()
    optional_imports._after_fork_in_parent()
    is_over.set()
    holder.join()
    optional_imports._before_fork()
    assert optional_imports._lock._is_owned()
    optional_imports._after_fork_in_parent()
