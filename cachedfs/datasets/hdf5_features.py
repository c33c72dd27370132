"""What h5py cannot read, or reads wrong, of a file that it has from us: a file object, and no path."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np

__all__ = ["elsewhere", "unreadable"]

SOFT = 64  # soft links on the way to a name: they may go in a circle, and HDF5 itself follows 16


def unreadable(data: Any) -> str:
    """Return what h5py cannot do with a dataset, and what to do, as the end of a message; "" where that is nothing.

    Rows of their own lengths in a foreign byte order: h5py 3 gives other numbers for them, without a word. Virtual datasets
    over other files: HDF5 opens those as it opened this one, by its file object, and that ends the process.
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
    """Return in which other file a name is, and what to do, as the end of a message; "" where it is no link to one.

    HDF5 would look in this file for it, as for every name of a file that it opens by a file object.
    """
    at: list[str] = []  # the folder that is reached, by hard links only
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
    return ""


def _steps(name: str) -> list[str]:
    return [step for step in name.split("/") if step not in ("", ".")]


def _virtual(data: Any, seen: set[str]) -> str:
    """Return a file that a virtual dataset is over, other than its own; also by way of others in that. "" for none."""
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
