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
    """The functions of `kernels.c`, of float32. Others may run Python meanwhile."""

    finite: Callable[[int, int], int]
    copy: Callable[[int, int, int, bool], int]
    descend: Callable[[int, int, int | None, int, float, bool], int]


@functools.cache
def kernels() -> Kernels | None:
    """None where they can't be had."""
    return compiling.load(_SOURCE, _load)


def _load(library: Path) -> Kernels:
    found = ctypes.CDLL(str(library))
    pointer, count = ctypes.c_void_p, ctypes.c_uint64
    found.insitu_finite.argtypes = [pointer, count]
    found.insitu_copy.argtypes = [pointer, pointer, count, ctypes.c_int]
    found.insitu_descend.argtypes = [pointer, pointer, pointer, count, ctypes.c_float, ctypes.c_int]
    return Kernels(found.insitu_finite, found.insitu_copy, found.insitu_descend)


def _fits(*arrays: Array) -> bool:
    return all(a.dtype == np.float32 and a.flags.c_contiguous and a.flags.aligned for a in arrays)


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
