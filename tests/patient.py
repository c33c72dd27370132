"""For processes of tests to import: they wait for one another's writes to the index, however long the machine pauses."""

from cachedfs.cache import database

database._WRITER_WAIT_S = 60.0
