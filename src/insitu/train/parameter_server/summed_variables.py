"""Variables that functions on several workers add to, such as those of metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.train.replica import to_numpy


class SummedVariables:
    """Gives each worker the sum of what all workers have added.

    Variables are counted in the order of their creation, which is the same in each worker. As one vector,
    those that are made later come behind the others.
    """

    def __init__(self) -> None:
        self._variables: list[Any] = []
        #: What each variable was before any function changed it, by position in the vector.
        self._first = np.zeros(0)
        #: The values when functions began to run.
        self._base = np.zeros(0)
        #: The sums of all workers up to the last join.
        self._sums = np.zeros(0)

    def read(self, variables: Sequence[Any]) -> NDArray[np.float64]:
        """Return the values of all variables, after noting those of `variables` that are new."""
        known = {id(variable) for variable in self._variables}
        for variable in variables:
            if id(variable) not in known:
                self._variables.append(variable)
                # It was made by the function that has just run, or is about to: metrics begin at zero.
                self._first = np.concatenate([self._first, np.zeros(int(np.prod(tuple(variable.shape))))])
        values = [np.asarray(to_numpy(v), np.float64).reshape(-1) for v in self._variables]
        return np.concatenate([np.zeros(0), *values])

    def first_values(self, start: int) -> NDArray[np.float64]:
        """Return the first values of variables from this position on."""
        return self._first[start:]

    def begin(self, variables: Sequence[Any]) -> None:
        """Remember the values at which functions begin."""
        self._base = self.read(variables)

    def end(self) -> None:
        """Go back to the values at which functions began: what this worker added isn't all."""
        self.assign(self._base)

    def load(self, sums: NDArray[np.float64]) -> None:
        """Add what all workers have added since the last call; `sums` are those up to now."""
        size = self._first.size
        now, before = _fit(sums, size), _fit(self._sums, size)
        self.assign(_fit(self._base, size) + now - before)
        self._sums = np.array(sums)

    def assign(self, values: NDArray[np.float64]) -> None:
        """Set all variables; those behind the end of `values` to zero."""
        values, start = _fit(values, self._first.size), 0
        for variable in self._variables:
            size = int(np.prod(tuple(variable.shape)))
            part = values[start : start + size].reshape(tuple(variable.shape))
            variable.assign(part.astype(to_numpy(variable).dtype))
            start += size


def _fit(vector: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Return `vector` of this size, with zeros behind what it has."""
    fitted = np.zeros(size)
    count = min(size, vector.size)
    fitted[:count] = vector[:count]
    return fitted
