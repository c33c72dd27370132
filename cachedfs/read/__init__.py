"""Reading objects: cached reads, fetching reads, open files and verification of blocks."""
