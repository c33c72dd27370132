"""A cache that several machines or users share, behind the local one: immutable files in a folder.

`SharedCache` is the entry point: an engine reads what the local cache lacks from it before it asks the origin, and gives
it what came from the origin. Nothing runs between the machines, and nothing here is locked. What is read is untrusted:
it is used after its checksum and its key match, no name in it becomes a file name, and every length in it is bounded.
"""

from cachedfs.shared.shared_cache import SharedCache
from cachedfs.shared.shared_reads import SharedReply

__all__ = ["SharedCache", "SharedReply"]
