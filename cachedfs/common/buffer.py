"""Memory that a read fills."""

from __future__ import annotations

import ctypes
import io
import os
import sys

_LARGE = 4 << 20  # bytes from which on NumPy, too, asks for huge pages
_HUGE_PAGES = 14  # MADV_HUGEPAGE of Linux


def zeros(size: int) -> io.BytesIO:
    """Return a buffer of `size` bytes. Its `getvalue` does not copy, once no view of it is left.

    A large one is to have huge pages, where Linux leaves that to programs: it is filled in half the time, as most of that
    goes into making pages of 4 KiB.
    """
    data = bytes(size)  # the kernel makes the zeros, at the first use
    if size >= _LARGE and sys.platform == "linux":
        _use_huge_pages(data)
    return io.BytesIO(data)


def _use_huge_pages(data: bytes) -> None:
    address_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))
    advise = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    start = address_of(data)
    skipped = -start % os.sysconf("SC_PAGE_SIZE")
    # Whether the advice is taken or not, the bytes are the same.
    advise(("madvise", ctypes.CDLL(None)))(start + skipped, len(data) - skipped, _HUGE_PAGES)
