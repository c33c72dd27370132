"""Packing in a process that kills itself at the n-th write."""

import os
import signal

from cachedfs.datasets import pack
from cachedfs.packing import runner, store
from cachedfs.packing.sources import sample_source

SMALL = {"chunk_bytes": "4KiB", "shard_bytes": "16KiB"}


def pack_and_die(source, target, number, when, options):
    """Pack, and die at the n-th write of an object: `before`, `within` (local files) or `after` it.

    The progress is stored after each file.
    """
    sample_source.PER_PART = 1
    put, left = store.ZarrTarget.put, [number]

    def deadly(self, name, data):
        left[0] -= 1
        if not left[0] and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if not left[0] and when == "within":
            self.fs.mv = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
        put(self, name, data)
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    store.ZarrTarget.put = deadly
    runner.SAVED_S = 0.0
    pack(source, target, n_workers=1, storage_options=options, target_options=options, **SMALL)
