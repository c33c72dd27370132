"""Samples of arrays: Zarr chunk layout, reading and decoding."""
