"""Registry of this process's engines, one for a cache directory and the shared cache behind it.

They are closed at exit and not used after a fork.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import tempfile
import threading

from cachedfs.cache.disk import is_network
from cachedfs.common.user_folders import found_folder, why_unwritable
from cachedfs.config import Config, SharedOptions
from cachedfs.core.engine import Engine

logger = logging.getLogger("cachedfs.core")

# By the real path of the cache directory, and the shared cache. A forked child starts with none.
_engines: dict[tuple[str, SharedOptions | None], Engine] = {}
_engines_lock = threading.RLock()  # reentrant: a destructor may need an engine
_inherited: list[Engine] = []


def engine_for(config: Config) -> Engine:
    """Return this process's engine for the cache directory and the shared cache of `config`."""
    directory = config.cache_dir[0] if config.cache_dir else _default_directory()
    key = os.path.realpath(directory), config.shared
    engine = _engines.get(key)
    if engine is None:
        with _engines_lock:
            engine = _engines.get(key)
            if engine is None:
                created = Engine(key[0], explicit=config.cache_dir is not None, shared=config.shared)
                engine = _engines.setdefault(key, created)  # a destructor may have added one meanwhile
                _close_with_process()
    return engine


def _default_directory() -> str:
    """Return the user's cache folder; where it cannot be used, the system's temporary folder, with one warning."""
    import platformdirs  # imported lazily: most processes set cache_dir

    directory = found_folder(platformdirs.user_cache_dir)
    if directory is None:
        problem = "this user has no home folder"
    elif is_network(directory):
        problem = f"{directory} is on a network file system"
    elif reason := why_unwritable(directory):
        problem = f"{directory} cannot be written ({reason})"
    else:
        return directory
    try:
        scratch = tempfile.gettempdir()
    except OSError:  # nothing can be written on this machine: nothing is cached, and the cache says why
        return directory or os.path.join(os.sep, "tmp")
    _warn(problem, scratch)
    return scratch


@functools.cache
def _warn(problem: str, scratch: str) -> None:
    logger.warning("%s, so cachedfs caches in %s; set cache_dir= to choose another folder", problem, scratch)


def drain_all() -> None:
    """Wait up to 5 s per engine until received blocks are stored.

    Warnings about storing are then logged.
    """
    for engine in list(_engines.values()):
        engine.drain()


def _close_all() -> None:
    for engine in list(_engines.values()):
        engine.close()
    _engines.clear()


def _close_with_process() -> None:
    """Close the engines when this process ends, if it is a worker of multiprocessing: these skip atexit."""
    if "multiprocessing.process" in sys.modules:
        from multiprocessing import process, util

        if process.parent_process() is not None:
            util.Finalize(None, _close_all, exitpriority=100)


def _after_fork() -> None:
    # Keep the parent's engines, unused and never garbage-collected: their threads do not exist here, and closing their
    # connections would disturb the parent. Only open block files are closed, as they keep disk space occupied.
    global _engines_lock
    _engines_lock = threading.RLock()
    for engine in _engines.values():
        engine.disconnect()
        engine.cache.close_inherited()
    _inherited.extend(_engines.values())
    _engines.clear()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
