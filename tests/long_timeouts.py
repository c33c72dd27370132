"""For processes of tests to import: they wait for one another's writes to the index, and requests for who reads on,
however long the machine pauses.
"""

from cachedfs.cache.index import database
from cachedfs.fetch import fetcher

database._WRITER_WAIT_S = 60.0
fetcher.PATIENCE_S = 60.0
