"""A read-only S3 endpoint over the filesystem: `cachedfs serve`, for programs that take neither fsspec nor paths."""
