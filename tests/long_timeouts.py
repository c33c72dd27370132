"""Imported by child processes of tests: waits for the index, and for readers of a request, are longer.

So a busy machine changes no exact counts.
"""

from cachedfs.cache.index import database
from cachedfs.core import downloads

database._WRITER_WAIT_S = 60.0
downloads.PATIENCE_S = 60.0
