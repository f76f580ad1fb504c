"""Records how far the seeds of a model's layers are, for a worker that trains on servers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.train.replica import ModelState, to_numpy


class SeedRecord:
    """How far each seed generator is: servers don't hold them, and a step moves each by the same amount.

    So where they are in the middle of an epoch follows from where they were at its beginning, once one epoch
    has shown by how much a step moves them.
    """

    def __init__(self) -> None:
        #: The seeds at the last record, and its epoch; None before.
        self._noted: tuple[NDArray[np.int64], int] | None = None
        #: By how much a step moves them; None until that is known.
        self._stride: NDArray[np.int64] | None = None

    def record(self, state: ModelState, epoch: int, step: int) -> dict[str, Any]:
        """Return the seeds, before step `step` of `epoch` or behind all its steps, and what a step moves."""
        now = _read(state)
        if step and self._noted is not None and self._noted[1] == epoch:
            self._stride = (now - self._noted[0]) // step
        if step == 0:
            self._noted = now, epoch
        return {"seeds": now, "epoch": epoch, "step": step, "stride": self._stride}

    def restore(self, state: ModelState, found: dict[str, Any], epoch: int, step: int) -> None:
        """Set the seeds to what they are at this step, as far as the record shows that."""
        seeds, self._stride = np.array(found["seeds"]), found["stride"]
        steps = step - found["step"] if epoch == found["epoch"] else step
        if steps > 0 and self._stride is not None:
            seeds = seeds + steps * self._stride
        for variable, value in zip(state.seeds, seeds, strict=True):
            variable.assign(value.astype(to_numpy(variable).dtype))


def _read(state: ModelState) -> NDArray[np.int64]:
    values = [to_numpy(variable).astype(np.int64) for variable in state.seeds]
    return np.stack(values) if values else np.zeros((0, 2), np.int64)
