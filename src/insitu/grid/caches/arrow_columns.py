"""Columns of a cache as Arrow arrays, for files and tables of others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from insitu.base.errors import InputError
from insitu.base.spec import CacheSpec, Column
from insitu.grid.partitions import TEXT, is_ragged, value_dtype
from insitu.grid.sources import logical_type, make_tensors

LABELS = b"labels"
"""Names, in the metadata of a field, the classes that the numbers of its values stand for, as JSON."""
_SIGNED = {"uint8": "int16", "uint16": "int32", "uint32": "int64", "uint64": "int64", "float16": "float32"}
"""Types that tables of SQL lack, and those that hold their values."""


def to_arrow(values: Any) -> pa.Array:
    """Return an array [rows, *shape] as an Arrow array: of numbers, bools or text, of lists of a fixed size,
    or of tensors of a fixed shape if rows have several axes."""
    array = np.asarray(values)
    if array.dtype.kind in "OSU":
        return pa.array(array.tolist(), pa.large_string())
    if array.ndim == 1:
        return pa.array(array)
    if array.ndim > 2:
        return make_tensors(array)
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, array.shape[1])


def make_schema(cache: CacheSpec, columns: Sequence[Column], row_id: str | None) -> pa.Schema:
    """Return the schema of the batches of `make_batch`, with the names of classes in its metadata."""
    fields = [] if row_id is None else [pa.field(row_id, pa.int64())]
    for column in columns:
        empty = _make_array(column, _make_empty(column))
        is_label = column.name == "label" and cache.labels and not column.shape
        metadata = {LABELS: json.dumps(cache.labels).encode()} if is_label else None
        fields.append(pa.field(column.name, empty.type, metadata=metadata))
    return pa.schema(fields, metadata={"cache": cache.name, "version": str(cache.version)})


def make_batch(
    schema: pa.Schema, columns: Sequence[Column], values: Mapping[str, Any], numbers: Any
) -> pa.RecordBatch:
    """Return rows in the form of `BlockRows` as a record batch. `numbers` are theirs in the version."""
    arrays = [_make_array(column, values[column.name]) for column in columns]
    if len(schema) > len(columns):
        arrays.insert(0, pa.array(numbers))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _make_empty(column: Column) -> Any:
    if column.dtype == TEXT:
        return pa.array([], pa.large_utf8())
    return (
        pa.array([], pa.large_binary()) if is_ragged(column) else np.empty((0, *column.shape), column.dtype)
    )


def _make_array(column: Column, values: Any) -> pa.Array:
    if is_ragged(column):
        return _make_lists(column, values)
    if column.logical:
        kind = logical_type(column)
        return pa.array(values).cast(pa.int32() if kind.bit_width == 32 else pa.int64()).cast(kind)
    return values if column.dtype == TEXT else to_arrow(values)


def _make_lists(column: Column, rows: Any) -> pa.Array:
    """Return a ragged column, which holds the bytes of each row's values, as lists of these."""
    dtype = value_dtype(column)
    _, offsets, data = rows.buffers()
    ends = np.frombuffer(offsets, np.int64)[rows.offset : rows.offset + len(rows) + 1] if offsets else [0]
    first, last = int(ends[0]), int(ends[-1])
    flat = np.frombuffer(data, np.uint8)[first:last].view(dtype) if last > first else np.empty(0, dtype)
    starts = (np.asarray(ends) - first) // dtype.itemsize
    return pa.LargeListArray.from_arrays(pa.array(starts), pa.array(flat))


# Types of tables of SQL


def widen_schema(schema: pa.Schema, *, flat: bool) -> pa.Schema:
    """Return the schema with types that tables of SQL have. `flat`: arrays have one axis."""
    return pa.schema([pa.field(field.name, _widen_type(field.type, flat)) for field in schema])


def _widen_type(kind: pa.DataType, flat: bool) -> pa.DataType:
    shape: tuple[int, ...] = ()
    if isinstance(kind, pa.FixedShapeTensorType):
        shape, kind = tuple(kind.shape), kind.value_type
    elif pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind):
        shape, kind = (0,), kind.value_type
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if pa.types.is_time(kind) or pa.types.is_duration(kind):
        return pa.int64()
    name = "float16" if pa.types.is_float16(kind) else str(kind)
    kind = pa.from_numpy_dtype(np.dtype(_SIGNED[name])) if name in _SIGNED else kind
    for _ in shape[:1] if flat else shape:
        kind = pa.list_(kind)
    return kind


def widen_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch as one of a schema of `widen_schema`. Raises InputError for numbers that it can't
    hold."""
    return pa.RecordBatch.from_arrays(
        [_widen(array, field) for array, field in zip(batch.columns, schema, strict=True)], schema=schema
    )


def _widen(array: pa.Array, field: pa.Field) -> pa.Array:
    shape: tuple[int, ...] = ()
    if isinstance(array.type, pa.FixedShapeTensorType):
        shape, array = tuple(array.type.shape), array.storage
    if not pa.types.is_list(field.type):
        return _cast(array, field)
    values, kind = _cast(array.flatten(), field), field.type
    if pa.types.is_large_list(array.type):
        offsets = array.offsets.cast(pa.int32())
        return pa.ListArray.from_arrays(offsets, values)
    depth = 0
    while pa.types.is_list(kind):
        depth, kind = depth + 1, kind.value_type
    sizes = shape[-depth:] if depth > 1 else (array.type.list_size,)
    for size in reversed(sizes):
        values = pa.ListArray.from_arrays(
            pa.array(np.arange(0, len(values) + 1, size, dtype=np.int32)), values
        )
    return values


def _cast(values: pa.Array, field: pa.Field) -> pa.Array:
    kind = field.type
    while pa.types.is_list(kind):
        kind = kind.value_type
    try:
        if pa.types.is_time32(values.type) and pa.types.is_integer(kind):
            values = pc.cast(values, pa.int32())
        return pc.cast(values, kind)
    except pa.ArrowInvalid as error:
        raise InputError(
            f"Integers of such a table are below 2**63. Received: column {field.name} ({error}). Leave it "
            f"out by --columns, or export to a .parquet file"
        ) from error
