"""Attributes of HDF5 and NetCDF files in the form that xarray reads from Zarr."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import h5py
import numpy as np

from cachedfs.datasets.hdf5_layout import is_scale
from cachedfs.packing.pack_types import Field

FILL = "_FillValue"
SCALES = ("add_offset", "scale_factor")
# Attributes that decide what a stored value means (CF conventions).
DECODING = {"units", "calendar", "missing_value", "_Unsigned", "flag_values", "flag_masks", "flag_meanings"}
DECODING |= {FILL, *SCALES}
# Attributes in which HDF5 and NetCDF keep dimension scales.
INTERNAL = {"DIMENSION_LIST", "REFERENCE_LIST", "_Netcdf4Coordinates", "_Netcdf4Dimid", "_NCProperties"}
INTERNAL |= {"_nc3_strict"}


def attributes_of(name: str, of: Any, field: Field | None, notes: list[str]) -> dict[str, Any]:
    """Return the attributes of a dataset, or of a group (without `field`), and add notes on what is not kept."""
    found: dict[str, Any] = {}
    hidden = INTERNAL | ({"CLASS", "NAME"} if is_scale(of) else set())
    for each in [each for each in of.attrs if each not in hidden]:
        try:
            value = of.attrs[each]
            found[each] = _fill_value(value, field) if each == FILL and field else _as_json(value)
        # h5py raises any of them for types that it lacks.
        except (TypeError, ValueError, OverflowError, OSError):
            notes.append(f"attribute {each!r} of {name or '/'!r} is left out: Zarr cannot hold its value")
    narrow = [each for each in SCALES if field and each in found and np.asarray(of.attrs[each]).dtype != "f8"]
    if narrow:
        types = " and ".join(f"{each} {np.asarray(of.attrs[each]).dtype}" for each in narrow)
        notes.append(
            f"{name!r}: xarray decodes it as float64, as Zarr keeps no types of attributes ({types})"
        )
    if enum := h5py.check_enum_dtype(of.dtype) if field else None:
        meanings = " ".join(sorted(enum, key=enum.__getitem__))
        found = {"flag_values": sorted(enum.values()), "flag_meanings": meanings} | found
    return found


def check_same(field: Field, first: Field) -> None:
    """Raise ValueError if the attributes of a dataset give its values another meaning than in the first file."""
    for name in sorted(DECODING):
        here, there = field.attributes.get(name), first.attributes.get(name)
        if here != there:
            raise ValueError(
                f"{name!r} of {field.name!r} is {here!r}, and {there!r} in the first file: the stored values mean something "
                f"else. Write all files with one {name!r} (xarray: encoding=), or pack them apart"
            )


def _as_json(value: Any) -> Any:
    """Return an attribute as a JSON value; an array of one element is that element, as in h5netcdf."""
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


def _fill_value(value: Any, field: Field) -> Any:
    """Return a `_FillValue` as xarray keeps it in Zarr: floats in base64.

    Raises ValueError if the field cannot have this value.
    """
    number, kind = np.asarray(value).item(), np.dtype(field.dtype).kind
    if field.is_ragged or isinstance(number, (str, bytes)) or (kind not in "fc" and int(number) != number):
        raise ValueError(f"{value} is no value of {field}")
    if kind not in "fc":
        return bool(number) if kind == "b" else int(number)
    parts = [number.real, number.imag] if kind == "c" else [number]
    coded = [base64.b64encode(struct.pack("<d", part)).decode() for part in parts]
    return coded if kind == "c" else coded[0]
