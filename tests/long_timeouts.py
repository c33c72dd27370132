"""Imported by child processes of tests: waits for the index, a shared folder and readers of a request are longer.

So a busy machine changes no exact counts.
"""

from cachedfs.cache.index import database
from cachedfs.core import downloads
from cachedfs.shared import shared_bucket, shared_cache, shared_writer

database._WRITER_WAIT_S = 60.0
downloads.PATIENCE_S = 60.0
shared_bucket.ANSWERS_S = shared_cache.ANSWERS_S = shared_writer.EXIT_S = 60.0
