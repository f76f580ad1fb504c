"""Arrow record batches as blocks: what Parquet, CSV and Arrow IPC have in common.

Lists whose rows all have the same lengths, at any depth, are tensors; so are fixed-size lists and
fixed-shape tensors. Dictionaries are decoded. A missing value of a floating column is NaN; of any other it
is refused, since it would have to be made up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from insitu.base.errors import SourceError
from insitu.base.spec import Column
from insitu.base.wording import format_count
from insitu.grid.partitions import RAGGED, TEXT, is_ragged, value_dtype
from insitu.grid.sources.base import check_column, native, raw_bytes


def is_of_the_system(error: Exception) -> bool:
    """Return whether an error comes from the system, such as for missing permission, and not from Arrow."""
    return isinstance(error, OSError) and error.errno is not None


@contextlib.contextmanager
def arrow_errors(path: Path) -> Iterator[None]:
    """Turn what Arrow raises for a file that isn't whole or of another format into SourceError."""
    try:
        yield
    except (pa.ArrowException, EOFError, OSError) as error:
        if is_of_the_system(error):
            raise
        raise SourceError(
            f"{path} can't be read: {error}. It may be truncated or of another format (see --format)"
        ) from error


def columns_of_batch(batch: Any, path: Path, ragged: frozenset[str] = frozenset()) -> tuple[Column, ...]:
    """Return the columns of all rows of a file, from its first batch, which has rows. Lists of the columns
    `ragged` may have any length. Raises SourceError."""
    names = batch.schema.names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SourceError(f"{path} has several columns of one name: {', '.join(twice)}")
    if not names:
        raise SourceError(f"{path} has no columns")
    _refuse_types(batch.schema, path)
    columns = []
    for name, values in zip(names, batch.columns, strict=True):
        if _is_text(values.type):
            columns.append(Column(name, TEXT))
        elif name in ragged and _is_list(values.type):
            array = _tensor(_flatten_lists(values.slice(0, 1), name, path), name, path)
            columns.append(Column(name, check_column(path, name, array.dtype, ()).dtype + RAGGED))
        else:
            array = _tensor(values.slice(0, 1), name, path)
            if _is_list(values.type) and 0 in array.shape[1:]:
                raise SourceError(
                    f"{path}: column {name!r} is of lists, the first of which is empty: rows of shape "
                    f"{array.shape[1:]} hold no values. Pad the lists to one length, or import the column as "
                    f"it is by --ragged {name}"
                )
            columns.append(check_column(path, name, array.dtype, array.shape[1:]))
    return tuple(columns)


def values_of_batch(batch: Any, columns: tuple[Column, ...], path: Path) -> dict[str, Any]:
    """Return a batch's values as a Block holds them. Raises SourceError if rows differ in shape."""
    found: dict[str, Any] = {}
    for column in columns:
        values = batch.column(batch.schema.get_field_index(column.name))
        if column.dtype == TEXT:
            found[column.name] = _texts(values, column.name, path)
            continue
        if is_ragged(column):
            found[column.name] = _ragged(values, column, path)
            continue
        array = _tensor(values, column.name, path)
        if array.shape[1:] != column.shape:
            raise mixed_shapes(path, column.name, column.shape, array.shape[1:])
        if array.dtype != np.dtype(column.dtype):
            raise SourceError(
                f"{path}: column {column.name!r} is of mixed types: first {column.dtype}, then "
                f"{array.dtype}. "
                f"Convert its values to one type"
            )
        found[column.name] = native(array)
    return found


def mixed_shapes(path: object, name: str, first: Sequence[int], second: Sequence[int]) -> SourceError:
    """Return the error for a column whose rows differ in shape."""
    return SourceError(
        f"{path}: column {name!r} is of mixed shapes: first {list(first)}, then {list(second)}. Pad or cut "
        "its "
        f"rows to one shape; give images one size and mode, such as by --reader images --reader-option "
        f"size=224,224 --reader-option mode=RGB"
    )


def _refuse_types(schema: Any, path: Path) -> None:
    """Raise SourceError, which names every column of a type that a cache can't hold."""
    bad = [field for field in schema if not (_is_text(field.type) or _is_tensor(field.type))]
    if bad:
        named = ", ".join(f"column {field.name!r} is of type {field.type}" for field in bad)
        raise SourceError(
            f"{path}: {named}, which a cache can't hold. Convert {'it' if len(bad) == 1 else 'them'} to "
            f"numbers, bools, text, or lists of equal length of numbers or bools, or leave "
            f"{'it' if len(bad) == 1 else 'them'} out of the file"
        )


def _is_tensor(kind: Any) -> bool:
    """Return whether values of an Arrow type are numbers, bools, or lists of them at any depth."""
    if isinstance(kind, pa.BaseExtensionType):
        return isinstance(kind, pa.FixedShapeTensorType)
    if pa.types.is_dictionary(kind):
        return _is_tensor(kind.value_type)
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_tensor(kind.value_type)
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view())


def _texts(values: Any, name: str, path: Path) -> Any:
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    _refuse_missing(values, name, path)
    texts = values.cast(pa.large_utf8())
    # Parquet's reader takes any bytes for text.
    texts.validate(full=True)
    return texts


def _tensor(values: Any, name: str, path: Path) -> Any:
    """Return `values`, of a type that `_is_tensor`, as one array [rows, ...]. Raises SourceError."""
    kind = values.type
    if isinstance(kind, pa.BaseExtensionType):
        if kind.permutation and list(kind.permutation) != sorted(kind.permutation):
            raise SourceError(f"{path}: column {name!r} holds permuted tensors. Store them in row order")
        flat = _tensor(values.storage, name, path)
        return flat.reshape(len(values), *kind.shape)
    if pa.types.is_dictionary(kind):
        return _tensor(values.dictionary_decode(), name, path)
    if pa.types.is_fixed_size_list(kind):
        _refuse_missing(values, name, path)
        inner = _tensor(values.flatten(), name, path)
        return inner.reshape(len(values), kind.list_size, *inner.shape[1:])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _equal_lists(values, name, path)
    if pa.types.is_floating(kind) and values.null_count:
        values = pc.fill_null(values, pa.scalar(float("nan"), kind))
    _refuse_missing(values, name, path)
    return values.to_numpy(zero_copy_only=False)


def _equal_lists(values: Any, name: str, path: Path) -> Any:
    _refuse_missing(values, name, path)
    lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False)
    length = int(lengths[0]) if len(lengths) else 0
    if (lengths != length).any():
        row = int(np.argmax(lengths != length))
        raise SourceError(
            f"{path}: column {name!r} is of mixed shapes: lists of {length} and of {int(lengths[row])} "
            f"values. Pad or cut them to one length, or import the column as it is by --ragged {name}"
        )
    inner = _tensor(values.flatten(), name, path)
    return inner.reshape(len(values), length, *inner.shape[1:])


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _flatten_lists(values: Any, name: str, path: Path) -> Any:
    """Return the values of all lists, end to end. Raises SourceError if they are lists themselves."""
    _refuse_missing(values, name, path)
    if not _is_tensor(values.type.value_type) or _is_list(values.type.value_type):
        raise SourceError(
            f"{path}: a ragged column has rows that are lists of numbers or bools. Received: column {name!r} "
            f"of type {values.type}. Flatten its rows, and keep their lengths in another column"
        )
    return values.flatten()


def _ragged(values: Any, column: Column, path: Path) -> Any:
    """Return lists as an Arrow array of large binaries, with the values of each row."""
    dtype = value_dtype(column)
    if not _is_list(values.type):
        raise SourceError(f"{path}: column {column.name!r} is of type {values.type}, not of lists")
    flat = native(_tensor(_flatten_lists(values, column.name, path), column.name, path))
    if flat.dtype != dtype:
        raise SourceError(
            f"{path}: column {column.name!r} is of mixed types: first {dtype}, then {flat.dtype}"
        )
    lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False).astype(np.int64)
    offsets = np.concatenate(([0], np.cumsum(lengths))) * dtype.itemsize
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(raw_bytes(flat))]
    return pa.Array.from_buffers(pa.large_binary(), len(values), buffers)


def _refuse_missing(values: Any, name: str, path: Path) -> None:
    if values.null_count:
        raise SourceError(
            f"{path}: column {name!r} of type {values.type} misses "
            f"{format_count(values.null_count, 'value')} in a block "
            f"of {len(values)}. Fill them or drop these rows"
        )
