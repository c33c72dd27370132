"""The structure of an HDF5 file: members, dimensions, attributes, and what h5py cannot read of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

from cachedfs.common.optional_imports import preload

__all__ = ["attributes_of", "dimensions_of", "elsewhere", "is_variable", "members_of", "unreadable"]

SOFT = 64  # soft links followed for one name; links may form a cycle, and HDF5 itself follows 16
PLUGINS = ("hdf5plugin", "bitshuffle.h5")  # modules that register filters with HDF5 when they are imported
NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable"
# Attributes in which HDF5 and NetCDF keep dimension scales.
INTERNAL = {"DIMENSION_LIST", "REFERENCE_LIST", "_Netcdf4Coordinates", "_Netcdf4Dimid", "_NCProperties"}
INTERNAL |= {"_nc3_strict"}


def members_of(group: Any, head: str = "", above: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the path of each dataset and group in a group, and the object; None for a circular link.

    Links to other files, and to nothing, are left out. It calls itself, and not a function inside it: that would be in a
    reference cycle with the datasets. If the garbage collector freed them in the event loop's thread, that thread
    would wait for the HDF5 lock, whose owner waits for the loop.
    """
    for name in group:
        path = head + name
        if why := elsewhere(group.file, path):
            if "another file" not in why:
                yield path, None
            continue
        what = group.get(name)  # None for a link to nothing
        if isinstance(what, h5py.Group) and what in (*above, group):
            yield path, None
        elif what is not None:
            yield path, what
            if isinstance(what, h5py.Group):
                yield from members_of(what, f"{path}/", (*above, group))


def is_variable(data: Any) -> bool:
    """Return whether a dataset holds values: NetCDF writes others for dimensions without coordinates."""
    return NO_VARIABLE not in str(data.attrs.get("NAME"))


def dimensions_of(data: Any) -> list[Any]:
    """Return the dimension scale of each axis, as a dataset; None for an axis without one."""
    if _is_scale(data):  # NetCDF has a scale of several axes for text; only its first axis is known
        return [data, *[None] * (data.ndim - 1)][: data.ndim]
    scales = data.attrs.get("DIMENSION_LIST", [()] * data.ndim)
    return [data.file[each[-1]] if len(each) else None for each in scales]  # the last one, as in NetCDF


def _is_scale(data: Any) -> bool:
    return bool(data.attrs.get("CLASS") == b"DIMENSION_SCALE")


def attributes_of(of: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the attributes of a dataset or group as JSON values, and the names of those that JSON cannot hold.

    As in h5netcdf, an array of one element becomes that element. The dimension scales are not among them.
    """
    hidden = INTERNAL | ({"CLASS", "NAME"} if _is_scale(of) else set())
    found, lost = {}, []
    for name in of.attrs:
        if name not in hidden:
            try:
                found[name] = _as_json(of.attrs[name])
            except (TypeError, ValueError, OSError):  # h5py raises the last two for types that it cannot read
                lost.append(name)
    return found, lost


def _as_json(value: Any) -> Any:
    if isinstance(value, h5py.Empty):
        return "" if h5py.check_string_dtype(value.dtype) else []
    if isinstance(value, np.ndarray) and value.dtype.kind != "V" and value.ndim:
        return _as_json(value[0]) if len(value) == 1 else [_as_json(each) for each in value]
    if isinstance(value, (str, bytes)):
        return value.decode() if isinstance(value, bytes) else value.encode().decode()
    number = np.asarray(value).item()
    if not isinstance(number, (bool, int, float)) or not math.isfinite(number):
        raise TypeError(f"{number!r} is no value of JSON")
    return number


def unreadable(data: Any) -> str:
    """Return what h5py cannot read in a dataset and what to do; "" if nothing.

    The text is the end of an error message. Variable-length rows in a foreign byte order: h5py 3 returns wrong numbers
    without an error. Filters that are not installed. Virtual datasets over other files: HDF5 would open those through
    the file object of this file, which kills the process.
    """
    base = h5py.check_vlen_dtype(data.dtype)
    if isinstance(base, np.dtype) and not base.isnative:
        return (
            f"has rows of their own lengths of {base}, whose bytes h5py takes for those of other numbers; "
            "write it with the byte order of this machine"
        )
    if missing := _missing_filter(data):
        return (
            f"is encoded by {missing}, which h5py does not have here: pip install hdf5plugin, and "
            "`import hdf5plugin` (or another module with this filter)"
        )
    if other := _virtual(data, set()):
        return f"is a virtual dataset over another file, {other!r}, which is not read from here; write it as one file"
    return ""


def _missing_filter(data: Any) -> str:
    """Return the filter of a dataset that cannot be decoded here; "" if none.

    Installed plugins are imported for it, in workers too: a spawned process has none of the modules of its parent.
    """
    properties = data.id.get_create_plist()
    for number, _, _, name in map(properties.get_filter, range(properties.get_nfilters())):
        for module in PLUGINS:
            if not h5py.h5z.filter_avail(number):
                preload([module])
        if not h5py.h5z.filter_avail(number):
            return f"HDF5 filter {number} {name.decode(errors='replace')}".rstrip()
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
