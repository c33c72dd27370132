"""Samples of Zarr and ragged arrays: chunk layout, reading and decoding."""
