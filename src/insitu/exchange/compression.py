"""bfloat16 on the wire: half the bytes of float32, for a gradient's worth of precision.

What rounding takes away from a process's rows is remembered and added to its rows the next time the same
array is reduced (error feedback: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014), so
that over many steps nothing is lost but what the rounding of each sum takes. All ranks still get the same
bits, but no longer those of the sum in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from insitu.exchange.arithmetic import chunks
from insitu.exchange.transport import Reduction, RunReduction, Transport, WaitStats

_PIECE = 64 * 1024
"""Elements rounded at a time, so that they stay in the processor's cache."""


class ErrorFeedback:
    """Rounds one row to bfloat16 again and again, and remembers what that takes away."""

    def __init__(self, length: int) -> None:
        from ml_dtypes import bfloat16  # it comes with keras; needed by nobody who doesn't compress

        self.rounded = np.zeros(length, bfloat16)
        self._residual = np.zeros(length, np.float32)
        self._back = np.empty(min(length, _PIECE), np.float32)

    def round(self, row: np.ndarray) -> None:
        """Puts `row` (float32) plus what was taken before into `rounded`. What isn't finite leaves no
        residual, so that one bad step doesn't spoil all later ones."""
        for low, high in chunks(0, len(row), _PIECE):
            residual, rounded, back = (
                self._residual[low:high],
                self.rounded[low:high],
                self._back[: high - low],
            )
            with np.errstate(all="ignore"):
                np.add(residual, row[low:high], residual)
                np.copyto(rounded, residual, casting="unsafe")
                np.copyto(back, rounded, casting="unsafe")
                np.subtract(residual, back, residual)
            if not np.isfinite(residual).all():
                residual[~np.isfinite(residual)] = 0.0


class CompressingTransport:
    """A Transport that hands all_reduce of float32 to another one as bfloat16, and all else as it is."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.name = inner.name

    @property
    def account(self) -> WaitStats:
        return self._inner.account

    def allocate(self, size: int, keep: np.ndarray | None = None) -> np.ndarray:
        return self._inner.allocate(size, keep)

    def reduction(self, reduction: Reduction) -> RunReduction:
        if reduction.dtype.name != "float32" or reduction.scatter is not None:
            return self._inner.reduction(reduction)
        roundings = [ErrorFeedback(reduction.length) for _ in reduction.rows]
        rows = tuple(rounding.rounded for rounding in roundings)
        result = rows[0] if rows else ErrorFeedback(reduction.length).rounded
        rounded = Reduction(reduction.op, result.dtype, reduction.length, rows, result)
        inner = self._inner.reduction(rounded)

        def run(weights: Sequence[float] | None) -> bool:
            for index, (rounding, row) in enumerate(zip(roundings, reduction.rows, strict=True)):
                # A row of weight 0 may hold anything: it says nothing, and leaves what was taken before.
                if weights is None or weights[index] != 0:
                    rounding.round(row)
            reduced = inner(weights)
            if reduced:
                with np.errstate(all="ignore"):
                    np.copyto(reduction.result, result, casting="unsafe")
            return reduced

        return run

    def gather(self, rows: Sequence[np.ndarray], out: np.ndarray, what: str) -> None:
        self._inner.gather(rows, out, what)

    def broadcast(self, data: np.ndarray, root: int, what: str) -> None:
        self._inner.broadcast(data, root, what)

    def close(self) -> None:
        self._inner.close()
