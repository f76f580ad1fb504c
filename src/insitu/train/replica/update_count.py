"""Where the updates of a model are counted: in which optimizer, and under which name in a saved state."""

from __future__ import annotations

from typing import Any

import keras

_LOSS_SCALE_VARIABLES = 4
"""Those of its own that a built LossScaleOptimizer has: iteration, learning rate, step counter, scale."""


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that makes the updates."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer
    return optimizer


def name_update_count(optimizer: Any) -> str:
    """Return the name of the count of updates in a saved state: that of an optimizer's first variable. A
    LossScaleOptimizer has its own variables, and a count that stays 0, before those of the inner one."""
    index = 0 if inner_optimizer(optimizer) is optimizer else _LOSS_SCALE_VARIABLES
    return f"optimizer/{index}"
