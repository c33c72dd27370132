"""Detect what h5py cannot read, or misreads, through a file object instead of a path."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np

__all__ = ["elsewhere", "unreadable"]

SOFT = 64  # soft links followed for one name; links may form a cycle, and HDF5 itself follows 16


def unreadable(data: Any) -> str:
    """Return what h5py cannot read in a dataset and what to do; "" if nothing.

    The text is the end of an error message. Variable-length rows in a foreign byte order: h5py 3 returns wrong numbers
    without an error. Virtual datasets over other files: HDF5 would open those through the file object of this file,
    which kills the process.
    """
    base = h5py.check_vlen_dtype(data.dtype)
    if isinstance(base, np.dtype) and not base.isnative:
        return (
            f"has rows of their own lengths of {base}, whose bytes h5py takes for those of other numbers; "
            "write it with the byte order of this machine"
        )
    if other := _virtual(data, set()):
        return f"is a virtual dataset over another file, {other!r}, which is not read from here; write it as one file"
    return ""


def elsewhere(file: Any, name: str) -> str:
    """Return why a name leads to no dataset of this file, as the end of a message; "" if it may lead to one.

    That is a link to another file, or soft links in a circle.

    HDF5 would look for the link's target in this file, because every file name leads it to the same file object.
    """
    at: list[str] = []  # path of the group reached so far, by hard links only
    left, n_soft = _steps(name), 0
    while left and n_soft <= SOFT:
        step, *left = left
        link = file.get("/".join([*at, step]), getlink=True)
        if isinstance(link, h5py.ExternalLink):
            return f"is a link to another file, {link.filename!r}, which is not read from here; write it as one file"
        if link is None:
            break
        if isinstance(link, h5py.SoftLink):
            n_soft += 1
            at = [] if link.path.startswith("/") else at
            left = [*_steps(link.path), *left]
        else:
            at.append(step)
    return "is a link that leads back to itself" if n_soft > SOFT else ""


def _steps(name: str) -> list[str]:
    return [step for step in name.split("/") if step not in ("", ".")]


def _virtual(data: Any, seen: set[str]) -> str:
    """Return a file that a virtual dataset uses, directly or through others; "" if none."""
    if not data.is_virtual or data.name in seen:
        return ""
    seen.add(data.name)
    for source in data.virtual_sources():
        if source.file_name != ".":
            return str(source.file_name)
        within = data.file.get(source.dset_name)
        if isinstance(within, h5py.Dataset) and (other := _virtual(within, seen)):
            return other
    return ""
