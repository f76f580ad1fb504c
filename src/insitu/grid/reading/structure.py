"""Batches as structures: an array, or tuples, lists and dicts of structures. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from insitu.base.errors import InputError, InsituError
from insitu.base.wording import format_count

PARTS = ("features", "label", "sample_weight")
"""The parts of a batch that is a tuple, in their order."""
Structure = Any
"""An array, or a tuple, list or dict (with text keys) of structures."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of a batch: `shape` begins with None, which stands for the rows."""

    #: Lengths of its axes, in elements; None for the rows.
    shape: tuple[int | None, ...]
    #: The dtype of its values.
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Pad:
    """Fills up rows of different lengths."""

    #: The value that fills up rows.
    value: Any
    #: Values of each row then.
    length: int

    def fill(self, array: Any) -> Any:
        """Return an array of rows of equal length, of an object array of rows; any other array as it is.

        Raises InputError for a row that is longer, or that isn't a list of values.
        """
        if array.dtype != object or not len(array) or isinstance(array[0], str | bytes):
            return array
        # NumPy makes two axes of rows that happen to be of one length.
        rows = [_to_array(row) for row in array]
        wrong = next((row for row in rows if row.ndim != 1 or len(row) > self.length), None)
        if wrong is not None:
            raise InputError(
                f"Rows must be lists of at most length={self.length} values. Received: one of shape "
                f"{wrong.shape}. Cut it in a map, or pass a larger length to batch"
            )
        kind = self._choose_dtype(array, rows)
        filled = np.full((len(rows), self.length), self.value, object if kind.kind in "SU" else kind)
        for target, row in zip(filled, rows, strict=True):
            target[: len(row)] = row
        return filled

    def _choose_dtype(self, array: Any, rows: Sequence[Any]) -> np.dtype[Any]:
        """Return the dtype of the values of all rows, and of the value that fills them up."""
        # A plain number takes the kind of the others, as in arithmetic.
        value = self.value if type(self.value) in (bool, int, float) else np.asarray(self.value)
        kinds = {row.dtype for row in rows if len(row)}
        if not kinds:  # NumPy makes float64 of an empty list
            kinds = {row.dtype for row in array if _is_typed(row) and row.dtype != np.float64}
        return np.result_type(value, *kinds)


def _is_typed(row: Any) -> bool:
    return isinstance(row, np.ndarray) and not row.dtype.hasobject


def _to_array(row: Any) -> Any:
    if _is_typed(row):
        return row
    return np.asarray(row.tolist() if isinstance(row, np.ndarray) else row)


def has_lists(structure: Structure) -> bool:
    """Return whether an array of the structure has lists or arrays for rows."""
    arrays = [array for array in leaves(structure) if array.dtype.hasobject and len(array)]
    return any(isinstance(array.reshape(-1)[0], list | tuple | np.ndarray) for array in arrays)


def map_leaves(fn: Callable[[Any], Any], structure: Structure) -> Structure:
    """Return the same structure with `fn` of each array."""
    if isinstance(structure, dict):
        return {key: map_leaves(fn, value) for key, value in structure.items()}
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(map_leaves(fn, value) for value in structure))
    if isinstance(structure, (tuple, list)):
        return type(structure)(map_leaves(fn, value) for value in structure)
    return fn(structure)


def leaves(structure: Structure) -> Iterator[Any]:
    """Yield the arrays of a structure, in its order."""
    if isinstance(structure, dict):
        structure = list(structure.values())
    if isinstance(structure, (tuple, list)):
        for value in structure:
            yield from leaves(value)
    else:
        yield structure


def name_leaves(structure: Structure, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the arrays of a structure, each with the key of the innermost dict that it is in."""
    if isinstance(structure, dict):
        for key, value in structure.items():
            yield from name_leaves(value, str(key))
    elif isinstance(structure, (tuple, list)):
        for value in structure:
            yield from name_leaves(value, name)
    else:
        yield name, structure


def describe(structure: Structure) -> str:
    """Return a structure with the dtype and shape of each array, such as `{age: float32[64]}`."""
    if isinstance(structure, dict):
        return f"{{{', '.join(f'{key}: {describe(value)}' for key, value in structure.items())}}}"
    if isinstance(structure, (tuple, list)):
        return f"({', '.join(map(describe, structure))})"
    dtype = getattr(structure, "dtype", None)
    if dtype is None:
        return type(structure).__name__
    name = "text or lists" if dtype.hasobject else "text" if dtype.kind in "SU" else str(dtype)
    return f"{name}{list(np.shape(structure))}"


def concatenate(structures: Sequence[Structure]) -> Structure:
    """Join structures of the same form, row by row."""
    first = structures[0]
    if len(structures) == 1:
        return first
    if isinstance(first, dict):
        return {key: concatenate([s[key] for s in structures]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(concatenate(parts) for parts in zip(*structures, strict=True)))
    if isinstance(first, (tuple, list)):
        return type(first)(concatenate(parts) for parts in zip(*structures, strict=True))
    return np.concatenate(structures)


def spec_of(structure: Structure) -> Structure:
    """Return the structure with an ArraySpec in place of each array."""
    return map_leaves(lambda array: ArraySpec((None, *array.shape[1:]), array.dtype), structure)


def check_parameters(fn: Callable[..., Any], *names: str) -> None:
    """Raise InputError if a function can't be called with these parts of a batch, one argument each."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of NumPy's own functions nothing is known
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        shown = f"{getattr(fn, '__qualname__', repr(fn))}{signature}"
        raise InputError(
            f"A function given to Dataset.map or filter takes {format_count(len(names), 'argument')} here: "
            f"{', '.join(names)}. Received: {shown} ({error}). Write it as `lambda {', '.join(names)}: ...`"
        ) from None


def call_of_batch(fn: Callable[..., Any], data: Structure) -> Any:
    """Return `fn(*data)` if data is a tuple, else `fn(data)`. Errors get a note that says what came.

    Raises InputError if it takes another number of arguments.
    """
    parts = data if isinstance(data, tuple) else (data,)
    try:
        return fn(*parts)
    except InsituError:  # its own text says what came
        raise
    except Exception as error:
        names = [PARTS[n] if n < len(PARTS) else f"part_{n}" for n in range(len(parts))]
        if isinstance(error, TypeError):
            check_parameters(fn, *names)
        shown = ", ".join(f"{name} {describe(part)}" for name, part in zip(names, parts, strict=True))
        error.add_note(f"{getattr(fn, '__qualname__', repr(fn))}, given to map or filter, got {shown}")
        raise


def apply_maps(maps: Sequence[Callable[..., Any]], data: Structure, rows: int) -> Structure:
    """Pass `data` through each of `maps`: `fn(*data)` if data is a tuple, else `fn(data)`.

    Raises InputError if the outcome doesn't have as many rows: each row must be trained on once.
    """
    for fn in maps:
        data = call_of_batch(fn, data)
        for leaf in leaves(data):
            shape = np.shape(leaf)
            if not shape or shape[0] != rows:
                name = getattr(fn, "__qualname__", repr(fn))
                raise InputError(
                    f"A function given to Dataset.map must return arrays with one entry per row of the "
                    f"batch: it may change rows, not drop or add any. Received from {name}: shape {shape} "
                    f"for {rows} rows"
                )
    return map_leaves(np.asarray, data) if maps else data
