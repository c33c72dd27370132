"""Fetching from the origin: in-flight requests, the fetch queue, the cache writer and the process runtime."""
