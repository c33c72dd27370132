"""For processes of tests to import: they wait for one another's writes to the index, and requests for who reads on,
however long the machine pauses.
"""

from cachedfs import fetcher
from cachedfs.cache import database

database._WRITER_WAIT_S = 60.0
fetcher.PATIENCE_S = 60.0
