"""The SQLite index of the cache: its connections, tables, and the statements on blocks and metadata."""
