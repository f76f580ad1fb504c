"""Notices weights that a script or a callback has changed on a worker, while the servers have others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.exchange import address_of
from insitu.train.replica import Replica, holds_table_rows, view

_SMALL_BYTES = 4096
"""To compare so little takes less time than to ask where it lies."""


class WeightsWatch:
    """Compares the variables of a replica with the values that were last pulled.

    To compare is cheap where nothing has changed: a value that lies in the buffer of the pull, or is the very
    object that was there behind the last step, isn't read. On TensorFlow a step's gradient brings the values.
    """

    def __init__(self, replica: Replica, rate: Any = None) -> None:
        """`rate` is the variable of a learning rate that is read as well, or None."""
        self._replica = replica
        #: The learning rate in the step whose weights were compared last; None where it wasn't read.
        self.learning_rate: float | None = None
        self._spans = [(v, span) for v, span in replica.float_spans() if not holds_table_rows(v)]
        self._tokens: list[Any] = []
        self._token = {"jax": _object_of, "torch": _version_of}.get(keras.backend.backend())
        rates = [] if rate is None else [rate]
        self._by_gradient = replica.watch_weights([*(v for v, _ in self._spans), *rates])

    def note(self) -> None:
        """Remember the variables, which have just been loaded."""
        if self._token is not None:
            self._tokens = [self._token(v) for v, _ in self._spans]

    def find_changed_in_step(self, values: NDArray[Any]) -> Sequence[Any]:
        """Return what `find_changed` returns, between the gradient of a step and its update."""
        taken = self._replica.take_watched() if self._by_gradient else ()
        self.learning_rate = None
        if not taken:
            return self.find_changed(values)
        if len(taken) > len(self._spans):
            self.learning_rate = float(taken[-1])
        return [
            variable
            for (variable, span), own in zip(self._spans, taken, strict=False)
            if _are_other(own, values[span.start : span.stop])
        ]

    def find_changed(self, values: NDArray[Any]) -> Sequence[Any]:
        """Return the variables whose values differ from `values`, which are laid out as its floats."""
        candidates = self._spans
        if self._token is not None and self._tokens:
            candidates = [
                pair
                for pair, token in zip(self._spans, self._tokens, strict=True)
                if not _is_same(self._token(pair[0]), token)
            ]
        return [v for v, span in candidates if _differs(v, values[span.start : span.stop])]


def _object_of(variable: Any) -> Any:
    return variable.value


def _version_of(variable: Any) -> Any:
    return variable.value.data_ptr(), variable.value._version


def _is_same(now: Any, before: Any) -> bool:
    return now is before or (isinstance(now, tuple) and bool(now == before))


def _differs(variable: Any, expected: NDArray[Any]) -> bool:
    return _are_other(view(variable), expected)


def _are_other(own: NDArray[Any], expected: NDArray[Any]) -> bool:
    own = own.reshape(-1)
    if own.dtype == expected.dtype and own.nbytes <= _SMALL_BYTES:
        return own.tobytes() != expected.tobytes()
    if own.dtype == expected.dtype and address_of(own) == address_of(expected):
        return False
    # What was pulled has been copied, so the bits are the same, also those of NaN.
    bits = np.dtype(f"u{own.itemsize}") if own.itemsize <= 8 else own.dtype
    return not np.array_equal(own.view(bits), expected.astype(own.dtype, copy=False).view(bits))
