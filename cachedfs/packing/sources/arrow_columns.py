"""Convert Arrow columns: their types to fields, and their values to NumPy arrays. No I/O."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cachedfs.packing.pack_types import Array, Field, SampleBatch
from cachedfs.packing.sources.arrow_types import (
    holds_bytes,
    is_bytes,
    is_list,
    is_number,
    is_text,
    stored_type,
)
from cachedfs.packing.sources.sample_source import checked_fields, joined

UNITS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
TYPE = re.compile(r"(ragged )?([a-z]+[0-9]*)(?:\[([0-9, ]+)\])?")
T = TypeVar("T")
TEXTS = {"utf8": "utf-8", "bytes": "bytes", "json": "json"}


# The user's types.


def parse_columns(columns: Any) -> tuple[list[str] | None, dict[str, str | None]]:
    """Parse the user's `columns`: the names to pack (None: all), and the given types (None: to be detected).

    A list selects, also with pairs of a name and a type; a dictionary gives types and keeps all other columns. Raises
    ValueError for an invalid type.
    """
    if columns is None:
        return None, {}
    if isinstance(columns, str):
        columns = [columns]
    is_mapping = isinstance(columns, Mapping)
    pairs = (
        columns.items()
        if is_mapping
        else [(each, None) if isinstance(each, str) else each for each in columns]
    )
    given = dict(pairs)
    for name, type_ in given.items():
        if type_ is not None:
            _field_of_type(name, type_)
    return None if is_mapping else list(given), given


def _field_of_type(name: str, given: str) -> Field:
    """Return the field of a type as text: int64, float32[768], ragged float32, utf8, bytes or json."""
    match = TYPE.fullmatch(given)
    if match and given in TEXTS:
        return Field(name, "uint8", is_ragged=True, means=TEXTS[given])
    try:
        dtype = np.dtype(match[2] if match else "V")
    except TypeError:
        dtype = np.dtype("V")
    if match is None or dtype.kind not in "biuf" or (match[1] and match[3]):
        raise ValueError(
            f"columns={{{name!r}: {given!r}}}: expected a type such as int64, float32[768], ragged float32, utf8, bytes or json"
        )
    shape = tuple(int(n) for n in match[3].split(",")) if match[3] else ()
    return Field(name, dtype.name, shape, is_ragged=bool(match[1]))


def arrow_type(name: str, given: str | None, found: pa.DataType) -> pa.DataType:
    """Return the type that a text format is read as, for the type that the user gave."""
    if given is None or given == "json":
        return pa.string() if pa.types.is_null(found) else found
    field = _field_of_type(name, given)
    if field.means:
        return pa.string() if field.means == "utf-8" else pa.binary()
    item = pa.from_numpy_dtype(np.dtype(field.dtype))
    return pa.list_(item) if field.is_ragged or field.shape else item


# Columns of several files.


def unified(schema: pa.Schema, other: pa.Schema, given: Collection[str]) -> pa.Schema:
    """Return a schema that holds the columns of both, with the names of the first one.

    Columns whose type is `given` keep that of the first schema. Raises ValueError for types that have nothing in common.
    """
    names = [name for name in schema.names if name in other.names and name not in given]
    try:
        both = [pa.schema([(name, each.field(name).type) for name in names]) for each in (schema, other)]
        found = pa.unify_schemas(both, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        reason = str(error).removeprefix("Unable to merge: ")
        raise ValueError(f"{reason}; columns={{...}} gives such a column one type") from error
    types = {each.name: each.type for each in found}
    return pa.schema([(each.name, types.get(each.name, each.type)) for each in schema])


def cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of a schema in its types (null: as they are).

    Raises ValueError for a value that would change.
    """
    if missing := [each.name for each in schema if each.name not in table.column_names]:
        raise ValueError(f"column {missing[0]!r} is not there; columns=[...] says which to pack")
    return pa.table(for_each(schema.names, lambda name: _cast(table[name], schema.field(name).type)))


def _cast(column: pa.ChunkedArray, type_: pa.DataType) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    found = column.type
    if found == type_ or pa.types.is_null(type_) or _is_json(type_):  # as JSON, fields stay as they are
        return column
    if not _may_cast(found, type_):
        raise pa.ArrowInvalid(f"it is {found}, and {type_} in the files that were looked at")
    try:
        return column.cast(type_)
    except pa.ArrowInvalid as error:
        if pa.types.is_integer(found) and pa.types.is_floating(type_):
            reason = f"{error}; it is packed as {type_}, since it has missing values or is of that type in other files"
            raise pa.ArrowInvalid(reason) from error
        raise


def _may_cast(found: pa.DataType, type_: pa.DataType) -> bool:
    """Return whether the types have a common one, so that a safe cast keeps values or fails."""
    if pa.types.is_boolean(found) and type_ == pa.float64():  # a column with gaps
        return True
    if pa.types.is_floating(found) and pa.types.is_floating(type_) and found.bit_width > type_.bit_width:
        return False  # Arrow rounds floats
    try:
        pa.unify_schemas([pa.schema([("", each)]) for each in (found, type_)], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return False
    return True


def for_each(names: Iterable[str], make: Callable[[str], T]) -> dict[str, T]:
    """Return what is made of each column. Raises one ValueError for those of all columns that cannot be converted."""
    found, problems = dict[str, T](), list[str]()
    for name in names:
        try:
            found[name] = make(name)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            problems.append(f"column {name!r}: {error}")
    if problems:
        raise ValueError(f"{'; '.join(problems)}; columns={{...}} can give it another type")
    return found


# Types to fields.


def fields_of(schema: pa.Schema, given: Mapping[str, str], names: Sequence[str]) -> tuple[Field, ...]:
    """Return the fields of the columns, with these names; `given` are the types from the user.

    Raises ValueError for invalid array names and for bytes inside JSON.
    """
    fields = [_field(column.name, column.type, given.get(column.name)) for column in schema]
    for column, field in zip(schema, fields, strict=True):
        if field.means == "json" and holds_bytes(stored_type(column.type)):
            raise ValueError(
                f"column {column.name!r} is {column.type}: JSON has no bytes; columns=[...] leaves it out, or gives it another type"
            )
    pairs = zip(fields, names, strict=True)
    return checked_fields([dataclasses.replace(field, name=name) for field, name in pairs])


def _field(name: str, type_: pa.DataType, given: str | None = None) -> Field:
    """Return the field of a column. Raises ValueError for a tensor whose axes are permuted."""
    if given is not None:
        return _field_of_type(name, given)
    if isinstance(type_, pa.FixedShapeTensorType):
        return _tensor(name, type_)
    if is_number(type_):
        return Field(name, _dtype(type_))
    if (units := _units(type_)) is not None:
        return Field(name, "int64", means=units)
    if is_text(type_) or pa.types.is_null(type_) or pa.types.is_decimal(type_):
        return Field(name, "uint8", is_ragged=True, means="utf-8")
    if is_bytes(type_):
        return Field(name, "uint8", is_ragged=True, means="bytes")
    if is_list(type_) and is_number(type_.value_type):
        dtype = _dtype(type_.value_type)
        if pa.types.is_fixed_size_list(type_):
            return Field(name, dtype, (type_.list_size,))
        return Field(name, dtype, is_ragged=True)
    return Field(name, "uint8", is_ragged=True, means="json")


def _tensor(name: str, type_: pa.FixedShapeTensorType) -> Field:
    found, order = _field(name, type_.storage_type), type_.permutation or []
    if order != sorted(order):
        raise ValueError(
            f"column {name!r} is {type_}: its axes are in another order than its numbers; columns={{...}} leaves it out, or "
            f"gives it another type, such as {found if found.shape else 'json'} for what is stored"
        )
    return dataclasses.replace(found, shape=tuple(type_.shape)) if found.shape else found


# Values.


def as_json(value: Any) -> bytes:
    """Return a value as JSON in UTF-8. Types that JSON lacks become text."""
    # UTF-8 cannot encode a lone surrogate: it stays a JSON escape.
    return json.dumps(value, default=str, ensure_ascii=False).encode(errors="backslashreplace")


def batch_of(table: pa.Table, fields: Sequence[Field]) -> SampleBatch:
    """Return the rows of a table as samples; column `i` of it has the values of field `i`.

    Raises ValueError, with all such columns, for values that do not fit their fields.
    """
    by_column = dict(zip(table.column_names, fields, strict=True))
    made = for_each(by_column, lambda name: _values(_whole(table[name]), by_column[name]))
    named = [(by_column[name].name, *each) for name, each in made.items()]
    sizes = {name: sizes for name, _, sizes in named if sizes is not None}
    return SampleBatch({name: values for name, values, _ in named}, sizes)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    found = column.combine_chunks()
    found = found if isinstance(found, pa.Array) else pa.concat_arrays(found.chunks)
    return found.storage if isinstance(found, pa.ExtensionArray) else found


def _values(column: pa.Array, field: Field) -> tuple[Array, Array | None]:
    if field.means in TEXTS.values():
        return _text(column, field)
    if field.is_ragged or field.shape:
        return _lists(column, field)
    if field.means:  # times
        times = column.cast(_integer(column.type)).cast(pa.int64())
        return np.asarray(_filled(times, np.iinfo(np.int64).min)), None
    return _numbers(column, field.dtype), None


def _numbers(column: pa.Array, dtype: str) -> Array:
    """Return values as numbers of type `dtype`, with NaN for a missing float. Floats may be rounded.

    Raises ArrowInvalid for a missing integer and for a value that the type cannot hold.
    """
    type_ = pa.from_numpy_dtype(np.dtype(dtype))
    if _units(column.type) is not None:  # Arrow cannot cast a date to int64
        column = column.cast(_integer(column.type))
    column = column.cast(type_, safe=not pa.types.is_floating(type_))
    if pa.types.is_floating(type_):
        column = _filled(column, float("nan"))
    if column.null_count:
        raise pa.ArrowInvalid(f"{column.null_count} values are missing, which {dtype} cannot tell")
    return np.array(column.to_numpy(zero_copy_only=False), dtype)  # copied: see `_text`


def _text(column: pa.Array, field: Field) -> tuple[Array, Array]:
    if field.means == "json" and not is_bytes(column.type):
        return joined(b"" if value is None else as_json(value) for value in column.to_pylist())
    if field.means == "utf-8" or not (is_text(column.type) or is_bytes(column.type)):
        column = column.cast(pa.large_string())
        column.validate(full=True)  # Arrow's readers do not check that text is UTF-8
    column = _filled(column.cast(pa.large_binary()), b"")
    offsets = np.frombuffer(column.buffers()[1], "i8")[column.offset : column.offset + len(column) + 1]
    data = column.buffers()[2]
    flat = np.frombuffer(data, "u1") if data is not None and data.size else np.empty(0, "u1")
    # Copied: a view keeps the whole Arrow buffer alive, which may be twice as large as its content.
    return flat[offsets[0] : offsets[-1]].copy(), np.diff(offsets)


def _lists(column: pa.Array, field: Field) -> tuple[Array, Array | None]:
    if not is_list(column.type):
        raise pa.ArrowInvalid(f"its values are {column.type}, and not lists")
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    if column.null_count and not field.is_ragged:
        raise pa.ArrowInvalid(
            f"{column.null_count} lists are missing; the type 'ragged {field.dtype}' packs them as empty ones"
        )
    sizes = np.asarray(_filled(pc.list_value_length(column), 0), np.int64)
    found = _numbers(column.flatten(), field.dtype)
    if field.is_ragged:
        return found, sizes
    n = int(np.prod(field.shape))
    if len(sizes) and (sizes != n).any():
        raise pa.ArrowInvalid(f"a list of {int(sizes[sizes != n][0])} elements, and not of {n}")
    return found.reshape(len(column), *field.shape), None


def _filled(column: pa.Array, value: Any) -> pa.Array:
    return column.fill_null(value) if column.null_count else column


# Types.


def _units(type_: pa.DataType) -> str | None:
    """Return the units of a time type in the form of the CF conventions; None for other types."""
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


def _dtype(type_: pa.DataType) -> str:
    return str(type_.to_pandas_dtype().__name__.removesuffix("_"))


def _is_json(type_: pa.DataType) -> bool:
    return pa.types.is_nested(type_) and not (is_list(type_) and is_number(type_.value_type))
