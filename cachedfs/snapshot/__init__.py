"""Export cached blocks and metadata as a few large objects, and import them into another cache.

`Export` writes them and `Import` reads them; docs/cache-format.md describes the bytes. Imported data is untrusted: it
is used only after its checksum matches, no name in it becomes a file name, and every length in it is bounded.
"""

from cachedfs.snapshot.export import Export
from cachedfs.snapshot.import_ import Import

__all__ = ["Export", "Import"]
