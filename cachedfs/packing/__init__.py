"""Packing: many files, lines, rows or members of archives into one sharded Zarr store. The door is `pack`.

A plan is made from a listing and some samples (`plan`, with `sizes`). `run` hands out the work: `job.measure` finds out what
is in a piece of the source, `job.write` makes one shard, which is one object. `store` is where they go.
"""

from cachedfs.packing.api import Packed, Packing, pack

__all__ = ["Packed", "Packing", "pack"]
