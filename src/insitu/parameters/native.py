"""Sweeps over large arrays, in compiled code where there is some (`kernels.c`), or NumPy: the same bits."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.exchange import compiling
from insitu.exchange.native import address_of

Array = NDArray[Any]
_SOURCE = Path(__file__).with_name("kernels.c")
_PAST_CACHES = 1 << 18
"""Elements from which copies are written past the caches."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The functions of `kernels.c`, by address. Others may run Python meanwhile."""

    finite: Callable[..., int]
    copy: Callable[..., int]
    descend: Callable[..., int]
    find: Callable[..., int]
    take: Callable[..., int]
    put: Callable[..., int]
    descend_rows: Callable[..., int]


@functools.cache
def kernels() -> Kernels | None:
    """None where they can't be had."""
    return compiling.load(_SOURCE, _load)


def _load(library: Path) -> Kernels:
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
    return Kernels(**functions)


def _fits(*arrays: Array) -> bool:
    return all(a.dtype == np.float32 and _plain(a) for a in arrays)


def _plain(array: Array) -> bool:
    return array.flags.c_contiguous and array.flags.aligned


def finite(values: Array) -> bool:
    """Whether all are."""
    compiled = kernels()
    if compiled is not None and _fits(values):
        return bool(compiled.finite(address_of(values), values.size))
    if values.dtype.itemsize >= 4:
        # One pass, and a second one only where the sum of squares isn't finite.
        flat = values.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(np.dot(flat, flat)):
                return True
    return bool(np.isfinite(values).all())


def copy(to: Array, source: Array, *, whole: int = 0) -> bool:
    """Copies `source` to `to`, of the same shape and dtype; whether all of it is finite. `whole`: the
    elements of what it is a part of."""
    compiled = kernels()
    if compiled is not None and _fits(to, source):
        past = max(whole, source.size) >= _PAST_CACHES
        return bool(compiled.copy(address_of(to), address_of(source), source.size, past))
    np.copyto(to, source)
    return finite(source)


def descend(value: Array, gradient: Array, rate: float, to: Array | None) -> bool:
    """`value -= rate * gradient`, in place, and what it comes to copied to `to`; all flat, of one size. False
    where there is no compiled code for it: then nothing was done."""
    compiled = kernels()
    if compiled is None or not _fits(value, gradient, *(() if to is None else (to,))):
        return False
    copied = None if to is None else address_of(to)
    past = value.size >= _PAST_CACHES
    compiled.descend(address_of(value), address_of(gradient), copied, value.size, rate, past)
    return True


# Rows of tables: their numbers are int32[n], distinct and within the table, or -1 where that is said.


def find(keys: Array, table: Array, known: Array, found: Array) -> int | None:
    """Writes the number of the row of each of `keys`, int64[n], to `found`, -1 for those that aren't there:
    see `insitu.parameters.key_index`. Returns how many aren't; None where there is no compiled code for it: then
    nothing was done."""
    compiled = kernels()
    if compiled is None or not _plain(keys):
        return None
    place = address_of(table), len(table) - 1
    return int(compiled.find(address_of(keys), len(keys), *place, address_of(known), address_of(found)))


def take(rows: Array, numbers: Array, out: Array) -> None:
    """`out[i] = rows[numbers[i]]`; anything where the number is -1."""
    compiled = kernels()
    if compiled is not None and _plain(out):
        size = out.strides[0]
        compiled.take(address_of(rows), address_of(numbers), len(numbers), size, address_of(out))
    else:
        # Row 0 in the place of what has no number.
        np.take(rows, numbers, axis=0, out=out, mode="clip")


def put(rows: Array, numbers: Array, source: Array) -> None:
    """`rows[numbers[i]] = source[i]`."""
    compiled = kernels()
    if compiled is not None and _plain(source):
        size = source.strides[0]
        compiled.put(address_of(rows), address_of(numbers), len(numbers), size, address_of(source))
    else:
        rows[numbers] = source


def descend_rows(rows: Array, numbers: Array, gradients: Array, rate: float) -> bool:
    """`rows[numbers[i]] -= rate * gradients[i]`. False where there is no compiled code for it: then nothing
    was done."""
    compiled = kernels()
    if compiled is None or rows.dtype != np.float32 or not _fits(gradients):
        return False
    place = address_of(rows), address_of(numbers), len(numbers), gradients.shape[1]
    compiled.descend_rows(*place, address_of(gradients), rate)
    return True
