"""A read-only S3 endpoint over the filesystem, for programs that take neither fsspec nor paths."""
