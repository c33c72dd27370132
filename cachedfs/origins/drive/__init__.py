"""Google Drive: sign-in, paths, reads and writes, as an origin and as the fsspec filesystem `drive://`."""
