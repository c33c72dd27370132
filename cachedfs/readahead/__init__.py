"""Predict the next reads from access patterns, without I/O. `cachedfs.core.readahead` requests them."""
