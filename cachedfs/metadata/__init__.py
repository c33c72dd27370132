"""Object and folder metadata: lookups, listings, change feeds and the stale fallback."""
