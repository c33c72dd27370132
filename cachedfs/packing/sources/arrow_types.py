"""Kinds of Arrow types, and structs that hold bytes: they become columns, as JSON has no bytes. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa


def structs_of(schema: pa.Schema) -> frozenset[str]:
    """Return the names of the structs that hold bytes, nested ones included, such as `image`.

    They are split into columns (`image.bytes`), because JSON cannot hold bytes.
    """
    return frozenset(each for column in schema for each in _structs(column.name, stored_type(column.type)))


def _structs(name: str, type_: pa.DataType) -> list[str]:
    if not (pa.types.is_struct(type_) and holds_bytes(type_)):
        return []
    return [name, *(each for field in type_ for each in _structs(f"{name}.{field.name}", field.type))]


def empty_table(schema: pa.Schema) -> pa.Table:
    """Return a table without rows. Unlike Arrow's own function, it supports tensors."""
    return pa.table([pa.chunked_array([], each.type) for each in schema], names=schema.names)


def unfolded(table: pa.Table, structs: frozenset[str]) -> pa.Table:
    """Split the named structs, and convert extension columns but tensors to their storage type.

    A field of a struct becomes a column (`image.path`). `structs` is the result of `structs_of` for the whole file: if
    only some fields of a struct are read, the type of the column may lack the bytes.
    """
    columns = zip(table.column_names, table.columns, strict=True)
    found = [part for name, column in columns for part in _parts(name, column, structs)]
    return pa.table([column for _, column in found], names=[name for name, _ in found])


def _parts(
    name: str, column: pa.ChunkedArray, structs: frozenset[str]
) -> Iterable[tuple[str, pa.ChunkedArray]]:
    stored = stored_type(column.type)
    if name in structs and pa.types.is_struct(stored):  # another column may have the same name
        if isinstance(column.type, pa.BaseExtensionType):
            column = column.cast(column.type.storage_type)
        # `flatten` makes the fields of a null struct null.
        parts = zip(column.type, column.flatten(), strict=True)
        return [each for field, part in parts for each in _parts(f"{name}.{field.name}", part, structs)]
    is_stored = stored == column.type or isinstance(column.type, pa.FixedShapeTensorType)
    return [(name, column if is_stored else column.cast(stored))]


def stored_type(type_: pa.DataType) -> pa.DataType:
    """Return the type with each extension type in it replaced by its storage type."""
    if isinstance(type_, pa.BaseExtensionType):
        return stored_type(type_.storage_type)
    if pa.types.is_struct(type_):
        return pa.struct([_stored_field(field) for field in type_])
    if pa.types.is_map(type_):
        return pa.map_(_stored_field(type_.key_field), _stored_field(type_.item_field), type_.keys_sorted)
    if pa.types.is_fixed_size_list(type_):
        return pa.list_(_stored_field(type_.value_field), type_.list_size)
    if is_list(type_):
        made = pa.large_list if pa.types.is_large_list(type_) else pa.list_
        return made(_stored_field(type_.value_field))
    return type_


def _stored_field(field: pa.Field) -> pa.Field:
    return field.with_type(stored_type(field.type))


def decoded(schema: pa.Schema) -> pa.Schema:
    """Return a schema with the type of the values of each dictionary."""
    return pa.schema([each.with_type(_decoded(each.type)) for each in schema])


def _decoded(type_: pa.DataType) -> pa.DataType:
    return type_.value_type if pa.types.is_dictionary(type_) else type_


def holds_bytes(type_: pa.DataType) -> bool:
    type_ = _decoded(type_)
    return is_bytes(type_) or any(holds_bytes(type_.field(i).type) for i in range(type_.num_fields))


def _is(*names: str) -> Any:
    """Return a function that tells whether a type is one of `pa.types.is_...`."""
    tests = [getattr(pa.types, f"is_{name}") for name in names]
    return lambda type_: any(test(type_) for test in tests)


is_text = _is("string", "large_string", "string_view")
is_bytes = _is("binary", "large_binary", "fixed_size_binary", "binary_view")
is_list = _is("list", "large_list", "fixed_size_list")
is_number = _is("boolean", "integer", "floating")
