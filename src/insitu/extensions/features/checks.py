"""The rules that arguments of feature columns keep. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from insitu.base.errors import InputError

MOST_BUCKETS = 2**31 - 1
"""Ids are int32 in the graph, since JAX has no other by default."""


def check_key(key: Any, what: str = "key") -> str:
    """Return the name of a feature. Raises InputError."""
    if not isinstance(key, str) or not key:
        raise InputError(
            f"{what} is the name of a feature. Received: {key!r}. Pass the feature's key in the data, as text"
        )
    return key


def check_count(count: Any, what: str, least: int = 1) -> int:
    """Return a whole number of `least` to MOST_BUCKETS. Raises InputError."""
    whole = isinstance(count, int | np.integer) and not isinstance(count, bool)
    if not whole or not least <= count <= MOST_BUCKETS:
        raise InputError(f"{what} is a whole number in [{least}, {MOST_BUCKETS}]. Received: {count!r}")
    return int(count)


def check_id(default: Any, buckets: int) -> int | None:
    """Return the id for unknown values. Raises InputError."""
    if default is None:
        return None
    whole = isinstance(default, int | np.integer) and not isinstance(default, bool)
    if not whole or not 0 <= default < buckets:
        raise InputError(
            f"default_value is one of the ids [0, {buckets}). Received: {default!r}. Leave it out: such "
            f"values are an error then"
        )
    return int(default)


def check_dtype(dtype: Any, what: str) -> str:
    """Return "string" or "int64" for the dtype of a categorical feature, also TensorFlow's. Raises
    InputError."""
    name = "string" if dtype is str else getattr(dtype, "name", dtype)
    if dtype is int or name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"):
        return "int64"
    if name in ("string", "str"):
        return "string"
    raise InputError(f"The dtype of {what} is 'string' or 'int64'. Received: {dtype!r}")


def check_number_dtype(dtype: Any) -> str:
    """Return the name of a dtype of numbers. Raises InputError."""
    name = getattr(dtype, "name", dtype)
    try:
        found = np.dtype(name)
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "iuf":
        raise InputError(
            f"dtype of a numeric_column is one of numbers, such as 'float32'. Received: {dtype!r}"
        )
    return str(found.name)


def check_shape(shape: Any) -> tuple[int, ...]:
    """Return the shape of a row. Raises InputError."""
    listed = tuple(shape) if isinstance(shape, Iterable) and not isinstance(shape, str) else (shape,)
    wrong = [n for n in listed if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1]
    if wrong or not listed:
        raise InputError(
            f"shape is that of one row: whole numbers, 1 at least. Received: {shape!r}. Leave out the rows' "
            f"axis"
        )
    return tuple(int(n) for n in listed)


def check_default(default: Any, shape: tuple[int, ...]) -> tuple[float, ...] | None:
    """Return a default for each value of a row. Raises InputError."""
    if default is None:
        return None
    values = np.asarray(default)
    size = int(np.prod(shape))
    if values.dtype.kind not in "iufb" or values.size not in (1, size):
        raise InputError(
            f"default_value is a number, or one for each of the {size} values of a row. Received: {default!r}"
        )
    return tuple(float(value) for value in np.broadcast_to(values.reshape(-1), (size,)))


def check_boundaries(boundaries: Any) -> tuple[float, ...]:
    """Return sorted boundaries. Raises InputError."""
    try:
        listed = tuple(float(value) for value in boundaries)
    except (TypeError, ValueError):
        listed = ()
    rising = all(low < high for low, high in pairwise(listed))
    if not listed or not rising or any(value != value for value in listed):
        raise InputError(f"boundaries are rising numbers, one at least. Received: {boundaries!r}. Sort them")
    return listed


def check_vocabulary(vocabulary: Any, dtype: Any, key: str) -> tuple[tuple[Any, ...], str]:
    """Return (the vocabulary, its dtype). Raises InputError."""
    if isinstance(vocabulary, str | bytes) or not isinstance(vocabulary, Iterable):
        raise InputError(f"vocabulary_list is a list of texts or whole numbers. Received: {vocabulary!r}")
    plain = [v.item() if isinstance(v, np.generic) else v for v in vocabulary]
    try:
        listed = tuple(v.decode() if isinstance(v, bytes) else v for v in plain)
    except UnicodeDecodeError as error:
        raise InputError(f"A vocabulary is in UTF-8. Received: {error}, for column {key!r}") from None
    are_texts = all(isinstance(value, str) for value in listed)
    are_numbers = all(isinstance(v, int) and not isinstance(v, bool) for v in listed)
    if not listed or not (are_texts or are_numbers):
        raise InputError(
            f"vocabulary_list has texts, or whole numbers, one at least. Received: {_shown(listed)} for "
            f"column "
            f"{key!r}"
        )
    found = "string" if are_texts else "int64"
    beyond = next((v for v in listed if isinstance(v, int) and not -(2**63) <= v < 2**63), None)
    if beyond is not None:
        raise InputError(f"Whole numbers must fit into int64. Received: {beyond} for column {key!r}")
    if dtype is not None and check_dtype(dtype, "vocabulary_list") != found:
        raise InputError(f"dtype is that of the vocabulary, {found!r}. Received: {dtype!r}. Leave it out")
    refuse_duplicates(listed, f"vocabulary_list of column {key!r}")
    return listed, found


def refuse_duplicates(values: tuple[Any, ...], what: str) -> None:
    """Raise InputError if a value comes twice."""
    if len(set(values)) < len(values):
        places: dict[Any, int] = {}
        for place, value in enumerate(values):
            if value in places:
                raise InputError(
                    f"A vocabulary has each value once. Received: {value!r} at {places[value]} and {place} "
                    f"of "
                    f"{what}. Leave out the second one"
                )
            places[value] = place


def check_unknown(default: Any, oov: Any, size: int) -> tuple[int, int]:
    """Return (id of unknown values, buckets for them) of a vocabulary. Raises InputError."""
    buckets = check_count(oov, "num_oov_buckets", 0)
    if buckets and default not in (None, -1):
        raise InputError(
            f"Unknown values go to one id or to buckets. Received: default_value={default!r} and "
            f"num_oov_buckets={oov!r}. Leave one of them out"
        )
    if default in (None, -1):
        return -1, buckets
    return check_id(default, size) or 0, buckets


def _shown(values: tuple[Any, ...]) -> str:
    return repr(list(values[:5]))[:-1] + (", ...]" if len(values) > 5 else "]")
