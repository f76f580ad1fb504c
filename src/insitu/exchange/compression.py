"""Compression between hosts: float32 is sent as bfloat16, in half the bytes.

The rounding error of a process's rows is kept and added to its rows the next time the same array is reduced
(error feedback: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014). So over many steps only
the rounding of the sums is lost. All ranks still get the same bits, but no longer those of the sum in
float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from insitu.exchange.plan import Reduction, RunReduction, Transport, WaitStats, split_chunks

_PIECE_LENGTH = 64 * 1024
"""Elements that are rounded at once: they stay in the processor's cache."""


class ErrorFeedback:
    """Rounds one row to bfloat16 many times, and keeps the rounding error."""

    def __init__(self, length: int) -> None:
        from ml_dtypes import bfloat16  # it comes with keras; loaded only for compression

        #: The row after `round`.
        self.rounded = np.zeros(length, bfloat16)
        self._residual = np.zeros(length, np.float32)
        self._back = np.empty(min(length, _PIECE_LENGTH), np.float32)

    def round(self, row: np.ndarray) -> None:
        """Round `row` (float32) plus the error of the last time to `rounded`.

        Elements that aren't finite leave no error, so that one bad step doesn't spoil all later ones.
        """
        for low, high in split_chunks(0, len(row), _PIECE_LENGTH):
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
    """A Transport that passes all_reduce of float32 to another one as bfloat16, and all else unchanged."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.name = inner.name

    @property
    def wait_stats(self) -> WaitStats:
        """See Transport."""
        return self._inner.wait_stats

    def allocate(self, size: int, keep: np.ndarray | None = None) -> np.ndarray:
        """See Transport."""
        return self._inner.allocate(size, keep)

    def prepare(self, reduction: Reduction) -> RunReduction:
        """See Transport."""
        if reduction.dtype.name != "float32" or reduction.scatter is not None:
            return self._inner.prepare(reduction)
        roundings = [ErrorFeedback(reduction.length) for _ in reduction.rows]
        rows = tuple(rounding.rounded for rounding in roundings)
        result = rows[0] if rows else ErrorFeedback(reduction.length).rounded
        rounded = Reduction(reduction.op, result.dtype, reduction.length, rows, result)
        inner = self._inner.prepare(rounded)

        def run(weights: Sequence[float] | None) -> bool:
            for index, (rounding, row) in enumerate(zip(roundings, reduction.rows, strict=True)):
                # A row of weight 0 may hold anything: it isn't read, and keeps the error of the last time.
                if weights is None or weights[index] != 0:
                    rounding.round(row)
            reduced = inner(weights)
            if reduced:
                with np.errstate(all="ignore"):
                    np.copyto(reduction.result, result, casting="unsafe")
            return reduced

        return run

    def gather(self, rows: Sequence[np.ndarray], out: np.ndarray, label: str) -> None:
        """See Transport."""
        self._inner.gather(rows, out, label)

    def broadcast(self, data: np.ndarray, root: int, label: str) -> None:
        """See Transport."""
        self._inner.broadcast(data, root, label)

    def close(self) -> None:
        """See Transport."""
        self._inner.close()
