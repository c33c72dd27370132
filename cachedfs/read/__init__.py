"""TODO: read."""
