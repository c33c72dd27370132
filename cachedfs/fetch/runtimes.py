"""The runtimes of this process: one per cache directory, closed with the process, and left behind by a fork."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import tempfile
import threading

from cachedfs.cache.disk import is_network
from cachedfs.config import Config
from cachedfs.fetch.runtime import Runtime

__all__ = ["runtime_for", "settle"]

logger = logging.getLogger("cachedfs.fetch")

# One runtime per (real paths of the cache directories); a child process starts with none.
_runtimes: dict[tuple[str, ...], Runtime] = {}
_runtimes_lock = threading.RLock()  # entered itself, by a signal's handler that reads
_inherited: list[Runtime] = []
_warned = False


def runtime_for(config: Config) -> Runtime:
    """Return this process's runtime for the cache directories of `config`."""
    directories = config.cache_dir or (_default_directory(),)
    key = tuple(os.path.realpath(path) for path in directories)
    runtime = _runtimes.get(key)
    if runtime is None:
        with _runtimes_lock:
            runtime = _runtimes.get(key)
            if runtime is None:
                made = Runtime(key, explicit=config.cache_dir is not None)
                runtime = _runtimes.setdefault(key, made)  # a signal's handler that read meanwhile made one
                _close_with_process()
    return runtime


def _default_directory() -> str:
    import platformdirs  # here: most processes name their cache_dir, or have it configured

    global _warned
    directory = platformdirs.user_cache_dir()
    if not is_network(directory):
        return directory
    scratch = tempfile.gettempdir()
    if not _warned:
        _warned = True
        logger.warning(
            "%s is on a network file system: cachedfs caches in %s; cache_dir= chooses", directory, scratch
        )
    return scratch


def settle() -> None:
    """Wait until what was read is stored, 5 s at most: what is wrong with that is said by then."""
    for runtime in list(_runtimes.values()):
        runtime.drain()


def _close_all() -> None:
    global _closing_in
    _closing_in = None  # an runtime that is made after this is closed as well
    for runtime in list(_runtimes.values()):
        runtime.close()
    _runtimes.clear()


_closing_in: int | None = None  # the process that will close its runtimes at its end
_at_exit = False


def _close_with_process() -> None:
    """Close the runtimes when this process ends: also a worker of multiprocessing, which skips atexit."""
    global _closing_in, _at_exit
    if _closing_in == os.getpid():
        return
    if not _at_exit:
        _at_exit = True
        atexit.register(_close_all)
    _closing_in = os.getpid()
    if "multiprocessing.process" in sys.modules:
        from multiprocessing import process, util

        if process.parent_process() is not None:
            util.Finalize(None, _close_all, exitpriority=100)


def _after_fork() -> None:
    # The parent's runtimes are not touched again, nor ever collected: their threads do not exist here, and closing their
    # connections and descriptors would act on what the parent still uses; but for those of blocks, which hold room on the disk.
    global _runtimes_lock
    _runtimes_lock = threading.RLock()
    for runtime in _runtimes.values():
        runtime.cache.leave()
    _inherited.extend(_runtimes.values())
    _runtimes.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
