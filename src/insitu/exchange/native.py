"""The compiled code of the exchange: a barrier within a microsecond, and sums that stay in the first-level
cache.

`kernels.c` is compiled when insitu is built (`insitu.base.compiled`). Python sums half precision and the
results of a reduce_scatter, and moves what is encrypted, with the same bits.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from insitu.base.compiled import load_library
from insitu.exchange.plan import PAGE, ReduceOp

ARRIVED, MISSING, LOSS_FLAGGED, EVICTED, AT_END = 0, 1, 2, 4, 8
"""The states that a call with a barrier returns: all members arrived; a member is missing; the loss flag is
set; the others have evicted this member. AT_END is added if that was at the second of two barriers."""

HOLD_GIL_BYTES = 256 * 1024
"""Rows up to this size are reduced while the GIL is held: releasing it would take longer."""

DTYPES = {"float32": 0, "float64": 1, "int32": 2, "int64": 3}
_MAX_PIECES = 1 << 18
"""Pieces of a row at most: twice their number must fit into `PIECE_BITS`."""
PIECE_BITS = 20
"""Low bits of a progress word: how far a member is within the phase that the other bits name."""

_SOURCE = Path(__file__).with_name("kernels.c")


class BarrierStruct(ctypes.Structure):
    """`struct barrier`."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("asleep", ctypes.c_void_p),
        ("others", ctypes.c_void_p),
        ("own", ctypes.c_uint64 * 2),
        *((name, ctypes.c_uint64) for name in ("loss_flag", "doorbell", "per_member", "member", "count")),
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


class SlotReductionStruct(ctypes.Structure):
    """`struct slot_reduction`."""

    _fields_ = (
        ("barrier", ctypes.c_void_p),
        ("sum", Sum),
        *((name, ctypes.c_uint64) for name in ("signature", "bytes", "own_count")),
        *((name, ctypes.c_void_p) for name in ("rows", "copies", "slots", "result")),
        ("start", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
    )


class RegionReductionStruct(ctypes.Structure):
    """`struct region_reduction`."""

    _fields_ = (
        ("barrier", ctypes.c_void_p),
        ("sum", Sum),
        *(
            (n, ctypes.c_uint64)
            for n in ("begin", "end", "start", "stop", "piece", "itemsize", "results_count")
        ),
        *((name, ctypes.c_void_p) for name in ("rows", "results", "scratch", "progress", "evicted")),
        ("piece_bits", ctypes.c_uint64),
    )


KernelFunction = Callable[[int, int], int]
"""Takes the address of a structure and a number; returns a state."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The functions of `kernels.c`. They hold the GIL, except for those named `_nogil`."""

    #: (address of a BarrierStruct, phase, signature) -> state
    barrier_wait: Callable[[int, int, int], int]
    #: (address of a SlotReductionStruct, phase) -> state
    reduce_slots: KernelFunction
    #: (address of a RegionReductionStruct, phase of the barrier before) -> state
    reduce_region: KernelFunction
    #: (address of a RegionReductionStruct, phase of its first barrier) -> state
    barrier_and_reduce_region: KernelFunction
    #: (address of a schedule, number of the operation) -> state, see `compiled_schedule`
    run_schedule: KernelFunction
    #: (address of a schedule, 0) -> state
    resume_schedule: KernelFunction
    #: As `reduce_region`, without the GIL.
    reduce_region_nogil: KernelFunction
    #: As `barrier_and_reduce_region`, without the GIL.
    barrier_and_reduce_region_nogil: KernelFunction
    #: As `run_schedule`, without the GIL.
    run_schedule_nogil: KernelFunction
    #: As `resume_schedule`, without the GIL.
    resume_schedule_nogil: KernelFunction
    #: (address of a schedule, index of a peer) -> whether anything has been received from that peer
    receive_from: KernelFunction


def address_of(array: np.ndarray) -> int:
    """Return the address of an array's memory."""
    return int(array.__array_interface__["data"][0])


def address_table(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the arrays' addresses, for C. The caller keeps the table and the arrays as long as C uses
    them."""
    return np.array([address_of(array) for array in arrays], np.uint64)


def supports(dtype: np.dtype) -> bool:
    """Return True if the compiled code can sum this dtype."""
    return dtype.isnative and dtype.name in DTYPES


def choose_piece_bytes(row_bytes: int) -> int:
    """Return the bytes that are summed at once: so few that rows and sum are still in the first-level cache
    when the sum is copied over the rows."""
    return PAGE * max(1, -(-row_bytes // (_MAX_PIECES * PAGE)))


def describe_sum(op: ReduceOp, dtype: np.dtype, shards: int, factors: np.ndarray | None) -> Sum:
    """Return the structure for a sum over `shards` rows.

    `factors` is a float64[shards] that the caller fills in before each call; None for sums without weights.
    """
    return Sum(
        DTYPES[dtype.name],
        shards,
        shards if op == "mean" else 0,
        None if factors is None else address_of(factors),
    )


class PreparedCall:
    """A structure for one of the functions. Keeps everything that it points to."""

    def __init__(self, structure: ctypes.Structure, *kept: Any) -> None:
        self._structure = structure
        self._kept = kept
        #: The address of the structure.
        self.address = ctypes.addressof(structure)


def prepare_slot_reduction(
    barrier: int,
    total: Sum,
    signature: int,
    row_bytes: int,
    rows: Sequence[np.ndarray],
    copies: Sequence[np.ndarray],
    slots: Sequence[np.ndarray],
    result: np.ndarray,
    start: int,
) -> PreparedCall:
    """Prepare copying `rows` to `copies`, a barrier, and writing the sum of `slots` from element `start` to
    `result`.

    `copies` and `slots` are those for even phases, followed by those for odd ones. `barrier` is the address
    of the BarrierStruct.
    """
    tables = [address_table(arrays) for arrays in (rows, copies, slots)]
    addresses = [address_of(array) for array in (*tables, result)]
    structure = SlotReductionStruct(
        barrier, total, signature, row_bytes, len(rows), *addresses, start, result.size
    )
    return PreparedCall(structure, tables, rows, copies, slots, result)


def prepare_region_reduction(
    barrier: int,
    total: Sum,
    signatures: tuple[int, int],
    interval: tuple[int, int],
    piece: int,
    rows: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    scratch: np.ndarray,
    shared_words: tuple[int, int],
) -> PreparedCall:
    """Prepare summing the elements in `interval` of all `rows` and copying the sum to all `results`.

    It sums `piece` elements at once, in `scratch`. `signatures` are those of the barriers before and after.
    `shared_words` are the addresses of two words: this member's progress, and whether it was evicted.
    `barrier` is the address of the BarrierStruct.
    """
    tables = [address_table(rows), address_table(results)]
    structure = RegionReductionStruct(
        *(barrier, total, *signatures, *interval, piece, results[0].itemsize, len(results)),
        *(*map(address_of, tables), address_of(scratch), *shared_words, PIECE_BITS),
    )
    return PreparedCall(structure, tables, rows, results, scratch)


@functools.cache
def load_kernels() -> Kernels:
    """Return the compiled functions. Raise MissingLibrary if they haven't been compiled."""
    return load_library(_SOURCE, _load)


def _load(library: Path) -> Kernels:
    held, released = ctypes.PyDLL(str(library)), ctypes.CDLL(str(library))
    return Kernels(
        barrier_wait=_declare(held.insitu_barrier_wait, ctypes.c_uint64),
        reduce_slots=_declare(held.insitu_reduce_slots),
        reduce_region=_declare(held.insitu_reduce_region),
        barrier_and_reduce_region=_declare(held.insitu_barrier_and_reduce_region),
        run_schedule=_declare(held.insitu_run_schedule),
        resume_schedule=_declare(held.insitu_resume_schedule),
        reduce_region_nogil=_declare(released.insitu_reduce_region),
        barrier_and_reduce_region_nogil=_declare(released.insitu_barrier_and_reduce_region),
        run_schedule_nogil=_declare(released.insitu_run_schedule),
        resume_schedule_nogil=_declare(released.insitu_resume_schedule),
        receive_from=_declare(held.insitu_receive_from),
    )


def _declare(function: Callable[..., int], *more: type) -> Callable[..., int]:
    """Set the C types of a function and return it."""
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, *more]  # type: ignore[attr-defined]
    function.restype = ctypes.c_int  # type: ignore[attr-defined]
    return function
