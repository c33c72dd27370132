"""TODO: readahead."""
