"""Imported by child processes of tests: waits for the index, a shared folder and readers of a request are longer.

So a busy machine changes no exact counts.
"""

from cachedfs.cache.index import database
from cachedfs.core import downloads
from cachedfs.shared.shared_store import SharedPlace

database._WRITER_WAIT_S = 60.0
downloads.PATIENCE_S = 60.0
SharedPlace.answers_s = 60.0
