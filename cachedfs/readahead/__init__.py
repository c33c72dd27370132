"""Readahead: predict the next reads from access patterns, and fetch them in the background."""
