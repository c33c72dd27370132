"""The demo: read simulated clouds with and without cachedfs, and compare the times."""
