"""Google Drive: sign-in, names, reading and writing, as an origin and as the fsspec filesystem `drive://`."""
