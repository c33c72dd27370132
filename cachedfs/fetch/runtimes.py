"""The engines of this process: one per cache directory, closed with the process, and left behind by a fork."""

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

__all__ = ["engine_for", "settle"]

logger = logging.getLogger("cachedfs.engine")

# One engine per (real paths of the cache directories); a child process starts with none.
_engines: dict[tuple[str, ...], Runtime] = {}
_engines_lock = threading.RLock()  # entered itself, by a signal's handler that reads
_inherited: list[Runtime] = []
_warned = False


def engine_for(config: Config) -> Runtime:
    """Return this process's engine for the cache directories of `config`."""
    directories = config.cache_dir or (_default_directory(),)
    key = tuple(os.path.realpath(path) for path in directories)
    engine = _engines.get(key)
    if engine is None:
        with _engines_lock:
            engine = _engines.get(key)
            if engine is None:
                made = Runtime(key, explicit=config.cache_dir is not None)
                engine = _engines.setdefault(key, made)  # a signal's handler that read meanwhile made one
                _close_with_process()
    return engine


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
    for engine in list(_engines.values()):
        engine.drain()


def _close_all() -> None:
    global _closing_in
    _closing_in = None  # an engine that is made after this is closed as well
    for engine in list(_engines.values()):
        engine.close()
    _engines.clear()


_closing_in: int | None = None  # the process that will close its engines at its end
_at_exit = False


def _close_with_process() -> None:
    """Close the engines when this process ends: also a worker of multiprocessing, which skips atexit."""
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
    # The parent's engines are not touched again, nor ever collected: their threads do not exist here, and closing their
    # connections and descriptors would act on what the parent still uses; but for those of blocks, which hold room on the disk.
    global _engines_lock
    _engines_lock = threading.RLock()
    for engine in _engines.values():
        engine.cache.leave()
    _inherited.extend(_engines.values())
    _engines.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
