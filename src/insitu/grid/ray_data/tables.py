"""Pure: what Ray Data's tables hold, as Arrow batches that other sources of an import hold, too.

Ray has types of its own for tensors. One whose rows all have the same shape becomes Arrow's; bytes become a
tensor where the user says which.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from insitu.errors import SourceError
from insitu.grid.sources import describe_columns
from insitu.spec import Column

PATH = "path"
"""The column in which Ray names the file of each row."""
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
_FIXED = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2")
_VARIABLE = "ray.data.arrow_variable_shaped_tensor"
_PICKLED = "ray.data.arrow_pickled_object"


def make_plain_batches(table: Any, path: object, tensors: Tensors, without: Collection[str]) -> Iterator[Any]:
    """Yield the rows of a table of Ray as record batches without Ray's types. `path` is named in errors.

    Columns of `without` are left out. Raises SourceError.
    """
    kept = [name for name in table.column_names if name not in without]
    if not kept:
        raise SourceError(f"{path} has no columns beside those that --without names. Leave out fewer")
    for batch in table.select(kept).combine_chunks().to_batches():
        values = [_make_plain(batch.column(name), name, path, tensors.get(name)) for name in kept]
        yield pa.RecordBatch.from_arrays(values, names=kept)


def _make_plain(values: Any, name: str, path: object, tensor: tuple[str, tuple[int, ...]] | None) -> Any:
    kind = values.type
    if isinstance(kind, pa.BaseExtensionType):
        _refuse_missing(values, name, path)
        if kind.extension_name in _FIXED:
            return _tensor_of(values.storage.flatten(), tuple(kind.shape))
        if kind.extension_name == _VARIABLE:
            return _tensor_of_equal(values.storage, name, path)
        if kind.extension_name == _PICKLED:
            raise SourceError(
                f"{path}: column {name!r} holds Python objects, which are never unpickled. Leave it out by "
                f"--without {name}, or write its values as numbers or text"
            )
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return _tensor_of_bytes(values, name, path, tensor)
    if tensor is not None:
        raise SourceError(f"{path}: --tensor {name} is for a column of bytes. Received: one of type {kind}")
    return values


def _tensor_of(flat: Any, shape: tuple[int, ...]) -> Any:
    """Return tensors of one shape, whose values lie end to end in `flat`."""
    if not shape:
        return flat
    kind = pa.fixed_shape_tensor(flat.type, shape)
    return pa.ExtensionArray.from_storage(kind, pa.FixedSizeListArray.from_arrays(flat, math.prod(shape)))


def _tensor_of_equal(storage: Any, name: str, path: object) -> Any:
    found = list(dict.fromkeys(map(tuple, storage.field("shape").to_pylist())))
    if len(found) > 1:
        first, second = found[:2]
        raise SourceError(
            f"{path}: column {name!r} is of mixed shapes: first {list(first)}, then {list(second)}. Give "
            f"images one size and mode, such as --reader-option size=224,224 --reader-option mode=RGB"
        )
    return _tensor_of(storage.field("data").flatten(), tuple(map(int, found[0])))


def _tensor_of_bytes(values: Any, name: str, path: object, tensor: tuple[str, tuple[int, ...]] | None) -> Any:
    if tensor is None:
        raise SourceError(
            f"{path}: column {name!r} holds bytes. Say what they are, such as --tensor {name}=uint8[28,28], "
            f"or leave it out by --without {name}"
        )
    _refuse_missing(values, name, path)
    dtype, shape = np.dtype(tensor[0]), tensor[1]
    wanted = dtype.itemsize * math.prod(shape)
    rows = values.to_pylist()
    bad = next((row for row, each in enumerate(rows) if len(each) != wanted), None)
    if bad is not None:
        raise SourceError(
            f"{path}: --tensor {name}={dtype}{list(shape)} needs {wanted} bytes in each row. Received: "
            f"{len(rows[bad])} bytes"
        )
    flat = np.frombuffer(b"".join(rows), dtype.newbyteorder("<")).astype(dtype, copy=False)
    return _tensor_of(pa.array(flat), shape)


def _refuse_missing(values: Any, name: str, path: object) -> None:
    if values.null_count:
        raise SourceError(
            f"{path}: column {name!r} misses {values.null_count} value(s) in a block of {len(values)}. Fill "
            f"them or drop these rows"
        )


def arrange(batch: Any, columns: tuple[Column, ...], path: object, *, widens: bool) -> Any:
    """Return a batch with the named columns in their order. Whole numbers become float64 where `widens` and
    the column is of that. Raises SourceError for other columns."""
    names = [column.name for column in columns]
    if sorted(batch.schema.names) != sorted(names):
        raise SourceError(
            f"All rows must have the same columns: {describe_columns(columns)}. Received: "
            f"{', '.join(batch.schema.names)} in {path}. Leave the others out by --without, or import these "
            f"files alone"
        )
    values = []
    for column in columns:
        value = batch.column(batch.schema.get_field_index(column.name))
        if widens and column.dtype == "float64" and pa.types.is_integer(value.type):
            value = value.cast(pa.float64())
        values.append(value)
    return pa.RecordBatch.from_arrays(values, names=names)


def cut_by_file(table: Any, *, keeps_path: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield (file, its rows) for the runs of rows of one file, in their order. The column PATH is left out
    unless it `keeps_path`."""
    paths = table.column(PATH)
    rows = table if keeps_path else table.drop_columns([PATH])
    encoded = paths.combine_chunks().dictionary_encode()
    encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
    numbers = encoded.indices.to_numpy(zero_copy_only=False)
    if not len(numbers):
        return
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1)]
    for start, stop in zip(starts, [*starts[1:], len(numbers)], strict=True):
        yield str(encoded.dictionary[int(numbers[start])]), rows.slice(int(start), int(stop - start))
