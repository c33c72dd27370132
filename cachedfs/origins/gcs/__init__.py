"""TODO: gcs."""
