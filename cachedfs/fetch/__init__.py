"""TODO: fetch."""
