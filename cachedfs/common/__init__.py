"""TODO: common."""
