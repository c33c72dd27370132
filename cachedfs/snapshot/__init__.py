"""Cached blocks, and what is known of their objects, as a few large objects: to another machine, or past the end of this one.

`Export` writes them, `Import` takes them in. docs/cache-format.md has their bytes. They come from elsewhere: nothing of them
is believed before its checksum was right, nothing in them is a file name, and every length in them is bounded.
"""

from cachedfs.snapshot.export import Export
from cachedfs.snapshot.import_ import Import

__all__ = ["Export", "Import"]
