"""TODO: index."""
