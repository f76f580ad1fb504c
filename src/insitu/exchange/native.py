"""Compiled code for what Python is too slow at: meeting within a microsecond, and sums that stay in the
first-level cache.

`kernels.c` is compiled on first use (`insitu.exchange.compiling`). Where it can't be, the same is done with
NumPy, with the same bits.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from insitu.exchange import compiling
from insitu.exchange.arithmetic import PAGE, ReduceOp

HERE, MISSING, ALARM, GIVEN_UP, AFTERWARDS = 0, 1, 2, 4, 8
"""What a call comes back with: all is done; somebody is missing; the alarm rings; the others have given this
member up; and whether that was at the meeting at the end."""

DTYPES = {"float32": 0, "float64": 1, "int32": 2, "int64": 3}
_MOST_PIECES = 1 << 18
"""Of a row: their number has its place in a word."""

_SOURCE = Path(__file__).with_name("kernels.c")


class BarrierStruct(ctypes.Structure):
    """`struct meeting`."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("asleep", ctypes.c_void_p),
        ("others", ctypes.c_void_p),
        ("own", ctypes.c_uint64 * 2),
        *((name, ctypes.c_uint64) for name in ("alarm", "bell", "per_member", "member", "count")),
        ("spins", ctypes.c_uint64),
        ("yields", ctypes.c_uint64),
        ("waited", ctypes.c_double),
        ("last", ctypes.c_int64),
    )


class Sum(ctypes.Structure):
    """`struct sum`."""

    _fields_ = (
        ("dtype", ctypes.c_uint64),
        ("shards", ctypes.c_uint64),
        ("divisor", ctypes.c_uint64),
        ("factors", ctypes.c_void_p),
    )


class Small(ctypes.Structure):
    """`struct small`."""

    _fields_ = (
        ("meeting", ctypes.c_void_p),
        ("sum", Sum),
        *((name, ctypes.c_uint64) for name in ("signature", "bytes", "mine")),
        *((name, ctypes.c_void_p) for name in ("rows", "copies", "slots", "result")),
        ("start", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
    )


class Part(ctypes.Structure):
    """`struct part`."""

    _fields_ = (
        ("meeting", ctypes.c_void_p),
        ("sum", Sum),
        *(
            (n, ctypes.c_uint64)
            for n in ("begin", "end", "start", "stop", "piece", "itemsize", "results_count")
        ),
        *((name, ctypes.c_void_p) for name in ("rows", "results", "scratch", "work", "out")),
        ("piece_bits", ctypes.c_uint64),
    )


KernelFunction = Callable[[int, int], int]
"""(address of a structure, number of the meeting) to one of the outcomes above."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The functions of `kernels.c`. What takes microseconds keeps the interpreter to itself; those that are
    called `long` let other threads run."""

    meet: Callable[[int, int, int], int]
    small: KernelFunction
    part: KernelFunction
    whole: KernelFunction
    round: KernelFunction
    round_on: KernelFunction
    long_part: KernelFunction
    long_whole: KernelFunction
    long_round: KernelFunction
    long_round_on: KernelFunction
    pull: KernelFunction


def address_of(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def table(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The arrays' addresses, for C. Keep it, and them, as long as C has it."""
    return np.array([address_of(array) for array in arrays], np.uint64)


def supports(dtype: np.dtype) -> bool:
    return dtype.isnative and dtype.name in DTYPES


def piece_bytes(row_bytes: int) -> int:
    """What is added up at once: so little that rows and sum are still in the first-level cache when the sum
    is copied over them."""
    return PAGE * max(1, -(-row_bytes // (_MOST_PIECES * PAGE)))


def sum_of(op: ReduceOp, dtype: np.dtype, shards: int, factors: np.ndarray | None) -> Sum:
    """`factors`: float64[shards], filled in before each call; None where there are no weights."""
    return Sum(
        DTYPES[dtype.name],
        shards,
        shards if op == "mean" else 0,
        None if factors is None else address_of(factors),
    )


class PreparedCall:
    """A structure for one of the functions, and everything that it points to."""

    def __init__(self, structure: ctypes.Structure, *kept: Any) -> None:
        self._structure = structure
        self._kept = kept
        self.address = ctypes.addressof(structure)


def small(
    place: int,
    total: Sum,
    signature: int,
    row_bytes: int,
    rows: Sequence[np.ndarray],
    copies: Sequence[np.ndarray],
    slots: Sequence[np.ndarray],
    result: np.ndarray,
    start: int,
) -> PreparedCall:
    """`rows` go to `copies`, and the elements from `start` of the sum of `slots` to `result`; `copies` and
    `slots` are those of even meetings, then those of odd ones. `place` is the address of the meeting."""
    tables = [table(arrays) for arrays in (rows, copies, slots)]
    addresses = [address_of(array) for array in (*tables, result)]
    structure = Small(place, total, signature, row_bytes, len(rows), *addresses, start, result.size)
    return PreparedCall(structure, tables, rows, copies, slots, result)


def part(
    place: int,
    total: Sum,
    signatures: tuple[int, int],
    interval: tuple[int, int],
    piece: int,
    dtype: np.dtype,
    rows: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    scratch: np.ndarray,
    watched: tuple[int, int],
    piece_bits: int,
) -> PreparedCall:
    """The elements in `interval` of the sum of `rows` go to all `results`, `piece` elements at once, by way
    of `scratch`. `watched` are the addresses of two words: how far this member is, and whether it was given
    up."""
    tables = [table(rows), table(results)]
    size = dtype.itemsize
    structure = Part(
        *(place, total, *signatures, *interval, piece, size, len(results)),
        *(*map(address_of, tables), address_of(scratch), *watched, piece_bits),
    )
    return PreparedCall(structure, tables, rows, results, scratch)


@functools.cache
def kernels() -> Kernels | None:
    """None where they can't be had."""
    return compiling.load(_SOURCE, _load)


def _load(library: Path) -> Kernels:
    brief, lengthy = ctypes.PyDLL(str(library)), ctypes.CDLL(str(library))
    return Kernels(
        _function(brief.insitu_meet, ctypes.c_uint64),
        _function(brief.insitu_small),
        _function(brief.insitu_part),
        _function(brief.insitu_whole),
        _function(brief.insitu_round),
        _function(brief.insitu_round_on),
        _function(lengthy.insitu_part),
        _function(lengthy.insitu_whole),
        _function(lengthy.insitu_round),
        _function(lengthy.insitu_round_on),
        _function(brief.insitu_round_pull),
    )


def _function(function: Callable[..., int], *more: type) -> Callable[..., int]:
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, *more]  # type: ignore[attr-defined]
    function.restype = ctypes.c_int  # type: ignore[attr-defined]
    return function
