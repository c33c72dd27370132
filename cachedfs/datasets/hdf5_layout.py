"""The structure of an HDF5 file: members, dimensions, attributes, and what h5py cannot read of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import h5py
import numpy as np

from cachedfs.common.optional_imports import preload
from cachedfs.filesystem import CachedFileSystem

HEADER = 1024  # bytes of an object's header, with its first attributes
SOFT = 64  # soft links followed for one name; links may form a cycle, and HDF5 itself follows 16
PLUGINS = ("hdf5plugin", "bitshuffle.h5")  # modules that register filters with HDF5 when they are imported
NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable"
NON_COORDINATE = "_nc4_non_coord_"  # prefix of a NetCDF variable that has the name of a dimension of others


def dataset_at(file: Any, name: str) -> Any:
    """Return a dataset by its path, as NetCDF names it. Raises ValueError if the file itself has none."""
    head, slash, last = name.rpartition("/")
    if linked := elsewhere(file, name):
        raise ValueError(f"{name!r} {linked}")
    found = file.get(f"{head}{slash}{NON_COORDINATE}{last}") or file.get(name)
    if not isinstance(found, h5py.Dataset):
        names = [other for other, at in members_of(file["/"]) if isinstance(at, h5py.Dataset)]
        raise ValueError(
            f"{name!r} is not a dataset there; the datasets are {', '.join(map(repr, names)) or 'none'}"
        )
    return found


def common_length(datasets: Mapping[str, Any]) -> int:
    """Return the number of rows that all datasets have. Raises ValueError if they differ."""
    lengths = {name: int(data.shape[0]) for name, data in datasets.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"datasets of unequal length have no common samples: {lengths}; name those of one length"
        )
    return next(iter(lengths.values()))


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype in native byte order. One that is native keeps the metadata that h5py attaches."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def fetch_headers(fs: Any, path: str, group: Any) -> None:
    """Fetch the headers of the members of a group in one round trip: HDF5 reads them one after another."""
    links = [group.id.links.get_info(name) for name in group.id]
    starts = [link.u for link in links if link.type == h5py.h5l.TYPE_HARD]
    if len(starts) > 1 and isinstance(fs, CachedFileSystem):
        fs.cat_ranges([path] * len(starts), starts, [start + HEADER for start in starts])


def members_of(
    group: Any,
    head: str = "",
    above: tuple[Any, ...] = (),
    before: Callable[[Any], object] = lambda group: None,
) -> Iterator[tuple[str, Any]]:
    """Yield the path of each dataset and group, as NetCDF names it, and the object; None for a circular link.

    `before` is called with each group before its members are read. Links to other files and to nothing are left out, and dimensions that are no variables. It calls itself, and not a
    function inside it: that would be in a reference cycle with the datasets. If the garbage collector freed them in
    the event loop's thread, that thread would wait for the HDF5 lock, whose owner waits for the loop.
    """
    before(group)
    for name in group:
        path = head + name
        if why := elsewhere(group.file, path):
            if "another file" not in why:
                yield path, None
            continue
        what = group.get(name)  # None for a link to nothing
        if isinstance(what, h5py.Group) and what in (*above, group):
            yield path, None
        elif what is not None and is_variable(what):
            yield head + name.removeprefix(NON_COORDINATE), what
            if isinstance(what, h5py.Group):
                yield from members_of(what, f"{path}/", (*above, group), before)


def is_variable(data: Any) -> bool:
    """Return whether a dataset (or group) holds values: NetCDF writes others for dimensions without coordinates."""
    return NO_VARIABLE not in str(data.attrs.get("NAME"))


def dimensions_of(data: Any) -> list[Any]:
    """Return the dimension scale of each axis, as a dataset; None for an axis without one."""
    if is_scale(data):  # NetCDF has a scale of several axes for text; only its first axis is known
        return [data, *[None] * (data.ndim - 1)][: data.ndim]
    scales = data.attrs.get("DIMENSION_LIST", [()] * data.ndim)
    return [data.file[each[-1]] if len(each) else None for each in scales]  # the last one, as in NetCDF


def is_scale(data: Any) -> bool:
    """Return whether a dataset is a dimension scale of others, or may become one."""
    return bool(data.attrs.get("CLASS") == b"DIMENSION_SCALE")


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
