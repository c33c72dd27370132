"""The `Loader` and its parts."""
