"""What the compiled code does, in NumPy and Python: the reference for tests of equality."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np

from insitu.exchange import native as exchange_native
from insitu.exchange import shm, shm_reductions
from insitu.exchange.shm_session import ShmSession
from insitu.parameters import native


@contextlib.contextmanager
def sums_in_python(here: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Leave all sums and transfers to Python where `here`, as those of half precision are."""
    supports = exchange_native.supports
    with mock.patch.object(exchange_native, "supports", lambda dtype: not here() and supports(dtype)):
        yield


@contextlib.contextmanager
def sums_in_numpy(sessions: Sequence[ShmSession]) -> Iterator[None]:
    """Sum in NumPy on these members of a host, in pieces as small as the compiled code's."""
    with contextlib.ExitStack() as stack:
        for name, kind in _IN_NUMPY.items():
            prepare = getattr(shm_reductions, name)

            def choose(session: ShmSession, *rest: Any, kind: Any = kind, prepare: Any = prepare) -> Any:
                return (kind if session in sessions else prepare)(session, *rest)

            stack.enter_context(mock.patch.object(shm_reductions, name, choose))
        yield


_IN_NUMPY = {
    "prepare_slot_reduction": shm_reductions.SlotReduction,
    "prepare_region_reduction": shm_reductions.NumpyRegionReduction,
    "prepare_buffer_reduction": shm_reductions.BufferReduction,
}


def step_through_sums() -> None:
    """Have this process reduce its part step by step in Python, in pieces as small as the compiled code's."""
    shm_reductions.prepare_region_reduction = shm_reductions.NumpyRegionReduction  # type: ignore[assignment]
    shm.prepare_buffer_reduction = shm_reductions.BufferReduction  # type: ignore[assignment]


@contextlib.contextmanager
def parameters_in_numpy() -> Iterator[None]:
    """Replace the loops over parameters and rows of tables by NumPy's."""
    with contextlib.ExitStack() as stack:
        for function in (all_finite, copy_and_check, find, take, put):
            stack.enter_context(mock.patch.object(native, function.__name__, function))
        for name in ("update_sgd", "update_sgd_rows"):
            stack.enter_context(mock.patch.object(native, name, lambda *_: False))
        yield


def all_finite(values: Any) -> bool:
    return bool(np.isfinite(values).all())


def copy_and_check(to: Any, source: Any, *, whole: int = 0) -> bool:
    np.copyto(to, source)
    return all_finite(source)


def find(keys: Any, buckets: Any, known: Any, found: Any) -> int:
    rows = {int(known[row]): row for row in buckets[buckets >= 0]}
    found[:] = [rows.get(int(key), -1) for key in keys]
    return int((found < 0).sum())


def take(rows: Any, numbers: Any, out: Any) -> None:
    out[numbers >= 0] = rows[numbers[numbers >= 0]]


def put(rows: Any, numbers: Any, source: Any) -> None:
    rows[numbers] = source
