"""Fetching from the origin: in-flight requests, fetch queue, cache writer, process runtime."""
