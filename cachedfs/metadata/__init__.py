"""TODO: metadata."""
