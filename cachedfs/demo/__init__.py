"""The demo: simulated clouds read with and without cachedfs, side by side."""
