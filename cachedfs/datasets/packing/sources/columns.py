"""Columns of Arrow as fields: of what type each is, and their values. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cachedfs.datasets.packing.model import END, OFFSETS, Array, Batch, Field

__all__ = ["Columns", "arrow_type", "batch_of", "chosen", "field_of", "fields_of", "merged"]

# Names with what each is to be; None: as found. `columns=` as users give it.
Columns = Mapping[str, str | None] | None
UNITS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
TYPE = re.compile(r"(ragged )?([a-z]+[0-9]*)(?:\[([0-9, ]+)\])?")
TEXTS = {"utf8": "utf-8", "bytes": "bytes", "json": "json"}


def chosen(columns: Any) -> Columns:
    """Return what users give as `columns`: names, or names with types. Raises ValueError for what is neither."""
    if columns is None:
        return None
    if isinstance(columns, str):
        columns = [columns]
    given = dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(columns)
    for name, type_ in given.items():
        if type_ is not None:
            _parsed(name, type_)
    return given


def arrow_type(name: str, given: str | None, found: pa.DataType) -> pa.DataType:
    """Return the type of a column that is to be `given`, where it was found to be `found`."""
    if given is None or given == "json":
        if pa.types.is_timestamp(found) and found.tz is None:
            return found
        return pa.string() if pa.types.is_null(found) else found
    field = _parsed(name, given)
    if field.means == "utf-8":
        return pa.string()
    if field.means == "bytes":
        return pa.binary()
    item = pa.from_numpy_dtype(np.dtype(field.dtype))
    return pa.list_(item) if field.is_ragged or field.shape else item


def fields_of(schema: pa.Schema, columns: Columns) -> tuple[Field, ...]:
    """Return the fields of these columns. Raises ValueError for names that cannot be those of arrays."""
    fields = tuple(field_of(column.name, column.type, (columns or {}).get(column.name)) for column in schema)
    taken = {
        name
        for field in fields
        for name in ([field.name, field.name + OFFSETS] if field.is_ragged else [field.name])
    }
    n = sum(1 + field.is_ragged for field in fields)
    folders = {
        "/".join(parts[:i]) for parts in (name.split("/") for name in taken) for i in range(1, len(parts))
    }
    bad = [field.name for field in fields if not _is_name(field.name) or field.name in folders]
    if bad or len(taken) < n:
        told = (
            f"{bad[0]!r} cannot be the name of an array"
            if bad
            else f"two arrays would have one name: {[f.name for f in fields]}"
        )
        raise ValueError(f"{told}; columns= says which columns to pack")
    return fields


def field_of(name: str, type_: pa.DataType, given: str | None = None) -> Field:
    """Return the field of a column."""
    if given is not None:
        return _parsed(name, given)
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    if pa.types.is_boolean(type_) or pa.types.is_integer(type_) or pa.types.is_floating(type_):
        return Field(name, type_.to_pandas_dtype().__name__.removesuffix("_"))
    if (units := _units(type_)) is not None:
        return Field(name, "int64", means=units)
    if _is_text(type_) or pa.types.is_null(type_) or pa.types.is_decimal(type_):
        return Field(name, "uint8", is_ragged=True, means="utf-8")
    if _is_bytes(type_):
        return Field(name, "uint8", is_ragged=True, means="bytes")
    if _is_list(type_) and _is_number(type_.value_type):
        dtype = type_.value_type.to_pandas_dtype().__name__.removesuffix("_")
        if pa.types.is_fixed_size_list(type_):
            return Field(name, dtype, (type_.list_size,))
        return Field(name, dtype, is_ragged=True)
    return Field(name, "uint8", is_ragged=True, means="json")


def batch_of(table: pa.Table, fields: Sequence[Field], stop: int = END) -> Batch:
    """Return samples from a table that has these columns. Raises ValueError for values that do not fit, naming the column."""
    values: dict[str, Array] = {}
    sizes: dict[str, Array] = {}
    for field in fields:
        column = table.column(field.name)
        try:
            values[field.name], n = _values(_whole(column), field)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise ValueError(
                f"column {field.name!r}: {error}; columns={{...}} can give it another type"
            ) from error
        if n is not None:
            sizes[field.name] = n
    return Batch(table.num_rows, values, sizes, stop)


def merged(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return one schema for tables that have these. Raises ValueError where there is none."""
    try:
        return pa.unify_schemas(list(schemas), promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(
            f"files have columns of one name and different types: {error}; columns={{...}} settles it"
        ) from error


def _values(column: pa.Array, field: Field) -> tuple[Array, Array | None]:
    if field.means in TEXTS.values():
        return _text(column, field)
    if field.is_ragged or field.shape:
        return _lists(column, field)
    if field.means:  # times
        return np.asarray(
            _filled(column.cast(_integer(column.type)).cast(pa.int64()), np.iinfo(np.int64).min)
        ), None
    if column.null_count and field.dtype.startswith("float"):
        column = _filled(column.cast(pa.from_numpy_dtype(np.dtype(field.dtype))), float("nan"))
    if column.null_count:
        raise pa.ArrowInvalid(f"{column.null_count} values are missing, which {field.dtype} cannot tell")
    return column.to_numpy(zero_copy_only=False).astype(field.dtype), None


def _text(column: pa.Array, field: Field) -> tuple[Array, Array]:
    if field.means == "json":
        texts = [
            b"" if value is None else json.dumps(value, default=str, ensure_ascii=False).encode()
            for value in column.to_pylist()
        ]
        return np.frombuffer(b"".join(texts), "u1"), np.fromiter(map(len, texts), np.int64, len(texts))
    if not (_is_text(column.type) or _is_bytes(column.type)):
        column = column.cast(pa.string())
    column = _filled(column.cast(pa.large_binary()), b"")
    offsets = np.frombuffer(column.buffers()[1], "i8")[column.offset : column.offset + len(column) + 1]
    data = column.buffers()[2]
    flat = np.frombuffer(data, "u1") if data is not None and data.size else np.empty(0, "u1")
    # Copied: Arrow's own buffers are up to twice as large as what is in them, and a view keeps all of one.
    return flat[offsets[0] : offsets[-1]].copy(), np.diff(offsets)


def _lists(column: pa.Array, field: Field) -> tuple[Array, Array | None]:
    if not _is_list(column.type):
        raise pa.ArrowInvalid(f"its values are {column.type}, and no lists")
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    sizes = np.asarray(_filled(pc.list_value_length(column), 0), np.int64)
    flat = column.flatten()
    if flat.null_count:
        if not field.dtype.startswith("float"):
            raise pa.ArrowInvalid(f"{flat.null_count} elements are missing, which {field.dtype} cannot tell")
        flat = _filled(flat.cast(pa.from_numpy_dtype(np.dtype(field.dtype))), float("nan"))
    found = flat.to_numpy(zero_copy_only=False).astype(field.dtype)
    if field.is_ragged:
        return found, sizes
    n = int(np.prod(field.shape))
    if len(sizes) and (sizes != n).any():
        raise pa.ArrowInvalid(f"a list of {int(sizes[sizes != n][0])} elements, and not of {n}")
    return found.reshape(len(column), *field.shape), None


def _parsed(name: str, given: str) -> Field:
    """Return the field that a type in words is: int64, float32[768], ragged float32, utf8, bytes, json."""
    match = TYPE.fullmatch(given)
    if match and given in TEXTS:
        return Field(name, "uint8", is_ragged=True, means=TEXTS[given])
    try:
        dtype = np.dtype(match[2] if match else "")
    except TypeError:
        dtype = np.dtype("V")
    if match is None or dtype.kind not in "biuf" or not match[2] or (match[1] and match[3]):
        raise ValueError(
            f"columns={{{name!r}: {given!r}}}: expected a type such as int64, float32[768], ragged float32, utf8, bytes or json"
        )
    shape = tuple(int(n) for n in match[3].split(",")) if match[3] else ()
    return Field(name, dtype.name, shape, is_ragged=bool(match[1]))


def _is_name(name: str) -> bool:
    parts = name.split("/")
    return (
        all(part and set(part) != {"."} and not part.startswith("__") for part in parts)
        and parts[-1] != "zarr.json"
    )


def _whole(column: pa.ChunkedArray) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    found = column.combine_chunks()
    return found if isinstance(found, pa.Array) else pa.concat_arrays(found.chunks)


def _filled(column: pa.Array, value: Any) -> pa.Array:
    return column.fill_null(value) if column.null_count else column


def _units(type_: pa.DataType) -> str | None:
    """Return what the numbers of a time are, as CF writes it; None for other types."""
    if pa.types.is_date32(type_):
        return "days since 1970-01-01"
    if pa.types.is_date64(type_):
        return "milliseconds since 1970-01-01"
    if pa.types.is_timestamp(type_):
        return f"{UNITS[type_.unit]} since 1970-01-01"
    if pa.types.is_time(type_) or pa.types.is_duration(type_):
        return UNITS[type_.unit]
    return None


def _integer(type_: pa.DataType) -> pa.DataType:
    return pa.int32() if pa.types.is_date32(type_) or pa.types.is_time32(type_) else pa.int64()


def _is_text(type_: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_)
    )


def _is_bytes(type_: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(type_)
        or pa.types.is_large_binary(type_)
        or pa.types.is_fixed_size_binary(type_)
        or pa.types.is_binary_view(type_)
    )


def _is_list(type_: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)
    )


def _is_number(type_: pa.DataType) -> bool:
    return bool(pa.types.is_boolean(type_) or pa.types.is_integer(type_) or pa.types.is_floating(type_))
