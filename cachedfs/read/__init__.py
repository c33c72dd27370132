"""Reading objects: cached reads, reads with fetches, open files and verification of cached blocks."""
