"""The core: what a path is, downloads, reads, open files, and storing what came."""
