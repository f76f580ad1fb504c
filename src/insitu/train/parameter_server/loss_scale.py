"""Scale a worker's losses, so that small gradients of half precision don't vanish.

A LossScaleOptimizer doubles its scale now and then, and halves it where a gradient isn't finite. On parameter
servers each worker does so for its own gradients: it divides them by its scale before it pushes them, and
pushes none that overflowed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.train.replica import inner_optimizer, to_numpy


class LossScale:
    """The loss scale of one optimizer, constant during a step: that of a LossScaleOptimizer, or an
    optimizer's own `loss_scale_factor`, which never changes."""

    def __init__(self, optimizer: Any) -> None:
        inner = inner_optimizer(optimizer)
        self._optimizer = optimizer if inner is not optimizer else None
        self._scale = float(getattr(inner, "loss_scale_factor", None) or 1.0)
        self._overflowed = False

    @property
    def changes(self) -> bool:
        """True if gradients are divided at all."""
        return self._optimizer is not None or self._scale != 1.0

    def begin(self) -> None:
        """Begin a step: read the scale."""
        if self._optimizer is not None:
            self._scale = float(to_numpy(self._optimizer.dynamic_scale))
            self._overflowed = False

    def unscale(self, gradient: NDArray[Any]) -> bool:
        """Divide one shard's gradient, in place. Returns False for one that isn't finite and must not be
        pushed."""
        if self._optimizer is not None and not np.isfinite(gradient).all():
            self._overflowed = True
            return False
        if self._scale != 1.0:
            gradient /= gradient.dtype.type(self._scale)
        return True

    def end(self) -> None:
        """End the step: grow or shrink the scale as its optimizer would."""
        optimizer = self._optimizer
        if optimizer is None:
            return
        steps = int(to_numpy(optimizer.step_counter)) + 1
        if self._overflowed:
            optimizer.dynamic_scale.assign(self._scale * 0.5)
            steps = 0
        elif steps == optimizer.dynamic_growth_steps:
            optimizer.dynamic_scale.assign(self._scale * 2.0)
            steps = 0
        optimizer.step_counter.assign(steps)
