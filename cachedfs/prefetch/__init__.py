"""TODO: prefetch."""
