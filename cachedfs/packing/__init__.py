"""Pack many files, lines, rows or tar members into one sharded Zarr store, with `pack`.

`layout` plans the arrays from a listing and some samples. `runner` schedules the work:
`PackTask.count` counts the samples in a piece of the source, and `PackTask.write` writes one shard as one object.
"""

from cachedfs.packing.packing import Packed, Packing, pack

__all__ = ["Packed", "Packing", "pack"]
