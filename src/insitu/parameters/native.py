"""Loops over large arrays in C (`kernels.c`), with the bits of NumPy. NumPy does what isn't float32."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.base.compiled import load_library
from insitu.exchange import address_of

Array = NDArray[Any]
_SOURCE = Path(__file__).with_name("kernels.c")
_STREAMING_ELEMENTS = 1 << 18
"""Elements from which copies bypass the caches."""


@dataclass(frozen=True, slots=True)
class ParameterKernels:
    """The functions of `kernels.c`, which take addresses. They release Python's lock."""

    #: (address, elements) -> whether no value is NaN or infinite.
    finite: Callable[..., int]
    #: (address of the copy, of the source, elements, whether to bypass the caches) -> whether all are finite.
    copy: Callable[..., int]
    #: (addresses of values, gradient and a copy or None; elements, rate, whether to bypass the caches).
    descend: Callable[..., int]
    #: (keys, how many, buckets, their mask, known keys, found) -> number of missing keys. See `native.find`.
    find: Callable[..., int]
    #: (addresses of rows and numbers, how many, bytes of a row, address of the output). See `native.take`.
    take: Callable[..., int]
    #: (addresses of rows and numbers, how many, bytes of a row, address of the source). See `native.put`.
    put: Callable[..., int]
    #: (addresses of rows and numbers, how many, width, address of the gradients, rate).
    descend_rows: Callable[..., int]


@functools.cache
def kernels() -> ParameterKernels:
    """Return the compiled functions. Raise MissingLibrary if they haven't been compiled."""
    return load_library(_SOURCE, _load)


def _load(library: Path) -> ParameterKernels:
    found = ctypes.CDLL(str(library))
    pointer, count, rate, flag = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_float, ctypes.c_int
    arguments: dict[str, list[Any]] = {
        "finite": [pointer, count],
        "copy": [pointer, pointer, count, flag],
        "descend": [pointer, pointer, pointer, count, rate, flag],
        "find": [pointer, count, pointer, count, pointer, pointer],
        "take": [pointer, pointer, count, count, pointer],
        "put": [pointer, pointer, count, count, pointer],
        "descend_rows": [pointer, pointer, count, count, pointer, rate],
    }
    functions = {}
    for name, types in arguments.items():
        functions[name] = getattr(found, f"insitu_{name}")
        functions[name].argtypes = types
    return ParameterKernels(**functions)


def _are_plain_float32(*arrays: Array) -> bool:
    return all(a.dtype == np.float32 and _is_contiguous(a) for a in arrays)


def _is_contiguous(array: Array) -> bool:
    return array.flags.c_contiguous and array.flags.aligned


def all_finite(values: Array) -> bool:
    """Return whether no value is NaN or infinite."""
    if _are_plain_float32(values):
        return bool(kernels().finite(address_of(values), values.size))
    if values.dtype.itemsize >= 4:
        # The sum of squares is one pass; a second one is needed only if it overflows.
        flat = values.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(np.dot(flat, flat)):
                return True
    return bool(np.isfinite(values).all())


def copy_and_check(to: Array, source: Array, *, whole: int = 0) -> bool:
    """Copy `source` to `to`, of the same shape and dtype. Return whether all of it is finite.

    `whole`: elements of the array that it is a part of, which decide whether caches are bypassed.
    """
    if _are_plain_float32(to, source):
        past = max(whole, source.size) >= _STREAMING_ELEMENTS
        return bool(kernels().copy(address_of(to), address_of(source), source.size, past))
    np.copyto(to, source)
    return all_finite(source)


def update_sgd(value: Array, gradient: Array, rate: float, to: Array | None) -> bool:
    """Compute `value -= rate * gradient` in place, and copy the result to `to`; all flat, of one size.

    Return False if there is no compiled code for it: then nothing was done.
    """
    if not _are_plain_float32(value, gradient, *(() if to is None else (to,))):
        return False
    copied = None if to is None else address_of(to)
    past = value.size >= _STREAMING_ELEMENTS
    kernels().descend(address_of(value), address_of(gradient), copied, value.size, rate, past)
    return True


# Rows of tables: `numbers` are int32[n], distinct and within the table, or -1 where noted.


def find(keys: Array, buckets: Array, known: Array, found: Array) -> int:
    """Write the row of each of `keys`, int64[n], to `found`, -1 for those that aren't there: see `HashIndex`.

    Return how many aren't.
    """
    if not _is_contiguous(keys):
        keys = keys.copy()
    table = address_of(buckets), len(buckets) - 1
    return int(kernels().find(address_of(keys), len(keys), *table, address_of(known), address_of(found)))


def _describe_rows(array: Array) -> tuple[int, int]:
    """Return (bytes of a row, address) of a contiguous array. Its first stride says something else if it is
    a view of one row."""
    if not array.flags.c_contiguous:
        raise ValueError(f"Rows must be contiguous. Received: strides {array.strides} of {array.shape}")
    return array.itemsize * math.prod(array.shape[1:]), address_of(array)


def take(rows: Array, numbers: Array, out: Array) -> None:
    """Compute `out[i] = rows[numbers[i]]`; skip it if the number is -1. `out` is contiguous."""
    kernels().take(address_of(rows), address_of(numbers), len(numbers), *_describe_rows(out))


def put(rows: Array, numbers: Array, source: Array) -> None:
    """Compute `rows[numbers[i]] = source[i]`. `source` is contiguous."""
    kernels().put(address_of(rows), address_of(numbers), len(numbers), *_describe_rows(source))


def update_sgd_rows(rows: Array, numbers: Array, gradients: Array, rate: float) -> bool:
    """Compute `rows[numbers[i]] -= rate * gradients[i]`.

    Return False if there is no compiled code for it: then nothing was done.
    """
    if rows.dtype != np.float32 or not _are_plain_float32(gradients):
        return False
    table = address_of(rows), address_of(numbers), len(numbers), gradients.shape[1]
    kernels().descend_rows(*table, address_of(gradients), rate)
    return True
