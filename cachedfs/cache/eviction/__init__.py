"""Eviction: which blocks leave the cache when it needs space, and which new blocks it keeps."""
