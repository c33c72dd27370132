"""Exit statuses of the command line. 0 is success; typer exits with 2 on wrong usage."""

__all__ = ["FAILED", "INTERRUPTED", "PIPE_CLOSED"]

FAILED, INTERRUPTED, PIPE_CLOSED = 1, 130, 141
