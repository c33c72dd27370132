"""Google Cloud Storage as an origin."""
